"""A job's folder as the export writes it, and nothing else: read back from its files, and refused by the first difference."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import JobMetaKey

from feddp.adaptation.request import AdaptationRequest
from feddp.errors import InputError
from feddp.flare.archive import require_files
from feddp.flare.configuration import APPS, CLIENT, FILES, SERVER, app_configuration, job_meta
from feddp.flare.documents import LARGEST, at, parsed, require_equal
from feddp.plan.resolve import WEIGHTS
from feddp.plan.schema import Plan
from feddp.training.settings import require_name

META = "meta.json"
# what FLARE's server adds to meta.json by itself
_KEYS = JobMetaKey
SERVERS_OWN = {
    *(_KEYS.JOB_ID, _KEYS.JOB_FOLDER_NAME, _KEYS.SUBMITTER_NAME, _KEYS.SUBMITTER_ORG, _KEYS.SUBMITTER_ROLE, _KEYS.STATUS),
    *(_KEYS.DATA_STORAGE_FORMAT, _KEYS.CONTENT_LOCATION, _KEYS.RESULT_LOCATION, _KEYS.SUBMIT_TIME, _KEYS.SUBMIT_TIME_ISO),
    *(_KEYS.START_TIME, _KEYS.DURATION, _KEYS.JOB_DEPLOY_DETAIL, _KEYS.SCHEDULE_COUNT, _KEYS.LAST_SCHEDULE_TIME),
    *(_KEYS.SCHEDULE_HISTORY, _KEYS.CLONED_FROM, _KEYS.JOB_CLIENTS, _KEYS.STUDY),
}
OWN = {key.value for key in SERVERS_OWN}
RESOURCES = {"num_of_gpus": (int, 64), "mem_per_gpu_in_GiB": (int | float, 1024)}  # what a job may ask of a site, and how much


@dataclass(frozen=True)
class Job:
    """What a job's folder holds, all of it: the plan and, for a newcomer, the request."""

    plan: Plan
    request: AdaptationRequest | None = None

    @property
    def asked(self) -> dict[str, Any] | None:
        """The request as `SitePolicy.accept` takes it."""
        return self.request.to_json() if self.request else None


def admitted(side: str, data: bytes) -> Job:
    """The job of one side's configuration.

    Raises:
        InputError: it is not what the export writes for any plan; names the first place that is not.
    """
    what = Path(FILES[side]).name
    document = parsed(what, data)
    args = at(what, document, "components", 0, "args")
    plan = Plan.from_json(require_object(what, "components[0].args.plan", at(what, document, "components", 0, "args", "plan")))
    asked = args.get("adaptation") if isinstance(args, dict) else None
    job = Job(plan, AdaptationRequest.from_json(asked) if asked is not None else None)
    require_equal(what, _as_read(app_configuration(side, job.plan, job.request)), document)
    return job


def require_meta(meta: Mapping[str, Any], job: Job | None = None) -> None:
    """InputError where meta.json, or what the server made of it, is not that of a job of ours: of `job`, where it is given."""
    for key in meta:
        if key not in OWN and key not in ("name", "scope", "min_clients", "mandatory_clients", "deploy_map", "resource_spec"):
            raise InputError(f"{META}: {str(key)[:80]} is {str(meta[key])[:80]}, but the export writes no such key")
    require_name(f"{META}: name", meta.get("name"))
    require_name(f"{META}: scope", meta.get("scope"))
    deploy_map = require_object(META, "deploy_map", meta.get("deploy_map"))
    require_equal(META, sorted(APPS.values()), sorted(deploy_map), "the apps of deploy_map")
    sites = deploy_map[APPS[CLIENT]]
    if not isinstance(sites, list):
        raise InputError(f"{META}: deploy_map.{APPS[CLIENT]} is no list of sites; export the job with `feddp job`")
    if job:
        wanted = job_meta(meta["name"], meta["scope"], job.plan, job.request)
        ours = {key: value for key, value in meta.items() if key not in OWN}
        require_equal(META, _as_read(wanted), ours | {"resource_spec": wanted["resource_spec"]})
    _require_resources(require_object(META, "resource_spec", meta.get("resource_spec", {})), sites)


def _require_resources(asked: Mapping[str, Any], sites: list[str]) -> None:
    for site, values in asked.items():
        if site not in sites:
            raise InputError(f"{META}: resource_spec.{site} is for no site of the job")
        for name, value in require_object(META, f"resource_spec.{site}", values).items():
            kind, most = RESOURCES.get(name, (None, 0))
            if kind is None or not isinstance(value, kind) or isinstance(value, bool) or not 0 <= value <= most:
                known = ", ".join(f"{known} up to {most}" for known, (_, most) in RESOURCES.items())
                raise InputError(f"{META}: resource_spec.{site}.{name} is {str(value)[:80]}; a job may ask for {known}")


def read_folder(side: str, app: Path) -> Job:
    """The job of an app that lies in a folder.

    Raises:
        InputError: it holds anything but what the export writes.
    """
    links = [path for path in app.rglob("*") if path.is_symlink()]
    if links:
        raise InputError(f"{app.name} holds the link {links[0].relative_to(app)}; export the job with `feddp job`")
    found = [path.relative_to(app).as_posix() for path in sorted(app.rglob("*")) if not path.is_dir() or path.name != "config"]
    file = app / FILES[side]
    brought = [f"config/{WEIGHTS}"] if side == SERVER and f"config/{WEIGHTS}" in found else []
    require_files(app.name, found, [FILES[side], *brought])
    with open(file, "rb") as handle:
        job = admitted(side, handle.read(LARGEST + 1))
    if side == SERVER and bool(brought) != bool(job.plan.weights):
        said = "brings" if job.plan.weights else "does not bring"
        raise InputError(f"{app.name}: its plan {said} initial tensors, and config/{WEIGHTS} says otherwise")
    return job


def require_object(what: str, place: str, value: Any) -> dict[str, Any]:
    """The value, where it is a JSON object. InputError where it is none."""
    if not isinstance(value, dict):
        raise InputError(f"{what}: {place} is missing, or no JSON object; export the job with `feddp job`")
    return value


def _as_read(document: dict[str, Any]) -> dict[str, Any]:
    """A document as it is read back from its file."""
    return dict(json.loads(json.dumps(document)))
