"""A run's folder at a participant: the plan to which it belongs, the process that holds it, the id by which it is found."""

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from feddp.errors import InputError, PolicyError, StorageError
from feddp.files import half_written, lock, write_text, writing
from feddp.reading import read_own

PLAN, LOCK = "plan.json", ".lock"
AS_NEW = "submit the job as a new one"  # the remedy where a run's own files cannot be used


def claim(folder: Path, plan: Mapping[str, Any], fixed: str = "", extends: Callable[[], None] = lambda: None) -> None:
    """Takes a run's folder for this process: saves the plan with which it is first opened, and refuses any other plan.

    The server chooses which run a job continues. With another plan, that plan's private rule would apply to the tensors stored
    here. Only the number of rounds may grow: that extends the run.

    Args:
        fixed: why the run cannot be extended; "" if it can.
        extends: called where the plan extends the run, before it is saved: a process that is killed meanwhile calls it again.

    Raises:
        PolicyError: the folder belongs to another plan or cannot be extended, holds tensors but no plan, or is in use by
            another process. Then plan.json stays as it is.
    """
    hold(folder)
    first, now = require_stored_plan(folder, plan), json.loads(json.dumps(plan))
    if first == now:
        return
    if first is None and any(folder.glob("*.safetensors")):
        raise PolicyError(f"{folder} holds tensors but no {PLAN}; {AS_NEW}")
    if first is not None and fixed:
        raise PolicyError(f"{folder} has {first['rounds']} rounds and cannot be extended: {fixed}; {AS_NEW}")
    if first is not None:
        extends()
    write_text(folder / PLAN, json.dumps(now, indent=2, sort_keys=True) + "\n")


def require_stored_plan(folder: Path, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the plan to which a run's folder belongs; None if it belongs to none: this site was absent so far.

    Raises:
        PolicyError: it is another plan than `plan`; names the difference. A plan with more rounds is no other plan.
    """
    path = folder / PLAN
    if not path.exists():
        return None
    first, now = read_own(path, PolicyError, AS_NEW), json.loads(json.dumps(plan))
    wrong = sorted(key for key in first.keys() | now.keys() if first.get(key) != now.get(key))
    if not wrong or (wrong == ["rounds"] and type(first.get("rounds")) is int and now["rounds"] > first["rounds"]):
        return first
    raise PolicyError(
        f"{folder} belongs to a run with {wrong[0]}={first.get(wrong[0])!r}, but this job has {wrong[0]}={now.get(wrong[0])!r}."
        f" Refused: the stored state belongs to another plan; {AS_NEW}"
    )


_held: dict[Path, int] = {}  # the locks of this process; the system frees the rest when the process ends
PATIENCE = 60.0  # seconds to wait for the end of another process with the same folder


def hold(folder: Path, patience: float = PATIENCE) -> None:
    """Locks a run's folder for this process, for as long as the process lives; removes what a killed process left half written.

    Raises:
        StorageError: the folder is read-only, or its file system has no locks.
        PolicyError: another process still has it after `patience` seconds.
    """
    path, deadline = folder.resolve() / LOCK, time.monotonic() + patience
    if path in _held:
        return
    with writing(path):
        # not through a link that another user laid there; it stays open: closing it would free the lock
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    while True:
        try:
            lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                raise PolicyError(f"{folder} is in use by another process; end that one first") from None
            time.sleep(0.2)
        except StorageError:
            os.close(handle)
            raise
        else:
            _held[path] = handle
            for part in half_written(folder):
                part.unlink(missing_ok=True)
            return


def is_held(folder: Path) -> bool:
    """Whether a process has locked a run's folder with `hold`.

    Raises:
        StorageError: the folder's file system has no locks.
    """
    path = folder / LOCK
    if not path.exists():
        return False
    with open(path, "rb") as handle:
        try:
            lock(handle.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB, path)
        except BlockingIOError:
            return True
    return False


def is_held_elsewhere(folder: Path) -> bool:
    """Whether another process than this one has locked a run's folder. Raises as `is_held`."""
    return folder.resolve() / LOCK not in _held and is_held(folder)


def is_unused(folder: Path) -> bool:
    """Whether a folder holds nothing but, perhaps, the lock of a process that took it and wrote nothing."""
    return all(path.name == LOCK for path in folder.iterdir())


def release(root: Path) -> None:
    """Frees this process's locks of the folders below `root`, when a run in this process has ended."""
    below = root.resolve()
    for path in [path for path in _held if path.is_relative_to(below)]:
        os.close(_held.pop(path))


def require_job_id(job: str) -> None:
    """Raises InputError if `job` is not a job's id; another text could lead out of the site's folder of jobs."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", str(job)):
        raise InputError(f"{job!r} is not a job's id; give the id of the finished run")
