"""A site starts a job's process again when a signal ended it: FLARE alone would end the run for all sites.

The site's state of the run is on disk, and the server gives the task that was lost again.
"""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle

from feddp.flare.audit import audit

TRIES, PAUSE = 3, 2.0  # starts after the first one; seconds before the first of them, which double
_VMSTAT = Path("/proc/vmstat")  # Linux counts here how often it ended a process for want of memory


class RestartingLauncher(ClientProcessJobLauncher):
    """For a site's resources.json, in place of FLARE's launcher of processes.

    A process that ends by itself, with whatever code, is not started again: its reason would be the same.
    """

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        job = str(job_meta.get(JobConstants.JOB_ID))

        def start() -> ProcessHandle:
            return super(RestartingLauncher, self).launch_job(job_meta, fl_ctx)

        def tell(line: str) -> None:
            self.logger.warning(audit(fl_ctx, f"job {job}: {line}"))

        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        return RestartedProcess(start, tell, Path(workspace.get_run_dir(job)) / FLMetaKey.PROCESS_RC_FILE)


class RestartedProcess(JobHandleSpec):
    """A job's process, started again after a signal.

    Args:
        start: starts the process.
        tell: takes a line for the site's administrator.
        left: the file in which the process leaves its own exit code, which FLARE prefers to `poll`.
    """

    def __init__(self, start: Callable[[], ProcessHandle], tell: Callable[[str], None], left: Path, pause: float = PAUSE):
        super().__init__()
        self._start, self._tell, self._left, self._pause = start, tell, left, pause
        self._failed_again = False
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._memory = _killed_for_memory()
        self._process = start()

    def terminate(self) -> None:
        with self._lock:
            self._ended.set()
            self._process.terminate()

    def poll(self) -> Any:
        """Returns FLARE's code of the last process; UNKNOWN while it runs or will be started again.

        Also UNKNOWN if a process that was started again failed by itself: the job may have ended meanwhile, and FLARE would
        otherwise end the job for all sites.
        """
        if not self._ended.is_set() or self._failed_again:
            return JobReturnCode.UNKNOWN
        return self._process.poll()

    def wait(self) -> None:
        """Returns when no process runs and none will be started."""
        for number in range(TRIES + 1):
            self._process.wait()
            code = self._process.adapter.poll()
            if self._ended.is_set() or code is None or code >= 0:
                if number and code and not self._ended.is_set():
                    self._failed_again = True
                    self._left.unlink(missing_ok=True)
                    self._tell(f"its process, started again, failed with exit code {code}; this site leaves the job")
                break
            reason = self._reason(-code)
            if number == TRIES:
                self._tell(f"its process was ended by {reason}; it was started {TRIES} times again, and is given up")
                break
            pause = self._pause * 2**number
            self._tell(f"its process was ended by {reason}; start {number + 1} of {TRIES} in {pause:.0f} s")
            if self._ended.wait(pause):
                break
            with self._lock:
                if not self._ended.is_set():
                    self._process = self._start()
        self._ended.set()

    def _reason(self, number: int) -> str:
        before, self._memory = self._memory, _killed_for_memory()
        if number == signal.SIGKILL and self._memory > before:
            return (
                "the system for want of memory (the run needs less with a smaller --set batch, --size or network, and with"
                " fewer sites on this machine)"
            )
        return f"signal {signal.Signals(number).name}"


def _killed_for_memory() -> int:
    """Returns how often this machine ended a process for want of memory since its start; 0 where it does not say."""
    if not _VMSTAT.exists():
        return 0
    counts = dict(line.split() for line in _VMSTAT.read_text(encoding="ascii").splitlines())
    return int(counts.get("oom_kill", 0))
