"""Published averages of the methods, and whether their order holds in a comparison.

From the texts of the papers: FedDP (Wang et al., TMI 2024), Tables I to III, Dice in per cent; virtual classes (Liu et al.,
2024), Table I, mean IoU in per cent. Our texts of IOP-FL and pFLFE lack the numbers of their tables.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations

from feddp.compare.patients import Names, PatientScores
from feddp.compare.reference import REFERENCE, last_round, reference, unlike
from feddp.compare.scores import Scores
from feddp.reporting.tables import BLANK, Cell, ResultTable, Value


@dataclass(frozen=True)
class PublishedTable:
    source: str
    metric: str
    averages: Mapping[str, float]  # by variant


_TABLE_I = ("local", "fedavg", "fedgkd", "finetune", "ditto", "fedrep", "iop_fl", "fedbabu", "fedlc", "feddp")
_LQ = ("fedavg", "feddp@when=before", "feddp")
_LIU = ("fedavg", "fedrep", "fedbabu", "fedlc", "iop_fl", "virtual_class")


def _of(source: str, metric: str, methods: tuple[str, ...], *values: float) -> PublishedTable:
    return PublishedTable(source, metric, dict(zip(methods, values, strict=True)))


PUBLISHED = (
    _of("FedDP, Table I", "dice", _TABLE_I, 61.69, 82.20, 82.26, 82.61, 80.08, 83.49, 83.60, 83.56, 84.36, 86.58),
    _of("FedDP, Table II", "dice", _TABLE_I, 89.94, 91.06, 91.09, 91.52, 91.53, 91.38, 91.49, 91.55, 92.14, 92.44),
    _of("FedDP, Table III, polyps", "dice", _LQ, 82.20, 84.80, 86.58),
    _of("FedDP, Table III, fundus", "dice", _LQ, 91.06, 92.14, 92.44),
    _of("Virtual classes, Table I, fundus, U-Net", "iou", _LIU, 72.39, 73.48, 73.40, 75.11, 74.07, 76.53),
    _of("Virtual classes, Table I, polyps, U-Net", "iou", _LIU, 62.48, 56.96, 58.51, 65.15, 63.30, 67.17),
    _of("Virtual classes, Table I, fundus, PVTv2", "iou", ("feddp", "virtual_class"), 76.54, 78.89),
    _of("Virtual classes, Table I, polyps, PVTv2", "iou", ("feddp", "virtual_class"), 67.48, 69.71),
)
_HEADS = ("Published", "Methods here", "Pairs", "Same order", "beyond chance", "Other order", "beyond chance", "Kendall's τ")
_NOTE = (
    "Pairs of methods that a published table and this comparison have: in the same order here, in the other, or equal; beyond"
    " chance where the interval of their difference (as in *Which methods differ*) leaves out 0. The papers used other images,"
    " sizes and trainings: the order of methods is compared, not their values. Their images of polyps and eyes always show"
    " the structure{empty}. τ: the pairs in the same order less those in the other, divided by both together."
)
_LEFT_OUT = ", so images with an empty mask are left out"
_COUNTED = "; images with an empty mask count here all the same, because a site has no others"
_ROUNDS = "A pair with FedAvg takes it of the round that the other method takes (*Which methods differ*)"
_OTHERS = "; other pairs may be of a best and of a last round."


def orderings_table(
    found: Mapping[str, Scores], names: Names, kept: Names | None, last: Collection[str] = ()
) -> ResultTable | None:
    """One row per published table of which two methods are here; None without one.

    Args:
        names: the patient of each test image.
        kept: the same of the images with structures, which are taken unless a site has none
            (`feddp.compare.tested.with_structures`).
        last: the methods whose networks are of the last round, or went on from it; they are compared with that of FedAvg,
            where it is here (`feddp.compare.reference`). Without FedAvg's best round, its last one is FedAvg for all.
    """
    rows: list[tuple[Cell, ...]] = []
    stand_in = None if REFERENCE in found else last_round(found, last)
    if stand_in:
        found = {REFERENCE if label == stand_in else label: scores for label, scores in found.items()}
        last = {REFERENCE if label == stand_in else label for label in last}
    uneven = [label for label in unlike(found, last) if reference(label, found, last) == REFERENCE]
    but = f", except beside {', '.join(uneven)}" if uneven else ""
    notes = [f"{_NOTE.format(empty=_LEFT_OUT if kept else _COUNTED)} {_ROUNDS}{but}{_OTHERS}"]
    notes += [f"{REFERENCE} is {stand_in} here."] if stand_in else []
    for table in PUBLISHED:
        if sum(label in table.averages for label in found) > 1:
            row, other = _compared(table, found, kept or names, last)
            rows.append(row)
            notes += other
    title = "Whether published orders hold"
    return ResultTable("published", title, _HEADS, (None,) * len(_HEADS), tuple(rows), tuple(notes)) if rows else None


def _compared(
    table: PublishedTable, found: Mapping[str, Scores], names: Names, last: Collection[str]
) -> tuple[tuple[Cell, ...], list[str]]:
    """A published table's row, and a note for each pair whose order is another here, beyond chance."""
    here = [label for label in found if label in table.averages]
    # what stands for FedAvg beside each other method
    fair = {label: reference(label, found, last) for label in here if label != REFERENCE}
    tested = PatientScores.of(
        {label: found[label].rows for label in dict.fromkeys((*here, *fair.values()))}, table.metric, names
    )
    counts, pairs, notes = {True: [0, 0], False: [0, 0]}, 0, []
    for above, below in combinations(sorted(here, key=lambda label: -table.averages[label]), 2):
        if table.averages[above] == table.averages[below]:
            continue
        pairs += 1
        pair = (fair[below] if above == REFERENCE else above), (fair[above] if below == REFERENCE else below)
        apart, interval = tested.apart(*map(tested.methods.index, pair))
        if apart == 0:
            continue
        low, high = interval or (0.0, 0.0)
        counts[apart > 0][0] += 1
        counts[apart > 0][1] += low > 0 or high < 0
        if high < 0:
            notes.append(f"{table.source}: {above} above {below}; here below, beyond chance.")
    (same, _), (other, _) = counts[True], counts[False]
    cells = [
        str(number) if tested.enough or not i else BLANK for kind in (True, False) for i, number in enumerate(counts[kind])
    ]
    tau: Cell = Value((same - other) / (same + other)) if same + other else BLANK  # all are equal here
    return (table.source, ", ".join(here), str(pairs), *cells, tau), notes
