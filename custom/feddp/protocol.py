"""Every task of a run, in one table: its stage, its kind, the consent it needs, and what its answer may hold.

No other module lists tasks; everything about tasks is derived from this table. Only the class allow-lists of sites and server
are separate lists, because they are reviewed by hand.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from feddp.methods.base import CALIBRATE as CALIBRATE_STAGE
from feddp.methods.base import HEADS as HEADS_STAGE
from feddp.methods.base import SPECTRA as SPECTRA_STAGE
from feddp.methods.base import TRAIN as TRAIN_STAGE
from feddp.methods.base import TUNE as TUNE_STAGE
from feddp.training.columns import DISTANCES, METRICS, VOLUME_METRICS, columns
from feddp.versions import PACKAGES
from feddp.versions import PARTS as VERSION_PARTS

READY_STAGE, EVALUATE_STAGE, ADAPT_STAGE = "ready", "evaluate", "adapt"
# the consent words of a site's policy
CALIBRATION, SPECTRA, OUTSIDE = CONSENTS = ("calibration", "spectra", "outside")

# names in answers and results, in addition to the names of metrics
WHEN = ("before_calibration", "final")
VOLUMES = "volumes"  # the same tables per case, if images are slices
WITHHELD = "withheld"  # replaces numbers withheld by the site's policy; its value is the required number of images or cases
STD_WITHHELD = "std_withheld"  # the same, if only standard deviations are withheld
LARGEST = 2**53  # of a number; Python's integers are unbounded, so one could hold a whole image
LOADING, EVALUATING, STORING = PARTS = ("seconds_loading", "seconds_evaluating", "seconds_storing")  # of a round's "seconds"
BEST_PER_SITE = "best_per_site"  # in results: each site's network is of its own best round (`Plan.best_per_site`)
ROUNDED = "rounded"  # in results: whether the sites' guards rounded the numbers (`rounded`)

# flags beside scores, which they explain: masks and networks that would make these say nothing; an answer may lack them
MASKS_EMPTY, MASKS_FULL, MARKS_NOTHING, MARKS_ALL = FLAGS = ("masks_empty", "masks_full", "marks_nothing", "marks_all")
TESTS_EMPTY, TESTS_FULL = TEST_FLAGS = ("tests_empty", "tests_full")

TOO_FEW = "too_few"  # beside "consent": the site's policy gives no mean of so few patients

READY = "ready"
INITIAL = "initial"
INTRODUCE_SPECTRA, COLLECT_SPECTRA, TAKE_SPECTRA = "introduce_spectra", "collect_spectra", "take_spectra"
AGREE, TRAIN, SCORE, ADOPT = "agree", "train", "score", "adopt"
TUNE = "tune"
INTRODUCE, COLLECT, CALIBRATE = "introduce", "collect", "calibrate"
COLLECT_HEADS, CALIBRATE_HEADS = "collect_heads", "calibrate_heads"
EVALUATE = "evaluate"
JOIN, GIVE_MODEL, ADAPT = "join", "give_model", "adapt"


class Kind(Enum):
    """The purpose of a task. An exchange between sites consists of a handshake, a collection and a delivery."""

    READY = "asks a site, before any other task, what runs there"
    START = "sends the initial network to the sites"
    AGREEMENT = "asks a site to sign a note of the shared tensors that the next task brings"
    ROUND = "sends shared tensors to the site; it returns its own"
    SCORE = "sends shared tensors to the site; it returns scores"
    HANDSHAKE = "asks the sites for consent and certificates"
    COLLECTION = "collects a site's tensors for its peers"
    DELIVERY = "delivers the peers' tensors to a site"
    LOCAL = "starts local work at the site"


class Sent(Enum):
    """The tensors that an answer may hold."""

    NONE = "none"
    SHARED = "the plan's shared tensors"
    PERSONAL = "the tensors that the calibration exchanges"
    HEADS = "the tensors of the segmentation head"
    AMPLITUDES = "centres of mean amplitude spectra"
    MODEL = "a whole network"


class Over(Enum):
    """The images over which a number is measured."""

    TEST = "the test images"
    CASES = "the cases of the test images"
    SELECTION = "the images by which rounds and epochs are selected"
    TRAIN = "the training images of an epoch"
    UNSEEN = "the images to which an unseen site adapts"


@dataclass(frozen=True)
class Number:
    """A scalar that may leave a site.

    Args:
        decimals: the decimals to which it is rounded; None: it is a count and not rounded.
        digits: the significant digits to which it is rounded, instead of decimals.
        over: the images over which it is measured, if any; a site withholds it if these are too few.
        least, most: its bounds; the server refuses other values.
        flag: it is true or false.
    """

    decimals: int | None = None
    digits: int | None = None
    over: Over | None = None
    least: float = 0
    most: float = LARGEST
    flag: bool = False

    def fits(self, value: Any) -> bool:
        """Returns whether `value` is a finite number within the bounds or, of a flag, true or false."""
        if self.flag or isinstance(value, bool):
            return self.flag and isinstance(value, bool)
        return isinstance(value, int | float) and self.least <= value <= self.most  # false for nan

    def rounded(self, value: float) -> float:
        """Returns the number as it leaves. Rounding is idempotent."""
        if self.digits is not None:
            return float(f"{value:.{self.digits}g}")
        return value if self.decimals is None else round(value, self.decimals)


@dataclass(frozen=True)
class Table:
    """Summaries (`cell`) per metric; with `by`, one such table for each name in it; `by` None: for each of the plan's sites.

    Every number of a table is measured over the images `over`. A plan of several classes adds the summaries of each class to
    those of the means over classes.
    """

    metrics: tuple[str, ...]
    over: Over
    by: tuple[str, ...] | None = ()


@dataclass(frozen=True)
class Versions:
    """The numbers of the versions of packages (`feddp.versions`), measured over no images."""

    over: None = None


COUNT, FLAG = Number(), Number(flag=True)
VERSION = Number(most=9_999)
METRIC = Number(decimals=3, over=Over.SELECTION, most=1)
LOSS = Number(digits=3, over=Over.TRAIN, least=-LARGEST)
SCALARS: Mapping[str, Number | Table | Versions] = {
    **dict.fromkeys(("consent", "scoring", TOO_FEW), FLAG),
    "versions": Versions(),
    **dict.fromkeys(("round", "phase", "epoch", "samples", "images"), COUNT),
    **dict.fromkeys(("seconds", LOADING, STORING), Number(decimals=1)),
    EVALUATING: Number(decimals=1, over=Over.SELECTION),  # it grows with their number
    **dict.fromkeys(("dice", "iou", "iou_before"), METRIC),
    **dict.fromkeys(("loss", "loss_before"), LOSS),
    **dict.fromkeys(FLAGS, Number(over=Over.SELECTION, flag=True)),
    **dict.fromkeys(TEST_FLAGS, Number(over=Over.TEST, flag=True)),
    "empty_masks": Number(over=Over.UNSEEN),
    "scores": Table(METRICS, Over.UNSEEN),
    **dict.fromkeys(WHEN, Table(METRICS, Over.TEST)),
    VOLUMES: Table(VOLUME_METRICS, Over.CASES, by=WHEN),
    "peers": Table(METRICS, Over.TEST, by=None),
}
MEASURED = frozenset(name for name, scalar in SCALARS.items() if scalar.over)
_TRAINED = ("loss", "samples", "seconds", *PARTS)
_SCORED, _TUNED = ("round", "dice", "iou"), ("loss", "iou_before", "iou", "epoch")
_ADAPTED = ("images", "empty_masks", "seconds", "loss_before", "loss", "epoch", "scores")


@dataclass(frozen=True)
class TaskSpec:
    """One task.

    Args:
        stage: its stage, a stage of a plan, READY_STAGE, EVALUATE_STAGE or ADAPT_STAGE: a module in `feddp.stages`.
        consent: the consent word without which no tensors of the site leave and no peers' tensors arrive.
        tensors: the tensors that an answer may hold.
        scalars: the names in SCALARS that an answer may hold.
        delivers: for a delivery, the collection whose tensors it brings.
        over: the images over which all measured numbers of this task are measured, if not those of SCALARS.
    """

    name: str
    stage: str = ""
    kind: Kind | None = None
    consent: str = ""
    tensors: Sent = Sent.NONE
    scalars: tuple[str, ...] = ()
    delivers: str = ""
    over: Over | None = None

    def measured_over(self, scalar: str) -> Over | None:
        """Returns the images over which a scalar of this task is measured, if any."""
        over = SCALARS[scalar].over
        return over and (self.over or over)


def _table(*specs: TaskSpec) -> dict[str, TaskSpec]:
    return {spec.name: spec for spec in specs}


_CONSENT = ("consent",)
TASKS: Mapping[str, TaskSpec] = _table(
    TaskSpec(READY, READY_STAGE, Kind.READY, scalars=("versions", "scoring", "samples")),
    TaskSpec(INTRODUCE_SPECTRA, SPECTRA_STAGE, Kind.HANDSHAKE, SPECTRA, scalars=_CONSENT),
    TaskSpec(COLLECT_SPECTRA, SPECTRA_STAGE, Kind.COLLECTION, SPECTRA, Sent.AMPLITUDES, (*_CONSENT, TOO_FEW)),
    TaskSpec(TAKE_SPECTRA, SPECTRA_STAGE, Kind.DELIVERY, SPECTRA, scalars=_CONSENT, delivers=COLLECT_SPECTRA),
    TaskSpec(INITIAL, TRAIN_STAGE, Kind.START),
    TaskSpec(AGREE, TRAIN_STAGE, Kind.AGREEMENT),
    TaskSpec(TRAIN, TRAIN_STAGE, Kind.ROUND, tensors=Sent.SHARED, scalars=(*_SCORED, *FLAGS, "phase", *_TRAINED)),
    TaskSpec(SCORE, TRAIN_STAGE, Kind.SCORE, scalars=_SCORED),
    TaskSpec(ADOPT, TRAIN_STAGE, Kind.SCORE, scalars=_SCORED),
    TaskSpec(TUNE, TUNE_STAGE, Kind.LOCAL, scalars=_TUNED),
    TaskSpec(INTRODUCE, CALIBRATE_STAGE, Kind.HANDSHAKE, CALIBRATION, scalars=_CONSENT),
    TaskSpec(COLLECT, CALIBRATE_STAGE, Kind.COLLECTION, CALIBRATION, Sent.PERSONAL, _CONSENT),
    TaskSpec(CALIBRATE, CALIBRATE_STAGE, Kind.DELIVERY, CALIBRATION, scalars=_TUNED, delivers=COLLECT),
    TaskSpec(COLLECT_HEADS, HEADS_STAGE, Kind.COLLECTION, CALIBRATION, Sent.HEADS, _CONSENT),
    TaskSpec(CALIBRATE_HEADS, HEADS_STAGE, Kind.DELIVERY, CALIBRATION, scalars=_TUNED, delivers=COLLECT_HEADS),
    TaskSpec(EVALUATE, EVALUATE_STAGE, Kind.LOCAL, scalars=(*WHEN, VOLUMES, "peers", *TEST_FLAGS)),
    TaskSpec(JOIN, ADAPT_STAGE, Kind.HANDSHAKE, OUTSIDE, scalars=_CONSENT),
    TaskSpec(GIVE_MODEL, ADAPT_STAGE, Kind.COLLECTION, OUTSIDE, Sent.MODEL, _CONSENT),
    TaskSpec(ADAPT, ADAPT_STAGE, Kind.DELIVERY, OUTSIDE, Sent.NONE, _ADAPTED, GIVE_MODEL, Over.UNSEEN),
)


def spec_of(task: str) -> TaskSpec:
    """Returns the row of a task; an unknown task has an empty row: no consent, no tensors, no scalars."""
    return TASKS.get(task, TaskSpec(task))


def with_shared() -> list[str]:
    """Returns the names of the tasks that bring shared tensors; a plan may send these in half precision."""
    return [spec.name for spec in TASKS.values() if spec.kind in (Kind.ROUND, Kind.SCORE)]


def rounded(name: str, value: Any, above: str = "") -> Any:
    """Returns a number, or every number of a table, as it leaves. `above` is what has it: in a table, a metric."""
    if isinstance(value, Mapping):
        return {below: rounded(below, each, name) for below, each in value.items()}
    number = cell(above).get(name) or SCALARS.get(name)
    return number.rounded(value) if isinstance(number, Number) else value


def numbers_of(task: str, sites: Sequence[str], classes: Sequence[str]) -> dict[str, Any]:
    """Returns the numbers that an answer may hold: {name: Number, or the same one level below}.

    `sites` and `classes` are the plan's.
    """
    return {name: _below(SCALARS[name], sites, classes) for name in spec_of(task).scalars}


def _below(scalar: Number | Table | Versions, sites: Sequence[str], classes: Sequence[str]) -> Any:
    if isinstance(scalar, Number):
        return scalar
    if isinstance(scalar, Versions):
        return {package: dict.fromkeys(VERSION_PARTS, VERSION) for package in PACKAGES}
    table = {name: cell(name) for name in columns(scalar.metrics, classes)}
    return table if scalar.by == () else dict.fromkeys(sites if scalar.by is None else scalar.by, table)


def cell(column: str) -> dict[str, Number]:
    """Returns the numbers of a table's cell: a distance keeps three digits, a share three decimals, which are as many."""
    value = Number(digits=3) if column.split("_", 1)[0] in DISTANCES else Number(decimals=3, most=1)
    return {"mean": value, "std": value, "n": COUNT}


def consents_of(stages: Iterable[str]) -> list[str]:
    """Returns the consent words for which these stages ask, each once."""
    wanted = set(stages)
    return list(dict.fromkeys(spec.consent for spec in TASKS.values() if spec.stage in wanted and spec.consent))


def tasks_of(stages: Collection[str]) -> list[str]:
    """Returns the names of these stages' tasks in the table's order, with the handshakes for their consent words."""
    asked = consents_of(stages)
    handshakes = [name for name, spec in TASKS.items() if spec.kind is Kind.HANDSHAKE and spec.consent in asked]
    return [name for name, spec in TASKS.items() if spec.stage in stages or name in handshakes]
