"""Published averages of the methods, and whether their order holds in a comparison.

From the texts of the papers: FedDP (Wang et al., TMI 2024), Tables I to III, Dice in per cent; virtual classes (Liu et al.,
2024), Table I, mean IoU in per cent. Our texts of IOP-FL and pFLFE lack the numbers of their tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import isfinite

from scipy.stats import kendalltau

from feddp.compare.patients import Names, PatientScores
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
    " sizes and trainings: the order of methods is compared, not their values. Their images of polyps and"
    " eyes always show the structure, so images with an empty mask are left out."
)


def orderings_table(found: Mapping[str, Scores], names: Names) -> ResultTable | None:
    """One row per published table of which two methods are here; None without one."""
    rows: list[tuple[Cell, ...]] = []
    notes = [_NOTE]
    for table in PUBLISHED:
        here = {label: scores for label, scores in found.items() if label in table.averages}
        if len(here) < 2:
            continue
        tested = PatientScores.of(here, table.metric, names)
        means = tested.means()
        then = [table.averages[label] for label in tested.methods]
        counts, pairs = {True: [0, 0], False: [0, 0]}, 0
        for one, other in combinations(range(len(then)), 2):
            if then[one] == then[other]:
                continue
            if then[one] < then[other]:
                one, other = other, one
            pairs += 1
            apart, interval = tested.apart(one, other)
            if apart == 0:
                continue
            same, (low, high) = apart > 0, interval or (0.0, 0.0)
            counts[same][0] += 1
            counts[same][1] += low > 0 or high < 0
            if not same and high < 0:
                notes.append(f"{table.source}: {tested.methods[one]} above {tested.methods[other]}; here below, beyond chance.")
        tau = float(kendalltau(then, means).statistic)
        cells = [
            str(number) if tested.enough or not i else BLANK for same in (True, False) for i, number in enumerate(counts[same])
        ]
        order: Cell = Value(tau) if isfinite(tau) else BLANK  # all are equal here
        rows.append((table.source, ", ".join(tested.methods), str(pairs), *cells, order))
    title = "Whether published orders hold"
    return ResultTable("published", title, _HEADS, (None,) * len(_HEADS), tuple(rows), tuple(notes)) if rows else None
