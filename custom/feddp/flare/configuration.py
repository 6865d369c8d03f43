"""The contents of a job's folder, a function of its plan and, for an unseen site, of the request, or of the run that the job
continues. The export writes them; the server and the sites accept nothing else (`feddp.flare.admission`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from feddp import protocol
from feddp.adaptation.request import AdaptationRequest
from feddp.errors import InputError
from feddp.plan.schema import Plan
from feddp.stages import stages_of

META = "meta.json"
SCOPE = "feddp"  # of a site's privacy.json, of which our jobs are unless they name another
RESOURCES = {"num_of_gpus": (int, 64), "mem_per_gpu_in_GiB": (int | float, 1024)}  # that a job may ask for: (type, maximum)
SIDES = SERVER, CLIENT = "server", "client"
APPS = {SERVER: "app_server", CLIENT: "app_client"}
FILES = {side: f"config/config_fed_{side}.json" for side in SIDES}  # within an app

# all classes that our jobs name, one by one; participants allow only these
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
CHUNK = 256 * 1024  # bytes of a stream that are sent, acknowledged and repeated as one: 2 s at 1 Mbit/s
AGAIN = 20.0  # seconds without an acknowledgement after which the chunks of a stream that lack one are sent again
STALLED = 300.0  # seconds without any after which a stream is given up
# FLARE's settings of its streams (`feddp.flare.streams`): local/comm_config.json of every kit of a server or site
COMMUNICATION = {
    "streaming_chunk_size": CHUNK,
    "streaming_ack_interval": CHUNK,
    "streaming_reliable": True,  # requests too: FLARE's default repeats the chunks of replies alone
    "streaming_retry_wait": AGAIN,
    "streaming_retry_timeout": STALLED - AGAIN,  # from the first repetition on
    "streaming_ack_progress_timeout": STALLED,
    "streaming_read_timeout": int(STALLED),
    "streaming_send_timeout": STALLED,  # of FLARE's tcp driver, for which a line that is down is a full buffer
    "streaming_ack_wait": 24 * 3600,  # until the window has room, however slowly that comes
}
# FLARE's setting of the connections between a participant's own processes, in the same file: without it they have no TLS, and
# any user of the machine can claim to be the server, a site or a job (`feddp.flare.neighbours`)
INTERNAL: dict[str, Any] = {"scheme": "tcp", "resources": {"host": "localhost", "connection_security": "mtls"}}
# FLARE's settings of a job's transport, the same at both ends
TRANSPORT = {
    # tensors travel in parts of about this size, requested one after another; a part is held in memory while it travels
    "tensor_download_chunk_size": 8 * 1024 * 1024,
    # seconds in which nothing of a part moves after which it is requested again. Its stream repeats what a broken connection
    # lost, so that is for what takes longer, as a line that is down for minutes
    "tensor_streaming_per_request_timeout": 120.0,
}
AT_SITE = {
    # seconds for a reply to the question whether the site's answer is wanted, which waits for what else is on the line
    "task_check_timeout": AGAIN,
}


def app_configuration(side: str, plan: Plan, request: AdaptationRequest | None = None, resume: str = "") -> dict[str, Any]:
    """Returns the content of config_fed_server.json or config_fed_client.json.

    Args:
        resume: the id of the run that the job continues, if any.
    """
    return (_server if side == SERVER else _client)(plan, request, resume)


def job_meta(name: str, scope: str, plan: Plan, request: AdaptationRequest | None = None) -> dict[str, Any]:
    """Returns the content of meta.json. `resource_spec`, here empty, may name GPUs per site."""
    # an adaptation needs the unseen site and one donor
    least = {"min_clients": plan.federation.min_sites}
    needed = {"min_clients": 2, "mandatory_clients": [request.newcomer]} if request else least
    deploy_map = {APPS[SERVER]: ["server"], APPS[CLIENT]: sorted(request.sites if request else plan.sites)}
    return {"name": name, "scope": scope, **needed, "deploy_map": deploy_map, "resource_spec": {}}


def require_resources(asked: Mapping[str, Any], sites: Sequence[str]) -> None:
    """Raises InputError if the resources that a job asks for, by site, are not those of RESOURCES at its sites."""
    for site, values in asked.items():
        if site not in sites:
            raise InputError(f"{META}: resource_spec.{site} does not name a site of the job; correct or remove it")
        for name, value in require_object(META, f"resource_spec.{site}", values).items():
            kind, most = RESOURCES.get(name, (None, 0))
            if kind is None or not isinstance(value, kind) or isinstance(value, bool) or not 0 <= value <= most:
                known = ", ".join(f"{known} up to {most}" for known, (_, most) in RESOURCES.items())
                raise InputError(f"{META}: resource_spec.{site}.{name} is {str(value)[:80]}; a job may ask for {known}")


def require_object(what: str, place: str, value: Any) -> dict[str, Any]:
    """Returns the value; raises InputError if it is not a JSON object."""
    if not isinstance(value, dict):
        raise InputError(f"{what}: {place} is missing or not a JSON object; export the job with `feddp job`")
    return value


def _server(plan: Plan, request: AdaptationRequest | None, resume: str) -> dict[str, Any]:
    controller, half = SERVER_CLASSES["stage"], _half(plan, request)
    stages = stages_of(plan, request is not None)
    return {
        "format_version": 2,
        "server": {"task_request_interval": 0.05},
        **TRANSPORT,
        "workflows": [{"id": stage, "path": controller, "args": {"stage": stage}} for stage in stages],
        # both ends convert received tensors first and sent tensors last
        **_filters(data=half, result=half),
        "components": [{"id": "persistor", "path": SERVER_CLASSES["persistor"], "args": _arguments(plan, request, resume)}],
    }


def _client(plan: Plan, request: AdaptationRequest | None, resume: str) -> dict[str, Any]:
    half, strip = _half(plan, request), [SITE_CLASSES["strip"]] if request is None else []
    tasks = protocol.tasks_of(stages_of(plan, request is not None))
    return {
        "format_version": 2,
        **TRANSPORT,
        **AT_SITE,
        "executors": [{"tasks": tasks, "executor": {"path": SITE_CLASSES["stages"]}}],
        **_filters(data=half, result=[*strip, *half]),
        "components": [{"id": "site", "path": SITE_CLASSES["site"], "args": _arguments(plan, request, resume)}],
    }


def _arguments(plan: Plan, request: AdaptationRequest | None, resume: str) -> dict[str, Any]:
    """Returns the arguments of both sides' components."""
    more = {"adaptation": request.to_json()} if request else {"resume": resume} if resume else {}
    return {"plan": plan.to_json(), **more}


def _half(plan: Plan, request: AdaptationRequest | None) -> list[str]:
    """Half precision applies to rounds only; an adaptation has none."""
    return [SITE_CLASSES["half"]] if plan.federation.half and request is None else []


def _filters(data: list[str], result: list[str]) -> Mapping[str, Any]:
    """Returns a job's filters: `data` for the tasks with shared tensors, `result` for the training results."""

    def chain(tasks: list[str], paths: list[str]) -> list[dict[str, Any]]:
        return [{"tasks": tasks, "filters": [{"path": path} for path in paths]}]

    chains = {"task_data_filters": (protocol.with_shared(), data), "task_result_filters": ([protocol.TRAIN], result)}
    return {name: chain(tasks, paths) for name, (tasks, paths) in chains.items() if paths}
