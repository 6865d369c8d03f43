"""FLARE job folders: a plan and the components that run it."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from feddp.adaptation.request import AdaptationRequest
from feddp.data.folder import SiteFolder, find_sites, metadata_of, misfit
from feddp.data.names import require_site
from feddp.errors import BadFile, InputError
from feddp.files import WEIGHTS, write_text, writing
from feddp.flare.configuration import (
    APPS,
    FILES,
    META,
    SCOPE,
    SERVER,
    SERVER_CLASSES,
    SIDES,
    app_configuration,
    job_meta,
    require_object,
    require_resources,
)
from feddp.limits import JSON_BYTES
from feddp.methods import METHODS
from feddp.networks.weights import save_network
from feddp.plan.resolve import require_initial, require_runnable
from feddp.plan.schema import Plan
from feddp.reading import read
from feddp.training.claim import require_job_id
from feddp.training.settings import require_name

SIMULATED_JOB, LOCAL = "simulate_job", "local_job"  # the job ids in FLARE's simulator and in one process


def export(
    plan: Plan,
    folder: Path,
    scope: str = SCOPE,
    initial: Mapping[str, Tensor] | None = None,
    resume: str = "",
    resources: Mapping[str, Mapping[str, float]] | None = None,
) -> Path:
    """Writes a ready-to-submit job folder for the plan's sites, replacing an earlier job; returns it.

    Args:
        plan: the run; its `weights` must be the fingerprint of `initial`, if given.
        folder: the folder to write; its name becomes the job's name.
        scope: the scope of the sites' privacy.json under which the job runs.
        initial: the tensors of the whole network from which every site starts. They travel in the server's app and then in a
            task, because FLARE's client accepts no app of more than 4 MiB over HTTP.
        resume: the id of the run that the job continues after its last completed round; the plan must be the run's, or have
            more rounds.
        resources: what the job asks of a site, by site (`feddp.flare.configuration.RESOURCES`); nothing by default.

    Raises:
        InputError: there are too few sites, the private rule does not fit the network, the tensors are not the plan's, or the
            folder holds something else.
    """
    require_initial(plan, f"the job {folder.name} was given", initial)
    if not METHODS[plan.method].federated:
        raise InputError(f"{plan.method} needs all images in one place, so it cannot be a FLARE job; use `feddp run`")
    require_runnable(plan)  # refuses a rule that selects nothing here, not at the hospitals
    if resume:
        require_job_id(resume)
    return write_job(folder, scope, plan, None, initial, resume, resources)


def write_job(
    folder: Path,
    scope: str,
    plan: Plan,
    request: AdaptationRequest | None,
    brought: Mapping[str, Tensor] | None,
    resume: str = "",
    resources: Mapping[str, Mapping[str, float]] | None = None,
) -> Path:
    """Writes a job folder, replacing an earlier job; returns it.

    Args:
        brought: the tensors in the server's app, if any; the sites' app contains none.

    Raises:
        InputError: the folder holds something else, its name is not valid for a job, or no site admits such resources.
    """
    require_name("the job's name, from its folder,", folder.name)
    require_name("scope", scope)
    asked = require_object(META, "resource_spec", resources or {})
    require_resources(asked, plan.sites)
    meta = job_meta(folder.name, scope, plan, request) | {"resource_spec": asked}
    part, old = (folder.with_name(f".{folder.name}.{state}") for state in ("part", "old"))
    _put_back(old, folder)
    if folder.exists() and not (folder.is_dir() and (_is_ours(folder) or not any(folder.iterdir()))):
        raise InputError(f"{folder} is neither empty nor an exported job; choose another folder")
    shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    try:
        _write(part / META, meta)
        for side in SIDES:
            _write(part / APPS[side] / FILES[side], app_configuration(side, plan, request, resume))
        if brought is not None:
            save_network((part / APPS[SERVER] / FILES[SERVER]).with_name(WEIGHTS), brought, {})
        if folder.exists():  # only now: a run that is continued takes its initial tensors from the earlier job
            folder.rename(old)
        part.rename(folder)
    finally:
        _put_back(old, folder)
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return folder


def jobs_in(folder: Path) -> list[Path]:
    """Returns the job folders in `folder`; one whose replacement was cut off is put back first."""
    for old in folder.glob(".*.old"):
        _put_back(old, folder / old.name.removeprefix(".").removesuffix(".old"))
    return [path for path in folder.glob("[!.]*") if path.is_dir()]


def _put_back(old: Path, folder: Path) -> None:
    """Puts back this user's job that was moved to `old`, if nothing took its place: it may hold the only initial tensors."""
    own = old.is_dir() and not old.is_symlink() and old.stat().st_uid == os.geteuid()
    if own and _is_ours(old) and not folder.exists():
        old.rename(folder)


def _is_ours(folder: Path) -> bool:
    try:
        config = read(folder / APPS[SERVER] / FILES[SERVER], JSON_BYTES, folder)
    except (FileNotFoundError, BadFile):  # whatever it is, it is no job of ours
        return False
    return SERVER_CLASSES["persistor"].encode() in config


def _write(path: Path, content: dict[str, Any]) -> None:
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _pretty(content) + "\n")


def _pretty(value: Any, indent: str = "") -> str:
    """Returns readable JSON: a value that fits on one line stays on one line."""
    flat = json.dumps(value)
    if len(indent) + len(flat) < 110 or not isinstance(value, dict | list):
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        parts, brackets = [f"{json.dumps(k)}: {_pretty(v, inner)}" for k, v in value.items()], "{}"
    else:
        parts, brackets = [_pretty(v, inner) for v in value], "[]"
    return f"{brackets[0]}\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}{brackets[1]}"


def federation_of(root: Path, only: Sequence[str] | None = None) -> tuple[list[str], dict[str, Any]]:
    """Returns the sites below `root`, or only those in `only`, and their common metadata: channels, classes, labels.

    Raises:
        InputError: there is no site, a site of `only` does not exist, two sites differ, or FLARE takes no site of such a name;
            names them.
    """
    paths = {path.name: path for path in find_sites(root)}
    for name, path in paths.items():
        require_site(path, name)
    if unknown := sorted(set(only or ()) - paths.keys()):
        raise InputError(f"{', '.join(unknown)}: not a site below {root}; the sites are {', '.join(paths)}")
    folders = [SiteFolder.open(path) for name, path in paths.items() if only is None or name in only]
    first = folders[0]
    for other in folders[1:]:
        if misfit(other, metadata_of(first)):
            raise InputError(
                f"sites {first.site} and {other.site} differ in channels, classes or labels; a federation needs them equal"
            )
    return [folder.site for folder in folders], metadata_of(first)
