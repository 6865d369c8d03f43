"""Bounds files of lines that others can make grow. Of each, its first and its last lines are kept, and the removed are counted.

A log of one run (`place_for`), such as record.jsonl: the file itself keeps the first lines. What follows goes to
record.last.jsonl, which becomes record.before.jsonl when it is full, in the place of an older one.

A log for years (`turned`), such as audit.log: a full file becomes audit.1.log, that one audit.2.log, and so on; the oldest is
removed. Somebody may drown what happened in lines. So a file that took SLOW or longer to fill, and the next one, in which a
flood may begin, get a second name, which only KEPT more such files take from them: audit.kept-1.log. Who floods a log, at
whatever speed, removes lines from the time of the flood, and earlier ones only KEPT / 2 * SLOW later.
"""

import os
import re
import shutil
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

RUN_BYTES, LAST_BYTES = 64 << 20, 4 << 20  # of a run's log: what the file itself keeps, and each of the two with the last lines
YEARS_BYTES = 16 << 20  # of each file of a log for years
OLDER, KEPT = 7, 6  # files of a log for years: the full ones, and those that are kept beside them
SLOW = 20 * 86_400.0  # seconds: who fills a file sooner may flood it. Of KEPT files half took so long: 60 days
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
    # each began with the last line of the one before; of the oldest nobody knows
    ends = [time.time(), *(each.stat().st_mtime if each.exists() else 0.0 for each in older[:2])]
    if any(end - began >= SLOW or not began for end, began in pairwise(ends)):
        _keep(path)
    removed = _removed_before(path) + _lines(older[-1])
    _shift([path, *older])
    return removed


def _keep(path: Path) -> None:
    """Gives a full file a second name, and removes the oldest of those that have one."""
    kept = _beside(path, [f"kept-{number}" for number in range(1, KEPT + 1)])
    _shift(kept)
    try:
        os.link(path, kept[0])
    except OSError:  # a file system without links
        shutil.copy2(path, kept[0])


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
