"""A disk that takes no more, and a folder that is read-only, as the system has them: also for root, whom tests may run as."""

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TAKES = 64  # bytes of a file, less than any file of a run has
_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root's rights over others' permissions
_VERSION_3 = 0x20080522


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """The system cuts off every write that makes a file longer, wherever it is, as a full disk does. Python ignores SIGXFSZ."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (TAKES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """No file can be made in `folder` by this thread, even if it is root's."""
    mode, effective = folder.stat().st_mode, _effective()
    os.chmod(folder, 0o500)
    _set_effective(effective & ~_OVERRIDES)
    try:
        yield
    finally:
        _set_effective(effective)
        os.chmod(folder, mode)


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def _sets() -> ctypes.Array:
    sets = (_Sets * 2)()
    _call("capget", sets)
    return sets


def _call(name: str, sets: ctypes.Array) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(ctypes.byref(_Header(_VERSION_3, 0)), sets):
        raise OSError(ctypes.get_errno(), f"{name} failed")


def _effective() -> int:
    return _sets()[0].effective


def _set_effective(rights: int) -> None:
    sets = _sets()
    sets[0].effective = rights
    _call("capset", sets)
