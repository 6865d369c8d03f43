"""Which round is the best, by the sites' validation IoU.

One round is better than another if the median of the sites' own differences in IoU is above 0. Scores are claims: a mean of
three sites would follow one that claims 1. If fewer than half of at least three sites lie, the median lies between two honest
differences. Of two sites the median is the mean.

Such comparisons can go round in a circle: the second round is better than the first, the third than the second, and the first
than the third. So each round counts for its worst difference to any other one, and the best is the round whose worst difference
is highest (minimax: Simpson, The Economic Journal 1969; Kramer, Journal of Economic Theory 1977). A round that is better than
all others is always it, whenever it comes; of equal rounds the first stays. A replaced round does not come back: the sites keep
the state of the best one alone.

Differences to one fixed round have no circles either. But sites gain differently from that round on, and whoever claims a gain
between those of two others would be the median, and alone order the rounds.

A site that is absent once must not decide, as it would for a mean if it is the weakest. So two rounds are compared over the
sites that scored the later one. Where such a site did not score the earlier one, its last score before that counts there, else
its first one after it. A site that never sends a score has no part.
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

Scored = dict[int, dict[str, float]]  # {round: {site: validation IoU}}, in the order of the rounds

DIGITS = 6  # scores have three decimals, so differences of floats that are smaller are none
KEPT = 50_000  # scores; the server writes them after every round. With ten sites they are those of 5000 rounds


def add(scored: Scored, best: int | None, number: int, ious: Mapping[str, float]) -> int | None:
    """Adds a round's scores to `scored`; of a round that is scored again, each site's first score stays.

    Args:
        number: the round, the latest one.
        best: the best round so far; None before there is one.

    Returns:
        The best round now.
    """
    if not ious:
        return best
    scored[number] = {**ious, **scored.get(number, {})}
    sites = {site for each in scored.values() for site in each}
    for old in sorted(scored.keys() - {best, number})[: -max(1, KEPT // len(sites))]:
        del scored[old]
    if best is None or best == number:
        return number
    compared = _Compared(scored)
    return number if compared.worst(number) > compared.worst(best) else best


class _Compared:
    """The differences between the rounds of `scored`."""

    def __init__(self, scored: Scored):
        self._scored = scored
        self._known: Scored = {}  # with the sites' last scores before
        self._first: dict[str, int] = {}  # {site: the first round that it scored}
        latest: dict[str, float] = {}
        for number in sorted(scored):
            self._known[number] = latest = {**latest, **scored[number]}
            for site in scored[number]:
                self._first.setdefault(site, number)

    def worst(self, number: int) -> float:
        """Returns the least of a round's differences to all rounds; that to itself is 0."""
        before = [self._gain(other, number) for other in self._scored if other < number]
        after = [-self._gain(number, other) for other in self._scored if other > number]
        return min(0.0, *before, *after)

    def _gain(self, early: int, late: int) -> float:
        """Returns the median over the sites by how much the later round is better than the earlier one; 0 without a site."""
        gains = []
        for site, iou in self._scored[late].items():
            since = max(early, self._first[site])
            if since < late:
                gains.append(iou - self._known[since][site])
        return round(median(gains), DIGITS) if gains else 0.0


def packed(scored: Scored) -> dict[str, Any]:
    """Returns the scores as JSON, with each site's name once."""
    sites = sorted({site for each in scored.values() for site in each})
    return {"rounds": list(scored), "ious": {site: [each.get(site) for each in scored.values()] for site in sites}}


def unpacked(content: Mapping[str, Any]) -> Scored:
    """Returns what `packed` packed."""
    scored: Scored = {number: {} for number in content["rounds"]}
    for site, ious in content["ious"].items():
        for number, iou in zip(scored, ious, strict=True):
            if iou is not None:
                scored[number][site] = iou
    return scored
