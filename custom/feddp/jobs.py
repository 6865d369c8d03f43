"""FLARE job folders: a plan, and the components that carry it out."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from feddp.data.folder import SiteFolder, find_sites
from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.methods import METHODS
from feddp.methods.base import SPECTRA
from feddp.methods.plan import WEIGHTS, Plan
from feddp.networks.weights import save_network

SCOPE = "feddp"

# every class a job of ours names, one by one: a participant allows these and nothing broader
SERVER_CLASSES = {
    "persistor": "feddp.flare.persistor.SharedTensorPersistor",
    "spectra": "feddp.flare.spectra.Spectra",
    "aggregation": "feddp.flare.partial_aggregation.PartialAggregation",
    "calibration": "feddp.flare.calibration.Calibration",
    "evaluation": "feddp.flare.evaluation.Evaluation",
    "outside": "feddp.flare.outside.Outside",
    "half": "feddp.flare.precision.HalfPrecision",
}
SITE_CLASSES = {
    "site": "feddp.flare.site.SiteComponent",
    "spectra": "feddp.flare.executors.SpectraExecutor",
    "train": "feddp.flare.executors.TrainExecutor",
    "calibrate": "feddp.flare.executors.CalibrationExecutor",
    "evaluate": "feddp.flare.executors.EvaluationExecutor",
    "strip": "feddp.flare.filters.StripPrivate",
    "outside": "feddp.flare.outside_executor.OutsideExecutor",
    "half": "feddp.flare.precision.HalfPrecision",
}
TASKS = {
    "spectra": [messages.INTRODUCE_SPECTRA, messages.COLLECT_SPECTRA, messages.TAKE_SPECTRA],
    "train": [messages.INITIAL, *messages.ROUNDS],
    "calibrate": [
        *(messages.TUNE, messages.INTRODUCE, messages.COLLECT, messages.CALIBRATE),
        *(messages.COLLECT_HEADS, messages.CALIBRATE_HEADS),
    ],
    "evaluate": [messages.EVALUATE],
    "outside": [messages.JOIN, messages.GIVE_MODEL, messages.ADAPT],
}
# a network in one piece: FLARE's pieces of 2 MiB, each asked for in turn, cost four sites on two cores 0.4 s a round
CHUNK, CHUNK_SIZE = "tensor_download_chunk_size", 32 * 1024 * 1024
SERVER_CONFIG = "app_server/config/config_fed_server.json"


def export(
    plan: Plan, sites: Sequence[str], folder: Path, scope: str = SCOPE, initial: Mapping[str, Tensor] | None = None
) -> Path:
    """Writes a ready-to-submit job folder, replacing an earlier one of ours; returns it.

    Args:
        plan: the run; its `weights` must be the fingerprint of `initial`, where that is given.
        sites: the sites' names in the federation.
        folder: where to write; its name is the job's.
        scope: the scope of the sites' privacy.json under which the job runs.
        initial: a whole network's tensors that every participant starts from. They travel in the server's app, and from there
            as a task: FLARE's client takes no app of more than 4 MiB over HTTP.

    Raises:
        FedDPError: too few sites, a private rule that does not fit the network, other tensors than the plan's, or the folder
            holds something else.
    """
    plan.require_initial(f"the job {folder.name} was given", initial)
    if not METHODS[plan.method].federated:
        raise FedDPError(f"{plan.method} needs all images in one place, so no job can carry it; use `feddp run`, outside FLARE")
    plan.partition(plan.build_network())  # a rule that selects nothing is refused here, not at the hospitals
    if len(set(sites)) < plan.federation.min_sites:
        raise FedDPError(f"{len(set(sites))} sites are fewer than min_sites={plan.federation.min_sites}; name more, or set it")
    stages = _around(plan, "spectra", "aggregation", "calibration", "evaluation")
    executors = _around(plan, "spectra", "train", "calibrate", "evaluate")
    half = [SITE_CLASSES["half"]] if plan.federation.half else []
    # both ends convert what they receive before anything reads it, and what they send last of all
    server_filters = _filters(data=half, result=half)
    client_filters = _filters(data=half, result=[SITE_CLASSES["strip"], *half])
    server = server_config(plan, [{"id": stage, "path": SERVER_CLASSES[stage]} for stage in stages], server_filters)
    answering = [{"tasks": TASKS[n], "executor": {"path": SITE_CLASSES[n]}} for n in executors]
    client = client_config(plan, answering, client_filters)
    return write_job(folder, scope, sites, {"min_clients": plan.federation.min_sites}, server, client, initial)


def write_job(
    folder: Path,
    scope: str,
    sites: Sequence[str],
    needed: Mapping[str, Any],
    server: Mapping[str, Any],
    client: Mapping[str, Any],
    brought: Mapping[str, Tensor] | None,
) -> Path:
    """Writes a job folder, replacing an earlier one of ours; returns it.

    Args:
        needed: what meta.json says of the sites without which FLARE does not start the job.
        server, client: the two configurations, of `server_config` and `client_config`.
        brought: the tensors that the server's app brings along, if any; a site's brings none.

    Raises:
        FedDPError: the folder holds something else.
    """
    if folder.exists() and not (folder.is_dir() and (_is_ours(folder) or not any(folder.iterdir()))):
        raise FedDPError(f"{folder} holds something else than a job of ours; choose another folder")
    shutil.rmtree(folder, ignore_errors=True)
    deploy_map = {"app_server": ["server"], "app_client": sorted(sites)}
    meta = {"name": folder.name, "scope": scope, **needed, "deploy_map": deploy_map, "resource_spec": {}}
    _write(folder / "meta.json", meta)
    _write(folder / SERVER_CONFIG, server)
    _write(folder / "app_client/config/config_fed_client.json", client)
    if brought is not None:
        save_network((folder / SERVER_CONFIG).with_name(WEIGHTS), brought, {})
    return folder


def _filters(data: list[str], result: list[str]) -> dict[str, Any]:
    """A job's filters: of the tasks of the rounds as they are sent, of the training's results."""

    def chain(tasks: list[str], paths: list[str]) -> list[dict[str, Any]]:
        return [{"tasks": tasks, "filters": [{"path": path} for path in paths]}]

    chains = {"task_data_filters": (list(messages.ROUNDS), data), "task_result_filters": ([messages.TRAIN], result)}
    return {name: chain(tasks, paths) for name, (tasks, paths) in chains.items() if paths}


def _is_ours(folder: Path) -> bool:
    config = folder / SERVER_CONFIG
    return config.exists() and SERVER_CLASSES["persistor"] in config.read_text(encoding="utf-8")


def server_config(plan: Plan, workflows: list[dict[str, Any]], filters: Mapping[str, Any]) -> dict[str, Any]:
    """config_fed_server.json."""
    return {
        "format_version": 2,
        "server": {"task_request_interval": 0.05},
        CHUNK: CHUNK_SIZE,
        "workflows": workflows,
        **filters,
        "components": [{"id": "persistor", "path": SERVER_CLASSES["persistor"], "args": {"plan": plan.to_json()}}],
    }


def client_config(plan: Plan, executors: list[dict[str, Any]], filters: Mapping[str, Any]) -> dict[str, Any]:
    """config_fed_client.json."""
    return {
        "format_version": 2,
        CHUNK: CHUNK_SIZE,
        "executors": executors,
        **filters,
        "components": [{"id": "site", "path": SITE_CLASSES["site"], "args": {"plan": plan.to_json()}}],
    }


def _around(plan: Plan, before: str, rounds: str, home: str, last: str) -> list[str]:
    """What of these the plan needs: `before` the rounds and `home` after them only where it has stages there."""
    return [*([before] if SPECTRA in plan.stages else []), rounds, *([home] if plan.home else []), last]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_pretty(content) + "\n", encoding="utf-8")


def _pretty(value: Any, indent: str = "") -> str:
    """JSON for people: what fits on a line stays on it."""
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
    """The sites below `root`, or `only` some of them, and what their data have in common: channels, classes, labels.

    Raises:
        FedDPError: there is no site, one of `only` is not there, or two differ; names them.
    """
    found = {path.name: path for path in find_sites(root)}
    if unknown := sorted(set(only or ()) - found.keys()):
        raise FedDPError(f"{', '.join(unknown)}: no site below {root}; there are {', '.join(found)}")
    folders = [SiteFolder.open(path) for name, path in found.items() if only is None or name in only]
    first = folders[0]
    for other in folders[1:]:
        if (other.channels, other.classes, other.labels) != (first.channels, first.classes, first.labels):
            raise FedDPError(
                f"sites {first.site} and {other.site} differ in channels, classes or labels; a federation needs them equal"
            )
    facts = {"channels": first.channels, "classes": first.classes, "labels": first.labels}
    return [folder.site for folder in folders], facts
