"""Bounds the deployed jobs that never start: a server deploys any number of them, each with up to 1 MiB, and no budget counts a
job before its start. A site keeps the newest MOST of them, so at most MOST MiB."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from feddp.flare.kept import JOB_ID

MOST = 20  # FLARE deploys a job when it starts it; so many wait for nothing
STARTED = "started.fl"  # in a job's folder; FLARE itself leaves no sign of a start where jobs run in pods
_DEPLOYED = ("fl_app.txt", "meta.json")  # what FLARE's deployer writes, beside the app


def mark_started(job: Path) -> None:
    """Notes in a deployed job's folder that the job is started; on a full disk its process leaves other signs, such as logs."""
    with suppress(OSError):
        (job / STARTED).touch(mode=0o600)


def make_room(workspace: Path, most: int = MOST) -> list[str]:
    """Removes the jobs that were deployed first and never started, so that one more makes `most` at most; returns their ids.

    What cannot be read or removed stays: it must not keep later jobs out.
    """
    waiting = [folder for folder in workspace.iterdir() if _never_started(folder)]
    waiting.sort(key=lambda folder: (folder.stat().st_mtime, folder.name))
    too_many = waiting[: max(0, len(waiting) - most + 1)]
    for folder in too_many:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in too_many if not folder.exists()]


def _never_started(folder: Path) -> bool:
    if not JOB_ID.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
        return False
    try:
        return all(name in _DEPLOYED or name.startswith("app_") for name in os.listdir(folder))
    except OSError:
        return False
