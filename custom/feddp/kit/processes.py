"""The processes that run a kit, and the files in which FLARE's start script keeps their numbers.

Before it starts anything, the script asks the system whether the number in such a file is in use, by whatever process. After a
power cut the files are still there and the numbers belong to others: the site stays down, and the script ends with code 0.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from feddp.errors import BadFile, Problem
from feddp.kit.containers import runtime
from feddp.limits import MIB
from feddp.reading import read, short
from feddp.sealing.kit import Kit

DAEMON = "daemon_pid.fl"  # the number of the start script, or of `feddp kit start`
FILES = (DAEMON, "pid.fl")  # and that of FLARE's process
_FLARES = ("client.client_train", "server.server_train", "sub_start.sh")  # in the command lines of what runs a participant


@dataclass(frozen=True)
class Noted:
    """A file with a process's number, and the process if it runs this kit; else why the file is out of date."""

    path: Path
    process: psutil.Process | None
    why: str = ""
    misleading: bool = False  # whether FLARE's start script takes it for a process of the kit


def noted(kit: Kit) -> Iterator[Noted]:
    """Yields the files with numbers in the kit's folder."""
    for path in (kit.folder / name for name in FILES):
        if not os.path.lexists(path):
            continue
        text = read(path, MIB).decode("utf-8", errors="replace").strip()
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
        if runs(kit, process):
            yield Noted(path, process)
        else:
            yield Noted(path, None, f"names process {text}, which is not of this kit ({short(words)})", True)


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
    """Returns a process that runs the kit, without those that started this one."""
    here = psutil.Process()
    own = {here.pid, *(parent.pid for parent in here.parents())}
    return next((each for each in psutil.process_iter() if each.pid not in own and runs(kit, each)), None)


def runs(kit: Kit, process: psutil.Process) -> bool:
    """Whether the command line is that of FLARE's start script, of its process, or of `feddp kit start`, for this kit."""
    folder = kit.folder.resolve()
    with suppress(psutil.Error, OSError):
        words, where = process.cmdline(), "/"  # FLARE's scripts are started by full paths
        with suppress(psutil.AccessDenied):  # of another user's process
            where = process.cwd()
        ours = "start" in words and any(Path(word).name in ("feddp", "__main__.py") for word in words)
        if ours or any(part in word for word in words for part in _FLARES):
            return any(Path(where, word).resolve() in (folder, folder / "startup/sub_start.sh") for word in words)
    return False
