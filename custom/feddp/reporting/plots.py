"""Plots of prepared numbers, with Matplotlib but without pyplot: no window, no global state. `save` writes a PNG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from feddp.files import replacing

Curve = Mapping[int, float]  # {round: IoU}
_MARKERS = "o^sDvP*X<>"
_DOTTED = 50  # rounds of a curve whose points are marked


@dataclass(frozen=True)
class Panel:
    """The embedded pixels of one run: points (n, 2), and for each its class (n,) and the index of its site (n,)."""

    points: np.ndarray
    classes: np.ndarray
    sites: np.ndarray


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG, whole or not at all."""
    with replacing(path) as part:
        figure.savefig(part, dpi=150, format="png")


def draw_curves(panels: Mapping[str, Mapping[str, Sequence[Curve]]], ylabel: str, columns: int | None = None) -> Figure:
    """One panel for each of {title: {label: a curve for each seed}}: the mean over seeds, and a band from min to max.

    The panels stand in one row, or in rows of `columns`.
    """
    columns = min(columns or len(panels), len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns + 1.2, 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    handles = {}
    for axis, (title, lines) in zip(axes, panels.items(), strict=False):
        for label, seeds in lines.items():
            rounds = sorted(set.intersection(*(set(curve) for curve in seeds)))
            values = np.array([[curve[round] for round in rounds] for curve in seeds])
            colour = f"C{labels.index(label) % 10}"
            dashes = ("-", "--", "-.")[labels.index(label) % 3]  # a curve below another one of the same values is seen too
            dots = {"marker": ".", "markersize": 3} if len(rounds) <= _DOTTED else {}
            (handles[label],) = axis.plot(rounds, values.mean(axis=0), dashes, color=colour, **dots)
            if len(seeds) > 1:
                axis.fill_between(rounds, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        axis.set(title=title, xlabel="round")
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        axis.grid(alpha=0.3)
    for axis in axes[::columns]:
        axis.set_ylabel(ylabel)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    return figure


def draw_bars(panels: Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]]) -> Figure:
    """One panel for each of {ylabel: {series: {group: (mean, std)}}}: bars side by side with their standard deviation."""
    figure, ink = Figure(figsize=(5 * len(panels), 3.6), layout="constrained"), matplotlib.rcParams["text.color"]
    for axis, (ylabel, series) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        groups = list(dict.fromkeys(group for values in series.values() for group in values))
        width = 0.8 / max(len(series), 1)
        for i, (label, values) in enumerate(series.items()):
            places = [groups.index(group) + (i - (len(series) - 1) / 2) * width for group in values]
            means, stds = zip(*values.values(), strict=True) if values else ((), ())
            axis.bar(places, means, width * 0.92, yerr=stds, capsize=2, label=label, error_kw={"linewidth": 0.8, "ecolor": ink})
        axis.set_xticks(range(len(groups)), groups)
        axis.set_ylabel(ylabel)
    if len(series) > 1:
        figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure


def draw_spread(groups: Mapping[str, Sequence[float]], xlabel: str, ylabel: str) -> Figure:
    """For each of {group: one value per site} a box and one dot per site; the average is a diamond."""
    figure = Figure(figsize=(1.3 * len(groups) + 2, 3.6), layout="constrained")
    axis = figure.subplots()
    for place, values in enumerate(groups.values()):
        axis.boxplot([values], positions=[place], widths=0.5, showfliers=False, medianprops={"color": "C0"})
        axis.scatter([place] * len(values), values, s=14, color="C0", alpha=0.7, zorder=3)
        axis.scatter([place], [np.mean(values)], s=50, marker="D", color="C1", zorder=4)
    axis.set_xticks(range(len(groups)), list(groups))
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.grid(axis="y", alpha=0.3)
    return figure


def draw_points(points: Mapping[str, tuple[float, float, float]], xlabel: str, ylabel: str) -> Figure:
    """One point for each of {label: (x, y, standard deviation of y)}."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    for i, (label, (x, y, std)) in enumerate(points.items()):
        axis.errorbar([x], [y], [std], fmt="os^Dv"[i // 10 % 5], color=f"C{i % 10}", capsize=2, linewidth=0.8, label=label)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.grid(alpha=0.3)
    if points:
        figure.legend(loc="outside right upper", fontsize="small")
    return figure


def draw_panels(panels: Mapping[str, Panel], classes: Sequence[str], sites: Sequence[str]) -> Figure:
    """One panel for each of {title: Panel}; the colour marks the class, the marker the site."""
    figure = Figure(figsize=(4 * len(panels) + 1.6, 4), layout="constrained")
    for axis, (title, panel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for s in range(len(sites)):
            for c in range(len(classes)):
                here = panel.points[(panel.sites == s) & (panel.classes == c)]
                axis.scatter(*here.T, s=9, color=f"C{c}", marker=_marker(s), alpha=0.6, linewidths=0)
        axis.set(title=title, xticks=[], yticks=[])
    handles = [Line2D([], [], color=f"C{c}", marker="s", linestyle="", label=name) for c, name in enumerate(classes)]
    handles += [Line2D([], [], color="0.3", marker=_marker(s), linestyle="", label=name) for s, name in enumerate(sites)]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    return figure


def _marker(site: int) -> str:
    return _MARKERS[site % len(_MARKERS)]
