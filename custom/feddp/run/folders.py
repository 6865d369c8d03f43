"""The runs below a folder of this machine: their list, their removal, and the removal of what is large in them.

What `slim` leaves, so that `feddp compare` and `feddp report` take the run as before: run.json, run.yaml, results.json,
results.md, progress.jsonl, time.json, of each site images.csv, cases.csv and record.jsonl; and whatever else lies there.
"""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from feddp.errors import InputError, PolicyError
from feddp.files import ARTIFACTS, COMPARISON, NETWORK, PROGRESS, REPORT, RESULTS, RUN, SHARED, TENSORBOARD, WEIGHTS
from feddp.reading import read_own, real
from feddp.reporting.standing import RUNNING
from feddp.run.keeper import processes_below
from feddp.run.session import JOB, POC_FOLDERS, SERVER_FILES, SIMULATOR, WORKSPACE, recorded, to_go_on
from feddp.stages.events import read_progress
from feddp.training.claim import hold, is_held

FINISHED, BROKEN_OFF, DAMAGED = "finished", "broken off", "damaged"
# in a run's folder, what neither tables nor reports are made from, and the networks
_SPARE = (TENSORBOARD, ARTIFACTS, JOB, WORKSPACE, SIMULATOR, *POC_FOLDERS, REPORT)
_NETWORKS = (SHARED, WEIGHTS, f"sites/*/{NETWORK}", f"outside/*/*/{NETWORK}")


@dataclass(frozen=True)
class RunFolder:
    """A folder that `feddp run` or `feddp compare` made."""

    path: Path
    stored: dict[str, Any]  # what run.json holds (`session.recorded`)

    @classmethod
    def of(cls, path: Path) -> "RunFolder":
        """Raises InputError if the folder is not a run's, or is a link, or its run.json is damaged."""
        if path.is_symlink():
            raise InputError(f"{path} is a link; name the folder itself")
        if not (path / RUN).is_file() or (path / RUN).is_symlink():
            raise InputError(f"{path} is no run: it has no {RUN}; `feddp runs list` lists the runs")
        return cls(path, recorded(path))

    @property
    def state(self) -> str:
        if (self.path / RESULTS).exists():
            return FINISHED
        return RUNNING if self.in_use() else BROKEN_OFF

    def in_use(self) -> bool:
        """Whether a process of the run, or of a comparison that executed it, is alive."""
        return is_held(self.path) or any(processes_below(self.path))

    def rounds(self) -> int:
        """The number of completed rounds."""
        return max((event["round"] for event in read_progress(self.progress()) if event["event"] == "round"), default=0)

    def progress(self) -> Path:
        """The file with the server's events: its own, or the copy that an ended attempt left, if that is newer."""
        copy = self.path / PROGRESS
        found = [path for folder in SERVER_FILES for path in (self.path / folder).glob(f"*/{PROGRESS}")]
        found = [real(path, self.path) for path in (*found, copy) if path.exists()]
        return max(found, key=lambda path: path.stat().st_mtime, default=copy)

    def size(self) -> int:
        """Bytes on the disk; a file with two names counts once."""
        found = (Path(root, name).lstat() for root, _, names in os.walk(self.path) for name in names)
        return sum({each.st_ino: each.st_blocks * 512 for each in found}.values())

    def cells(self) -> tuple[str, ...]:
        """The columns of the list."""
        plan, began = self.stored["plan"], time.localtime((self.path / RUN).stat().st_mtime)
        rounds = f"{self.rounds()} of {plan['rounds']} rounds"
        when = time.strftime("%Y-%m-%d %H:%M", began)
        return (str(self.path), plan["method"], self.stored["env"], rounds, self.state, decimal(self.size()), when)

    def delete(self) -> None:
        """Removes the folder. Links in it are removed, and not what they point to.

        Raises:
            PolicyError: a process uses the folder.
        """
        self.require_idle()
        hold(self.path, patience=0)
        for path in self.path.iterdir():
            if path.name == RUN:  # last: as long as it is there, the folder can be deleted again
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (self.path / RUN).unlink()
        self.path.rmdir()

    @property
    def record(self) -> Path:
        """Where a comparison says which run it is (`feddp.compare.planned_run`)."""
        return self.path.with_name(f"{self.path.name}.json")

    def is_whole(self) -> bool:
        """Whether it is finished, for its comparison too, and no process uses it."""
        if self.state != FINISHED or self.in_use():
            return False
        remedy = "remove it and the run's folder; its comparison runs it again"
        return not self.record.exists() or read_own(self.record, InputError, remedy).get("finished") is True

    def slim(self) -> int:
        """Removes the networks, TensorBoard's files, the copies of the job and the report. Returns the bytes that this freed.

        Raises:
            PolicyError: a process uses the folder.
        """
        self.require_idle()
        hold(self.path, patience=0)
        before = self.size()
        remove_spare(self.path)
        return before - self.size()

    def require_idle(self) -> None:
        """Raises PolicyError if a process uses the folder."""
        if self.in_use():
            raise PolicyError(f"{self.path} is in use: its run, or the comparison around it, is running; end that first")


def remove_spare(run: Path) -> None:
    """Removes from a finished run's folder what `RunFolder.slim` does. Links are removed, and not what they point to."""
    for path in [*(run / name for name in _SPARE), *(path for pattern in _NETWORKS for path in run.glob(pattern))]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def to_slim(folder: Path) -> tuple[list[RunFolder], list[RunFolder]]:
    """Returns the runs of a comparison's folder, or the run whose folder it is: those that are whole, and the others.

    Raises:
        InputError: it is the folder of neither, such as one with several comparisons; or of a comparison that runs or was
            broken off, which may still need its networks; or a run.json is damaged.
    """
    if not any((folder / name).is_file() for name in (RUN, COMPARISON)):
        raise InputError(
            f"{folder} is no run and no finished comparison: it has no {RUN} and no {COMPARISON}; name the --out of one, or let"
            " its `feddp compare` end first"
        )
    found, damaged = runs_below(folder)
    if damaged:
        raise InputError("\n".join(damaged))
    alone = (folder / RUN).is_file()
    whole = [run.path for run in found if run.is_whole() and (alone or run.record.exists())]
    return [run for run in found if run.path in whole], [run for run in found if run.path not in whole]


def runs_below(folder: Path) -> tuple[list[RunFolder], list[str]]:
    """Returns the runs below a folder, and a line for each one whose run.json is damaged; follows no links.

    Both are in alphabetical order.

    Raises:
        InputError: the folder does not exist.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; name the one with the runs")
    found, damaged = [], []
    for root, names, files in os.walk(folder):
        names.sort()
        if RUN in files:
            names.clear()
            try:
                found.append(RunFolder.of(Path(root)))
            except InputError as error:
                damaged.append(f"{root}  {DAMAGED}: {error}")
    return found, damaged


def listed(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the `lines` of the runs below a folder, and a line for each one whose run.json or progress.jsonl is damaged.

    Raises:
        InputError: the folder does not exist.
    """
    found, damaged = runs_below(folder)
    rows: dict[Path, tuple[str, ...]] = {}
    for run in found:
        try:
            rows[run.path] = run.cells()
        except InputError as error:
            damaged.append(f"{run.path}  {DAMAGED}: {error}")
    return list(_lines(rows)), sorted(damaged)


def lines(runs: list[RunFolder]) -> Iterator[str]:
    """Yields the list, one line for each run; a second line has the command that continues it.

    Raises:
        BadFile: a progress.jsonl is damaged.
    """
    yield from _lines({run.path: run.cells() for run in runs})


def _lines(rows: Mapping[Path, tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows.values(), strict=True)]
    for path, row in rows.items():
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if BROKEN_OFF in row:
            yield f"    {to_go_on(path)}"
