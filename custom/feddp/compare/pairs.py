"""Every two methods of a comparison: what they differ by, with its interval, and the test. `ranking` has each against one."""

from collections.abc import Collection, Mapping

import numpy as np

from feddp.compare.patients import Names, PatientScores
from feddp.compare.ranking import shown_interval
from feddp.compare.scores import Scores
from feddp.compare.statistics import METRIC
from feddp.reporting.tables import BLANK, Cell, ResultTable, Value

_NOTE = (
    "Right of the diagonal: the Dice of the row less that of the column, in points{interval}; left of it: p of Wilcoxon's"
    " test of the same two. As in *Which methods differ*, but not corrected for the number of pairs{chance}."
)
_ROUNDS = (
    "Of the last round, or gone on from it: {last}; beside a method of the best round, the choice of the round counts, too."
)
_CHANCE = ": if no two methods differed, about 1 interval in 20 would leave out 0"


def pairs_tables(
    found: Mapping[str, Scores], names: Names, kept: Names | None, last: Collection[str] = ()
) -> list[ResultTable]:
    """Over all test images; then over those with structures, if some masks are empty; [] of fewer than three methods.

    Of two methods, *Which methods differ* has the one pair.

    Args:
        found: `feddp.compare.ranking.finished`.
        names: the patient of each test image.
        kept: the same of the images with structures (`feddp.compare.tested.with_structures`).
        last: the methods whose networks are of the last round, or went on from it.
    """
    if len(found) < 3:
        return []
    tables = [_table("pairs", "Every two methods", found, names, last)]
    if kept and kept != names:
        tables.append(_table("pairs_filled", "Every two methods on images with structures", found, kept, last))
    return tables


def _table(name: str, title: str, found: Mapping[str, Scores], names: Names, last: Collection[str]) -> ResultTable:
    """Rows and columns by falling mean, so no difference is negative."""
    tested = PatientScores.of({label: each.rows for label, each in found.items()}, METRIC, names)
    order = np.argsort(-tested.means(), kind="stable").tolist()
    methods = [tested.methods[i] for i in order]

    def cell(row: int, column: int) -> Cell:
        one, other = order[row], order[column]
        if row == column:
            return BLANK
        if row > column:
            return Value(tested.p_value(one, other), digits=4)
        apart, wide = tested.apart(one, other)
        return f"{apart:.2f} ({shown_interval(*wide)})" if wide else Value(apart)

    places = range(len(methods))
    rows = tuple((method, *(cell(row, column) for column in places)) for row, method in enumerate(methods))
    enough = tested.enough
    notes = [_NOTE.format(interval=" with its interval" if enough else "", chance=_CHANCE if enough else "")]
    if 0 < len(ends := [method for method in methods if method in last]) < len(methods):
        notes.append(_ROUNDS.format(last=", ".join(ends)))
    return ResultTable(name, title, ("Method", *methods), (None,) * (1 + len(methods)), rows, tuple(notes))
