"""The tables of a report's page: means by site, the heat map and the spread, from results.json; differences, from the verdict;
seconds, bytes and stages, from the runs' events."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from feddp.compare.efficiency import local_seconds, stages_table, traffic, train_seconds
from feddp.compare.scores import AVERAGE
from feddp.compare.statistics import METRIC
from feddp.pages.collected import Collected, FinishedRun, Measurements
from feddp.pages.differences import Difference, points
from feddp.pages.verdict import Verdict
from feddp.protocol import WHEN
from feddp.reporting.tables import BLANK, SHOWN, Cell, ResultTable, Value
from feddp.training.columns import class_names, of_class

_SITE_HEAD = "Site"
_ACROSS = 12  # sites that have room side by side; more stand one below the other
_MATRIX = 64  # sites: more are thousands of cells, most of the page's bytes
_BY_SITE = (
    "Means over a site's test images, then over the seeds; Average: mean ± population standard deviation over the sites that"
    " all methods have."
)
_SPREAD = (
    "Mean, population variance (points²) and worst of the Dice of the sites that all methods have; the gap is from the best"
    " to the worst of them. A smaller variance and a better worst site are what fairness over sites asks for."
)
_COSTS = (
    "Means over the seeds. Wall-clock seconds of the rounds, and of the local stages after them; bytes of tensors that the"
    " server sent and received, of all sites together."
)


@dataclass(frozen=True)
class HeatCell:
    """`depth` from 0, the lowest of the map, to 1, the highest; None where there is no value."""

    text: str
    depth: float | None = None


@dataclass(frozen=True)
class HeatMap:
    heads: tuple[str, ...]
    rows: tuple[tuple[str, tuple[HeatCell, ...]], ...]
    low: float
    high: float
    corner: str = "Method"  # the head of the rows


def heat_map(rows: Mapping[str, Mapping[str, float]], columns: Sequence[str], average: bool) -> HeatMap | None:
    """Dice in per cent of {row: {column: a share}}; with `average`, a last column of each row's mean where all have values."""
    values = [100 * value for row in rows.values() for value in row.values()]
    if not values:
        return None
    low, high = min(values), max(values)

    def cell(value: float | None) -> HeatCell:
        if value is None:
            return HeatCell(BLANK)
        return HeatCell(f"{100 * value:.1f}", (100 * value - low) / (high - low) if high > low else 0.5)

    both = common(rows.values())

    def mean(row: Mapping[str, float]) -> float | None:
        return float(np.mean([row[name] for name in both])) if both and row else None

    found = tuple(
        (name, (*(cell(row.get(column)) for column in columns), *([cell(mean(row))] if average else [])))
        for name, row in rows.items()
    )
    return HeatMap((*columns, *([AVERAGE] if average else [])), found, low, high)


def common(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """The names that all rows have which have any, in their order."""
    found = [row for row in rows if row]
    return [name for name in found[0] if all(name in row for row in found)] if found else []


def dice_map(collected: Collected) -> HeatMap | None:
    """Methods by sites; many sites one below the other."""
    means = {label: found.means(METRIC) for label, found in collected.methods.items()}
    found = heat_map(means, collected.sites, average=True)
    if found is None or len(collected.sites) <= _ACROSS:
        return found
    rows = tuple((head, tuple(cells[i] for _, cells in found.rows)) for i, head in enumerate(found.heads))
    return HeatMap(tuple(means), rows, found.low, found.high, _SITE_HEAD)


def _turned(table: ResultTable) -> ResultTable:
    """A table of methods by sites; many sites one below the other, without best values."""
    if len(table.heads) <= _ACROSS + 2:
        return table
    heads = (_SITE_HEAD, *(str(row[0]) for row in table.rows))
    rows = tuple((head, *(row[i] for row in table.rows)) for i, head in enumerate(table.heads) if i)
    return ResultTable(table.name, table.title, heads, (None,) * len(heads), rows, table.notes)


def exchange_map(run: FinishedRun) -> HeatMap | None:
    """The matrix of results.json: every exchanged network, before calibration, at every site; None of very many sites."""
    if len(run.results.get("matrix", {})) > _MATRIX:
        return None
    rows = {site: {m: cell[METRIC]["mean"] for m, cell in row.items()} for site, row in run.results.get("matrix", {}).items()}
    return heat_map(rows, sorted({model for row in rows.values() for model in row}), average=False)


def metric_tables(collected: Collected) -> list[ResultTable]:
    """One table for each metric, of each class too, and by case where images are slices of volumes."""
    classes = class_names(name for run in collected.runs for site in run.sites for name in run.summary(site, WHEN[1]))
    tables = []
    for name in ("", *classes):
        for metric, shown in SHOWN.items():
            title = f"{shown.head}{f', {name}' if name else ''}"
            tables.append(_metric_table(collected, of_class(metric, name), metric, title))
    return [table for table in tables if any(isinstance(cell, Value) for row in table.rows for cell in row)]


def spread_over_sites(collected: Collected) -> ResultTable:
    """Of the sites that all methods have."""
    rows: list[tuple[Cell, ...]] = []
    each = {label: found.means(METRIC) for label, found in collected.methods.items()}
    both = common(each.values())
    for label, means in each.items():
        dice = {site: 100 * means[site] for site in both if means}
        if not dice:
            rows.append((label, *[BLANK] * 5))
            continue
        worst = min(dice, key=lambda site: (dice[site], site))
        values = np.array(list(dice.values()))
        cells = (Value(float(values.mean())), Value(float(values.var())), Value(dice[worst]), worst)
        rows.append((label, *cells, Value(float(values.max() - values.min()))))
    heads = ("Method", "Dice (%) mean", "Variance", "Worst site's Dice (%)", "Worst site", "Gap")
    return ResultTable("spread", "Spread over the sites", heads, (None, max, min, max, None, min), tuple(rows), (_SPREAD,))


def before_after(measured: Measurements) -> ResultTable:
    """Dice and ASSD of each site before and after the local stage."""
    metrics = (METRIC, "assd")
    found = [measured.means(metric, when) for metric in metrics for when in WHEN]
    sites = sorted(set.intersection(*map(set, found)))
    rows: list[tuple[Cell, ...]] = []
    for site in sites:
        rows.append((site, *(Value(SHOWN[m].factor * means[site]) for m, means in zip(_twice(metrics), found, strict=True))))
    if sites:
        averages = [float(np.mean([means[site] for site in sites])) for means in found]
        rows.append((AVERAGE, *(Value(SHOWN[m].factor * mean) for m, mean in zip(_twice(metrics), averages, strict=True))))
    heads = (_SITE_HEAD, *(f"{SHOWN[metric].head} {word}" for metric in metrics for word in ("before", "after")))
    return ResultTable("before_after", "", heads, (None,) * len(heads), tuple(rows))


def difference_table(verdict: Verdict) -> ResultTable:
    """The numbers of the figure of differences."""
    found = [(f"{each.one} − {each.other}", each) for each in verdict.contrasts if each is not verdict.calibration]
    if verdict.calibration:
        found.append((f"after − before {verdict.stage}", verdict.calibration))
    sites = sorted({site for _, each in found for site in each.sites})
    rows = [(site, *(_difference(each.sites.get(site)) for _, each in found)) for site in sites]
    rows.append((AVERAGE, *(_difference(each.average) for _, each in found)))
    heads = (_SITE_HEAD, *(title for title, _ in found))
    return ResultTable("differences", "", heads, (None,) * len(heads), tuple(rows))


def costs(collected: Collected) -> ResultTable:
    """Seconds and bytes of each method's runs."""
    rows: list[tuple[Cell, ...]] = []
    for label, found in collected.methods.items():
        if not found.ends:  # the same run as the method's other row
            continue
        events = [run.events for run in found.runs]
        times = [Value(float(np.mean([of(each) for each in events])), digits=1) for of in (train_seconds, local_seconds)]
        exchanged = [pair for each in events if (pair := traffic(each))]
        sizes: list[Cell] = [Value(float(size) / 1e6) for size in np.mean(exchanged, axis=0)] if exchanged else [BLANK, BLANK]
        rows.append((label, *(times if any(events) else [BLANK, BLANK]), *sizes))
    heads = ("Method", "Rounds (s)", "Local stages (s)", "Rounds (MB)", "Local stages (MB)")
    return ResultTable("costs", "Time and bytes", heads, (None,) * len(heads), tuple(rows), (_COSTS,))


def stages(collected: Collected) -> ResultTable | None:
    """Seconds of each method's stages; None where no run has its events."""
    if not any(run.events for run in collected.runs):
        return None
    return stages_table({label: found.result for label, found in collected.methods.items() if found.ends})


def volume_table(collected: Collected) -> ResultTable | None:
    """Dice by case, where images are slices of volumes."""
    each = {label: found.means(METRIC, volumes=True) for label, found in collected.methods.items()}
    rows: list[tuple[Cell, ...]] = [
        (label, *(Value(100 * means[site]) if site in means else BLANK for site in collected.sites))
        for label, means in each.items()
        if means
    ]
    heads = ("Method", *collected.sites)
    note = "All test slices of a patient are one volume; means over the seeds."
    return (
        _turned(ResultTable("volumes", "Dice (%) by case", heads, (None,) * len(heads), tuple(rows), (note,))) if rows else None
    )


def _metric_table(collected: Collected, column: str, metric: str, title: str) -> ResultTable:
    factor, better = SHOWN[metric].factor, SHOWN[metric].better
    rows: list[tuple[Cell, ...]] = []
    each = {label: found.means(column) for label, found in collected.methods.items()}
    both = common(each.values())
    for label, found in each.items():
        means = {site: factor * value for site, value in found.items()}
        cells: list[Cell] = [Value(means[site]) if site in means else BLANK for site in collected.sites]
        whole = [means[site] for site in both if means]
        rows.append((label, *cells, _average(whole)))
    heads = ("Method", *collected.sites, AVERAGE)
    return _turned(ResultTable(column, title, heads, (None, *[better] * (len(heads) - 1)), tuple(rows), (_BY_SITE,)))


def _average(values: Sequence[float]) -> Cell:
    """Of one site there is no deviation."""
    return Value(float(np.mean(values)), float(np.std(values)) if len(values) > 1 else None) if values else BLANK


def _difference(found: Difference | None) -> str:
    if found is None:
        return BLANK
    return points(found.mean) + (" ({} to {})".format(*map(points, found.interval)) if found.interval else "")


def _twice(metrics: Sequence[str]) -> list[str]:
    return [metric for metric in metrics for _ in WHEN]
