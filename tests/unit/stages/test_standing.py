"""How a run stands, by hand, from the server's events."""

import json

import pytest

from feddp.stages.standing import Standing

SITES = ["site-1", "site-2"]


def after(plan, *events) -> Standing:
    standing = Standing(plan)
    for event in events:
        standing.add(event)
    return standing


def ask(task, time, sites=SITES, size=100, **more):
    return {"event": "ask", "task": task, "time": time, "sites": sites, "bytes": dict.fromkeys(sites, size), **more}


def answer(site, time, task="train", **scalars):
    return {"event": "answer", "site": site, "task": task, "time": time, "bytes": 40, "scalars": scalars}


def round(number, time, seconds):
    return {"event": "round", "round": number, "of": 10, "time": time, "seconds": seconds}


@pytest.fixture
def plan(plan_for):
    """Ten rounds of two local epochs, then 6 epochs of calibration."""
    return plan_for(method="feddp", rounds=10, local_epochs=2, calibration_epochs=6)


def test_the_time_left_by_hand(plan):
    """Nothing is known before a round ends. Round 1 lasts 20 s: nine rounds of 20 s and six epochs of 20/2 s are left: 240 s.
    5 s later, 235 s; 25 s later, the second round is 5 s over and counts no more: 8 · 20 + 60 = 220 s. It lasts 8 s and the
    third 10 s, and the first, in which images are opened, is not counted any more: seven rounds of 9 s, six epochs of 4.5 s,
    90 s."""
    first = (ask("initial", 95, size=0), ask("train", 100, round=1))
    assert after(plan, *first).seconds_left(110) is None
    first += (round(1, 120, 20.0),)
    assert after(plan, *first).seconds_left(120) == 240
    assert after(plan, *first, ask("train", 120, round=2)).seconds_left(125) == 235
    assert after(plan, *first, ask("train", 120, round=2)).seconds_left(145) == 220
    assert after(plan, *first, round(2, 128, 8.0), round(3, 138, 10.0)).seconds_left(138) == 90


def test_the_time_left_in_the_stages_after_the_rounds(plan):
    """After rounds of 10 s (the first: 30 s) six epochs of 5 s: 30 s, until the last round's score too; 12 s into the stage,
    18 s; after its end 0, and in the evaluation nobody knows."""
    events = [round(1, 30, 30.0), *(round(number, 30 + 10 * (number - 1), 10.0) for number in range(2, 11))]
    done = after(plan, ask("train", 0, round=1), *events, ask("adopt", 121, round=10))
    assert done.seconds_left(125) == 30
    done.add(ask("collect", 130))
    done.add(ask("calibrate", 132))
    assert done.seconds_left(142) == 18
    assert done.seconds_left(200) == 0
    done.add(ask("evaluate", 200))
    assert done.seconds_left(200) is None


def test_epochs_that_are_seen_count_themselves(plan_for):
    """FedLC asks for each epoch: the first two of 5 took 4 s and 6 s. 2 s into the third: 3 · 5 − 2 = 13 s. Continued from
    there, nothing of the epochs is measured yet, and a round, of 7 s, is an epoch: five of them, and 1 s is over."""
    plan = plan_for(method="fedlc", rounds=1, heads_epochs=5, stages=("train", "heads"))
    phases = plan.phases
    events = [ask("train", 0, round=1), round(1, 7.0 * phases, 7.0 * phases)]
    heads = [ask("collect_heads", time, epoch=epoch) for epoch, time in ((1, 20), (2, 24), (3, 30))]
    assert after(plan, *events, *heads).seconds_left(32) == 13
    assert after(plan, *events, heads[0]).seconds_left(21) == 34


def test_a_continued_run_measures_anew(plan):
    """What another attempt measured counts until this one has a round: eight rounds left of 20 s, six epochs of 10 s."""
    resumed = {"event": "resumed", "round": 2, "of": 10, "time": 500, "done": [], "epoch": 0}
    events = [ask("train", 0, round=1), round(1, 50, 50.0), round(2, 70, 20.0), resumed, ask("train", 510, round=3)]
    assert after(plan, *events).seconds_left(510) == 8 * 20 + 60
    events.append(round(3, 590, 80.0))  # its images are opened again
    assert after(plan, *events).seconds_left(590) == 7 * 20 + 60


def test_what_each_site_does(plan):
    """site-1 answers, site-2 computes, and sends; then site-2 gives no answer in round 2, is not asked in round 3, and comes
    back. Bytes: 100 to a site with every request, 40 back with every answer."""
    standing = after(plan, ask("train", 0, round=1), answer("site-1", 4, loss=0.5))
    assert standing.sites["site-1"].loss == 0.5

    def states(now):
        return [site["state"] for site in standing.summary(now)["sites"].values()]

    assert states(5) == ["waits", "works"]
    standing.add({"event": "computed", "site": "site-2", "time": 6})
    assert states(6) == ["waits", "sends"]
    for event in (answer("site-2", 7, loss=0.7), round(1, 8, 8.0), ask("train", 8, round=2), answer("site-1", 12, dice=0.25)):
        standing.add(event)
    assert states(20) == ["waits", "works"]
    assert states(23) == ["waits", "late"], "15 s are more than twice its 7 s"
    assert standing.summary(23)["sites"]["site-2"]["why"] == "no answer for 15 s; until now it came within 7 s"
    reason = "site site-2: no answer to train"
    standing.add({"event": "refused", "site": "site-2", "task": "train", "time": 30, "reason": reason, "late": True})
    assert states(30) == ["waits", "late"]
    standing.add(round(2, 30, 22.0))
    standing.add(ask("train", 30, sites=SITES[:1], round=3))
    assert states(30) == ["works", "lost"]
    standing.add({"event": "returned", "site": "site-2", "time": 31})
    standing.add({"event": "refused", "site": "site-1", "task": "train", "time": 33, "reason": "site site-1: NaN in q.weight"})
    found = standing.summary(33)
    assert [(s["state"], s["why"]) for s in found["sites"].values()] == [
        ("refused", "site site-1: NaN in q.weight"),
        ("waits", ""),
    ]
    assert found["notes"] == [reason, "site site-2 is back", "site site-1: NaN in q.weight"]
    one, two = found["sites"].values()
    assert (one["loss"], one["dice"], one["received"], one["sent"]) == (0.5, 0.25, 300, 80)
    assert (two["loss"], two["dice"], two["received"], two["sent"]) == (0.7, None, 200, 40)
    assert json.loads(json.dumps(found)) == found


def test_a_site_that_has_not_signed_is_late_and_not_lost(plan):
    """It is not asked for the task that follows; if it has vanished, it is lost from the next question for a note on."""
    standing = after(plan, ask("agree", 0, round=1, brought_by="train"))
    standing.add(
        {"event": "refused", "site": "site-2", "task": "agree", "time": 9, "reason": "site site-2: late", "late": True}
    )
    for task, state in (("train", "late"), ("agree", "lost"), ("train", "lost")):
        standing.add(ask(task, 10, sites=SITES[:1], round=1))
        assert standing.sites["site-2"].state == state


def moving(way, moved, time, rate=100_000, size=2_000_000):
    where = {"event": "transfer", "site": "site-2", "task": "train", "time": time}
    left = (size - moved) / rate if rate else None
    return where | {"way": way, "moved": moved, "size": size, "rate": rate, "seconds_left": left}


def test_a_slow_transfer_is_told_with_its_rate_and_the_time_left(plan):
    """Of 2 MB, 1.5 MB at 0.1 MB/s: 5 s are left. What has arrived is worked on, and an answer on its way is sent. A transfer
    that stands still has no time left to tell. A site that receives is not late."""
    standing = after(plan, ask("train", 0, round=1), answer("site-2", 4), round(1, 5, 5.0), ask("train", 5, round=2))

    def row(*event):
        standing.add(moving(*event))
        found = standing.summary(event[2])["sites"]["site-2"]
        return found["state"], found["since"], found["why"]

    assert row("to", 1_500_000, 35) == ("receives", 30, "1.5 MB of 2.0 MB at 0.80 Mbit/s, about 5 seconds left")
    assert row("to", 1_500_000, 65, 0) == ("receives", 60, "1.5 MB of 2.0 MB at 0.00 Mbit/s")
    assert row("to", 2_000_000, 70)[:2] == ("late", 0)
    standing.add({"event": "computed", "site": "site-2", "time": 71})
    assert row("back", 0, 86, 0)[:1] == ("late",)


def test_an_adaptation_asks_sites_in_turn(plan):
    """So a site that is not asked is not lost."""
    standing = after(plan, ask("join", 0), ask("give_model", 5, sites=["site-1"]))
    assert standing.sites["site-2"].state == "waits"
