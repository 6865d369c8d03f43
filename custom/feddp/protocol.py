"""Every task of a run, in one table: its stage, whose consent it needs, and what may travel with its answer.

Whoever has to know something about a task asks this table; no other module lists tasks. The class allow-lists of the site and
the server stay lists of their own: they are reviewed.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from feddp.methods.base import CALIBRATE as CALIBRATE_STAGE
from feddp.methods.base import HEADS as HEADS_STAGE
from feddp.methods.base import SPECTRA as SPECTRA_STAGE
from feddp.methods.base import TRAIN as TRAIN_STAGE
from feddp.methods.base import TUNE as TUNE_STAGE
from feddp.training.metrics import METRICS
from feddp.training.volumes import VOLUME_METRICS

EVALUATE_STAGE, ADAPT_STAGE = "evaluate", "adapt"
# what a site may consent to, by the word in its policy
CALIBRATION, SPECTRA, OUTSIDE = CONSENTS = ("calibration", "spectra", "outside")

# names in answers and results, beside the names of metrics
WHEN = ("before_calibration", "final")
VOLUMES = "volumes"  # beside WHEN, where images are slices: the same by case
WITHHELD = "withheld"  # in place of what a site's policy does not let out: over how many images or cases it would
STD_WITHHELD = "std_withheld"  # the same, where of a summary the standard deviation alone stays
ROUNDED = "rounded"  # in results: whether the sites' guards rounded what they measured (`rounded`)

INITIAL = "initial"
INTRODUCE_SPECTRA, COLLECT_SPECTRA, TAKE_SPECTRA = "introduce_spectra", "collect_spectra", "take_spectra"
TRAIN, SCORE, ADOPT = "train", "score", "adopt"
TUNE = "tune"
INTRODUCE, COLLECT, CALIBRATE = "introduce", "collect", "calibrate"
COLLECT_HEADS, CALIBRATE_HEADS = "collect_heads", "calibrate_heads"
EVALUATE = "evaluate"
JOIN, GIVE_MODEL, ADAPT = "join", "give_model", "adapt"


class Kind(Enum):
    """What a task is for. An exchange between sites is an introduction, a collection and a delivery."""

    START = "the network that all sites start from"
    ROUND = "shared tensors to the site, and its own back"
    SCORE = "shared tensors to the site, and scores back"
    HANDSHAKE = "sites say whether they consent, and show their certificates"
    COLLECTION = "a site gives tensors to its peers"
    DELIVERY = "a site receives what its peers gave"
    LOCAL = "the site's own work"


class Sent(Enum):
    """Which tensors an answer may hold."""

    NONE = "none"
    SHARED = "the plan's shared tensors"
    PERSONAL = "those that the calibration exchanges"
    HEADS = "the segmentation head's"
    AMPLITUDES = "centres of amplitude spectra"
    MODEL = "a whole network"


@dataclass(frozen=True)
class Number:
    """A scalar that may leave.

    Args:
        decimals: to how many it is rounded; None: not at all, as a count.
        digits: to how many significant digits it is rounded, in place of decimals.
        measured: whether it tells something about images, so that a site withholds it where these are too few.
    """

    decimals: int | None = None
    digits: int | None = None
    measured: bool = False

    def rounded(self, value: float) -> float:
        """The number as it leaves. Rounding twice is rounding once."""
        if self.digits is not None:
            return float(f"{value:.{self.digits}g}")
        return value if self.decimals is None else round(value, self.decimals)


@dataclass(frozen=True)
class Table:
    """Summaries by metric (`CELL`); `by` says above them: a name for each table, or None for the plan's sites.

    Every number of a table is measured.
    """

    metrics: tuple[str, ...]
    by: tuple[str, ...] | None = ()
    measured: ClassVar[bool] = True


COUNT, FLAG = Number(), Number()
METRIC, LOSS = Number(decimals=3, measured=True), Number(digits=3, measured=True)
CELL = {"mean": METRIC, "std": METRIC, "n": COUNT}
SCALARS: Mapping[str, Number | Table] = {
    "consent": FLAG,
    **dict.fromkeys(("round", "phase", "epoch", "samples", "images"), COUNT),
    "seconds": Number(decimals=1),
    **dict.fromkeys(("dice", "iou", "iou_before"), METRIC),
    **dict.fromkeys(("loss", "loss_before"), LOSS),
    "empty_masks": Number(measured=True),
    "scores": Table(METRICS),
    **dict.fromkeys(WHEN, Table(METRICS)),
    VOLUMES: Table(VOLUME_METRICS, by=WHEN),
    "peers": Table(METRICS, by=None),
}
NUMBERS: Mapping[str, Number | Table] = {**CELL, **SCALARS}  # and what stands within a table
MEASURED = frozenset(name for name, scalar in SCALARS.items() if scalar.measured)
_SCORED, _TUNED = ("round", "dice", "iou"), ("loss", "iou_before", "iou", "epoch")


@dataclass(frozen=True)
class TaskSpec:
    """One task.

    Args:
        stage: the stage of a plan, or EVALUATE_STAGE or ADAPT_STAGE, that it belongs to; its module in `feddp.stages`.
        consent: the word without which no tensor of this site's leaves, and none of a peer's arrives.
        tensors: what an answer may hold.
        scalars: names in SCALARS that an answer may hold.
        delivers: of a delivery, the collection whose tensors it brings.
    """

    name: str
    stage: str = ""
    kind: Kind | None = None
    consent: str = ""
    tensors: Sent = Sent.NONE
    scalars: tuple[str, ...] = ()
    delivers: str = ""


def _table(*specs: TaskSpec) -> dict[str, TaskSpec]:
    return {spec.name: spec for spec in specs}


_SAYS = ("consent",)
TASKS: Mapping[str, TaskSpec] = _table(
    TaskSpec(INTRODUCE_SPECTRA, SPECTRA_STAGE, Kind.HANDSHAKE, SPECTRA, scalars=_SAYS),
    TaskSpec(COLLECT_SPECTRA, SPECTRA_STAGE, Kind.COLLECTION, SPECTRA, Sent.AMPLITUDES, _SAYS),
    TaskSpec(TAKE_SPECTRA, SPECTRA_STAGE, Kind.DELIVERY, SPECTRA, scalars=_SAYS, delivers=COLLECT_SPECTRA),
    TaskSpec(INITIAL, TRAIN_STAGE, Kind.START),
    TaskSpec(TRAIN, TRAIN_STAGE, Kind.ROUND, tensors=Sent.SHARED, scalars=(*_SCORED, "phase", "loss", "samples", "seconds")),
    TaskSpec(SCORE, TRAIN_STAGE, Kind.SCORE, scalars=_SCORED),
    TaskSpec(ADOPT, TRAIN_STAGE, Kind.SCORE, scalars=_SCORED),
    TaskSpec(TUNE, TUNE_STAGE, Kind.LOCAL, scalars=_TUNED),
    TaskSpec(INTRODUCE, CALIBRATE_STAGE, Kind.HANDSHAKE, CALIBRATION, scalars=_SAYS),
    TaskSpec(COLLECT, CALIBRATE_STAGE, Kind.COLLECTION, CALIBRATION, Sent.PERSONAL, _SAYS),
    TaskSpec(CALIBRATE, CALIBRATE_STAGE, Kind.DELIVERY, CALIBRATION, scalars=_TUNED, delivers=COLLECT),
    TaskSpec(COLLECT_HEADS, HEADS_STAGE, Kind.COLLECTION, CALIBRATION, Sent.HEADS, _SAYS),
    TaskSpec(CALIBRATE_HEADS, HEADS_STAGE, Kind.DELIVERY, CALIBRATION, scalars=_TUNED, delivers=COLLECT_HEADS),
    TaskSpec(EVALUATE, EVALUATE_STAGE, Kind.LOCAL, scalars=(*WHEN, VOLUMES, "peers")),
    TaskSpec(JOIN, ADAPT_STAGE, Kind.HANDSHAKE, OUTSIDE, scalars=_SAYS),
    TaskSpec(GIVE_MODEL, ADAPT_STAGE, Kind.COLLECTION, OUTSIDE, Sent.MODEL, _SAYS),
    TaskSpec(
        *(ADAPT, ADAPT_STAGE, Kind.DELIVERY, OUTSIDE),
        scalars=("images", "empty_masks", "seconds", "loss_before", "loss", "epoch", "scores"),
        delivers=GIVE_MODEL,
    ),
)


def spec_of(task: str) -> TaskSpec:
    """The row of a task. A name that is in no row has nothing: no consent, no tensors, no scalars."""
    return TASKS.get(task, TaskSpec(task))


def with_shared() -> list[str]:
    """The names of the tasks that bring the shared tensors, which a plan may have travel in half precision."""
    return [spec.name for spec in TASKS.values() if spec.kind in (Kind.ROUND, Kind.SCORE)]


def rounded(name: str, value: Any) -> Any:
    """A number as it leaves, or every number of a table."""
    if isinstance(value, Mapping):
        return {below: rounded(below, each) for below, each in value.items()}
    number = NUMBERS.get(name)
    return number.rounded(value) if isinstance(number, Number) else value


def consents_of(stages: Iterable[str]) -> list[str]:
    """What these stages ask a site to consent to, each word once."""
    wanted = set(stages)
    return list(dict.fromkeys(spec.consent for spec in TASKS.values() if spec.stage in wanted and spec.consent))


def tasks_of(stages: Collection[str]) -> list[str]:
    """The names of these stages' tasks, in the table's order; an introduction is of every stage with its consent."""
    asked = consents_of(stages)
    introduces = [name for name, spec in TASKS.items() if spec.kind is Kind.HANDSHAKE and spec.consent in asked]
    return [name for name, spec in TASKS.items() if spec.stage in stages or name in introduces]
