"""What a site stops goes to its own audit file: FLARE's, which its administrator reads."""

import threading
import time
from collections.abc import Callable

from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.fl_context_utils import add_job_audit_event
from nvflare.fuel.sec.audit import AuditService

LIMIT = 500  # characters of a line


def audit(fl_ctx: FLContext, what: str) -> str:
    """Adds one line, to which FLARE adds scope, job and task; returns it. The simulator has no auditor, and writes nothing.

    Names of tensors and settings are the job's words: they make no line of their own, and none without end.
    """
    line = " ".join(what.split())[:LIMIT]
    add_job_audit_event(fl_ctx, msg=f"[{line}]")
    return line


class Refusals:
    """Lines about messages that the gate refused. Whoever sends them decides how many: a minute has `most` lines, and the first
    after it says how many were left out."""

    def __init__(self, most: int = 30, clock: Callable[[], float] = time.monotonic):
        self._most, self._clock, self._lock = most, clock, threading.Lock()
        self._begun, self._written, self._left_out = clock(), 0, 0

    def add(self, job: str, sender: str, what: str) -> None:
        """A line in the audit file of a job's process, or in that of the parent process where there is no job."""
        with self._lock:
            if self._clock() - self._begun >= 60:
                self._begun, self._written = self._clock(), 0
            if self._written == self._most:
                self._left_out += 1
                return
            self._written += 1
            more = f" ({self._left_out} refusals before this one are not shown)" if self._left_out else ""
            self._left_out = 0
        line = f"[gate refused {' '.join(what.split())[:LIMIT]}{more}]"
        if job:
            AuditService.add_job_event(job_id=job, msg=line)
        else:
            AuditService.add_event(user=sender, action="gate", msg=line)
