"""Writes what a site stops to its audit file. It is FLARE's, and the site's administrator reads it."""

import errno
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.fl_context_utils import add_job_audit_event
from nvflare.fuel.sec.audit import EXCLUDED_ACTIONS, Auditor, AuditService

from feddp.logs import YEARS_BYTES, removed_line, turned
from feddp.reading import one_line

LONGEST, FIELD = 700, 100  # characters of any text in a line, and of each field before it
_NO_BRACKETS = str.maketrans("[]", "()")  # a bracket ends a field


def audit(fl_ctx: FLContext, what: str) -> str:
    """Writes one line and returns it; FLARE adds scope, job and task. The simulator has no auditor and writes nothing.

    The line may hold names of tensors and settings that the job chose; it is one line of bounded length.
    """
    line = one_line(what)
    add_job_audit_event(fl_ctx, msg=f"[{line}]")
    return line


def audit_if_possible(fl_ctx: FLContext, what: str) -> str:
    """As `audit`, where what follows protects the site and must happen although the line cannot be written (a full disk).

    Returns the line for the log, with the error if there was one.
    """
    try:
        return audit(fl_ctx, what)
    except OSError as error:
        remedy = "; free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{one_line(what)} (not in the audit file: {error}{remedy})"


class Minute:
    """Limits lines to `most` per minute, because a sender controls how many events it causes."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic):
        self._most, self._clock, self._lock = most, clock, threading.Lock()
        self._begun, self._written, self._left_out = clock(), 0, 0

    def left_out(self) -> int | None:
        """Returns how many lines were left out before this one; None if this one must be left out too."""
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
    """Writes lines about refused messages, at most `most` per minute; the next line says how many were left out."""

    def __init__(self, most: int = 30, clock: Callable[[], float] = time.monotonic):
        self._minute = Minute(most, clock)

    def add(self, job: str, sender: str, what: str) -> None:
        """Writes a line to the audit file of the job's process or, without a job, of the parent process."""
        if (before := self._minute.left_out()) is None:
            return
        more = f" ({before} refusals before this one are not shown)" if before else ""
        line = f"[gate refused {one_line(what)}{more}]"
        if job:
            AuditService.add_job_event(job_id=job, msg=line)
        else:
            AuditService.add_event(user=sender, action="gate", msg=line)


def plain_lines(most: int = 1200, clock: Callable[[], float] = time.monotonic) -> None:
    """Makes FLARE's audit file safe: one line of printable ASCII per event, fields of bounded length without brackets, at most
    `most` lines per minute, in files of bounded size (`feddp.logs`). FLARE alone would copy the requester's name and the
    event's reference as the server wrote them.
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
        with auditor._lock:  # FLARE's, under which it writes and closes: a file is not opened for an auditor that closes
            _make_room(auditor)
        return add(auditor, **fields, msg=_printable(message, LONGEST) + more)

    return added


def _make_room(auditor: Auditor) -> None:
    """Lets a full audit file make way for a new one; other files keep its lines (`feddp.logs`)."""
    file = auditor.audit_file
    if file is None or os.fstat(file.fileno()).st_size < YEARS_BYTES:
        return
    try:
        removed = turned(Path(file.name))
        auditor.audit_file = open(file.name, "a", encoding="ascii")  # noqa: SIM115 (FLARE closes it)
    except OSError:  # a folder that is read-only now, say: the present file goes on
        return
    file.close()
    if removed:
        auditor.audit_file.write(f"[T:{datetime.now()}][{removed_line(removed)}]\n")


def _printable(text: Any, most: int) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in str(text)[:most])
