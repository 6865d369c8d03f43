"""Checks the numbers of a site's answers: known names, finite, bounded, and measured over enough of the site's images."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddp.data.folder import SiteFolder
from feddp.data.images import Images
from feddp.data.loading import in_an_epoch
from feddp.errors import PolicyError
from feddp.plan.schema import Plan
from feddp.protocol import LARGEST, MEASURED, SCALARS, Over, Table, numbers_of, spec_of

# the tables over the test images leave together or not at all
_TOGETHER = frozenset(name for name, scalar in SCALARS.items() if isinstance(scalar, Table) and scalar.over is Over.TEST)


def checked(site: str, task: str, scalars: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Returns a copy of an answer's numbers.

    Raises:
        PolicyError: the task has no such name, or a value is not a number, not finite or beyond LARGEST.
    """
    return _plain(f"site {site}: task {task} tried to send", scalars, numbers_of(task, plan.sites, plan.classes))


def _plain(who: str, scalars: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in scalars.items():
        if name not in known:
            raise PolicyError(f"{who} {str(name)[:20]!r} among its scalars; nothing was sent")
        below = known[name]
        table = isinstance(below, dict)
        if isinstance(value, dict) and table:
            plain[name] = _plain(who, value, below)
        elif not isinstance(value, int | float) or table:
            raise PolicyError(f"{who} a {type(value).__name__} among its scalars ({name}); nothing was sent")
        elif isinstance(value, bool):
            plain[name] = value
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise PolicyError(f"{who} a number of {value.bit_length()} bits among its scalars ({name}); nothing was sent")
        elif not math.isfinite(value):
            raise PolicyError(f"{who} a number that is not finite among its scalars ({name}); nothing was sent")
        else:
            plain[name] = int(value) if isinstance(value, int) else float(value)
    return plain


def too_few(task: str, scalars: Mapping[str, Any], plan: Plan, data: Path, least: int) -> set[str]:
    """Returns the names of numbers measured over fewer than `least` images or cases, by the folder or by the answer's `n`."""
    if not MEASURED & scalars.keys():
        return set()
    counts = _counts(task, plan, data)
    few = {name for name in MEASURED & scalars.keys() if min([counts[name], *_sizes(scalars[name])]) < least}
    return few | (_TOGETHER & scalars.keys() if few & _TOGETHER else set())


def without_std(task: str, scalars: Mapping[str, Any], plan: Plan, data: Path, least: int) -> dict[str, Any]:
    """Returns the numbers; tables over fewer than `least` images or cases keep only means and counts."""
    tables = {name for name in MEASURED & scalars.keys() if isinstance(scalars[name], Mapping)}
    if not tables:
        return dict(scalars)
    counts = _counts(task, plan, data)
    few = {name for name in tables if min([counts[name], *_sizes(scalars[name])]) < least}
    return {name: _means(value) if name in few else value for name, value in scalars.items()}


def selected_by(plan: Plan, data: Path) -> int:
    """Returns the number of the site's images by which the plan's rounds are selected."""
    return _size(Over.SELECTION, plan, SiteFolder.open(data))


def _means(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    # a table of peers may hold a site with the name of a number
    return {name: _means(below) for name, below in value.items() if name != "std" or isinstance(below, Mapping)}


def _counts(task: str, plan: Plan, data: Path) -> dict[str, int]:
    """Returns {name: the number of the site's images or cases over which it is measured} of a task's measured numbers."""
    spec = spec_of(task)
    over = {name: images for name in spec.scalars if (images := spec.measured_over(name))}
    if spec.over is Over.UNSEEN:
        return dict.fromkeys(over, len(Images.of(data).files))
    folder = SiteFolder.open(data)
    return {name: _size(images, plan, folder) for name, images in over.items()}


def _size(over: Over, plan: Plan, folder: SiteFolder) -> int:
    if over is Over.TRAIN:
        return in_an_epoch(len(folder.rows_of(*plan.training.trained_on)), plan.training.batch)
    if over is Over.SELECTION:
        return len(folder.rows_of(plan.training.selection))
    test = folder.rows_of("test")
    return len({row.patient for row in test}) if over is Over.CASES else len(test)


def _sizes(value: Any) -> list[float]:
    """Returns every `n` in a table."""
    if not isinstance(value, dict):
        return []
    below = [n for each in value.values() for n in _sizes(each)]
    return below if isinstance(value.get("n", {}), dict) else [value["n"], *below]
