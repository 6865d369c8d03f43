"""The scalars of a run by tag and round, derived from the server's events.

The step is the round. That of local work after the rounds is the last round, plus the epoch of an exchange of heads.

The sites score the mean of a round at the start of the next one, so the last `val/` points follow after the rounds. A site that
withholds a number by its policy has no point, and does not count in the mean.
"""

from typing import NamedTuple

from feddp import protocol
from feddp.files import Event
from feddp.protocol import Kind, rounded

MEAN = "mean"
SCORES = ("dice", "iou")
# {tag: what it is}; SITE is a site's name, TASK calibrate, tune or calibrate_heads
TAGS = {
    "train/loss/SITE": "mean loss of the site's last local epoch in the round",
    "train/loss/mean": "its mean over the sites",
    "train/seconds/SITE": "seconds of the site's own work",
    "val/dice/SITE": "validation Dice of the networks after the round's mean, with each site's private tensors",
    "val/dice/mean": "its mean over the sites",
    "val/iou/SITE": "the same for IoU",
    "val/iou/mean": "its mean over the sites; the best round is chosen by the median of the sites' differences",
    "round/seconds": "seconds of the whole round",
    "round/beyond_compute": "the same without the work of the slowest site",
    "round/combining": "seconds of the mean",
    "round/saving": "seconds of the server's files",
    "round/sites": "number of contributions",
    "bytes/to/SITE": "bytes of the tensors to the site",
    "bytes/from/SITE": "bytes of the tensors that it sent",
    "TASK/loss/SITE": "after the rounds: mean loss of the last epoch of local work",
    "TASK/iou_before/SITE": "validation IoU before it",
    "TASK/iou/SITE": "validation IoU after it",
}
_ROUND = ("seconds", "beyond_compute", "combining", "saving")
_TUNED = ("loss", "iou_before", "iou")


class Scalar(NamedTuple):
    """A point of a curve; `time` is in seconds since 1970."""

    tag: str
    step: int
    value: float
    time: float


class Curves:
    """Turns events into scalars, in their order. A round gives its scalars when it ends, so a broken-off one gives none."""

    def __init__(self) -> None:
        self._completed = 0  # rounds
        self._losses: dict[str, float] = {}
        self._sums: dict[str, float] = {}  # {tag: sum over the phases of the present round}
        self._scores: dict[str, dict[str, float]] = {}  # {name: {site: value}} of `_scored`
        self._scored = 0  # the round of which the scores are
        self._shown: set[int] = set()  # the rounds whose scores were given
        self._time = 0.0

    def of(self, event: Event) -> list[Scalar]:
        """Returns the scalars that an event completes."""
        self._time = event["time"]
        kind = event["event"]
        if kind == "ask":
            return self._asked(event)
        if kind == "answer":
            return self._answered(event)
        if kind == "round":
            return self._ended(event)
        if kind == "resumed":
            self._completed = event["round"]
            self._losses, self._sums, self._scores = {}, {}, {}
            self._shown = {round for round in self._shown if round < self._completed}
        return []

    def rest(self) -> list[Scalar]:
        """Returns the scores that no later event completes."""
        return self._take_scores()

    def _asked(self, event: Event) -> list[Scalar]:
        scalars: list[Scalar] = []
        if event["task"] != protocol.TRAIN:
            scalars = self._take_scores()
        elif not event.get("phase"):
            scalars = self._take_scores()
            self._losses, self._sums = {}, {}
        if event["task"] == protocol.TRAIN:
            for site, nbytes in event["bytes"].items():
                self._add(f"bytes/to/{site}", nbytes)
        return scalars

    def _answered(self, event: Event) -> list[Scalar]:
        site, task, scalars = event["site"], event["task"], event["scalars"]
        spec = protocol.spec_of(task)
        if spec.kind in (Kind.ROUND, Kind.SCORE):
            for name in SCORES:
                if name in scalars:
                    self._scored = event["round"] - (spec.kind is Kind.ROUND)
                    self._scores.setdefault(name, {})[site] = rounded(name, scalars[name])
        if spec.kind is Kind.ROUND:
            if "loss" in scalars:
                self._losses[site] = rounded("loss", scalars["loss"])
            self._add(f"bytes/from/{site}", event["bytes"])
            self._add(f"train/seconds/{site}", scalars["seconds"])
        if "iou_before" not in spec.scalars:
            return []
        step = self._completed + event.get("epoch", 0)
        return [self._point(f"{task}/{name}/{site}", step, rounded(name, scalars[name])) for name in _TUNED if name in scalars]

    def _ended(self, event: Event) -> list[Scalar]:
        self._completed = step = event["round"]
        values = self._take_scores()
        values += self._by_site("train/loss", step, self._losses)
        values += [self._point(tag, step, value) for tag, value in self._sums.items()]
        values += [self._point(f"round/{name}", step, event[name]) for name in _ROUND if name in event]
        sites = sum(tag.startswith("bytes/from/") for tag in self._sums)
        self._losses, self._sums = {}, {}
        return [*values, self._point("round/sites", step, sites)]

    def _take_scores(self) -> list[Scalar]:
        """Returns the scores of one round, each round's once: the chosen round is scored again when the sites adopt it."""
        scores, self._scores = self._scores, {}
        if not scores or self._scored in self._shown:
            return []
        self._shown.add(self._scored)
        return [point for name, values in scores.items() for point in self._by_site(f"val/{name}", self._scored, values)]

    def _by_site(self, tag: str, step: int, values: dict[str, float]) -> list[Scalar]:
        points = [self._point(f"{tag}/{site}", step, value) for site, value in sorted(values.items())]
        return [*points, self._point(f"{tag}/{MEAN}", step, sum(values.values()) / len(values))] if values else []

    def _add(self, tag: str, value: float) -> None:
        self._sums[tag] = self._sums.get(tag, 0) + value

    def _point(self, tag: str, step: int, value: float) -> Scalar:
        return Scalar(tag, step, float(value), self._time)
