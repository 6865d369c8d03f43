"""A run on this machine: export the job, start it, follow it, collect its results. The environments have their own modules."""

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from feddp.data.folder import refuse_occupied
from feddp.errors import FedDPError, InputError, StorageError
from feddp.files import (
    ARTIFACTS,
    CASES,
    CONFIG,
    IMAGES,
    NETWORK,
    PROGRESS,
    RECORD,
    RESULTS,
    RESULTS_TABLE,
    RUN,
    SHARED,
    TENSORBOARD,
    TIME,
    copy_file,
    read_events,
    site_folder,
    write_json,
    write_text,
    writing,
)
from feddp.flare.policy import SitePolicy
from feddp.jobs import folder as jobs
from feddp.limits import RESULTS_BYTES
from feddp.plan.resolve import idle_queries, require_runnable
from feddp.plan.schema import Plan
from feddp.reading import read_json, read_own, short, shown
from feddp.reporting.page import write_markdown
from feddp.run.follow import Follower
from feddp.stages.empty import at_the_end
from feddp.stages.memory import start_file
from feddp.stages.site import last_network
from feddp.terminal import note
from feddp.tracking import VARIABLE
from feddp.training.claim import hold, is_unused
from feddp.versions import installed

ENVIRONMENTS = ("local", "sim", "poc")
# where the server's files of a run lie, below the run's folder: of the simulator, of one process, of a POC
JOB, WORKSPACE, SIMULATOR, POC = "job", "workspace", "simulated", "poc/feddp/prod_00"
POC_FOLDERS = ("poc", "home")  # below the run's folder too
SERVER_FILES = (f"{SIMULATOR}/simulator_server/feddp", f"{WORKSPACE}/server/feddp", f"{POC}/localhost/feddp")

# what FLARE's simulator writes where a site's process has not started in time, and what it means
NOT_STARTED = "Failed to create connection to the child process"
SLOW_START = (
    "a site's process did not start in time: the machine is too busy, or has too little memory for all sites at once; free it,"
    " run fewer sites at once (--threads 1), or without FLARE (--env local)"
)


@dataclass(frozen=True)
class Request:
    """What to run, and the folder for the results."""

    plan: Plan
    policies: Mapping[str, dict[str, Any]]  # {site: its properties}; the approval of this plan is added to them
    out: Path
    threads: int | None = None  # sites that run at once; None: as `run_here`
    initial: dict[str, Tensor] | None = None
    env: str = "sim"  # the environment's name, for whoever continues the run
    resume: str = ""  # the id of the run that is continued
    config: str = ""  # the content of run.yaml
    verbose: bool = False  # show the lines of the logs
    rounds: Path | None = None  # where runs with equal rounds keep and find them (`feddp.run.rounds`), if env is "local"

    def __post_init__(self) -> None:
        admitting = SitePolicy.admitting(self.plan)  # the user starts all sites, so he is their administrator
        object.__setattr__(self, "policies", {site: admitting | dict(own) for site, own in self.policies.items()})

    @property
    def sites(self) -> list[str]:
        return sorted(self.policies)


class Running(Protocol):
    """A running job."""

    id: str
    progress: Path  # the server's progress.jsonl, once it exists
    log: Path  # the log to read after a failure

    def logs(self) -> dict[str, Path]:
        """Returns all logs that there are now, by their writers' names."""
        ...

    def finished(self) -> bool: ...

    def outcome(self) -> tuple[bool, Path]:
        """Returns whether the job succeeded, and the folder with the server's files."""
        ...

    def store(self, site: str) -> Path:
        """Returns a site's folder of this job."""
        ...


Environment = Callable[[Request, Path], AbstractContextManager[Running]]


def run(request: Request, environment: Environment, name: str) -> dict[str, Any]:
    """Runs the plan and writes results.json, results.md, the shared tensors and every site's network to `request.out`.

    If `request.out` holds an unfinished run of this plan, it is continued after its last completed round.

    Raises:
        FedDPError: the folder holds something else, or the job failed; names the cause, the log and the command that continues.
    """
    if VARIABLE in os.environ:  # FLARE's processes work in other folders
        os.environ[VARIABLE] = os.path.abspath(os.environ[VARIABLE])
    with _continued(request.out):
        return _run(replace(request, resume=begin(request)), environment, name)


@contextmanager
def _continued(out: Path) -> Iterator[None]:
    """Raises StorageError with the command that continues the run, where the block is ended by a full disk."""
    try:
        with writing(out):
            yield
    except StorageError as error:
        raise StorageError(f"{error}; {to_go_on(out)}") from error


def to_go_on(out: Path) -> str:
    """Returns what a user types to continue the unfinished run in `out`, as the end of a message.

    For a comparison's run, that is the comparison: it then goes on with its other runs. It also takes a run that
    `feddp run --resume` has finished (`feddp.compare.planned_run`).
    """
    compared = out.with_name(f"{out.name}.json").exists()
    return "to go on: " + ("the same `feddp compare` again" if compared else resuming(out))


def resuming(out: Path) -> str:
    """Returns the command that continues the unfinished run in `out`, as a shell reads it."""
    return shlex.join(["feddp", "run", "--resume", str(out)])


def _run(request: Request, environment: Environment, name: str) -> dict[str, Any]:
    out = request.out
    job = jobs.export(request.plan, out / JOB / name, initial=request.initial, resume=request.resume)
    if request.env != "local":  # one process asks nobody
        note(f"approved for this run: plan {request.plan.digest()[:12]} at {len(request.sites)} sites")
    if idle := idle_queries(request.plan):
        note(f"warning: {idle}")
    with environment(request, job) as running:
        if not request.resume:
            write_json(out / RUN, record(request) | {"versions": installed(), "job": running.id})
        content, server = awaited(request, request.sites, running)
        for site in request.sites:
            copy_results(running.store(site), site_folder(out, site))
        copy_file(start_file(server, content["start_round"]), out / SHARED)
    return finish(out, content)


def begin(request: Request) -> str:
    """Prepares a run's folder. Returns the id of the run that it continues, "" where the run begins.

    Raises:
        InputError: no run of the plan can begin, or the folder holds something else than an unfinished run of this request.
    """
    require_runnable(request.plan)  # a run that can never begin claims no folder
    out, wanted = request.out, json.loads(json.dumps(record(request)))
    if not (out / RUN).exists():
        fresh(out)
        write_json(out / RUN, wanted | {"versions": installed()})
        _write_config(request)
        hold(out, patience=0)
        return ""
    if out.stat().st_uid != os.getuid():
        raise InputError(f"{out} belongs to another user; name another folder")
    if (out / RESULTS).exists():
        raise InputError(f"{out} holds a finished run; name another folder")
    hold(out, patience=0)
    stored = recorded(out)
    job = stored.pop("job", "")
    if differing := [key for key in wanted if stored[key] != wanted[key]]:
        before, now = stored["plan"], wanted["plan"]
        details = ", ".join(f"{key}={before.get(key)!r}" for key in now if before.get(key) != now[key])
        what = differing[0] + (f" ({short(details)})" if details else "")
        raise InputError(
            f"{out} holds an unfinished run with another {what}; continue that one with `{resuming(out)}`, or name"
            " another folder"
        )
    if not (out / CONFIG).exists():  # a process was killed before it wrote it
        _write_config(request)
    note(f"{out} holds this run, unfinished: it is continued")
    return job if begun(out, job) else ""


def _write_config(request: Request) -> None:
    if request.config:
        write_text(request.out / CONFIG, request.config)


def record(request: Request) -> dict[str, Any]:
    """What `feddp run --resume` needs to know about a run."""
    policies = {site: dict(policy) for site, policy in request.policies.items()}
    return {"env": request.env, "plan": request.plan.to_json(), "policies": policies, "threads": request.threads}


def recorded(out: Path) -> dict[str, Any]:
    """What the run.json of a run holds: its `record`, and `job`, the id of its first job, once that was submitted.

    Raises:
        InputError: the file is damaged, or not of FedDP.
    """
    remedy = "the run cannot be continued: remove its folder, or name another one"
    content = read_own(out / RUN, InputError, remedy)
    if lacking := [name for name in ("env", "plan", "policies", "threads") if name not in content]:
        raise InputError(f"{out / RUN} is damaged, or not of FedDP: it lacks {', '.join(lacking)}; {remedy}")
    plan, policies, threads = content["plan"], content["policies"], content["threads"]
    right = {
        "env": content["env"] in ENVIRONMENTS,
        "plan": isinstance(plan, dict) and isinstance(plan.get("method"), str) and type(plan.get("rounds")) is int,
        "policies": isinstance(policies, dict) and all(isinstance(policy, dict) for policy in policies.values()),
        "threads": threads is None or (type(threads) is int and threads > 0),
        "job": isinstance(content.get("job", ""), str),
    }
    for name in right:
        if not right[name]:
            raise InputError(f"{out / RUN}: {name} cannot be {shown(content[name])}; {remedy}")
    if sorted(policies) != plan.get("sites"):
        raise InputError(f"{out / RUN}: policies and plan name different sites; {remedy}")
    return content


def begun(out: Path, job: str) -> bool:
    """Whether the server of a run began it, in any environment."""
    return bool(job) and any((out / folder / job).is_dir() for folder in SERVER_FILES)


def awaited(request: Request, sites: Sequence[str], running: Running) -> tuple[dict[str, Any], Path]:
    """Follows a job to its end and copies its progress to `request.out`. Returns its results and the server's folder.

    Raises:
        FedDPError: the job failed; names the cause and the log.
    """
    logs = running.logs if request.verbose else dict
    Follower(request.plan, sites, running.progress, logs).until(running.finished)
    succeeded, server = running.outcome()
    results = server / RESULTS
    if not succeeded or not results.exists():
        cause = _first_error(running, sites, server)
        raise FedDPError(f"the job failed: {cause}; log: {running.log}; {to_go_on(request.out)}")
    for name in (PROGRESS, TIME):
        if (server / name).exists():  # a server of an earlier version left no time.json
            copy_file(server / name, request.out / name)
    for name in (TENSORBOARD, ARTIFACTS):
        if (server / name).exists():  # moved: TensorBoard would show the run twice
            shutil.rmtree(request.out / name, ignore_errors=True)  # of an attempt that failed later
            shutil.move(server / name, request.out / name)
    return read_json(results, RESULTS_BYTES), server


def fresh(out: Path) -> None:
    """Creates a run's folder, readable only by its owner, because it will hold every site's network.

    Raises:
        InputError: the folder is not empty, or it lies in another run's, with which it would be removed.
    """
    if not (out.is_dir() and is_unused(out)):  # a comparison takes the folder before it begins a run there
        refuse_occupied([out])
    for parent in Path(os.path.abspath(out)).parents:
        if _is_run(parent):
            raise InputError(f"{out} lies in the folder of another run, {parent}; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    out.chmod(0o700)


def _is_run(folder: Path) -> bool:
    try:
        return (folder / RUN).is_file() and bool(recorded(folder))
    except InputError:  # a file of this name, of whatever program
        return False


def finish(out: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Writes results.md, then results.json: a run with results.json is complete. Prints the warning of `at_the_end`."""
    write_text(out / RESULTS_TABLE, write_markdown(results))
    write_json(out / RESULTS, results)
    if warning := at_the_end(results):
        note(f"warning: {warning}")
    return results


def copy_results(store: Path, folder: Path) -> None:
    """Copies a site's results to the run's folder: its last network, its metrics per image and per case, its log."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if network := last_network(store):
        copy_file(network, folder / NETWORK)
    for name in (IMAGES, CASES, RECORD):
        if (store / name).exists():
            copy_file(store / name, folder / name)


def _first_error(running: Running, sites: Sequence[str], server: Path) -> str:
    """Returns what ended the run: a site's first error in the last task, else the server's error, else the log's."""
    path = server / PROGRESS
    events = read_events(path if path.exists() else running.progress)
    begins = [number for number, event in enumerate(events) if event["event"] == "resumed"]
    events = events[begins[-1] :] if begins else events  # those before are of an earlier attempt
    asked = max((e["time"] for e in events if e["event"] == "ask"), default=0.0)
    records = [e | {"site": site} for site in sites for e in read_events(running.store(site) / RECORD)]
    errors = sorted((e for e in records if e["event"] == "error" and e["time"] >= asked), key=lambda e: e["time"])
    if errors:
        return f"{errors[0]['site']}: {errors[0]['message']}"
    for event in events:
        if event["event"] == "error":
            return str(event["message"])
    if running.log.exists():
        lines = running.log.read_text(errors="replace").splitlines()
        if any(NOT_STARTED in line for line in lines):
            return SLOW_START
        for line in lines:
            if "ERROR" in line or "Error:" in line:
                return line.strip()
    return "it ended without results and without an error message"
