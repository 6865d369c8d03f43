"""The files that a site keeps across jobs, in `feddp/` of its workspace beside the jobs' folders. Only the owner reads them."""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from feddp.errors import InputError
from feddp.files import locked, write_text
from feddp.training.claim import require_job_id

SECRET = "site.secret"  # job ids contain no dot, so no job's folder has this name
JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # the form of FLARE's job ids
_LOCK = "kept.lock"
_SECRET = re.compile(r"[0-9a-f]{64}")


def kept_below(root: Path) -> Path:
    """Returns the folder in which a participant with the workspace `root` keeps its files of runs."""
    return root / "feddp"


def files_of(kept: Path, run: str) -> Path:
    """Returns a participant's folder of a run, below `kept`; raises InputError if `run` is not a valid id."""
    require_job_id(run)
    return kept / run


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Locks the folder against the site's other processes and threads, because two jobs may run at once.

    Raises:
        StorageError: the folder's file system has no locks.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(folder / _LOCK):
        yield


def secret_of(folder: Path) -> str:
    """Returns the site's secret, 64 hexadecimal digits; the first call draws it, later calls return the same.

    Raises:
        InputError: the file holds something else.
    """
    path = folder / SECRET
    with alone(folder):
        if not path.exists():
            write_text(path, secrets.token_hex(32), mode=0o600)
        secret = path.read_text(encoding="ascii", errors="replace")
    if not _SECRET.fullmatch(secret):
        raise InputError(f"{path} does not hold 64 hexadecimal digits; remove it, and the next job draws a new secret")
    return secret
