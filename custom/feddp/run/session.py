"""A run on this machine: export, start, follow, gather. What differs between the environments is in theirs."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from feddp import jobs
from feddp.errors import FedDPError
from feddp.methods.plan import Plan
from feddp.methods.site import CALIBRATED, START, TUNED
from feddp.report import write_markdown
from feddp.run.follow import Follower


@dataclass(frozen=True)
class Request:
    """What to run and where to leave it."""

    plan: Plan
    policies: Mapping[str, dict[str, Any]]  # each site's own properties, by name (`flare.policy.SitePolicy`)
    out: Path
    threads: int | None = None  # sites that run at once, in the simulator; all of them if None
    initial: dict[str, Tensor] | None = None

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


def run(request: Request, environment: Environment, name: str) -> dict:
    """Runs the plan and leaves results.json, results.md and every site's own network in `request.out`.

    Raises:
        FedDPError: the folder is taken, or the job failed; names the first real error and the log.
    """
    out = request.out
    if out.exists() and any(out.iterdir()):
        raise FedDPError(f"{out} is not empty; choose another --out, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    job = jobs.export(request.plan, request.sites, out / "job" / name, initial=request.initial)
    with environment(request, job) as running:
        Follower(request.plan, request.sites, running.progress).until(running.finished)
        succeeded, server = running.outcome()
        results = server / "results.json"
        if not succeeded or not results.exists():
            raise FedDPError(f"the job failed: {_first_error(running, request.sites, server)}; log: {running.log}")
        for site in request.sites:
            _bring_home(running.store(site), out / "sites" / site)
        shutil.copy(results, out / "results.json")
        shutil.copy(server / "progress.jsonl", out / "progress.jsonl")
    content = json.loads((out / "results.json").read_text())
    (out / "results.md").write_text(write_markdown(content), encoding="utf-8")
    return content


def _bring_home(store: Path, home: Path) -> None:
    home.mkdir(parents=True)
    for slot in (CALIBRATED, TUNED, START):
        if (store / f"{slot}.safetensors").exists():
            shutil.copy(store / f"{slot}.safetensors", home / "network.safetensors")
            break
    for name in ("images.csv", "record.jsonl"):
        if (store / name).exists():
            shutil.copy(store / name, home / name)


def _first_error(running: Running, sites: Sequence[str], server: Path) -> str:
    """What ended the run: a site's own words on the last task it was asked, otherwise the server's, otherwise the log's."""
    path = server / "progress.jsonl"
    events = _events(path if path.exists() else running.progress)
    asked = max((e["time"] for e in events if e["event"] == "ask"), default=0.0)
    records = [e | {"site": site} for site in sites for e in _events(running.store(site) / "record.jsonl")]
    errors = sorted((e for e in records if e["event"] == "error" and e["time"] >= asked), key=lambda e: e["time"])
    if errors:
        return f"{errors[0]['site']}: {errors[0]['message']}"
    for event in events:
        if event["event"] == "error":
            return event["message"]
    if running.log.exists():
        for line in running.log.read_text(errors="replace").splitlines():
            if "ERROR" in line or "Error:" in line:
                return line.strip()
    return "it ended without results and without an error message"


def _events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
