"""Removes the folders of runs that nobody has used for long from a participant's folder of all runs.

Of a removed run its empty folder stays, as `removed/<run>`, and the site refuses a job that would continue the run. Otherwise
it would take part as a site that was absent so far, with new private tensors.
"""

import os
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from feddp.errors import PolicyError
from feddp.flare.kept import JOB_ID, alone
from feddp.training.claim import PLAN, is_held

_DAY = 86_400.0  # seconds


def removed_of(kept: Path, run: str) -> Path:
    """Returns the empty folder that stays of a removed run."""
    return kept / "removed" / run


def require_not_removed(site: str, kept: Path, run: str) -> None:
    """Raises PolicyError if the site has removed the run, with which a job would go on."""
    if os.path.lexists(removed_of(kept, run)):
        raise PolicyError(
            f"site {site}: it removed the run {run}, which was unused for long (`keep_days` in privacy.json);"
            " submit the job as a new one, or leave this site out"
        )


def remove_unused(kept: Path, days: int, present: Collection[str]) -> list[str]:
    """Removes each run's folder in which nothing was modified for `days` days, and whose lock no process holds.

    A run's folder is a folder with the form of FLARE's job ids as its name and with a plan. Links are not followed.

    Args:
        present: runs that stay, because the present job uses them.

    Returns:
        A line for each run that was removed, or that could not be.
    """
    if not kept.is_dir():
        return []
    removed, lines = kept / "removed", []
    with alone(kept):
        if removed.is_symlink():
            return [f"no run was removed: {removed} is a link; replace it by a folder"]
        for folder in sorted(kept.iterdir()):
            if folder.name in present or not _is_run(folder):
                continue
            try:
                if is_held(folder) or (unused := (time.time() - _modified(folder)) / _DAY) < days:
                    continue
                removed.mkdir(mode=0o700, exist_ok=True)
                # first out of the way: a process that is killed while it removes files leaves no half of a run
                folder.rename(removed_of(kept, folder.name))
            except OSError as error:
                lines.append(f"run {folder.name} not removed: {error}; remove {folder}")
            else:
                lines.append(f"run {folder.name} removed: unused for {int(unused)} days")
        return lines + list(_emptied(removed))


def _is_run(folder: Path) -> bool:
    return bool(JOB_ID.fullmatch(folder.name)) and _is_folder(folder) and (folder / PLAN).is_file()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _modified(folder: Path) -> float:
    """Returns the latest time, in seconds since 1970, at which anything in the folder was modified."""
    latest = folder.stat().st_mtime
    for at, folders, files in os.walk(folder, onerror=_raised):
        latest = max([latest, *(os.lstat(os.path.join(at, name)).st_mtime for name in (*folders, *files))])
    return latest


def _raised(error: OSError) -> None:
    raise error


def _emptied(removed: Path) -> Iterator[str]:
    """Empties the folders of removed runs; yields a line for each that cannot be emptied."""
    for folder in sorted(removed.iterdir()) if removed.is_dir() else ():
        if not _is_folder(folder):
            continue
        try:
            for path in folder.iterdir():
                if _is_folder(path):
                    shutil.rmtree(path)
                else:
                    path.unlink()
        except OSError as error:
            yield f"run {folder.name} not removed entirely: {error}; empty {folder}"
