"""`feddp kit start`: runs a server or a site until somebody stops it, for systemd or in a terminal.

In the place of FLARE's loop around its process (`sub_start.sh` without --once), which takes a stranger's process for its own
after a power cut, and ends with code 0 whatever happened. The same files stop and restart it, so FLARE's commands do too.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from feddp.errors import InputError
from feddp.files import lock, write_text
from feddp.kit.containers import DOCKER, runtime
from feddp.kit.files import require_owner
from feddp.kit.here import odd_paths
from feddp.kit.processes import DAEMON, noted, require_file, running
from feddp.kit.startup import SUB_START, missing
from feddp.sealing.kit import ADMIN, Kit
from feddp.sealing.kit_certificates import require_certificates

SHUTDOWN, RESTART = "shutdown.fl", "restart.fl"  # FLARE's commands and its stop script make these files
POLL = 0.5  # seconds between two looks
GRACE = 20.0  # seconds in which FLARE may end by itself


def start(folder: Path, say: Callable[[str], None]) -> int:
    """Runs a kit; returns 0 if it was stopped, else the code of FLARE's process, never 0.

    Args:
        say: is told in a line which files of earlier processes were removed.

    Raises:
        InputError: the kit runs already, is a person's or another user's, was prepared for containers, or its certificates
            are not valid.
    """
    kit = Kit.open(folder)
    _require_startable(kit)
    with _alone(kit):
        for each in list(noted(kit)):
            say(f"{each.path} {each.why or 'names the process that starts it'}; removed")
            each.path.unlink()
        for name in (SHUTDOWN, RESTART):  # of an earlier process
            require_file(kit.folder / name)
            (kit.folder / name).unlink(missing_ok=True)
        write_text(kit.folder / DAEMON, f"{os.getpid()}\n")  # FLARE's own script then says that the kit runs
        try:
            with _asked_to_end() as asked:
                while True:
                    code = _run(kit, asked)
                    if asked() or not (kit.folder / RESTART).exists():
                        return 0 if asked() or (kit.folder / SHUTDOWN).exists() else code or 1
                    (kit.folder / RESTART).unlink()
        finally:
            for name in (SHUTDOWN, RESTART, DAEMON):
                (kit.folder / name).unlink(missing_ok=True)


def _require_startable(kit: Kit) -> None:
    if kit.kind == ADMIN:
        raise InputError(f"{kit.folder} is a person's kit, which starts nothing; name the kit of a site or of the server")
    require_owner(kit)
    if (where := runtime(kit)) is not None:
        how = "startup/start_docker.sh" if where == DOCKER else "the chart that `nvflare deploy` wrote"
        raise InputError(f"{kit.folder} was prepared for containers; start it with {how}")
    for problem in [*missing(kit), *odd_paths(kit)]:
        raise InputError(str(problem))
    require_certificates(kit)


@contextmanager
def _alone(kit: Kit) -> Iterator[None]:
    """Holds the kit for this process, which the system ends with it: of two that start at once, one starts.

    Raises:
        InputError: another `feddp kit start` has it, or FLARE's own process or script runs it.
        StorageError: the folder's file system has no locks.
    """
    handle = os.open(kit.folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, kit.folder / DAEMON)
        except BlockingIOError:
            raise InputError(f"{kit.folder} runs already, by another `feddp kit start`; stop it first") from None
        if process := running(kit):
            raise InputError(f"{kit.folder} runs already, as process {process.pid}; stop it first")
        yield
    finally:
        os.close(handle)


def _run(kit: Kit, asked: Callable[[], bool]) -> int:
    """Runs FLARE's process once; returns its code, that of a signal as a shell has it."""
    python = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{python}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    env.pop("NVFL_WORKSPACE", None)  # with it, FLARE's script would run a copy of the kit in another folder
    folder = kit.folder.resolve()
    # from the kit's folder, which `kit check` has searched: Python looks first for modules where it is started
    process = subprocess.Popen(["bash", str(folder / "startup" / SUB_START), "--once"], cwd=folder, env=env)
    patience = float("inf")
    while True:
        try:
            code = process.wait(POLL)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            if patience == float("inf") and (asked() or any((kit.folder / name).exists() for name in (SHUTDOWN, RESTART))):
                patience = time.monotonic() + GRACE
                if asked():
                    process.terminate()
            if time.monotonic() > patience:
                process.kill()


@contextmanager
def _asked_to_end() -> Iterator[Callable[[], bool]]:
    """Yields whether this process was asked to end, by systemd or in its terminal."""
    seen: list[int] = []
    before = {sent: signal.signal(sent, lambda number, _: seen.append(number)) for sent in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(seen)
    finally:
        for sent, handler in before.items():
            signal.signal(sent, handler)
