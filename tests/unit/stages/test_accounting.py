"""Where a round's time went, from events with times written by hand."""

from feddp.protocol import AGREE, EVALUATING, LOADING, STORING, TRAIN
from feddp.stages.accounting import ROUND, SITE, accounted
from feddp.stages.stopwatch import Stopwatch


def scalars(seconds, loading, evaluating, storing):
    return {"seconds": seconds, LOADING: loading, EVALUATING: evaluating, STORING: storing}


def ask(time, round=1, phase=0):
    return {"event": "ask", "task": TRAIN, "time": time, "sites": ["A", "B"], "round": round, "phase": phase}


def answer(time, site, own, round=1, phase=0):
    return {"event": "answer", "task": TRAIN, "time": time, "site": site, "scalars": own, "round": round, "phase": phase}


def test_a_round_s_parts():
    """A is asked at 100 and says it took 6 s: 1 to load, 0.5 to evaluate, 0.25 for its state, so 4.25 to train. At 107.5 it
    has its answer: before that, 7.5 − 6 = 1.5 s passed until it began. At 108 the answer is there: 0.5 s of sending. The round
    ends at 111: 3 s idle. B misses the round.
    """
    events = [
        ask(100.0),
        {"event": "computed", "site": "A", "time": 107.5},
        answer(108.0, "A", scalars(6.0, 1.0, 0.5, 0.25)),
        {"event": "refused", "task": TRAIN, "site": "B", "time": 110.0, "round": 1, "phase": 0},
        {"event": "round", "round": 1, "time": 111.0, "seconds": 11.0, "beyond_compute": 5.0, "combining": 0.5, "saving": 0.25},
        ask(111.0, round=2),
        answer(113.0, "B", scalars(1.0, 0.0, 0.0, 0.0), round=2),
        {"event": "round", "round": 2, "time": 114.0, "seconds": 3.0, "beyond_compute": 2.0, "combining": 0.5, "saving": 0.5},
    ]
    found = accounted(events)
    assert found["rounds"] == {"wall": [11.0, 3.0], "combining": [0.5, 0.5], "saving": [0.25, 0.5]}
    assert {name: values[0] for name, values in found["sites"]["A"].items()} == {
        **{"agreeing": None, "computing": 4.25, "loading": 1.0, "evaluating": 0.5, "storing": 0.25},
        **{"receiving": 1.5, "sending": 0.5, "idle": 3.0},
    }
    assert [values[1] for values in found["sites"]["A"].values()] == [None] * len(SITE)
    assert found["sites"]["B"]["computing"] == [None, 1.0]
    assert (found["sites"]["B"]["sending"][1], found["sites"]["B"]["receiving"][1]) == (None, 1.0)


def test_a_site_that_was_given_a_task_again_sends_what_it_computed_last():
    """A is asked at 0, has its answer at 40, and its process dies as it sends it. It is given the task again at 41, works 45 s,
    and has its answer at 87; the server has it at 90: 3 s of sending. What is neither, 90 − 45 − 3 = 42 s, is receiving: the
    attempt that was cut off is within it. Together these are the round's 90 s."""
    events = [
        ask(0.0),
        {"event": "computed", "site": "A", "time": 40.0},
        {"event": "again", "site": "A", "task": TRAIN, "time": 41.0},
        {"event": "computed", "site": "A", "time": 87.0},
        {"event": "computed", "site": "A", "time": 88.0},  # the first attempt to send fails
        answer(90.0, "A", scalars(45.0, 5.0, 0.0, 1.0)),
        {"event": "round", "round": 1, "time": 90.0, "seconds": 90.0},
    ]
    parts = {name: values[0] for name, values in accounted(events)["sites"]["A"].items()}
    assert (parts["computing"], parts["sending"], parts["receiving"]) == (39.0, 3.0, 42.0)
    assert sum(seconds or 0.0 for seconds in parts.values()) == 90.0


def test_the_parts_of_every_site_make_up_the_round():
    """Two phases, asked at 0 and 10; the round ends at 20. Each site's parts are those 20 s, whoever waits for the other.

    A answers at 2 and 12, after 1.5 s of work: 0.5 + 0.5 s of receiving, 8 + 8 s idle. B answers at 9 and 18: idle 1 + 2 s.
    """
    events = [
        ask(0.0),
        answer(2.0, "A", scalars(1.5, 0.5, 0.0, 0.5)),
        {"event": "computed", "site": "B", "time": 8.0},
        answer(9.0, "B", scalars(7.0, 1.0, 1.0, 1.0)),
        ask(10.0, phase=1),
        answer(12.0, "A", scalars(1.5, 0.5, 0.0, 0.5), phase=1),
        {"event": "computed", "site": "B", "time": 17.0},
        answer(18.0, "B", scalars(5.0, 1.0, 0.0, 1.0), phase=1),
        {"event": "round", "round": 1, "time": 20.0, "seconds": 20.0},
    ]
    one, other = ({name: values[0] for name, values in accounted(events)["sites"][site].items()} for site in "AB")
    assert [sum(seconds or 0.0 for seconds in parts.values()) for parts in (one, other)] == [20.0, 20.0]
    assert (one["computing"], one["receiving"], one["idle"]) == (1.0, 1.0, 16.0)
    assert (other["computing"], other["sending"], other["idle"]) == (4.0 + 3.0, 1.0 + 1.0, 3.0)


def test_the_sites_agree_before_each_phase():
    """Notes are asked for at 0 and 10, the phases at 1 and 12, and the round ends at 20: 1 + 2 s of agreeing, and A, which
    answers at 4 and 14 after 3 and 2 s, is idle until 10 and 20: 6 + 6 s. The later notes of its scores belong to no round."""
    events = [
        ask(0.0) | {"task": AGREE},
        ask(1.0),
        answer(4.0, "A", scalars(3.0, 0.0, 0.0, 0.0)),
        ask(10.0, phase=1) | {"task": AGREE},
        ask(12.0, phase=1),
        answer(14.0, "A", scalars(2.0, 0.0, 0.0, 0.0), phase=1),
        {"event": "round", "round": 1, "time": 20.0, "seconds": 20.0},
        {"event": "ask", "task": AGREE, "time": 20.0, "sites": ["A"], "round": 1},
        {"event": "answer", "task": AGREE, "time": 21.5, "site": "A", "scalars": {}, "round": 1},
    ]
    found = accounted(events)
    parts = {name: values[0] for name, values in found["sites"]["A"].items()}
    assert (parts["agreeing"], parts["computing"], parts["idle"]) == (3.0, 5.0, 12.0)
    assert sum(seconds or 0.0 for seconds in parts.values()) == 20.0
    assert found["stages"]["train"]["wall"] == 20.0 + 1.5


def test_a_phase_without_scores_keeps_those_of_the_other():
    """pFLFE scores in its first phase alone: 10 s with 4 s of scores, then 10 s without. 6 + 10 = 16 s of computing.

    A's second phase does not say how long its images took: what it computed is unknown, because `loading` would be within it.
    """
    first, second = scalars(10.0, 0.0, 4.0, 0.0), {"seconds": 10.0, LOADING: 0.0, STORING: 0.0}

    def found(second):
        events = [ask(0.0), answer(10.0, "A", first), ask(10.0, phase=1), answer(20.0, "A", second, phase=1)]
        events += [{"event": "round", "round": 1, "time": 20.0, "seconds": 20.0}]
        return {name: values[0] for name, values in accounted(events)["sites"]["A"].items()}

    parts = found(second)
    assert (parts["computing"], parts["evaluating"]) == (16.0, 4.0)
    assert sum(seconds or 0.0 for seconds in parts.values()) == 20.0
    older = found({"seconds": 10.0})
    assert (older["computing"], older["loading"], older["evaluating"]) == (None, None, 4.0)


def test_rounds_keep_their_numbers():
    """Round 2 was saved, but the server died before it noted it; round 3 was asked for twice, and counts as it ended last."""
    events = []
    for number, start in ((1, 0.0), (3, 20.0), (3, 40.0)):
        end = {"event": "round", "round": number, "time": start + 4, "seconds": 4 + start / 10}
        events += [ask(start, number), answer(start + 3, "A", scalars(2.0, 0.0, 0.0, 0.0), number), end]
    found = accounted(events)
    assert found["rounds"]["wall"] == [4.0, None, 8.0]
    assert found["sites"]["A"]["computing"] == [2.0, None, 2.0]


def test_a_round_asked_for_again_counts_as_it_ended():
    """The server died after A's first answer; what it asked before does not count."""
    events = [
        ask(0.0),
        answer(5.0, "A", scalars(5.0, 0.0, 0.0, 0.0)),
        {"event": "resumed", "time": 50.0},
        ask(51.0),
        answer(54.0, "A", scalars(2.0, 0.0, 0.0, 0.0)),
        {"event": "round", "round": 1, "time": 55.0, "seconds": 4.0},
    ]
    assert accounted(events)["sites"]["A"]["computing"] == [2.0]


def test_an_older_run_has_fewer_parts():
    """Its answers have `seconds` alone, its rounds only their length."""
    events = [ask(0.0), answer(5.0, "A", {"seconds": 4.0}), {"event": "round", "round": 1, "time": 6.0, "seconds": 6.0}]
    found = accounted(events)
    assert (found["rounds"]["wall"], found["rounds"]["saving"]) == ([6.0], [None])
    assert found["sites"]["A"]["computing"] == [None]
    assert (found["sites"]["A"]["receiving"], found["sites"]["A"]["idle"]) == ([1.0], [1.0])


def test_no_events_are_no_rounds():
    assert accounted([]) == {"rounds": {name: [] for name in ROUND}, "sites": {}, "stages": {}}


def request(time, task, answers, **more):
    """A request, and {site: when it answers; negative: when it is refused}."""
    events = [{"event": "ask", "task": task, "time": time, "sites": list(answers), **more}]
    for site, when in answers.items():
        kind = "answer" if when > 0 else "refused"
        events.append({"event": kind, "task": task, "time": abs(when), "site": site, "scalars": {"seconds": 1.0}, **more})
    return events


def test_the_seconds_of_every_stage():
    """The initial tensors take 2 s, the round 6 s by its own clock (until 8), the scores at its end 9 − 8 = 1 s: stage 1 is
    2 + 6 + 1 = 9 s; A answers 1, 3 and 1 s after these requests. The handshake of FedLC (1 s) bears the name of the
    calibration's consent, and belongs to the heads: with two epochs of 1 + 2 s, 7 s. B is refused 3 s after the second
    epoch's request, which the stage waits for. A's evaluation takes 1.5 s, B's 4 s.
    """
    events = [
        *request(0.0, "initial", {"A": 1.0, "B": 2.0}),
        *request(2.0, TRAIN, {"A": 5.0, "B": 7.0}, round=1, phase=0),
        {"event": "round", "round": 1, "time": 8.0, "seconds": 6.0},
        *request(8.0, "adopt", {"A": 9.0, "B": 9.0}, round=1),
        *request(10.0, "introduce", {"A": 10.5, "B": 11.0}),
        *request(11.0, "collect_heads", {"A": 12.0, "B": 12.0}, epoch=1),
        *request(12.0, "calibrate_heads", {"A": 13.0, "B": 14.0}, epoch=1),
        *request(14.0, "collect_heads", {"A": 15.0, "B": 15.0}, epoch=2),
        *request(15.0, "calibrate_heads", {"A": 16.0, "B": -17.0}, epoch=2),
        *request(20.0, "evaluate", {"A": 21.5, "B": 24.0}),
    ]
    found = accounted(events)["stages"]
    assert list(found) == ["train", "heads", "evaluate"]
    assert found["train"] == {"wall": 9.0, "sites": {"A": 1.0 + 3.0 + 1.0, "B": 2.0 + 5.0 + 1.0}}
    assert found["heads"] == {"wall": 1.0 + 3.0 + 3.0, "sites": {"A": 0.5 + 2.0 + 2.0, "B": 1.0 + 3.0 + 1.0}}
    assert found["evaluate"] == {"wall": 4.0, "sites": {"A": 1.5, "B": 4.0}}


def test_a_stage_counts_as_it_ended_and_without_what_came_too_late():
    """The server died while B tuned, and asked again at 50. The evaluation ends at 80, when C is given up; C's answer to it,
    and A's to a task that was over, count nowhere."""
    events = [
        *request(0.0, "tune", {"A": 5.0}),
        {"event": "resumed", "time": 40.0, "round": 1, "of": 1},
        *request(50.0, "tune", {"A": 52.0, "B": 53.0}),
        *request(53.0, "evaluate", {"B": 54.0, "C": -80.0}),
        {"event": "refused", "task": "tune", "time": 60.0, "site": "A", "reason": "late", "late": True},
        {"event": "refused", "task": "unknown", "time": 61.0, "site": "A", "reason": "late", "late": True},
        {"event": "refused", "task": "evaluate", "time": 95.0, "site": "C", "reason": "late", "late": True},
    ]
    assert accounted(events)["stages"] == {
        "tune": {"wall": 3.0, "sites": {"A": 2.0, "B": 3.0}},
        "evaluate": {"wall": 27.0, "sites": {"B": 1.0}},
    }


def test_the_watch_adds_up_its_parts(monkeypatch):
    """A clock that ticks once for every look: a block takes one tick; five looks passed before `seconds`, the first at 0."""
    ticks = iter(range(100))
    monkeypatch.setattr("feddp.stages.stopwatch.time.monotonic", lambda: float(next(ticks)))
    watch = Stopwatch()
    for _ in range(2):
        with watch.part("disk"):
            pass
    assert watch.parts == {"disk": 2.0}
    assert watch.seconds == 5.0


def test_a_site_that_withholds_its_evaluation_says_nothing_of_it():
    """5 s, of which 1 s for images and 1 s for files: 3 s are training, and the evaluation that is withheld."""
    own = {name: value for name, value in scalars(5.0, 1.0, 0.0, 1.0).items() if name != EVALUATING}
    site = accounted([ask(0.0), answer(6.0, "A", own), {"event": "round", "round": 1, "time": 6.0, "seconds": 6.0}])["sites"][
        "A"
    ]
    assert (site["computing"], site["evaluating"]) == ([3.0], [None])
