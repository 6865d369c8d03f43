"""Reads a job back from its folder and refuses the job at the first difference from an exported folder."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import JobMetaKey

from feddp.adaptation.request import AdaptationRequest
from feddp.errors import BadFile, InputError
from feddp.files import WEIGHTS
from feddp.flare.archive import require_files
from feddp.flare.configuration import (
    APPS,
    CLIENT,
    FILES,
    META,
    SERVER,
    app_configuration,
    job_meta,
    require_object,
    require_resources,
)
from feddp.flare.documents import LARGEST, at, parsed, require_equal
from feddp.plan.schema import Plan
from feddp.reading import read
from feddp.training.claim import require_job_id
from feddp.training.settings import require_name

# keys that FLARE's server adds to meta.json
_KEYS = JobMetaKey
SERVERS_OWN = {
    *(_KEYS.JOB_ID, _KEYS.JOB_FOLDER_NAME, _KEYS.SUBMITTER_NAME, _KEYS.SUBMITTER_ORG, _KEYS.SUBMITTER_ROLE, _KEYS.STATUS),
    *(_KEYS.DATA_STORAGE_FORMAT, _KEYS.CONTENT_LOCATION, _KEYS.RESULT_LOCATION, _KEYS.SUBMIT_TIME, _KEYS.SUBMIT_TIME_ISO),
    *(_KEYS.START_TIME, _KEYS.DURATION, _KEYS.JOB_DEPLOY_DETAIL, _KEYS.SCHEDULE_COUNT, _KEYS.LAST_SCHEDULE_TIME),
    *(_KEYS.SCHEDULE_HISTORY, _KEYS.CLONED_FROM, _KEYS.JOB_CLIENTS, _KEYS.STUDY),
}
OWN = {key.value for key in SERVERS_OWN}


@dataclass(frozen=True)
class Job:
    """The whole content of a job's folder: the plan; for an adaptation at an unseen site, the request; the run it continues."""

    plan: Plan
    request: AdaptationRequest | None = None
    resume: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.resume, str):
            raise InputError(f"resume={str(self.resume)[:80]!r} is not a run's id; export the job with `feddp job`")
        if self.resume:
            require_job_id(self.resume)

    @property
    def asked(self) -> dict[str, Any] | None:
        """The request in the form for `SitePolicy.accept`."""
        return self.request.to_json() if self.request else None


def admitted(side: str, data: bytes) -> Job:
    """Returns the job that a side's configuration describes.

    Raises:
        InputError: the export writes no such configuration; names the first difference.
    """
    what = Path(FILES[side]).name
    document = parsed(what, data)
    args = at(what, document, "components", 0, "args")
    plan = Plan.from_json(require_object(what, "components[0].args.plan", at(what, document, "components", 0, "args", "plan")))
    asked, resume = (args.get("adaptation"), args.get("resume", "")) if isinstance(args, dict) else (None, "")
    job = Job(plan, AdaptationRequest.from_json(asked) if asked is not None else None, resume)
    require_equal(what, _as_read(app_configuration(side, job.plan, job.request, job.resume)), document)
    return job


def require_meta(meta: Mapping[str, Any], job: Job | None = None) -> None:
    """Raises InputError if meta.json, with the server's additions, is not an exported one, or not that of `job` if given."""
    for key in meta:
        if key not in OWN and key not in ("name", "scope", "min_clients", "mandatory_clients", "deploy_map", "resource_spec"):
            raise InputError(f"{META}: {str(key)[:80]} is {str(meta[key])[:80]}, but the export writes no such key")
    require_name(f"{META}: name", meta.get("name"))
    require_name(f"{META}: scope", meta.get("scope"))
    deploy_map = require_object(META, "deploy_map", meta.get("deploy_map"))
    require_equal(META, sorted(APPS.values()), sorted(deploy_map), "the apps of deploy_map")
    sites = deploy_map[APPS[CLIENT]]
    if not isinstance(sites, list):
        raise InputError(f"{META}: deploy_map.{APPS[CLIENT]} is not a list of sites; export the job with `feddp job`")
    if job:
        wanted = job_meta(meta["name"], meta["scope"], job.plan, job.request)
        ours = {key: value for key, value in meta.items() if key not in OWN}
        require_equal(META, _as_read(wanted), ours | {"resource_spec": wanted["resource_spec"]})
    require_resources(require_object(META, "resource_spec", meta.get("resource_spec", {})), sites)


def read_folder(side: str, app: Path) -> Job:
    """Returns the job of an app in a folder.

    Raises:
        InputError: the folder differs from what the export writes.
    """
    found = sorted(_entries(app))
    if links := [path for path in found if path.is_symlink()]:
        raise InputError(f"{app.name} holds the link {links[0].relative_to(app)}; export the job with `feddp job`")
    files = [path.relative_to(app).as_posix() for path in found]
    brought = [f"config/{WEIGHTS}"] if side == SERVER and f"config/{WEIGHTS}" in files else []
    require_files(app.name, files, [FILES[side], *brought])
    try:
        content = read(app / FILES[side], LARGEST)
    except BadFile as bad:  # without the path: the server, which calls this too, tells the message to the lead
        raise InputError(f"{app.name}: {FILES[side]} {bad.problem.what}; export the job with `feddp job`") from None
    job = admitted(side, content)
    if side == SERVER and bool(brought) != bool(job.plan.weights):
        claim, fact = ("has", "is missing") if job.plan.weights else ("has no", "is present")
        raise InputError(f"{app.name}: its plan {claim} initial tensors, but config/{WEIGHTS} {fact}; export the job again")
    return job


def _entries(app: Path) -> Iterator[Path]:
    """Yields the files of an app, and every folder but config; none of those is entered, because it may have any depth."""
    for root, folders, files in os.walk(app):
        here = Path(root)
        others = [name for name in folders if here != app or name != "config" or (here / name).is_symlink()]
        folders[:] = [name for name in folders if name not in others]
        yield from (here / name for name in (*others, *files))


def _as_read(document: dict[str, Any]) -> dict[str, Any]:
    """Returns a document as JSON reads it back from a file."""
    return dict(json.loads(json.dumps(document)))
