"""A site whose parent process was started again starts its unfinished jobs again.

FLARE's script starts the parent process again, but nobody would start its jobs' processes, which have ended with it. The client
registers with a new token, which the server's jobs learn (`feddp.flare.participants`).
"""

import json
import threading
import time
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.workspace import Workspace
from nvflare.private.admin_defs import Message
from nvflare.private.defs import ERROR_MSG_PREFIX, RequestHeader, TrainingTopic
from nvflare.private.fed.client.scheduler_cmds import StartJobProcessor
from nvflare.private.scheduler_constants import ShareableHeader

from feddp.errors import BadFile, InputError, PolicyError, StorageError
from feddp.files import write_json
from feddp.flare.admission import require_signers
from feddp.flare.audit import audit_if_possible
from feddp.flare.kept import alone
from feddp.flare.workspace import kept
from feddp.reading import read_json, read_own

UNFINISHED = "unfinished.json"  # in the site's folder of all runs: {job's id: [times at which it was started again]}
TRIES, WITHIN = 3, 3600.0  # starts of a job by new parent processes within so many seconds; then the site leaves the job


class Unfinished(FLComponent):
    """For a site's resources.json: starts the jobs again that ran when the parent process ended.

    The deployed app is still in the site's workspace; its admission stands, and the policy is read again in the job's process.
    A job that has ended at the server meanwhile is stopped at the client's next heartbeat.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.AFTER_JOB_LAUNCH:
            job = fl_ctx.get_prop(FLContextKey.JOB_META)[JobMetaKey.JOB_ID.value]
            if job not in _noted(kept(fl_ctx)):
                self._note(fl_ctx, job, [])
        elif event_type == EventType.JOB_COMPLETED:
            self._note(fl_ctx, fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID), None)
        elif event_type == EventType.SYSTEM_START:
            # a thread: FLARE's client answers no command before this event has been handled
            threading.Thread(target=self._start_all, args=(fl_ctx,), daemon=True).start()

    def _note(self, fl_ctx: FLContext, job: str, started: list[float] | None) -> None:
        """Notes the times at which an unfinished job was started again; None: the job has ended here.

        On a full disk the note stays as it was and the log says so: no job waits for space, and such a start is not counted.
        """
        folder = kept(fl_ctx)
        try:
            with alone(folder):
                jobs = _noted(folder)
                jobs.pop(job, None)
                write_json(folder / UNFINISHED, jobs if started is None else {**jobs, job: started})
        except StorageError as error:
            self.logger.warning(f"job {job}: {error}")

    def _start_all(self, fl_ctx: FLContext) -> None:
        folder = kept(fl_ctx)
        try:
            jobs = _noted(folder)
        except InputError as error:
            self.logger.warning(audit_if_possible(fl_ctx, f"{error}; no job is started again"))
            return
        for job, before in jobs.items():
            # a time ahead of the clock is of a clock that was wrong
            recent = [when for when in before if 0 <= time.time() - when < WITHIN]
            if len(recent) == TRIES:
                why = f"it was started again {TRIES} times within {WITHIN / 60:.0f} minutes"
            else:
                self._note(fl_ctx, job, [*recent, time.time()])  # before the start: the job may end at once
                why = self._start(fl_ctx, job)
            if why:
                self._note(fl_ctx, job, None)
            what = f"it is given up: {why}" if why else "it is started again"
            self.logger.warning(audit_if_possible(fl_ctx, f"job {job} ran when this site's client ended; {what}"))

    @staticmethod
    def _start(fl_ctx: FLContext, job: str) -> str:
        """Starts a deployed job, as FLARE does when the server says so; returns why it could not."""
        engine, site = fl_ctx.get_engine(), fl_ctx.get_identity_name()
        workspace: Workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        try:
            meta = read_json(Path(workspace.get_job_meta_path(job)))
            require_signers(workspace, job)  # the client may have ended between the deployment and this check
        except PolicyError as error:
            return str(error)
        except (FileNotFoundError, BadFile) as error:
            return f"its files are not in this workspace any more ({error})"
        needs = meta.get(JobMetaKey.RESOURCE_SPEC.value, {}).get(site, {})
        with engine.new_context() as own:
            enough, token = engine.get_component(SystemComponents.RESOURCE_MANAGER).check_resources(needs, own)
        if not enough:
            return f"the site lacks its resources ({json.dumps(needs)}): {token}"
        request = Message(TrainingTopic.START_JOB, needs)
        request.set_headers(
            {RequestHeader.JOB_ID: job, RequestHeader.JOB_META: meta, ShareableHeader.RESOURCE_RESERVE_TOKEN: token}
        )
        answer = str(StartJobProcessor().process(request, engine).body)
        return answer if answer.startswith(ERROR_MSG_PREFIX) else ""


def _noted(folder: Path) -> dict[str, list[float]]:
    """Returns the unfinished jobs and when they were started again.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / UNFINISHED
    if not path.exists():
        return {}
    jobs = read_own(path, InputError, "remove it")
    if not all(isinstance(times, list) for times in jobs.values()):
        raise InputError(f"{path} does not hold a list of times for every job; remove it")
    return jobs
