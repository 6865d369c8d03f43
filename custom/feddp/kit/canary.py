"""`feddp kit check --canary`: the first two rounds of a job, and what they say of the links, before days are spent on the rest.

A canary is the job itself, submitted with a person's kit and aborted after its second round. So no hospital approves anything
else, nothing leaves a hospital that the job would not send, and a job with `--resume` goes on after these rounds.

Times are those of the server's clock and its events: it asks a site, FLARE's client announces that the site has its answer
(`computed`), the answer has arrived. The second round is measured, because in the first one a site also opens its images.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning
from nvflare.fuel.flare_api.flare_api import Session
from rich.progress import BarColumn, SpinnerColumn, TimeElapsedColumn

from feddp.errors import FedDPError, InputError
from feddp.files import PROGRESS, Event, read_events
from feddp.flare.admin_session import is_final, opened_session, session_errors
from feddp.flare.job_folder import Job
from feddp.flare.persistor import STATS
from feddp.kit.approve import read_job
from feddp.protocol import TRAIN
from feddp.reading import lasting, megabytes, transferred
from feddp.sealing.kit import ADMIN, Kit
from feddp.stages.accounting import requests_of
from feddp.stages.events import BACK
from feddp.terminal import progress

ROUNDS = 2
POLL, ENDS = 2.0, 120.0  # seconds between two looks, for an aborted job to end


@dataclass(frozen=True)
class Crossing:
    """A round's message to one site and back: bytes of tensors, and seconds on each way and at the site."""

    down: int
    up: int
    to_site: float
    at_site: float
    back: float


def canary(kit: Kit, folder: Path, within: float) -> tuple[list[str], list[str]]:
    """Runs the first rounds of the job in `folder`; returns lines about its links, and a line for every problem.

    Args:
        kit: of a person who may submit jobs.
        within: seconds until the job is aborted, if its rounds are not complete.

    Raises:
        FedDPError: the kit is not a person's, the job is not suitable, a site has not joined, or the server does not answer.
    """
    job = _suitable(kit, folder)
    host, port = kit.server
    refused = f"the server {host}:{port} did not do what {kit.name} asked"
    asked = session_errors(refused, "read its log.txt, and abort the job in the admin console if it still runs")
    with asked, closing(opened_session(kit.name, kit.folder)) as session:
        joined = {client.name for client in session.get_system_info().client_info}
        if absent := sorted(set(job.plan.sites) - joined):
            raise InputError(f"{', '.join(absent)} of {folder}: not connected to the server; start these kits, then try again")
        id = session.submit_job(str(folder.resolve()))
        try:
            _watch(session, id, time.monotonic() + within)
        finally:
            session.abort_job(id)  # without effect on a job that has ended
        meta = _ended(session, id)
        events = before_abort(_events(session, id)) if meta.get(JobMetaKey.START_TIME.value) else []
    return _lines(job, id, events), _problems(kit, id, meta, events)


def _suitable(kit: Kit, folder: Path) -> Job:
    if kit.kind != ADMIN:
        raise InputError(
            f"{kit.folder} is the kit of a {kit.kind}, which cannot submit jobs; the lead runs the canary with the lead's kit"
            " (feddp kit check --canary JOB_FOLDER KIT), and sees this site's bytes and seconds"
        )
    _, job = read_job(folder)
    if job.request or job.resume or job.plan.rounds <= ROUNDS:
        raise InputError(
            f"{folder} is no job of more than {ROUNDS} rounds that begins a run; submit it itself, or name another job's folder"
        )
    return job


def _watch(session: Session, id: str, deadline: float) -> None:
    """Shows the rounds; returns when they are complete, the job has ended, or the time is over."""
    counted = "{task.completed}/{task.total} rounds"
    with progress(SpinnerColumn(), "{task.description}", BarColumn(), counted, TimeElapsedColumn()) as bar:
        task, done = bar.add_task(f"canary {id}: submitted", total=ROUNDS), 0
        while done < ROUNDS and time.monotonic() < deadline:
            status = session.get_job_meta(id)["status"]
            if is_final(status):
                return
            done = _rounds(session, id) if status == RunStatus.RUNNING.value else 0
            bar.update(task, completed=min(done, ROUNDS), description=f"canary {id}: {status.lower()}")
            time.sleep(POLL)


def _rounds(session: Session, id: str) -> int:
    """Returns the number of completed rounds of a running job; 0 while its process starts or ends."""
    try:
        return int(session.show_stats(id, "server").get("server", {}).get(STATS, {}).get("round", 0))
    except (JobNotRunning, JobNotFound):
        return 0


def _ended(session: Session, id: str) -> dict[str, Any]:
    """Returns a job's metadata when it has ended, with the sites' replies to its deployment if it could not run.

    Raises:
        FedDPError: it does not end.
    """
    deadline = time.monotonic() + ENDS
    while time.monotonic() < deadline:
        meta: dict[str, Any] = session.get_job_meta(id)
        # FLARE writes the reasons after this status
        told = meta["status"] != RunStatus.FAILED_TO_RUN.value or JobMetaKey.JOB_DEPLOY_DETAIL.value in meta
        if is_final(meta["status"]) and told:
            return meta
        time.sleep(POLL)
    raise FedDPError(f"job {id} did not end within {ENDS:.0f} s after its abort; abort it in the admin console")


def _events(session: Session, id: str) -> list[Event]:
    """Returns the server's progress of an ended job. The download, with the shared tensors, is removed."""
    with TemporaryDirectory() as folder:
        return read_events(Path(session.download_job_result(id, folder)) / "workspace" / PROGRESS)


def before_abort(events: Sequence[Event]) -> Sequence[Event]:
    """Returns the events until the canary's rounds are complete, or until a site answers that its work was aborted."""
    for number, event in enumerate(events):
        if _completes(event):
            return events[: number + 1]
        if event["event"] == "refused" and ReturnCode.TASK_ABORTED in event["reason"]:
            return events[:number]
    return events


def _completes(event: Event) -> bool:
    return bool(event["event"] == "round" and event["round"] == ROUNDS)


def crossings(events: Sequence[Event]) -> dict[str, Crossing]:
    """Returns {site: its last crossing in the measured round}; a round with several phases has several."""
    found: dict[str, Crossing] = {}
    for request in requests_of(events):
        if request.task != TRAIN or request.asked.get("round") != ROUNDS:
            continue
        for site, answer in request.answers.items():
            to_site, back = request.ways(site)
            if back is not None:
                at_site = float(answer["scalars"]["seconds"])
                found[site] = Crossing(request.asked["bytes"][site], answer["bytes"], to_site, at_site, back)
    return found


def _lines(job: Job, id: str, events: Sequence[Event]) -> list[str]:
    found = crossings(events)
    lines = [
        f"{site}: {megabytes(c.down)} to the site in {c.to_site:.1f} s, {megabytes(c.up)} back in {c.back:.1f} s; the site"
        f" worked {c.at_site:.1f} s"
        for site, c in sorted(found.items())
    ]
    ways = [(seconds, way, site) for site, c in found.items() for seconds, way in ((c.to_site, "to"), (c.back, "from"))]
    if ways:
        seconds, way, site = max(ways)
        lines.append(f"slowest way: {way} {site}, {seconds:.1f} s")
    for event in filter(_completes, events):
        seconds, rounds = event["seconds"], job.plan.rounds
        lines.append(f"round {ROUNDS} took {seconds:.1f} s; {rounds} such rounds take {lasting(rounds * seconds)}")
        lines.append(f"job {id} was ended; export the job again with --resume {id} to go on after these rounds")
    return lines


def _problems(kit: Kit, id: str, meta: Mapping[str, Any], events: Sequence[Event]) -> list[str]:
    complete = any(map(_completes, events))
    replies = (line.partition(": ") for line in meta.get(JobMetaKey.JOB_DEPLOY_DETAIL.value, []))
    problems = [f"{site}: {said}" for site, _, said in replies if said != "OK"]
    if not complete and meta["status"] == RunStatus.FINISHED_ABORTED.value:  # by us, when the time was over
        problems += _unanswered(kit, events)
    for event in events:
        if event["event"] in ("refused", "error"):
            problems.append(str(event["reason" if event["event"] == "refused" else "message"]))
    if not complete and not problems:
        problems.append(f"job {id} ended ({meta['status']}) before round {ROUNDS} was complete; read log.txt of the server")
    return list(dict.fromkeys(problems))


def _unanswered(kit: Kit, events: Sequence[Event]) -> Iterator[str]:
    """Yields a line for each site whose answer to the last task did not come in time, with the way that it is on."""
    host, port = kit.server
    for last in requests_of(events)[-1:]:
        for site in sorted(last.waiting):
            what = f"{site}: task {last.task} ({megabytes(last.asked['bytes'][site])}) did not come back in time"
            through = "let firewall and proxy pass messages of this size and connections of this length"
            if slow := last.moving.get(site):
                way = "its answer is" if slow["way"] == BACK else "the task is"
                far = transferred(slow["moved"], slow["size"], slow["rate"])
                yield f"{what}: {way} still on the line, {far}; allow more time with --within, or give the site a faster line"
            elif site in last.computed:
                yield f"{what}: the site has its answer, which does not get through to {host}:{port}; {through}"
            else:
                yield (
                    f"{what}: either the site is still at work, and log.txt of the job there says `got task assignment:"
                    f" name={last.task}` (then allow more with --within), or the task does not get through from"
                    f" {host}:{port}; {through}"
                )
