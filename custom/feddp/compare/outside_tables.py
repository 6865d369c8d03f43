"""The tables and figures of the hospitals outside."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from feddp.compare.leave_one_out import Outside
from feddp.compare.outside_studies import TABLE_II, Entry, Study
from feddp.compare.scores import scores
from feddp.compare.tables import scores_table
from feddp.reporting.plots import draw_bars, draw_points, draw_spread
from feddp.reporting.tables import BLANK, SHOWN, Cell, ResultTable, Value, shown_value

_INSIDE = "Inside n: the first n of the other sites in alphabetical order."
_SECONDS = "Seconds a sample: adaptation, prediction and writing, on the machine that did it; means over sites and seeds."
_DICE = SHOWN["dice"].head

Results = Mapping[Entry, Outside]


def outside_tables(name: str, study: Study, results: Results, sites: list[str], seeds: int) -> list[ResultTable]:
    """Table II as two tables, Dice and ASSD, a column for each site outside; any other study as one, of the averages."""
    rows = [(entry.labels, results[entry], "") for entry in study.entries]
    if name == TABLE_II:
        return [
            scores_table(f"{name}{end}", f"{study.title}{by}", study.heads, rows, (metric,), sites, seeds, per_site=True)
            for metric, end, by in (("dice", "", ""), ("assd", "_assd", ", by ASSD"))
        ]
    table = scores_table(f"outside_{name}", study.title, study.heads, rows, ("dice", "assd"), sites, seeds)
    if name == "inside_sites":
        table = replace(table, notes=(*table.notes, _INSIDE))
    return [_timed(table, [results[entry] for entry in study.entries]) if name == "time" else table]


def _timed(table: ResultTable, results: Sequence[Outside]) -> ResultTable:
    """The same with a column of the seconds a sample."""
    cells: list[Cell] = [Value(result.seconds(), digits=3) if result.folders else BLANK for result in results]
    rows = tuple((*row, cell) for row, cell in zip(table.rows, cells, strict=True))
    heads, better = (*table.heads, "Seconds a sample"), (*table.better, min)
    return replace(table, heads=heads, better=better, rows=rows, notes=(*table.notes, _SECONDS))


def draw_outside(name: str, study: Study, out: Path, results: Results, sites: list[str]) -> None:
    """Figs. 6 to 8, each of its study; what did not finish with every site outside is left out."""
    found = {entry: scores(results[entry], sites) for entry in study.entries if results[entry].folders}
    found = {entry: found_here for entry, found_here in found.items() if found_here.average}
    dice = {entry: shown_value(found_here.average, "dice") for entry, found_here in found.items()}
    path = out / f"outside_{name}.png"
    if name == "inside_sites":
        series: dict[str, dict[str, tuple[float, float]]] = {}
        for entry, cell in dice.items():
            method, inside = entry.labels
            series.setdefault(method, {})[inside] = cell.mean, cell.std
        draw_bars(path, {_DICE: series})
    elif name == "losses":
        draw_bars(path, {_DICE: {"routing": {entry.labels[0]: (cell.mean, cell.std) for entry, cell in dice.items()}}})
    elif name == "tau":
        spread = {e.labels[0]: [100 * found[e].sites[site]["dice"]["mean"] for site in sites] for e in found}
        draw_spread(path, spread, "τ", f"{_DICE}, a dot a site outside")
    elif name == "time":
        points = {entry.labels[0]: (results[entry].seconds(), cell.mean, cell.std) for entry, cell in dice.items()}
        draw_points(path, points, "seconds a sample", _DICE)
