"""From results to figures: which numbers each of the paper's figures shows."""

from collections.abc import Mapping
from pathlib import Path

from feddp.compare.progress import curves, mean_curve
from feddp.compare.results import Result
from feddp.compare.scores import scores
from feddp.compare.studies import STUDIES, Entry
from feddp.compare.variants import Variant
from feddp.files import PROGRESS, read_events
from feddp.reporting.plots import Curve, draw_bars, draw_curves, draw_spread
from feddp.reporting.tables import SHOWN, shown_value

Results = Mapping[Variant, Result]
AVERAGE = "Average"


def draw_methods(out: Path, methods: Mapping[str, Result], sites: list[str]) -> None:
    """Fig. 7: the validation IoU over rounds, on average and at each site."""
    panels = {
        title: {label: seeds for label, r in methods.items() if (seeds := _seeds(r, title))} for title in (AVERAGE, *sites)
    }
    draw_curves(out / "curves_methods.png", panels, _selected(list(methods.values())))


def draw_study(name: str, out: Path, results: Results, sites: list[str]) -> None:
    """The figure of one of STUDIES, where it has one; what did not finish at every site is left out."""
    entries = [entry for entry in STUDIES[name].entries if results[entry.variant].folders]
    if name == "backbones":
        panels: dict[str, dict[str, list[Curve]]] = {}
        for entry in entries:
            method, network = entry.labels
            if seeds := _seeds(results[entry.variant], AVERAGE):
                panels.setdefault(method, {})[network] = seeds
        if panels:
            draw_curves(out / "curves_backbones.png", panels, _selected([results[entry.variant] for entry in entries]))
    elif name in ("private", "vc_private", "vc_number", "vc_lambda"):
        panels_of = {SHOWN[m].head: {m: _averages(entries, results, sites, m)} for m in STUDIES[name].metrics}
        draw_bars(out / f"{name}.png", panels_of)
    elif name == "lambda":
        found = {entry.labels[0]: scores(results[entry.variant], sites) for entry in entries}
        dice = {label: [100 * s.sites[k]["dice"]["mean"] for k in sites] for label, s in found.items() if s.average}
        draw_spread(out / "lambda.png", dice, "λ", f"test {SHOWN['dice'].head}, a dot a site")
    elif name == "igc":
        series = {}
        for label in dict.fromkeys(entry.labels[1] for entry in entries):
            series[label] = _averages([e for e in entries if e.labels[1] == label], results, sites, "dice")
        draw_bars(out / "igc.png", {SHOWN["dice"].head: series})


def _averages(entries: list[Entry], results: Results, sites: list[str], metric: str) -> dict[str, tuple[float, float]]:
    """{first label: (mean, std over the sites)}, in the unit it is shown in."""
    found = {entry.labels[0]: scores(results[entry.variant], sites, entry.when).average for entry in entries}
    shown = {label: shown_value(average, metric) for label, average in found.items() if average}
    return {label: (cell.mean, cell.std) for label, cell in shown.items()}


def _seeds(result: Result, title: str) -> list[Curve]:
    """A curve a seed, of a site or on average; none where the runs kept none."""
    found = [curves(read_events(folder / PROGRESS)) for folder in result.folders.values()]
    seeds = [mean_curve(sites) if title == AVERAGE else sites.get(title, {}) for sites in found]
    return seeds if seeds and all(seeds) else []


def _selected(results: list[Result]) -> str:
    """The paper shows test IoU; a run's progress holds the IoU of the split that selects."""
    splits = set().union(*(result.selections for result in results))
    return {("val",): "validation IoU", ("test",): "test IoU (selection=test)"}.get(tuple(splits), "IoU on the selection split")
