"""The figures of a comparison: which numbers each of the papers' figures shows."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from feddp.compare.leave_one_out import UnseenResult
from feddp.compare.scores import AVERAGE, Result, Scores, scores
from feddp.compare.studies import STUDIES, AdaptedModels, Entry, Study, TrainedNetworks
from feddp.compare.variants import Variant
from feddp.files import PROGRESS
from feddp.reporting.plots import Curve, draw_bars, draw_curves, draw_points, draw_spread, save
from feddp.reporting.tables import SHOWN, Value, shown_value
from feddp.stages.events import read_progress
from feddp.stages.scored import curves

_DICE = SHOWN["dice"].head
_BLOCK = 10  # rounds; FedDP's Fig. 7 shows the maximum of each

Results = Mapping[Variant, Result]


@dataclass(frozen=True)
class _Drawing:
    """What a figure of a study is drawn from: the entries that finished under some seed, and the comparison's sites."""

    name: str
    entries: list[Entry[TrainedNetworks]]
    results: Results
    sites: list[str]

    def scores(self, entry: Entry[TrainedNetworks]) -> Scores:
        return scores(self.results[entry.source.variant], self.sites, entry.source.when)

    def averages(self, entries: Iterable[Entry[TrainedNetworks]], metric: str) -> dict[str, tuple[float, float]]:
        """{first label: (mean, std over the sites)}, in the unit it is shown in."""
        found = {entry.labels[0]: self.scores(entry).average for entry in entries}
        return {label: _bar(shown_value(average, metric)) for label, average in found.items() if average}


def draw_methods(out: Path, methods: Mapping[str, Result], sites: list[str]) -> None:
    """Fig. 7: the validation IoU over rounds, on average and at each site; of longer runs, the maxima of every ten too."""
    panels, split = learning_panels(methods, (AVERAGE, *sites)), selected(methods.values())
    save(draw_curves(panels, split), out / "curves_methods.png")
    if any(max(curve) > _BLOCK for lines in panels.values() for seeds in lines.values() for curve in seeds):
        highest = {t: {label: [*map(maxima, seeds)] for label, seeds in lines.items()} for t, lines in panels.items()}
        save(draw_curves(highest, f"{split}, maximum of {_BLOCK} rounds"), out / "curves_methods_maxima.png")


def learning_panels(methods: Mapping[str, Result], titles: Iterable[str]) -> dict[str, dict[str, list[Curve]]]:
    """{site or AVERAGE: {label: one curve per seed}}, without methods whose runs kept none."""
    found = {label: _scored(result) for label, result in methods.items()}
    return {title: {label: seeds for label, each in found.items() if (seeds := _seeds(each, title))} for title in titles}


def draw_study(name: str, out: Path, results: Results, sites: list[str]) -> None:
    """Writes the figure of one of STUDIES, where it has one."""
    if figure := study_figure(name, results, sites):
        save(figure, out / f"{_FILES.get(name, name)}.png")


def study_figure(name: str, results: Results, sites: list[str]) -> Figure | None:
    """The figure of one of STUDIES, where it has one; an entry that did not finish at every site is left out."""
    if name not in _FIGURES:
        return None
    entries = [entry for entry in STUDIES[name].entries if results[entry.source.variant].folders]
    return _FIGURES[name](_Drawing(name, entries, results, sites))


def draw_outside(
    name: str, study: Study[AdaptedModels], out: Path, results: Mapping[AdaptedModels, UnseenResult], sites: list[str]
) -> None:
    """Figs. 6 to 8 of IOP-FL, each of its study; an entry that did not finish for every unseen site is left out."""
    finished = [(entry.labels, results[entry.source]) for entry in study.entries if results[entry.source].folders]
    found = [(labels, result, scores(result, sites)) for labels, result in finished]
    means = [
        (labels, result, by_site, shown_value(by_site.average, "dice")) for labels, result, by_site in found if by_site.average
    ]
    path = out / f"outside_{name}.png"
    if name == "inside_sites":
        series: dict[str, dict[str, tuple[float, float]]] = {}
        for (method, inside), _, _, mean in means:
            series.setdefault(method, {})[inside] = _bar(mean)
        save(draw_bars({_DICE: series}), path)
    elif name == "losses":
        save(draw_bars({_DICE: {"routing": {labels[0]: _bar(mean) for labels, _, _, mean in means}}}), path)
    elif name == "tau":
        spread = {labels[0]: _dice(by_site, sites) for labels, _, by_site, _ in means}
        save(draw_spread(spread, "τ", f"{_DICE}, a dot a site outside"), path)
    elif name == "time":
        points = {labels[0]: (result.seconds(), *_bar(mean)) for labels, result, _, mean in means}
        save(draw_points(points, "seconds a sample", _DICE), path)


def maxima(curve: Curve) -> dict[int, float]:
    """{last round of every ten: the highest value of those ten}; the last rounds may be fewer."""
    blocks: dict[int, list[float]] = {}
    for round, value in curve.items():
        blocks.setdefault((round - 1) // _BLOCK, []).append(value)
    last = max(curve)
    return {min((block + 1) * _BLOCK, last): max(values) for block, values in sorted(blocks.items())}


def mean_curve(sites: dict[str, dict[int, float]]) -> dict[int, float]:
    """{round: mean IoU over the sites}, of the rounds that every site has."""
    common = set.intersection(*(set(curve) for curve in sites.values())) if sites else set()
    return {round: float(np.mean([curve[round] for curve in sites.values()])) for round in sorted(common)}


def _curves(drawing: _Drawing) -> Figure | None:
    """A panel for each first label, a line for each second one."""
    panels: dict[str, dict[str, list[Curve]]] = {}
    for entry in drawing.entries:
        title, line = entry.labels
        if seeds := _seeds(_scored(drawing.results[entry.source.variant]), AVERAGE):
            panels.setdefault(title, {})[line] = seeds
    if not panels:
        return None
    return draw_curves(panels, selected(drawing.results[entry.source.variant] for entry in drawing.entries))


def _by_metric(drawing: _Drawing) -> Figure:
    metrics = STUDIES[drawing.name].metrics
    panels = {SHOWN[metric].head: {metric: drawing.averages(drawing.entries, metric)} for metric in metrics}
    return draw_bars(panels)


def _components(drawing: _Drawing) -> Figure:
    """One bar for each combination of components, named by those that it has."""
    study = STUDIES[drawing.name]
    panels: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for metric in study.metrics:
        bars = panels.setdefault(SHOWN[metric].head, {}).setdefault(metric, {})
        for entry in drawing.entries:
            there = [head for head, label in zip(study.heads, entry.labels, strict=True) if label]
            if average := drawing.scores(entry).average:
                bars[" + ".join(there) or "none"] = _bar(shown_value(average, metric))
    return draw_bars(panels)


def _over_sites(drawing: _Drawing) -> Figure:
    """A box and a dot per site for each value; the study has one head."""
    found = {entry.labels[0]: drawing.scores(entry) for entry in drawing.entries}
    dice = {label: _dice(by_site, drawing.sites) for label, by_site in found.items() if by_site.average}
    (head,) = STUDIES[drawing.name].heads
    return draw_spread(dice, head, f"test {_DICE}, a dot a site")


def _igc(drawing: _Drawing) -> Figure:
    series = {
        label: drawing.averages([entry for entry in drawing.entries if entry.labels[1] == label], "dice")
        for label in dict.fromkeys(entry.labels[1] for entry in drawing.entries)
    }
    return draw_bars({_DICE: series})


_FIGURES: dict[str, Callable[[_Drawing], Figure | None]] = {
    **dict.fromkeys(("ablation", "vc_components", "vc_paa"), _components),
    **dict.fromkeys(("backbones", "local_epochs"), _curves),
    **dict.fromkeys(("private", "vc_private", "vc_number", "vc_lambda"), _by_metric),
    **dict.fromkeys(("lambda", "tau"), _over_sites),
    "igc": _igc,
}
_FILES = {name: f"curves_{name}" for name in ("backbones", "local_epochs")}  # where the file is not called as the study


def _dice(found: Scores, sites: list[str]) -> list[float]:
    """The mean Dice of each site, in per cent."""
    return [100 * found.sites[site]["dice"]["mean"] for site in sites]


def _bar(value: Value) -> tuple[float, float]:
    return value.mean, value.std or 0.0


def _scored(result: Result) -> list[dict[str, dict[int, float]]]:
    """{site: its curve} of every seed."""
    return [curves(read_progress(folder / PROGRESS)) for folder in result.folders.values()]


def _seeds(found: Iterable[dict[str, dict[int, float]]], title: str) -> list[Curve]:
    """One curve per seed, of a site or on average; none where the runs kept none."""
    seeds = [mean_curve(sites) if title == AVERAGE else sites.get(title, {}) for sites in found]
    return [*seeds] if all(seeds) else []


def selected(results: Iterable[Result]) -> str:
    """The paper shows test IoU; a run's progress holds the IoU of the split that selects."""
    splits = {split for result in results for split in result.selections}
    if splits == {"val"}:
        return "validation IoU"
    return "test IoU (selection=test)" if splits == {"test"} else "IoU on the selection split"
