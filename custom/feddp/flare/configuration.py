"""What a job's folder says: a function of its plan and, for a newcomer, of the request. The export writes it, and server and
sites admit nothing else (`feddp.flare.admission`)."""

from collections.abc import Mapping
from typing import Any

from feddp import protocol
from feddp.adaptation.request import OutsideRequest
from feddp.methods.base import CALIBRATE, HEADS, SPECTRA, TRAIN, TUNE
from feddp.plan.schema import Plan

SIDES = SERVER, CLIENT = "server", "client"
APPS = {SERVER: "app_server", CLIENT: "app_client"}
FILES = {side: f"config/config_fed_{side}.json" for side in SIDES}  # within an app

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
# the executors and their tasks
TASKS = {
    "spectra": protocol.tasks_of(SPECTRA),
    "train": protocol.tasks_of(TRAIN),
    "calibrate": protocol.tasks_of(TUNE, HEADS, CALIBRATE),
    "evaluate": protocol.tasks_of(protocol.EVALUATE_STAGE),
    "outside": protocol.tasks_of(protocol.OUTSIDE_STAGE),
}
# a network in one piece: FLARE's pieces of 2 MiB, each asked for in turn, cost four sites on two cores 0.4 s a round
CHUNK, CHUNK_SIZE = "tensor_download_chunk_size", 32 * 1024 * 1024


def app_configuration(side: str, plan: Plan, request: OutsideRequest | None = None) -> dict[str, Any]:
    """config_fed_server.json or config_fed_client.json, as the JSON that is read back from it."""
    return (_server if side == SERVER else _client)(plan, request)


def job_meta(name: str, scope: str, plan: Plan, request: OutsideRequest | None = None) -> dict[str, Any]:
    """meta.json. To its empty `resource_spec` the lead may add GPUs by site."""
    # a newcomer and one donor are enough
    least = {"min_clients": plan.federation.min_sites}
    needed = {"min_clients": 2, "mandatory_clients": [request.newcomer]} if request else least
    deploy_map = {APPS[SERVER]: ["server"], APPS[CLIENT]: sorted(request.sites if request else plan.sites)}
    return {"name": name, "scope": scope, **needed, "deploy_map": deploy_map, "resource_spec": {}}


def _server(plan: Plan, request: OutsideRequest | None) -> dict[str, Any]:
    if request:
        workflows = [{"id": "outside", "path": SERVER_CLASSES["outside"], "args": request.at_the_server()}]
    else:
        stages = _around(plan, "spectra", "aggregation", "calibration", "evaluation")
        workflows = [{"id": stage, "path": SERVER_CLASSES[stage]} for stage in stages]
    half = _half(plan, request)
    return {
        "format_version": 2,
        "server": {"task_request_interval": 0.05},
        CHUNK: CHUNK_SIZE,
        "workflows": workflows,
        # both ends convert what they receive before anything reads it, and what they send last of all
        **_filters(data=half, result=half),
        "components": [{"id": "persistor", "path": SERVER_CLASSES["persistor"], "args": {"plan": plan.to_json()}}],
    }


def _client(plan: Plan, request: OutsideRequest | None) -> dict[str, Any]:
    args, half = {"plan": plan.to_json()}, _half(plan, request)
    if request:
        args["outside"] = request.to_json()
        executor = {"path": SITE_CLASSES["outside"], "args": request.at_the_sites()}
        executors, strip = [{"tasks": TASKS["outside"], "executor": executor}], []
    else:
        names = _around(plan, "spectra", "train", "calibrate", "evaluate")
        executors, strip = [{"tasks": TASKS[n], "executor": {"path": SITE_CLASSES[n]}} for n in names], [SITE_CLASSES["strip"]]
    return {
        "format_version": 2,
        CHUNK: CHUNK_SIZE,
        "executors": executors,
        **_filters(data=half, result=[*strip, *half]),
        "components": [{"id": "site", "path": SITE_CLASSES["site"], "args": args}],
    }


def _half(plan: Plan, request: OutsideRequest | None) -> list[str]:
    """A newcomer's job has no rounds, which are what travels in half precision."""
    return [SITE_CLASSES["half"]] if plan.federation.half and request is None else []


def _filters(data: list[str], result: list[str]) -> Mapping[str, Any]:
    """A job's filters: of the tasks of the rounds as they are sent, of the training's results."""

    def chain(tasks: list[str], paths: list[str]) -> list[dict[str, Any]]:
        return [{"tasks": tasks, "filters": [{"path": path} for path in paths]}]

    chains = {"task_data_filters": (protocol.with_shared(), data), "task_result_filters": ([protocol.TRAIN], result)}
    return {name: chain(tasks, paths) for name, (tasks, paths) in chains.items() if paths}


def _around(plan: Plan, before: str, rounds: str, home: str, last: str) -> list[str]:
    """What of these the plan needs: `before` the rounds and `home` after them only where it has stages there."""
    return [*([before] if SPECTRA in plan.stages else []), rounds, *([home] if plan.home else []), last]
