"""FLARE's simulator starts each site's process as a fork of one that has loaded what they all load, which takes seconds.

That one knows no job, no site and no task: what a fork of it remembers is what a new process would.
"""

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from select import select
from types import SimpleNamespace
from typing import Any

from nvflare.private.fed.app.simulator import simulator_runner

from feddp.flare.configuration import SITE_CLASSES
from feddp.lean import import_monai, no_search

# what the classes of a site's job import when they are asked for something
LATER = ("segmentation_models_pytorch", "monai.metrics", "monai.losses", "scipy.ndimage", "feddp.stages.site")


class Forked:
    """What the simulator has of a process: as `subprocess.Popen`, but for its exit code."""

    returncode = 0

    def __init__(self, words: Sequence[str], **_: Any):
        self._ended = os.pidfd_open(_asked(words))

    def poll(self) -> int | None:
        return self.returncode if select([self._ended], [], [], 0)[0] else None

    def wait(self, timeout: float) -> int:
        if not select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a fork", timeout)
        return self.returncode

    def terminate(self) -> None:
        signal.pidfd_send_signal(self._ended, signal.SIGTERM)

    def kill(self) -> None:
        signal.pidfd_send_signal(self._ended, signal.SIGKILL)


_ONE = threading.Lock()  # the simulator starts sites in threads
_OURS, _THEIRS = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _asked(words: Sequence[str]) -> int:
    with _ONE:
        _OURS.send(json.dumps(words).encode())
        return int(_OURS.recv(64))


def start(begin: Callable[[], None]) -> None:
    """Of the simulator's process, first; `begin` is called in each fork."""
    import_monai()
    with no_search():
        for name in (*(path.rpartition(".")[0] for path in SITE_CLASSES.values()), *LATER):
            import_module(name)
    gc.freeze()
    if os.fork():
        _THEIRS.close()
        simulator_runner.subprocess = SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)
        return
    _OURS.close()  # so the simulator's end is seen
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
    while words := _THEIRS.recv(2**16):
        if fork := os.fork():
            _THEIRS.send(str(fork).encode())
            continue
        _THEIRS.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        sys.orig_argv = json.loads(words)
        _, _, program, *own = sys.orig_argv
        sys.argv = [program, *own]
        begin()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once: to take torch and MONAI apart takes seconds more
