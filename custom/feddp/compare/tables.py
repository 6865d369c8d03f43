"""The tables of a comparison: means of test metrics, and how they spread."""

import textwrap
from collections.abc import Mapping, Sequence

from feddp.compare.results import FINAL, IMAGE, Kind, Result
from feddp.compare.scores import scores
from feddp.reporting.tables import BLANK, SHOWN, Cell, ResultTable, Value, shown_value

OPTIMISTIC = "Optimistic: rounds and epochs were chosen on the test images (selection=test)."
APART = "Rows without a federation, or without some of the seeds, compete neither for the best value nor in the test."


def scores_table(
    name: str,
    title: str,
    heads: Sequence[str],
    entries: Sequence[tuple[Sequence[str], Result, str]],
    metrics: Sequence[str],
    sites: list[str],
    seeds: int,
    per_site: bool = False,
    kind: Kind = IMAGE,
) -> ResultTable:
    """Mean ± std of test metrics, a row for each of `entries`: (what stands below `heads`, its runs, before or final).

    Args:
        sites: the federation's; the Average is over them.
        seeds: how many were asked for; with several, a column says how the average differs between them.
        per_site: a column for every site, not the Average alone.
        kind: of images, or of cases.
    """
    shown = [*(sites if per_site else []), "Average", *(["± seeds"] if seeds > 1 else [])]
    columns = [(metric, column) for metric in metrics for column in shown]
    rows = []
    for labels, result, when in entries:
        some = f" ({seeds - len(result.failed)} of {seeds} seeds)" if result.folders and result.failed else ""
        cells = _values(result, when, columns, sites, kind) if result.folders else failed(result, len(columns))
        rows.append((*labels[:-1], labels[-1] + some, *cells))
    optimistic = any("test" in result.selections for _, result, _ in entries)
    apart = frozenset(i for i, (_, result, _) in enumerate(entries) if not result.competes)
    return ResultTable(
        name,
        title,
        (*heads, *(f"{SHOWN[m].head} {c}" for m, c in columns)),
        (*[None] * len(heads), *(None if c == "± seeds" else SHOWN[m].better for m, c in columns)),
        tuple(rows),
        (*([OPTIMISTIC] if optimistic else []), *([APART] if apart else [])),
        apart,
    )


def spread_table(entries: Mapping[str, Result], sites: list[str]) -> ResultTable:
    """Dice as 002 reports it: the mean over clients, the mean over all test images, and the variance over clients (points²)."""
    rows = []
    for label, result in entries.items():
        if not result.folders:
            rows.append((label, *failed(result, 3)))
            continue
        found = scores(result, sites, FINAL)
        if found.average is None:
            rows.append((label, BLANK, BLANK, BLANK))
            continue
        clients = found.average["dice"]
        images = [row["dice"] for rows_here in found.images.values() for row in rows_here.values()]
        values = 100 * clients["mean"], 100 * sum(images) / len(images), (100 * clients["std"]) ** 2
        rows.append((label, *map(Value, values)))
    heads = ("Method", "Dice (%) per client", "Dice (%) over images", "Variance over clients")
    apart = frozenset(i for i, result in enumerate(entries.values()) if not result.competes)
    return ResultTable(
        "spread", "Dice and its spread, as pFLFE's Tables 1-3", heads, (None, max, max, min), tuple(rows), (), apart
    )


def failed(result: Result, width: int) -> tuple[str, ...]:
    """A row of a variant without a finished run: the first reason, and nothing."""
    return (f"failed: {textwrap.shorten(next(iter(result.failed.values())), 120)}", *[""] * (width - 1))


def _values(result: Result, when: str, columns: Sequence[tuple[str, str]], sites: list[str], kind: Kind) -> tuple[Cell, ...]:
    found = scores(result, sites, when, kind)
    cells: list[Cell] = []
    for metric, column in columns:
        if column == "± seeds":
            cells.append(Value(SHOWN[metric].factor * found.seeds[metric]) if found.seeds else BLANK)
        else:
            summary = found.average if column == "Average" else found.sites.get(column)
            cells.append(shown_value(summary, metric) if summary else BLANK)
    return tuple(cells)
