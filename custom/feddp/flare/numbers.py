"""Which numbers leave a site, by task: known names, finite, bounded, coarse, and nothing over too few of the site's images."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddp.data.folder import SiteFolder
from feddp.data.images import Images
from feddp.data.loading import in_an_epoch
from feddp.errors import PolicyError
from feddp.plan.schema import Plan
from feddp.protocol import ADAPT, CELL, MEASURED, SCALARS, VOLUMES, WHEN, Number, Table, spec_of

LARGEST = 2**53  # Python's ints have no end: a whole image fits into one
_TABLES = (*WHEN, "peers")  # over the test images: they go together or not at all
_SCORES = ("dice", "iou", "iou_before")  # over the images that choose rounds and epochs
_ADAPTED = ("loss", "loss_before", "empty_masks", "scores")  # over the images that a newcomer adapts to


def checked(site: str, task: str, scalars: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """The numbers of an answer, written anew.

    Raises:
        PolicyError: a name is unknown to the task, or a value is no number, not finite or beyond LARGEST.
    """
    return _plain(f"site {site}: task {task} tried to send", scalars, _known(task, plan))


def _known(task: str, plan: Plan) -> dict[str, Any]:
    """What a task may send: name -> None for a number, or the names below it."""
    return {name: _below(SCALARS[name], plan) for name in spec_of(task).scalars}


def _below(scalar: Number | Table, plan: Plan) -> dict[str, Any] | None:
    if isinstance(scalar, Number):
        return None
    table = dict.fromkeys(scalar.metrics, dict.fromkeys(CELL))
    return table if scalar.by == () else dict.fromkeys(plan.sites if scalar.by is None else scalar.by, table)


def _plain(who: str, scalars: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in scalars.items():
        if name not in known:
            raise PolicyError(f"{who} {str(name)[:20]!r} among its scalars; nothing was sent")
        below = known[name]
        if isinstance(value, dict) and below is not None:
            found[name] = _plain(who, value, below)
        elif not isinstance(value, int | float) or below is not None:
            raise PolicyError(f"{who} a {type(value).__name__} among its scalars ({name}); nothing was sent")
        elif isinstance(value, bool):
            found[name] = value
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise PolicyError(f"{who} a number of {value.bit_length()} bits among its scalars ({name}); nothing was sent")
        elif not math.isfinite(value):
            raise PolicyError(f"{who} a number that is not finite among its scalars ({name}); nothing was sent")
        else:
            found[name] = int(value) if isinstance(value, int) else float(value)
    return found


def too_few(task: str, scalars: Mapping[str, Any], plan: Plan, data: Path, least: int) -> set[str]:
    """The names of what is measured over fewer than `least` images, or cases, by the site's own folder and by what it says."""
    if not MEASURED & scalars.keys():
        return set()
    counts = _counts(task, plan, data)
    few = {name for name in MEASURED & scalars.keys() if min([counts[name], *_said(scalars[name])]) < least}
    return few | (set(_TABLES) & scalars.keys() if few & set(_TABLES) else set())


def without_std(task: str, scalars: Mapping[str, Any], plan: Plan, data: Path, least: int) -> dict[str, Any]:
    """The same numbers; of the tables over fewer than `least` images, or cases, the means and counts alone."""
    tables = {name for name, value in scalars.items() if isinstance(value, Mapping)}
    if not tables:
        return dict(scalars)
    counts = _counts(task, plan, data)
    few = {name for name in tables if min([counts[name], *_said(scalars[name])]) < least}
    return {name: _means(value) if name in few else value for name, value in scalars.items()}


def _means(value: Any) -> Any:
    return {name: _means(below) for name, below in value.items() if name != "std"} if isinstance(value, Mapping) else value


def _counts(task: str, plan: Plan, data: Path) -> dict[str, int]:
    """Over how many of the site's images a number is, by its name; volumes: over how many cases."""
    if task == ADAPT:
        return dict.fromkeys(_ADAPTED, len(Images.of(data).files))
    folder = SiteFolder.open(data)
    test = folder.rows_of("test")
    return (
        dict.fromkeys(_TABLES, len(test))
        | dict.fromkeys(_SCORES, len(folder.rows_of(plan.training.selection)))
        | {"loss": in_an_epoch(len(folder.rows_of("train")), plan.training.batch), VOLUMES: len({row.patient for row in test})}
    )


def _said(value: Any) -> list[float]:
    """Every `n` in a table."""
    if not isinstance(value, dict):
        return []
    return [n for name, below in value.items() for n in ([below] if name == "n" else _said(below))]
