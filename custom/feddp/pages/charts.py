"""The figures of a report's page, as SVG text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from feddp.compare.figures import learning_panels, selected, study_figure
from feddp.compare.scores import AVERAGE
from feddp.compare.statistics import LEVEL, METRIC
from feddp.compare.studies import STUDIES
from feddp.pages.collected import Collected, FinishedRun, Measurements
from feddp.pages.differences import Contrast
from feddp.pages.verdict import Verdict
from feddp.reading import short
from feddp.reporting.plots import draw_curves, draw_spread
from feddp.reporting.svg import inline, page_style
from feddp.reporting.tables import SHOWN
from feddp.stages.accounting import SITE, accounted

_POINTS = 20_000  # of all curves together: more make the page large, not clearer
_COLUMNS = 3
_PANELS = 12
_LETTERS = 28
_DICE = SHOWN[METRIC].head


@dataclass(frozen=True)
class Chart:
    """An `<svg>` element, and the words below it."""

    svg: str
    caption: str


def differences_chart(verdict: Verdict) -> Chart | None:
    """Every contrast of the verdict: the sites' and the average's difference with their intervals."""
    contrasts = {f"{each.one} − {each.other}": each for each in verdict.contrasts if each is not verdict.calibration}
    if verdict.calibration:
        contrasts[f"{verdict.calibration.one}: after − before {verdict.stage}"] = verdict.calibration
    if not contrasts:
        return None
    text = f"Points of Dice, right of 0 is better; bars are {LEVEL} % intervals, where there are any."
    with page_style():
        return Chart(inline(_forest(contrasts), "differences", "Differences of Dice by site"), text)


def curves_chart(collected: Collected, verdict: Verdict) -> Chart | None:
    """The IoU over rounds, on average and at the sites; of many sites, at the worst of the verdict's subject."""
    methods = {label: found.result for label, found in collected.methods.items() if found.ends}
    means = verdict.subject.means(METRIC) if verdict.subject else {}
    sites = sorted(means, key=lambda site: (means[site], site))
    whole = learning_panels(methods, (AVERAGE, *sites))
    lengths = [len(curve) for seeds in whole[AVERAGE].values() for curve in seeds]
    if max(lengths, default=0) < 2:
        return None
    most = max(1, min(_PANELS, _POINTS // sum(lengths)) - 1)
    chosen = sorted(sites[:most])
    left = f" The {most} worst sites of {len(sites)} are shown." if len(sites) > most else ""
    split = selected(methods.values())
    with page_style():
        panels = {title: whole[title] for title in (AVERAGE, *chosen)}
        figure = draw_curves(dict(zip(_labels(panels), panels.values(), strict=True)), split, _COLUMNS)
        return Chart(
            inline(figure, "curves", f"Learning curves: {split} over the rounds"),
            f"{split[0].upper()}{split[1:]} after each round.{left}",
        )


def spread_chart(collected: Collected) -> Chart | None:
    groups = {label: [100 * v for v in found.means(METRIC).values()] for label, found in collected.methods.items()}
    groups = {label: values for label, values in groups.items() if values}
    if len(groups) < 2:
        return None
    with page_style():
        figure = draw_spread(groups, "", f"test {_DICE}")
        figure.axes[0].tick_params(axis="x", rotation=30 if len(groups) > 4 else 0)
        return Chart(inline(figure, "spread", "Spread over the sites"), "One dot per site; the diamond is the mean over sites.")


def study_charts(collected: Collected) -> dict[str, Chart]:
    """{a study's title: its figure}, of the studies that have one."""
    charts = {}
    for name, results in collected.studies.items():
        with page_style():
            if figure := study_figure(name, results, collected.sites):
                title = STUDIES[name].title
                charts[title] = Chart(inline(figure, f"study-{name}", title), "")
    return charts


def time_chart(measured: Measurements) -> Chart | None:
    """Where the time of a mean round went, site by site: means over a run's rounds, then over the seeds."""
    means = {site: {name: _mean(each) for name, each in parts.items()} for site, parts in _seconds(measured.runs).items()}
    if not any(value for parts in means.values() for value in parts.values()):
        return None
    seeds = sorted(run.results["seed"] for run in measured.runs)
    of = f"seed {seeds[0]}" if len(seeds) == 1 else f"means over the seeds {', '.join(map(str, seeds))}"
    text = (
        f"{measured.label}, {of}. Receiving and sending include waiting for the server and for sites of the same process, and"
        " the writing of tensors as bytes."
    )
    with page_style():
        return Chart(inline(_stacked(means, "seconds of a mean round"), "time", "Seconds of a mean round by site"), text)


def _seconds(runs: Sequence[FinishedRun]) -> dict[str, dict[str, list[float]]]:
    """{site: {part: the mean over the rounds of each run that knows it}}."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for site, parts in accounted(run.events)["sites"].items():
            means = found.setdefault(site, {name: [] for name in SITE})
            for name in SITE:
                if any(seconds is not None for seconds in parts[name]):
                    means[name].append(_mean(parts[name]))
    return dict(sorted(found.items()))


def _forest(contrasts: Mapping[str, Contrast]) -> Figure:
    sites = sorted({site for each in contrasts.values() for site in each.sites})
    names = [*sites, AVERAGE]
    figure = Figure(figsize=(3.3 * len(contrasts) + 1.2, 0.3 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots(1, len(contrasts), squeeze=False, sharey=True)[0]
    for axis, (title, found) in zip(axes, contrasts.items(), strict=True):
        axis.axvline(0, linewidth=0.8, color=axis.xaxis.label.get_color())
        for place, name in enumerate(names):
            difference = found.average if name == AVERAGE else found.sites.get(name)
            if difference is None:
                continue
            colour = {1: "C2", -1: "C1", 0: "C9"}[difference.side]
            if difference.interval:
                axis.plot(difference.interval, (place, place), color=colour, linewidth=3, alpha=0.55, solid_capstyle="butt")
            axis.plot([difference.mean], [place], "D" if name == AVERAGE else "o", color=colour, markersize=6)
        axis.set(title=title, xlabel="points of Dice")
        axis.grid(axis="x", alpha=0.2)
    axes[0].set_yticks(range(len(names)), _labels(names))
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


def _stacked(parts: Mapping[str, Mapping[str, float]], xlabel: str) -> Figure:
    figure = Figure(figsize=(7.5, 0.32 * len(parts) + 1.2), layout="constrained")
    axis = figure.subplots()
    left = np.zeros(len(parts))
    for name in SITE:
        widths = np.array([values[name] for values in parts.values()])
        axis.barh(range(len(parts)), widths, 0.6, left=left, label=name)
        left += widths
    axis.set_yticks(range(len(parts)), _labels(parts))
    axis.set(xlabel=xlabel)
    axis.invert_yaxis()
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _labels(names: Iterable[str]) -> list[str]:
    """Names with room in a figure, no two alike; tables have the whole ones."""
    cut = [short(name, _LETTERS) for name in names]
    return [text if cut.count(text) == 1 else f"{text} {cut[:i].count(text) + 1}" for i, text in enumerate(cut)]


def _mean(values: Iterable[float | None]) -> float:
    known: Sequence[float] = [value for value in values if value is not None]
    return float(np.mean(known)) if known else 0.0
