"""What a site keeps across jobs, in `feddp/` of its workspace beside their folders: files of its own, for its owner alone."""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from feddp.errors import InputError
from feddp.files import write_text

SECRET = "site.secret"  # no job's id has a dot, so none leads here
_LOCK = "kept.lock"
_SECRET = re.compile(r"[0-9a-f]{64}")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other process, and no other thread, of the site's is inside: two jobs may run at once."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def secret_of(folder: Path) -> str:
    """The site's secret, 64 hexadecimal digits: drawn the first time it is asked for, the same ever after.

    Raises:
        InputError: the file holds something else.
    """
    path = folder / SECRET
    with alone(folder):
        if not path.exists():
            write_text(path, secrets.token_hex(32), mode=0o600)
        found = path.read_text(encoding="ascii", errors="replace")
    if not _SECRET.fullmatch(found):
        raise InputError(f"{path} is no secret of 64 hexadecimal digits; remove it, and a new one is drawn with the next job")
    return found
