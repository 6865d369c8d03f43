"""Removes the folders of runs that nobody has used for long from a participant's folder of all runs.

One look at the clock removes nothing, because a machine's clock may be wrong: far ahead, or in 1970 until the network has
corrected it. unused.json holds what earlier looks saw of each run's folder. A run is removed if it was unused for `days` days,
and an earlier look, at least GRACE days ago, has found so already. A time of a file counts only if it lies between two looks.

Of a removed run its empty folder stays, as `removed/<run>`, and the site refuses a job that would continue the run. Otherwise
it would take part as a site that was absent so far, with new private tensors.
"""

import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from feddp.errors import PolicyError, StorageError
from feddp.files import write_json
from feddp.flare.kept import JOB_ID, alone
from feddp.reading import is_number, read_own
from feddp.training.claim import PLAN, is_held

UNUSED = "unused.json"  # job ids contain no dot, so no run's folder has this name
GRACE = 7.0  # days from the look that finds a run unused for too long to the one that removes it, at most `days`
_DAY = 86_400.0  # seconds


@dataclass(frozen=True)
class RunSeen:
    """What the looks at a run's folder have seen, by this machine's clock, in seconds since 1970.

    Args:
        modified: the latest time at which anything in the folder was modified.
        used: when it was last used: `modified`, or if that is not to be trusted, the first look that saw it.
        over: the first look that found the run unused for too long; None: none has.
    """

    modified: float
    used: float
    over: float | None = None

    def again(self, now: float, days: float) -> "RunSeen":
        """Returns what a look at `now` makes of it; what a clock said that was ahead of the present one is forgotten."""
        seen = self if self.used <= now else RunSeen(self.modified, now)
        if now - seen.used < days * _DAY:
            return replace(seen, over=None)
        return seen if seen.over is not None and seen.over <= now else replace(seen, over=now)


@dataclass(frozen=True)
class Looks:
    """The content of unused.json: when the last look was, and what it saw of each run."""

    time: float = float("inf")  # no look: no time of a file is later
    runs: Mapping[str, RunSeen] = field(default_factory=dict)

    def of(self, run: str, modified: float, now: float, days: float) -> RunSeen:
        """Returns what a look at `now` sees of a run's folder."""
        known = self.runs.get(run)
        if known is None or known.modified != modified:
            known = RunSeen(modified, modified if self.time <= modified else now)
        return known.again(now, days)


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
    """Looks at the folders of all runs; removes those unused for `days` days whose lock no process holds (see the module).

    A run's folder is a folder with the form of FLARE's job ids as its name and with a plan. Links are not followed.

    Args:
        present: runs that stay, because the present job uses them.

    Returns:
        A line for each run that was removed, that will be, or that could not be.
    """
    if not kept.is_dir():
        return []
    removed, lines = kept / "removed", list[str]()
    with alone(kept):
        if removed.is_symlink():
            return [f"no run was removed: {removed} is a link; replace it by a folder"]
        before, now, runs = _read(kept / UNUSED, lines), time.time(), dict[str, RunSeen]()
        grace = min(GRACE, days)
        for folder in sorted(kept.iterdir()):
            name = folder.name
            if name in present or not _is_run(folder):
                continue
            try:
                if is_held(folder):
                    continue
                runs[name] = seen = before.of(name, _modified(folder), now, days)
                if seen.over is None:
                    continue
                unused = f"unused for {int((now - seen.used) / _DAY)} days"
                if now - seen.over < grace * _DAY:
                    if seen.over == now:
                        what = f"a job that starts here in {grace:g} days or later removes it"
                        lines.append(f"run {name} {unused} if this machine's clock is right; {what}")
                    continue
                removed.mkdir(mode=0o700, exist_ok=True)
                # first out of the way: a process that is killed while it removes files leaves no half of a run
                folder.rename(removed_of(kept, name))
            except OSError as error:
                lines.append(f"run {name} not removed: {error}; remove {folder}")
            else:
                del runs[name]
                lines.append(f"run {name} removed: {unused}")
        looks = {"time": now, "runs": {name: asdict(seen) for name, seen in runs.items()}}
        try:
            write_json(kept / UNUSED, looks, mode=0o600)
        except StorageError as error:  # the job may need no more space
            lines.append(f"{error}; unused runs stay for longer")
        return lines + list(_emptied(removed))


def _read(path: Path, lines: list[str]) -> Looks:
    """Returns what earlier looks saw; where the file is damaged, nothing, with a line: all runs count from today."""
    if not path.exists():
        return Looks()
    remedy = "it is written anew, and unused runs stay for longer"
    try:
        content = read_own(path, PolicyError, remedy)
        looks = Looks(content["time"], {name: RunSeen(**seen) for name, seen in content["runs"].items()})
        times = [looks.time, *(v for seen in looks.runs.values() for v in asdict(seen).values() if v is not None)]
        if not all(map(is_number, times)):
            raise PolicyError(f"{path} holds a time that is none; {remedy}")
    except PolicyError as error:
        lines.append(str(error))
    except (KeyError, TypeError, AttributeError):
        lines.append(f"{path} holds something else than looks at runs; {remedy}")
    else:
        return looks
    return Looks()


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
