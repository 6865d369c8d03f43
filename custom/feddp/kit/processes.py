"""The processes that run a kit, and the files in which FLARE's start script keeps their numbers.

Before it starts anything, the script asks the system whether the number in such a file is in use, by whatever process. After a
power cut the files are still there and the numbers belong to others: the site stays down, and the script ends with code 0.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from feddp.errors import BadFile, Problem
from feddp.kit.containers import runtime
from feddp.lean import PARENTS
from feddp.limits import MIB
from feddp.reading import read, short
from feddp.sealing.kit import Kit

DAEMON = "daemon_pid.fl"  # the number of the start script, or of `feddp kit start`
FILES = (DAEMON, "pid.fl")  # and that of FLARE's process


@dataclass(frozen=True)
class Noted:
    """A file with a process's number, and the process if it runs this kit; else why the file is out of date."""

    path: Path
    process: psutil.Process | None
    why: str = ""
    misleading: bool = False  # whether FLARE's start script takes it for a process of the kit


def noted(kit: Kit) -> Iterator[Noted]:
    """Yields the files with numbers in the kit's folder.

    Raises:
        BadFile: one of them is a folder or a pipe, which neither FLARE nor this package made.
    """
    for path in (kit.folder / name for name in FILES):
        if not os.path.lexists(path):
            continue
        if path.is_symlink():  # FLARE writes none
            yield Noted(path, None, "is a link", True)
            continue
        require_file(path)
        try:
            text = read(path, MIB).decode("utf-8", errors="replace").strip()
        except BadFile as bad:
            yield Noted(path, None, bad.problem.what, True)
            continue
        if not re.fullmatch("[1-9][0-9]{0,9}", text):
            yield Noted(path, None, f"holds {short(repr(text))}, which is no number of a process", bool(text))
            continue
        try:
            process = psutil.Process(int(text))
            words = " ".join(process.cmdline()) or process.name()
        except psutil.NoSuchProcess:
            yield Noted(path, None, f"names process {text}, which has ended")
            continue
        except psutil.AccessDenied:
            words = "another user's"
        if runs(kit, process) or starts(kit, process):
            yield Noted(path, process)
        else:
            yield Noted(path, None, f"names process {text}, which is not of this kit ({short(words)})", True)


def require_file(path: Path) -> None:
    """Raises BadFile if there is something else than a file, a folder perhaps, where FLARE keeps a file or a command's mark."""
    if os.path.lexists(path) and not path.is_symlink() and not path.is_file():
        raise BadFile(Problem(path, "is not a file, which FLARE expects there", "Remove it"))


def stale_problems(kit: Kit) -> list[Problem]:
    """Returns the files with numbers for which FLARE's start script would not start the kit."""
    try:
        if runtime(kit) is not None:  # the numbers are a container's
            return []
        remedy = "Remove it, or start the kit with `feddp kit start`, which does; FLARE's start script would start nothing"
        return [Problem(each.path, each.why, remedy) for each in noted(kit) if each.misleading]
    except BadFile as bad:
        return [bad.problem]


def running(kit: Kit) -> psutil.Process | None:
    """Returns a process of FLARE's that runs the kit, or FLARE's start script, without those that started this one."""
    here = psutil.Process()
    own = {here.pid, *(parent.pid for parent in here.parents())}
    return next((each for each in psutil.process_iter() if each.pid not in own and runs(kit, each)), None)


def runs(kit: Kit, process: psutil.Process) -> bool:
    """Whether the command line is that of FLARE's process for this kit, or of FLARE's start script.

    An editor or a pager that shows the script has the same path in its command line.
    """
    folder, words, at = kit.folder.resolve(), *_line(process)
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    if words and Path(words[0]).name in ("bash", "sh") and at(script) == folder / "startup/sub_start.sh":
        return True
    return any(
        (before, option) == ("-m", "-m") and module in PARENTS and at(path) == folder
        for before, module, option, path in zip(words, words[1:], words[2:], words[3:], strict=False)
    )


def starts(kit: Kit, process: psutil.Process) -> bool:
    """Whether the command line is that of `feddp kit start` for this kit."""
    folder, words, at = kit.folder.resolve(), *_line(process)
    return any(
        Path(program).name in ("feddp", "__main__.py") and (group, command) == ("kit", "start") and at(path) == folder
        for program, group, command, path in zip(words, words[1:], words[2:], words[3:], strict=False)
    )


def _line(process: psutil.Process) -> tuple[list[str], Callable[[str], Path]]:
    """Returns the words of a process's command line, none if it has ended, and what makes a path of one of them."""
    words, where = list[str](), "/"  # FLARE's scripts are started by full paths
    with suppress(psutil.Error, OSError):
        words = process.cmdline()
    with suppress(psutil.Error, OSError):  # of another user's process
        where = process.cwd()
    return words, lambda word: Path(where, word).resolve()
