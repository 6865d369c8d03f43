"""The tables of a comparison: test metrics of methods, of studies and at unseen sites."""

import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from feddp.compare.leave_one_out import UnseenResult
from feddp.compare.patients import Names
from feddp.compare.ranking import sentence
from feddp.compare.scores import AVERAGE, CASE, FINAL, IMAGE, Measured, Result, Scores, Unit, classes_of, has_cases, scores
from feddp.compare.statistics import METRIC
from feddp.compare.studies import TABLE_7, TABLE_II, AdaptedModels, Study, TrainedNetworks
from feddp.compare.variants import Variant
from feddp.reporting.tables import BLANK, SHOWN, Better, Cell, ResultTable, Value, shown_value
from feddp.training.columns import VOLUME_METRICS, of_class

OPTIMISTIC = "Optimistic: rounds and epochs were chosen on the test images (selection=test)."
APART = "Rows without a federation, or without some of the seeds, compete neither for the best value nor in the test."
BY_CASE = (
    "All test slices of a patient are one volume; ± is over a site's test cases. Sites whose images are no slices have none."
)
INSIDE = "Inside n: the first n of the other sites in alphabetical order."
SECONDS = "Seconds a sample: adaptation, prediction and writing, on the machine that did it; means over sites and seeds."
SEEDS = "± seeds"
VARIANCE = "Variance over clients: the population's, of the sites' means."
OVER_SEEDS = "Here ± is the population standard deviation over the seeds, of each site's mean and of the Average."

Line = tuple[Sequence[str], Measured, str]  # a row's labels, what it is of, before or after the last stage


def methods_tables(
    named: Mapping[str, Result], sites: list[str], names: Names, seeds: int, last: Collection[str]
) -> list[ResultTable]:
    """Table I or II with the test of its best two, each class, the other metrics, the spread, and the cases if any.

    Args:
        names: the patient of each test image.
        last: the methods whose networks are of the last round, or went on from it.
    """
    rows = [((label,), result, FINAL) for label, result in named.items()]
    title = "Table I / II: the methods"
    first = scores_table("methods", title, ("Method",), rows, ("dice", "assd"), sites, seeds, per_site=True)
    title, metrics = "The methods by IoU, HD95, HD and medpy's ASSD", ("iou", "hd95", "hd", "assd-medpy")
    more = scores_table("methods_more", title, ("Method",), rows, metrics, sites, seeds, per_site=True)
    competing = {label: result for label, result in named.items() if result.folders and result.competes}
    test = sentence(_distinct({label: (result, scores(result, sites)) for label, result in competing.items()}), names, last)
    by_class = class_tables("methods", "The methods", ("Method",), rows, sites, seeds)
    tables = [replace(first, notes=(test, _rounds(named, last), *first.notes)), *by_class, more, spread_table(named, sites)]
    if seeds > 1:
        title = "The methods by site, ± over the seeds, as IOP-FL's Table I"
        tables.append(seeds_table("seeds", title, ("Method",), rows, ("dice", "iou", "hd"), sites, seeds))
    if any(has_cases(result) for result in named.values()):
        title = "The methods by case"
        cases = scores_table("volumes", title, ("Method",), rows, VOLUME_METRICS, sites, seeds, per_site=True, unit=CASE)
        tables.append(replace(cases, notes=(BY_CASE, *cases.notes)))
    return tables


def _distinct(rows: Mapping[str, tuple[Result, Scores]]) -> dict[str, Scores]:
    """Of the rows of one run, before its last stage and after it, the better one: no run is tested against itself."""
    best: dict[tuple[Path, ...], str] = {}
    found = {label: scored.average[METRIC]["mean"] for label, (_, scored) in rows.items() if scored.average}
    for label in sorted(found, key=lambda label: -found[label]):
        best.setdefault(tuple(rows[label][0].folders.values()), label)
    return {label: rows[label][1] for label in rows if label in best.values()}


def _rounds(named: Iterable[str], last: Collection[str]) -> str:
    """Says of which round the methods' networks are."""
    kinds = {
        True: "the last round, or gone on from it (Algorithm 1)",
        False: "the round that is best on the selection split, in Local Train each site's own",
    }
    found = {ends: [label for label in named if (label in last) == ends] for ends in kinds}
    if not all(found.values()):
        return f"All networks are of {kinds[not found[False]]}."
    return " ".join(f"Of {kinds[ends]}: {', '.join(found[ends])}." for ends in kinds)


def optimistic(results: Iterable[Measured]) -> tuple[str, ...]:
    """The note of a table where a method chose rounds and epochs on the test images; () where none did."""
    return (OPTIMISTIC,) if any("test" in result.selections for result in results) else ()


def labelled(label: str, result: Measured, seeds: int | None = None) -> str:
    """A row's label, which says so where not all `seeds` finished; if None, those that finished and those that failed."""
    seeds = len(result.folders) + len(result.failed) if seeds is None else seeds
    return label + (f" ({seeds - len(result.failed)} of {seeds} seeds)" if result.folders and result.failed else "")


def class_tables(
    name: str,
    title: str,
    heads: Sequence[str],
    lines: Sequence[Line],
    sites: list[str],
    seeds: int,
    classes: Sequence[str] | None = None,
) -> list[ResultTable]:
    """Dice and ASSD of each class alone, one table for each; none where there is one class.

    Args:
        classes: those of the rows if None.
    """

    def alone(name: str, title: str, class_name: str) -> ResultTable:
        return scores_table(name, title, heads, lines, ("dice", "assd"), sites, seeds, per_site=True, class_name=class_name)

    return by_class(alone, name, title, classes_of(result for _, result, _ in lines) if classes is None else classes)


def by_class(table: Callable[[str, str, str], ResultTable], name: str, title: str, classes: Iterable[str]) -> list[ResultTable]:
    """Returns `table(name, title, class)` of each class, with a name and a title of its own."""
    return [table(f"{name}_class_{number}", f"{title}: {one} alone", one) for number, one in enumerate(classes, 1)]


def study_table(
    name: str, study: Study[TrainedNetworks], results: Mapping[Variant, Result], sites: list[str], seeds: int
) -> ResultTable:
    """One of STUDIES, with the averages of its paper's metrics."""
    rows = [(entry.labels, results[entry.source.variant], entry.source.when) for entry in study.entries]
    return scores_table(name, study.title, study.heads, rows, study.metrics, sites, seeds)


def outside_tables(
    name: str, study: Study[AdaptedModels], results: Mapping[AdaptedModels, UnseenResult], sites: list[str], seeds: int
) -> list[ResultTable]:
    """Table II as tables of Dice and ASSD, of each class, and of Dice ± over seeds, a column per unseen site.

    Any other study is one table, and Table 7 one more for each class.
    """
    found = [results[entry.source] for entry in study.entries]
    rows = [(entry.labels, result, FINAL) for entry, result in zip(study.entries, found, strict=True)]
    if name == TABLE_II:
        tables = [
            scores_table(f"{name}{end}", f"{study.title}{by}", study.heads, rows, (metric,), sites, seeds, per_site=True)
            for metric, end, by in (("dice", "", ""), ("assd", "_assd", ", by ASSD"))
        ]
        tables += class_tables(name, study.title, study.heads, rows, sites, seeds)
        title = f"{study.title}, ± over the seeds"
        return tables + ([seeds_table(f"{name}_seeds", title, study.heads, rows, ("dice",), sites, seeds)] if seeds > 1 else [])
    table = scores_table(
        f"outside_{name}", study.title, study.heads, rows, study.metrics, sites, seeds, per_site=name == TABLE_7
    )
    if name == "inside_sites":
        table = replace(table, notes=(*table.notes, INSIDE))
    by_class = class_tables(table.name, study.title, study.heads, rows, sites, seeds) if name == TABLE_7 else []
    return [_timed(table, found) if name == "time" else table, *by_class]


def scores_table(
    name: str,
    title: str,
    heads: Sequence[str],
    lines: Sequence[Line],
    metrics: Sequence[str],
    sites: list[str],
    seeds: int,
    per_site: bool = False,
    unit: Unit = IMAGE,
    class_name: str = "",
) -> ResultTable:
    """Mean ± std of test metrics, one row for each of `lines`.

    Args:
        sites: the federation's; the Average is over them.
        seeds: how many were asked for; with several, a column says how the average differs between them.
        per_site: one column per site, not the Average alone.
        unit: images or cases.
        class_name: the class whose metrics are shown; "": the means over the classes.
    """
    shown = [*(sites if per_site else []), AVERAGE, *([SEEDS] if seeds > 1 else [])]
    columns = [(metric, column) for metric in metrics for column in shown]
    rows = []
    for labels, result, when in lines:
        cells = _values(result, when, columns, sites, unit, class_name) if result.folders else failed(result, len(columns))
        rows.append((*labels[:-1], labelled(labels[-1], result, seeds), *cells))
    apart = frozenset(i for i, (_, result, _) in enumerate(lines) if not result.competes)
    better: list[Better | None] = [None if column == SEEDS else SHOWN[metric].better for metric, column in columns]
    return ResultTable(
        name,
        title,
        (*heads, *(f"{SHOWN[metric].head} {column}" for metric, column in columns)),
        (*[None] * len(heads), *better),
        tuple(rows),
        (*optimistic(result for _, result, _ in lines), *([APART] if apart else [])),
        apart,
    )


def seeds_table(
    name: str, title: str, heads: Sequence[str], lines: Sequence[Line], metrics: Sequence[str], sites: list[str], seeds: int
) -> ResultTable:
    """The means of each site and their Average, where ± is over the seeds: (Jiang et al., TMI 2023) shows three runs so."""
    table = scores_table(name, title, heads, lines, metrics, sites, seeds, per_site=True)
    kept = [i for i, head in enumerate(table.heads) if not head.endswith(SEEDS)]
    columns = [(metric, column) for metric in metrics for column in (*sites, AVERAGE)]
    rows = []
    for row, (_, result, when) in zip(table.rows, lines, strict=True):
        cells = [row[i] for i in kept]
        over = scores(result, sites, when).seeds if result.folders else None
        for place, (metric, column) in enumerate(columns, len(heads)):
            if isinstance(cell := cells[place], Value):
                std = SHOWN[metric].factor * over[column][metric] if over else None
                cells[place] = replace(cell, std=std)
        rows.append(tuple(cells))
    better = tuple(table.better[i] for i in kept)
    notes = (OVER_SEEDS, *table.notes)
    return replace(table, heads=tuple(table.heads[i] for i in kept), better=better, rows=tuple(rows), notes=notes)


def spread_table(named: Mapping[str, Result], sites: list[str]) -> ResultTable:
    """Dice as in (Xie et al., 2024): means over clients and over all test images, variance over clients (points²)."""
    rows: list[tuple[Cell, ...]] = []
    for label, result in named.items():
        if not result.folders:
            rows.append((label, *failed(result, 3)))
            continue
        found = scores(result, sites)
        if found.average is None:
            rows.append((label, BLANK, BLANK, BLANK))
            continue
        clients = found.average["dice"]
        images = [row["dice"] for rows_here in found.rows.values() for row in rows_here.values()]
        values = 100 * clients["mean"], 100 * sum(images) / len(images), (100 * clients["std"]) ** 2
        rows.append((label, *map(Value, values)))
    heads = ("Method", "Dice (%) per client", "Dice (%) over images", "Variance over clients")
    apart = frozenset(i for i, result in enumerate(named.values()) if not result.competes)
    title, better = "Dice and its spread, as pFLFE's Tables 1-3", (None, max, max, min)
    return ResultTable("spread", title, heads, better, tuple(rows), (VARIANCE, *optimistic(named.values())), apart)


def failed(result: Measured, width: int) -> tuple[str, ...]:
    """The row of a variant without a finished run: the first reason, then empty cells."""
    return (f"failed: {textwrap.shorten(next(iter(result.failed.values())), 120)}", *[""] * (width - 1))


def _values(
    result: Measured, when: str, columns: Sequence[tuple[str, str]], sites: list[str], unit: Unit, class_name: str
) -> tuple[Cell, ...]:
    found = scores(result, sites, when, unit)
    cells: list[Cell] = []
    for metric, column in columns:
        name = of_class(metric, class_name)  # results written before classes were kept apart lack it
        if column == SEEDS:
            over = (found.seeds or {}).get(AVERAGE, {})
            cells.append(Value(SHOWN[metric].factor * over[name]) if name in over else BLANK)
        else:
            summary = found.average if column == AVERAGE else found.sites.get(column)
            cells.append(shown_value(summary, metric, class_name) if summary and name in summary else BLANK)
    return tuple(cells)


def _timed(table: ResultTable, results: Sequence[UnseenResult]) -> ResultTable:
    """The same table with the seconds per sample as its last column."""
    cells: list[Cell] = [Value(result.seconds(), digits=3) if result.folders else BLANK for result in results]
    rows = tuple((*row, cell) for row, cell in zip(table.rows, cells, strict=True))
    heads, better = (*table.heads, "Seconds a sample"), (*table.better, min)
    return replace(table, heads=heads, better=better, rows=rows, notes=(*table.notes, SECONDS))
