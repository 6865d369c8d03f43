"""What a job's folder says: a function of its plan and, for a newcomer, of the request. The export writes it, and server and
sites admit nothing else (`feddp.flare.admission`)."""

from collections.abc import Mapping
from typing import Any

from feddp import protocol
from feddp.adaptation.request import AdaptationRequest
from feddp.plan.schema import Plan
from feddp.stages import stages_of

SIDES = SERVER, CLIENT = "server", "client"
APPS = {SERVER: "app_server", CLIENT: "app_client"}
FILES = {side: f"config/config_fed_{side}.json" for side in SIDES}  # within an app

# every class a job of ours names, one by one: a participant allows these and nothing broader
SERVER_CLASSES = {
    "persistor": "feddp.flare.persistor.SharedTensorPersistor",
    "stage": "feddp.flare.controller.StageController",
    "half": "feddp.flare.precision.HalfPrecision",
}
SITE_CLASSES = {
    "site": "feddp.flare.site.SiteComponent",
    "stages": "feddp.flare.executor.StageExecutor",
    "strip": "feddp.flare.filters.StripPrivate",
    "half": "feddp.flare.precision.HalfPrecision",
}
# a network in one piece: FLARE's pieces of 2 MiB, each asked for in turn, cost four sites on two cores 0.4 s a round
CHUNK, CHUNK_SIZE = "tensor_download_chunk_size", 32 * 1024 * 1024


def app_configuration(side: str, plan: Plan, request: AdaptationRequest | None = None) -> dict[str, Any]:
    """config_fed_server.json or config_fed_client.json, as the JSON that is read back from it."""
    return (_server if side == SERVER else _client)(plan, request)


def job_meta(name: str, scope: str, plan: Plan, request: AdaptationRequest | None = None) -> dict[str, Any]:
    """meta.json. To its empty `resource_spec` the lead may add GPUs by site."""
    # a newcomer and one donor are enough
    least = {"min_clients": plan.federation.min_sites}
    needed = {"min_clients": 2, "mandatory_clients": [request.newcomer]} if request else least
    deploy_map = {APPS[SERVER]: ["server"], APPS[CLIENT]: sorted(request.sites if request else plan.sites)}
    return {"name": name, "scope": scope, **needed, "deploy_map": deploy_map, "resource_spec": {}}


def _server(plan: Plan, request: AdaptationRequest | None) -> dict[str, Any]:
    controller, half = SERVER_CLASSES["stage"], _half(plan, request)
    stages = stages_of(plan, request is not None)
    return {
        "format_version": 2,
        "server": {"task_request_interval": 0.05},
        CHUNK: CHUNK_SIZE,
        "workflows": [{"id": stage, "path": controller, "args": {"stage": stage}} for stage in stages],
        # both ends convert what they receive before anything reads it, and what they send last of all
        **_filters(data=half, result=half),
        "components": [{"id": "persistor", "path": SERVER_CLASSES["persistor"], "args": _said(plan, request)}],
    }


def _client(plan: Plan, request: AdaptationRequest | None) -> dict[str, Any]:
    half, strip = _half(plan, request), [SITE_CLASSES["strip"]] if request is None else []
    tasks = protocol.tasks_of(stages_of(plan, request is not None))
    return {
        "format_version": 2,
        CHUNK: CHUNK_SIZE,
        "executors": [{"tasks": tasks, "executor": {"path": SITE_CLASSES["stages"]}}],
        **_filters(data=half, result=[*strip, *half]),
        "components": [{"id": "site", "path": SITE_CLASSES["site"], "args": _said(plan, request)}],
    }


def _said(plan: Plan, request: AdaptationRequest | None) -> dict[str, Any]:
    """What both sides are told."""
    return {"plan": plan.to_json(), **({"adaptation": request.to_json()} if request else {})}


def _half(plan: Plan, request: AdaptationRequest | None) -> list[str]:
    """A newcomer's job has no rounds, which are what travels in half precision."""
    return [SITE_CLASSES["half"]] if plan.federation.half and request is None else []


def _filters(data: list[str], result: list[str]) -> Mapping[str, Any]:
    """A job's filters: of the tasks of the rounds as they are sent, of the training's results."""

    def chain(tasks: list[str], paths: list[str]) -> list[dict[str, Any]]:
        return [{"tasks": tasks, "filters": [{"path": path} for path in paths]}]

    chains = {"task_data_filters": (protocol.with_shared(), data), "task_result_filters": ([protocol.TRAIN], result)}
    return {name: chain(tasks, paths) for name, (tasks, paths) in chains.items() if paths}
