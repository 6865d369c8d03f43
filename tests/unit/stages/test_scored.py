"""The rounds' scores from the server's events, and each site's best round, by hand."""

from feddp.stages.scored import best_rounds, curves


def answer(task, site, round, iou=None, **more):
    return {
        "event": "answer",
        "task": task,
        "site": site,
        "round": round,
        "scalars": {} if iou is None else {"iou": iou},
        **more,
    }


def rounds(site, *ious):
    """Round t's network is scored with the answer of round t + 1, the last one with SCORE."""
    answers = [answer("train", site, t + 1, iou) for t, iou in enumerate((None, *ious[:-1]))]
    return [*answers, answer("score", site, len(ious), ious[-1])]


def test_an_adopted_network_is_not_the_curve_of_another_round():
    """A's best round is 1, with 0.9; it adopts that when the server, for the mean's sake, names round 2."""
    events = [*rounds("A", 0.9, 0.5, 0.6), answer("adopt", "A", 2, 0.9)]
    assert curves(events) == {"A": {1: 0.9, 2: 0.5, 3: 0.6}}
    assert curves([answer("adopt", "A", 3, 0.7)]) == {"A": {3: 0.7}}, "of a run that starts from the last round"


def test_each_sites_own_best_round():
    """A: the first of two equal ones. B: 0.7001 and 0.7004 leave a site as 0.700: the first. C: the last."""
    events = [*rounds("A", 0.2, 0.8, 0.8), *rounds("B", 0.7001, 0.7004, 0.1), *rounds("C", 0.1, 0.2, 0.3)]
    assert best_rounds(events) == {"A": 2, "B": 1, "C": 3}


def test_of_a_site_that_withholds_a_score_the_best_round_is_unknown():
    assert best_rounds([*rounds("A", 0.2, None, 0.1), *rounds("B", 0.2, 0.1)]) == {"B": 1}
    assert best_rounds([{"event": "answer", "task": "evaluate", "site": "A", "scalars": {}}]) == {}
