"""What a site stops goes to its own audit file: FLARE's, which its administrator reads."""

import functools
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.fl_context_utils import add_job_audit_event
from nvflare.fuel.sec.audit import EXCLUDED_ACTIONS, Auditor, AuditService

LIMIT = 500  # characters of what we say in a line
LONGEST, FIELD = 700, 100  # of what anybody says in one, and of each field before it
_NO_BRACKETS = str.maketrans("[]", "()")  # they end a field


def audit(fl_ctx: FLContext, what: str) -> str:
    """Adds one line, to which FLARE adds scope, job and task; returns it. The simulator has no auditor, and writes nothing.

    Names of tensors and settings are the job's words: they make no line of their own, and none without end.
    """
    line = one_line(what)
    add_job_audit_event(fl_ctx, msg=f"[{line}]")
    return line


def one_line(text: str) -> str:
    """At most LIMIT characters of a text, in one line."""
    return " ".join(text.split())[:LIMIT]


class Minute:
    """Room for `most` lines in a minute: whoever causes them decides how many there would be."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic):
        self._most, self._clock, self._lock = most, clock, threading.Lock()
        self._begun, self._written, self._left_out = clock(), 0, 0

    def left_out(self) -> int | None:
        """How many were left out before this line, for which there is room; None where there is none."""
        with self._lock:
            if self._clock() - self._begun >= 60:
                self._begun, self._written = self._clock(), 0
            if self._written == self._most:
                self._left_out += 1
                return None
            self._written += 1
            before, self._left_out = self._left_out, 0
            return before


class Refusals:
    """Lines about messages that the gate refused: `most` in a minute; the first after them says how many were left out."""

    def __init__(self, most: int = 30, clock: Callable[[], float] = time.monotonic):
        self._minute = Minute(most, clock)

    def add(self, job: str, sender: str, what: str) -> None:
        """A line in the audit file of a job's process, or in that of the parent process where there is no job."""
        if (before := self._minute.left_out()) is None:
            return
        more = f" ({before} refusals before this one are not shown)" if before else ""
        line = f"[gate refused {one_line(what)}{more}]"
        if job:
            AuditService.add_job_event(job_id=job, msg=line)
        else:
            AuditService.add_event(user=sender, action="gate", msg=line)


def plain_lines(most: int = 1200, clock: Callable[[], float] = time.monotonic) -> None:
    """From now on FLARE's audit file has one line of printable ASCII for each event, with fields of bounded length that hold no
    bracket, and at most `most` lines a minute. FLARE alone writes who asks, and what an event refers to, in the server's words.
    """
    minute = Minute(most, clock)
    for name in ("add_event", "add_job_event"):
        add = getattr(Auditor, name)
        if not hasattr(add, "__wrapped__"):
            setattr(Auditor, name, _plain(add, minute))


def _plain(add: Callable[..., str], minute: Minute) -> Callable[..., str]:
    names = list(inspect.signature(add).parameters)

    @functools.wraps(add)
    def added(*args: Any, **kwargs: Any) -> str:
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("action") in EXCLUDED_ACTIONS or (before := minute.left_out()) is None:
            return ""
        auditor, message = given.pop(names[0]), given.pop("msg", "")
        fields = {name: _printable(value, FIELD).translate(_NO_BRACKETS) for name, value in given.items()}
        more = f"[{before} lines before this one were left out]" if before else ""
        return add(auditor, **fields, msg=_printable(message, LONGEST) + more)

    return added


def _printable(text: Any, most: int) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in str(text)[:most])
