"""A run on this machine: export, start, follow, gather. What differs between the environments is in theirs."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from feddp.data.folder import refuse_occupied
from feddp.errors import FedDPError
from feddp.files import (
    CASES,
    IMAGES,
    NETWORK,
    PROGRESS,
    RECORD,
    RESULTS,
    RESULTS_TABLE,
    SHARED,
    read_events,
    site_folder,
    write_json,
    write_text,
)
from feddp.flare.policy import SitePolicy
from feddp.jobs import folder as jobs
from feddp.limits import RESULTS_BYTES
from feddp.plan.schema import Plan
from feddp.reading import read_json
from feddp.reporting.page import write_markdown
from feddp.run.follow import Follower
from feddp.stages.memory import start_file
from feddp.stages.site import last_network


@dataclass(frozen=True)
class Request:
    """What to run and where to leave it."""

    plan: Plan
    policies: Mapping[str, dict[str, Any]]  # each site's own properties, by name; to them is added that it takes this plan
    out: Path
    threads: int | None = None  # sites that run at once, in the simulator; all of them if None
    initial: dict[str, Tensor] | None = None

    def __post_init__(self) -> None:
        admitting = SitePolicy.admitting(self.plan)  # who starts all the sites is every one's administrator
        object.__setattr__(self, "policies", {site: admitting | dict(own) for site, own in self.policies.items()})

    @property
    def sites(self) -> list[str]:
        return sorted(self.policies)


class Running(Protocol):
    """A job under way."""

    progress: Path  # the server's progress.jsonl, once it is there
    log: Path  # where to look when it fails

    def finished(self) -> bool: ...

    def outcome(self) -> tuple[bool, Path]:
        """Whether the job succeeded, and the folder with the server's files."""
        ...

    def store(self, site: str) -> Path:
        """A site's own files of this job."""
        ...


Environment = Callable[[Request, Path], AbstractContextManager[Running]]


def run(request: Request, environment: Environment, name: str) -> dict[str, Any]:
    """Runs the plan and leaves results.json, results.md, the shared tensors and every site's own network in `request.out`.

    Raises:
        FedDPError: the folder is taken, or the job failed; names the first real error and the log.
    """
    out = request.out
    fresh(out)
    job = jobs.export(request.plan, out / "job" / name, initial=request.initial)
    print(f"approved for this run: plan {request.plan.digest()[:12]} at {len(request.sites)} sites", file=sys.stderr)
    with environment(request, job) as running:
        content, server = awaited(request, request.sites, running)
        for site in request.sites:
            bring_home(running.store(site), site_folder(out, site))
        shutil.copy(start_file(server, content["start_round"]), out / SHARED)
    return finish(out, content)


def awaited(request: Request, sites: Sequence[str], running: Running) -> tuple[dict[str, Any], Path]:
    """Follows a job to its end; its results, and the folder with the server's files. Its progress is in `request.out` then.

    Raises:
        FedDPError: the job failed; names the first real error and the log.
    """
    Follower(request.plan, sites, running.progress).until(running.finished)
    succeeded, server = running.outcome()
    results = server / RESULTS
    if not succeeded or not results.exists():
        raise FedDPError(f"the job failed: {_first_error(running, sites, server)}; log: {running.log}")
    shutil.copy(server / PROGRESS, request.out / PROGRESS)
    return read_json(results, RESULTS_BYTES), server


def fresh(out: Path) -> None:
    """Makes the folder of a run, which gets every site's own network, for its owner alone. InputError where it is not empty."""
    refuse_occupied([out])
    out.mkdir(parents=True, exist_ok=True)
    out.chmod(0o700)


def finish(out: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Writes a run's results for people and, last of all, for programs: where results.json is, the run is whole."""
    write_text(out / RESULTS_TABLE, write_markdown(results))
    write_json(out / RESULTS, results)
    return results


def bring_home(store: Path, home: Path) -> None:
    """Copies what a person wants of a site's own files: its last network, its metrics by image and by case, its log."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if network := last_network(store):
        shutil.copy(network, home / NETWORK)
    for name in (IMAGES, CASES, RECORD):
        if (store / name).exists():
            shutil.copy(store / name, home / name)


def _first_error(running: Running, sites: Sequence[str], server: Path) -> str:
    """What ended the run: a site's own words on the last task it was asked, otherwise the server's, otherwise the log's."""
    path = server / PROGRESS
    events = read_events(path if path.exists() else running.progress)
    asked = max((e["time"] for e in events if e["event"] == "ask"), default=0.0)
    records = [e | {"site": site} for site in sites for e in read_events(running.store(site) / RECORD)]
    errors = sorted((e for e in records if e["event"] == "error" and e["time"] >= asked), key=lambda e: e["time"])
    if errors:
        return f"{errors[0]['site']}: {errors[0]['message']}"
    for event in events:
        if event["event"] == "error":
            return str(event["message"])
    if running.log.exists():
        for line in running.log.read_text(errors="replace").splitlines():
            if "ERROR" in line or "Error:" in line:
                return line.strip()
    return "it ended without results and without an error message"
