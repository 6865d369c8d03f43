"""The scalars of a run, from events written by hand."""

import re

from feddp.tracking.curves import TAGS, Curves, Scalar


def ask(task, time=0.0, sites=("A", "B"), **more):
    return {"event": "ask", "task": task, "time": time, "sites": list(sites), "bytes": dict.fromkeys(sites, 100), **more}


def answer(task, site, time=0.0, nbytes=40, scalars=None, **more):
    return {"event": "answer", "task": task, "site": site, "time": time, "bytes": nbytes, "scalars": scalars or {}, **more}


def train(site, round, loss, phase=0, seconds=2.0, **scores):
    return answer("train", site, round=round, phase=phase, scalars={"loss": loss, "seconds": seconds, **scores})


def ended(round, time=9.0):
    return {"event": "round", "round": round, "of": 2, "time": time, "seconds": 5.0, "beyond_compute": 3.0, "saving": 0.5}


def points(curves: Curves, *events) -> dict[tuple[str, int], float]:
    found = [scalar for event in events for scalar in curves.of(event)]
    assert len({(scalar.tag, scalar.step) for scalar in found}) == len(found), "each point once"
    return {(scalar.tag, scalar.step): scalar.value for scalar in found}


def test_a_round_gives_its_scalars_when_it_ends():
    """Two sites, losses 0.5 and 0.25: their mean is 0.375. 100 bytes to each site, 40 back; seconds are the server's."""
    curves = Curves()
    begun = [ask("train", round=1, phase=0), train("B", 1, 0.25), train("A", 1, 0.5, seconds=4.0)]
    assert points(curves, *begun) == {}
    assert points(curves, ended(1)) == {
        ("train/loss/A", 1): 0.5,
        ("train/loss/B", 1): 0.25,
        ("train/loss/mean", 1): 0.375,
        ("train/seconds/A", 1): 4.0,
        ("train/seconds/B", 1): 2.0,
        ("bytes/to/A", 1): 100,
        ("bytes/to/B", 1): 100,
        ("bytes/from/A", 1): 40,
        ("bytes/from/B", 1): 40,
        ("round/seconds", 1): 5.0,
        ("round/beyond_compute", 1): 3.0,
        ("round/saving", 1): 0.5,
        ("round/sites", 1): 2,
    }


def test_a_point_has_the_time_of_the_event_that_completes_it():
    curves = Curves()
    found = [
        each for event in (ask("train", round=1, phase=0), train("A", 1, 0.5), ended(1, time=7.5)) for each in curves.of(event)
    ]
    assert Scalar("train/loss/A", 1, 0.5, 7.5) in found


def test_the_scores_of_a_round_come_with_the_next_one_and_count_for_it():
    """The sites score γ¹ when they receive it for round 2: 0.8 and 0.6, in the mean 0.7. B withholds its IoU."""
    curves = Curves()
    points(curves, ask("train", round=1, phase=0), train("A", 1, 0.5), ended(1))
    second = [ask("train", round=2, phase=0), train("A", 2, 0.4, dice=0.8, iou=0.5), train("B", 2, 0.2, dice=0.6), ended(2)]
    found = points(curves, *second)
    scores = {key: value for key, value in found.items() if key[0].startswith("val/")}
    assert {key: round(value, 9) for key, value in scores.items()} == {
        ("val/dice/A", 1): 0.8,
        ("val/dice/B", 1): 0.6,
        ("val/dice/mean", 1): 0.7,
        ("val/iou/A", 1): 0.5,
        ("val/iou/mean", 1): 0.5,
    }
    adopted = [answer("adopt", site, round=2, scalars={"dice": 1.0}) for site in "AB"]
    assert points(curves, ask("adopt", round=2), *adopted) == {}, "more may answer"
    assert points(curves, ask("evaluate")) == {("val/dice/A", 2): 1.0, ("val/dice/B", 2): 1.0, ("val/dice/mean", 2): 1.0}


def test_the_last_scores_are_not_lost():
    curves = Curves()
    points(curves, ask("adopt", round=2), answer("adopt", "A", time=3.0, round=2, scalars={"dice": 1.0}))
    assert curves.rest() == [Scalar("val/dice/A", 2, 1.0, 3.0), Scalar("val/dice/mean", 2, 1.0, 3.0)]
    assert curves.rest() == []


def test_the_chosen_round_is_scored_twice_and_shown_once():
    curves = Curves()
    first = [ask("train", round=2, phase=0), train("A", 2, 0.4, dice=0.8), ended(2)]
    assert ("val/dice/A", 1) in points(curves, *first)
    again = [ask("score", round=2), answer("score", "A", round=2, scalars={"dice": 0.7})]
    again += [ask("adopt", round=1), answer("adopt", "A", round=1, scalars={"dice": 0.8}), ask("evaluate")]
    assert points(curves, *again) == {("val/dice/A", 2): 0.7, ("val/dice/mean", 2): 0.7}


def test_the_phases_of_a_round_are_one_point():
    """Two phases: bytes and seconds add up, the loss is the last one's."""
    curves = Curves()
    events = []
    for phase, loss in ((0, 0.9), (1, 0.6)):
        events += [ask("train", sites=["A"], round=1, phase=phase), train("A", 1, loss, phase)]
    found = points(curves, *events, ended(1))
    assert (found["train/loss/A", 1], found["bytes/to/A", 1], found["bytes/from/A", 1]) == (0.6, 200, 80)
    assert found["train/seconds/A", 1] == 4.0


def test_a_round_that_was_broken_off_and_asked_for_again_counts_once():
    """B answered before the server was killed; its answer of that attempt is of no round, nor are the scores in it."""
    curves = Curves()
    points(curves, ask("train", round=1, phase=0), train("A", 1, 0.5), ended(1))
    points(curves, ask("train", round=2, phase=0), train("B", 2, 0.9, dice=0.1))
    resumed = {"event": "resumed", "round": 1, "of": 2, "time": 5.0}
    found = points(curves, resumed, ask("train", round=2, phase=0), train("A", 2, 0.4, dice=0.8), ended(2))
    assert ("train/loss/B", 2) not in found
    assert found["bytes/to/A", 2] == 100
    assert found["val/dice/mean", 1] == 0.8


def test_local_work_after_the_rounds():
    curves = Curves()
    points(curves, ask("train", round=1, phase=0), train("A", 1, 0.5), ended(1))
    tuned = {"loss": 0.3, "iou_before": 0.5, "iou": 0.6, "epoch": 4}
    assert points(curves, ask("calibrate"), answer("calibrate", "A", scalars=tuned)) == {
        ("calibrate/loss/A", 1): 0.3,
        ("calibrate/iou_before/A", 1): 0.5,
        ("calibrate/iou/A", 1): 0.6,
    }
    heads = points(curves, answer("calibrate_heads", "A", scalars=tuned, epoch=2))
    assert heads["calibrate_heads/iou/A", 3] == 0.6


def test_every_tag_is_in_the_table():
    curves = Curves()
    first = [ask("train", round=1, phase=0), train("A", 1, 0.5), ended(1)]
    second = [ask("train", round=2, phase=0), train("A", 2, 0.4, dice=0.8, iou=0.5), ended(2) | {"combining": 0.1}]
    tuned = answer("tune", "A", scalars={"loss": 0.3, "iou_before": 0.5, "iou": 0.6})
    tags = {tag for tag, _ in points(curves, *first, *second, tuned)}
    known = {re.sub("^tune/", "TASK/", re.sub("/[AB]$", "/SITE", tag)) for tag in tags}
    assert known == set(TAGS)
