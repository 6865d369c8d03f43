"""Bounds files of lines that others can make grow. Of each, its first and its last lines are kept, and the removed are counted.

A log of one run (`place_for`), such as record.jsonl: the file itself keeps the first lines. What follows goes to
record.last.jsonl, which becomes record.before.jsonl when it is full, in the place of an older one.

A log for years (`turned`), such as audit.log: a full file becomes audit.1.log, that one audit.2.log, and so on; the oldest is
removed. Where files begin to fill fast, somebody may drown what happened: the file that holds the beginning of that is kept
beside the others, as audit.first-1.log.
"""

import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

RUN_BYTES, LAST_BYTES = 64 << 20, 4 << 20  # of a run's log: what the file itself keeps, and each of the two with the last lines
YEARS_BYTES = 16 << 20  # of each file of a log for years
OLDER, FIRST = 7, 4  # files of a log for years: the full ones, and those that hold the beginning of a flood
FAST = 86_400.0  # seconds: a file that is full sooner fills fast
_REMOVED = re.compile(rb"(\d{1,18}) earlier lines were removed")


def removed_line(count: int) -> str:
    """Returns what the first line of a file says where earlier lines were removed."""
    return f"{count} earlier lines were removed"


def place_for(path: Path, most: int = RUN_BYTES, last: int = LAST_BYTES) -> tuple[Path, int]:
    """Returns the file for the next line of a run's log; and if lines were removed for it, how many there were until now.

    Args:
        most: bytes that `path` keeps.
        last: bytes of each of the two files that keep the last lines.
    """
    if _size(path) < most:
        return path, 0
    end, before = _beside(path, ["last", "before"])
    if _size(end) < last:
        return end, 0
    removed = _removed_before(end) + _lines(before)
    os.replace(end, before)
    return end, removed


def turned(path: Path) -> int:
    """Moves the file of a log for years out of the way; returns how many lines were removed until now.

    It may be gone: an administrator has moved it, or it was moved here and the next one could not be opened.
    """
    if not path.exists():
        return 0
    older = _beside(path, range(1, OLDER + 1))
    _keep_beginning(path, older)
    removed = _removed_before(path) + _lines(older[-1])
    _shift([path, *older])
    return removed


def _keep_beginning(path: Path, older: Sequence[Path]) -> None:
    """Gives a second name to the last file before those that fill fast, in which that has begun."""
    end, before = (each.stat().st_mtime if each.exists() else None for each in older[:2])
    if end is None or time.time() - end >= FAST or (before is not None and end - before < FAST):
        return
    first = _beside(path, [f"first-{number}" for number in range(1, FIRST + 1)])
    _shift(first)
    try:
        os.link(older[0], first[0])
    except OSError:  # a file system without links
        shutil.copy2(older[0], first[0])


def _beside(path: Path, names: Sequence[str | int]) -> list[Path]:
    return [path.with_name(f"{path.stem}.{name}{path.suffix}") for name in names]


def _shift(files: Sequence[Path]) -> None:
    """Renames each file to the next name; the last one is lost."""
    for source, target in reversed([*zip(files[:-1], files[1:], strict=True)]):
        if source.exists():
            os.replace(source, target)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _removed_before(path: Path) -> int:
    """Returns how many lines were removed before the first line of a file, which says so."""
    with open(path, "rb") as stream:
        found = _REMOVED.search(stream.readline(4096))
    return int(found[1]) if found else 0


def _lines(path: Path) -> int:
    """Returns how many lines a file has, without the one that counts removed lines."""
    if not path.exists():
        return 0
    with open(path, "rb") as stream:
        count = sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 20), b""))
    return count - bool(_removed_before(path))
