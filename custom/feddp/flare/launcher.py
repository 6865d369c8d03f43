"""A site starts a job's process again when a signal ended it: FLARE alone would end the run for all sites.

The site's state of the run is on disk, and the server gives the task that was lost again.
"""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobLauncherSpec, JobReturnCode
from nvflare.private.fed.client.client_executor import JobExecutor

from feddp.errors import FedDPError, PolicyError
from feddp.flare.admission import require_signers
from feddp.flare.audit import audit, audit_if_possible
from feddp.flare.endings import started
from feddp.flare.never_started import mark_started
from feddp.reading import one_line

TRIES, WITHIN = 3, 3600.0  # starts after a signal within so many seconds; then the site leaves the job
PAUSE = 2.0  # seconds before the first of them, which double
WANT = (
    "the system for want of memory (give the job more memory; or the run needs less with a smaller --set batch, --size or"
    " network, and with fewer sites on this machine)"
)
_NAMES = {number.value: number.name for number in signal.Signals}


class JobRestarter(FLComponent):
    """For a site's resources.json: puts `Restarting` around the site's launcher, of whatever runtime it is, and keeps from the
    server why a job could not be started."""

    def __init__(self) -> None:
        super().__init__()
        if JobExecutor.start_app.__module__ == JobExecutor.__module__:
            JobExecutor.start_app = _untold(JobExecutor.start_app)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.BEFORE_JOB_LAUNCH:
            launchers = _Launchers()
            for launcher in fl_ctx.get_prop(FLContextKey.JOB_LAUNCHER, []):  # of a component before this one
                launchers.append(launcher)
            fl_ctx.set_prop(FLContextKey.JOB_LAUNCHER, launchers, private=True, sticky=False)


def _untold(start: Callable[..., None]) -> Callable[..., None]:
    """Returns FLARE's `start_app`, whose errors FLARE sends to the server: the text of one that is not ours stays here."""

    def start_app(
        executor: JobExecutor, client: Any, job_id: str, job_meta: Any, args: Any, resource: Any, token: Any, manager: Any,
        fl_ctx: FLContext,
    ) -> None:  # fmt: skip
        try:
            start(executor, client, job_id, job_meta, args, resource, token, manager, fl_ctx)
        except FedDPError:
            raise
        except Exception as error:  # of any type; its text may hold paths
            line = f"job {job_id} not started: {type(error).__name__}: {error}"
            executor.logger.warning(audit_if_possible(fl_ctx, line))
            raise FedDPError(f"job {one_line(job_id)} not started: this site failed; its audit.log has the reason") from error

    return start_app


class _Launchers(list[JobLauncherSpec]):
    """The list to which FLARE's launchers append themselves, and from which FLARE takes the only one."""

    def append(self, launcher: JobLauncherSpec) -> None:
        super().append(Restarting(launcher))


class Restarting(JobLauncherSpec):
    """One of FLARE's launchers, whose jobs are started again after a signal."""

    def __init__(self, launcher: JobLauncherSpec):
        super().__init__()
        self.launcher = launcher

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        """Starts a deployed job.

        The server says when. The app lies in the workspace before the admission has looked at its signers, and stays there
        if the client is killed meanwhile.

        Raises:
            PolicyError: the app's signer has no right to submit jobs here; the app is removed.
        """
        job = str(job_meta.get(JobConstants.JOB_ID))
        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        try:
            require_signers(workspace, job)
        except PolicyError as error:
            raise PolicyError(audit(fl_ctx, f"job {job} not started: {error}")) from None

        mark_started(Path(workspace.get_run_dir(job)))

        def start() -> JobHandleSpec:
            return self.launcher.launch_job(job_meta, fl_ctx)

        def tell(line: str) -> None:
            self.logger.warning(audit_if_possible(fl_ctx, f"job {job}: {line}"))

        return RestartedJob(start, tell, Path(workspace.get_run_dir(job)) / FLMetaKey.PROCESS_RC_FILE)


class RestartedJob(JobHandleSpec):
    """A job's process, container or pod, started again after a signal.

    One that ends by itself, with whatever code, is not started again: its reason would be the same.

    Args:
        start: starts it, and returns FLARE's handle.
        tell: takes a line for the site's administrator.
        left: the file in which the process leaves its own exit code, which FLARE prefers to `poll`.
    """

    def __init__(self, start: Callable[[], JobHandleSpec], tell: Callable[[str], None], left: Path, pause: float = PAUSE):
        super().__init__()
        self._start, self._tell, self._left, self._pause = start, tell, left, pause
        self._leaves = False
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._job = started(start())

    def terminate(self) -> None:
        with self._lock:
            self._ended.set()
            self._job.handle.terminate()

    def poll(self) -> Any:
        """Returns FLARE's code of the last process; UNKNOWN while it runs or will be started again.

        Also UNKNOWN if this site leaves the job: of another code, FLARE would end the job for all sites. The server ends it if
        too few are left.
        """
        if not self._ended.is_set() or self._leaves:
            return JobReturnCode.UNKNOWN
        return self._job.handle.poll()

    def wait(self) -> None:
        """Returns when no process runs and none will be started."""
        killed: list[float] = []  # when signals ended it, of late
        again = False
        while True:
            self._job.handle.wait()
            code, memory = self._job.ending()
            if self._ended.is_set() or code is None or code >= 0:
                if again and code and not self._ended.is_set():  # perhaps the job ended meanwhile
                    self._leave(f"its process, started again, failed with exit code {code}")
                break
            reason = WANT if memory else f"signal {_NAMES.get(-code, -code)}"
            now = time.monotonic()
            killed = [when for when in killed if now - when < WITHIN]
            if len(killed) == TRIES:
                self._leave(
                    f"its process was ended by {reason}; it was started {TRIES} times again within"
                    f" {WITHIN / 60:.0f} minutes, and is given up"
                )
                break
            pause = self._pause * 2 ** len(killed)
            killed.append(now)
            self._tell(f"its process was ended by {reason}; start {len(killed)} of {TRIES} in {pause:.0f} s")
            if self._ended.wait(pause) or not self._again():
                break
            again = True
        self._ended.set()

    def _leave(self, why: str) -> None:
        """Has FLARE see no failure: neither by `poll` nor in the file that the process left."""
        self._leaves = True
        self._left.unlink(missing_ok=True)
        self._tell(f"{why}; this site leaves the job")

    def _again(self) -> bool:
        """Starts the job again; returns whether it runs, and was not aborted meanwhile."""
        try:
            self._job.clear()
            job = started(self._start())  # without the lock: a cluster may take minutes
        except Exception as error:  # FLARE's launchers raise any type
            self._leave(f"its process could not be started again ({type(error).__name__}: {error})")
            return False
        with self._lock:
            self._job = job
            if self._ended.is_set():
                job.handle.terminate()
        return not self._ended.is_set()
