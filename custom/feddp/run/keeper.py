"""Ends a run's FLARE processes, whatever ends the command that started them.

The command holds a pipe to a small process of its own, the keeper. When the command ends, in whatever way, the system closes
the pipe, and the keeper ends what the command left behind.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from feddp.terminal import note

GRACE = 10.0  # seconds between the request to end and the kill
_PARTS = ("nvflare.", "sub_start.sh", "feddp.run.patient_simulator")  # in the command lines of FLARE's processes


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Ends FLARE's processes with files below `folder`: an earlier attempt's at the start, this run's at the end.

    This process may be killed meanwhile: they end all the same.
    """
    end_below(folder)
    command = [sys.executable, "-m", "feddp.run.keeper", str(folder.resolve())]
    # in a session of its own, so that Ctrl-C does not reach it
    keeper = subprocess.Popen(command, cwd="/", stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        end_below(folder)
        keeper.kill()  # nothing is left to end
        keeper.communicate()


def end_below(folder: Path, grace: float = GRACE) -> None:
    """Ends every FLARE process that names a path below `folder` in its command line, kills it after `grace` seconds.

    Says on stderr which processes stay: one that waits inside the system, for instance for a network drive, cannot be killed
    before its wait is over. Then it ends without running any further.
    """
    stuck: set[psutil.Process] = set()
    while family := set(processes_below(folder)) - stuck:  # again: a script may have started another one meanwhile
        for process in family:
            with suppress(psutil.NoSuchProcess):  # it may have ended by itself
                process.terminate()
        _, alive = psutil.wait_procs(family, timeout=grace)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        stuck |= set(psutil.wait_procs(alive, timeout=grace)[1])
    if stuck:
        numbers = ", ".join(str(number) for number in sorted(process.pid for process in stuck))
        note(
            f"{folder}: killed, but still there: process {numbers}. It waits for the system (a disk or a network drive?) and"
            " ends after that; if it does not, restart the machine"
        )


def processes_below(folder: Path) -> Iterator[psutil.Process]:
    """Yields FLARE's processes that name a path below `folder` in their command lines."""
    inside = f"{folder.resolve()}{os.sep}"
    for process in psutil.process_iter(["cmdline", "status", "uids"]):
        words, uids = process.info["cmdline"] or [], process.info["uids"]
        # another user's process may name the folder too
        own = process.pid != os.getpid() and uids is not None and uids.real == os.getuid()
        ours = own and process.info["status"] != "zombie"
        flares = any(part in w for w in words if not w.startswith(inside) or w.endswith(".sh") for part in _PARTS)
        if ours and flares and any(f"{word}{os.sep}".startswith(inside) for word in words):
            yield process


def main() -> None:
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sent, signal.SIG_IGN)
    sys.stdin.buffer.read()  # until the command has ended
    end_below(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
