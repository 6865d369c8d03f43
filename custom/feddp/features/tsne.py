"""t-SNE of pixel features (002, Fig. 1; 003, Fig. 8 a, b), by scikit-learn; a colour a class, a marker a site."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from feddp.errors import InputError

PERPLEXITY = 30.0  # scikit-learn's default; less where there are few pixels
_MARKERS = "o^sDvP*X<>"


@dataclass(frozen=True)
class Panel:
    """A run's picture: points (n, 2), and of each the class (n,) and the site's place (n,)."""

    points: np.ndarray
    classes: np.ndarray
    sites: np.ndarray


def embed(features: np.ndarray, seed: int) -> np.ndarray:
    """(n, width) -> (n, 2), the same bits for the same seed on one machine. InputError below 3 pixels.

    One thread: the sums of several come in any order, and t-SNE magnifies their last bits.
    """
    if len(features) < 3:
        raise InputError(f"{len(features)} pixels are too few for a t-SNE; raise --pixels, or name more sites")
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    with threadpool_limits(1):
        return TSNE(perplexity=perplexity, init="pca", random_state=seed % 2**32).fit_transform(features)


def draw(path: Path, panels: Mapping[str, Panel], classes: Sequence[str], sites: Sequence[str]) -> None:
    """A panel for each of {title: Panel}."""
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
    figure.savefig(path, dpi=150)


def _marker(site: int) -> str:
    return _MARKERS[site % len(_MARKERS)]
