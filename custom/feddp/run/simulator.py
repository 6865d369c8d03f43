"""FLARE's simulator with the allow-list enforced. It applies no scopes; an environment variable passes their properties."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from feddp.files import PROGRESS, write_text
from feddp.flare.configuration import SERVER_CLASSES, SITE_CLASSES
from feddp.flare.policy import SIMULATED
from feddp.jobs.folder import SIMULATED as SIMULATED_JOB
from feddp.provision import restrict
from feddp.run.session import Request


class Simulation:
    """A simulator's process and its workspace."""

    def __init__(self, process: subprocess.Popen[bytes], workspace: Path, log: Path):
        self.process, self.workspace, self.log = process, workspace, log
        self.progress = self._server / PROGRESS

    @property
    def _server(self) -> Path:
        return self.workspace / "server" / SIMULATED_JOB

    def finished(self) -> bool:
        return self.process.poll() is not None

    def outcome(self) -> tuple[bool, Path]:
        return self.process.returncode == 0, self._server

    def store(self, site: str) -> Path:
        return self.workspace / site / "feddp" / SIMULATED_JOB


@contextmanager
def simulator(request: Request, job: Path) -> Iterator[Simulation]:
    """Runs `job` in the simulator; ends its processes when the block ends."""
    workspace = request.out.resolve() / "workspace"
    (workspace / "local").mkdir(parents=True)
    classes = sorted([*SERVER_CLASSES.values(), *SITE_CLASSES.values()])
    write_text(workspace / "local" / "resources.json", json.dumps(restrict({"format_version": 2}, classes), indent=2))
    log = request.out / "simulator.log"
    threads = min(request.threads or len(request.sites), len(request.sites))
    command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", str(job.resolve())]
    command += ["-w", str(workspace), "-c", ",".join(request.sites), "-t", str(threads)]
    home = request.out.resolve() / "home"
    home.mkdir()
    env = {**os.environ, "HOME": str(home), SIMULATED: json.dumps(dict(request.policies))}
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            yield Simulation(process, workspace, log)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes], grace: float = 10) -> None:
    """Ends a process and its descendants: terminates them, and kills them after `grace` seconds."""
    if process.poll() is None:
        end(psutil.Process(process.pid), grace)
        process.wait()


def end(process: psutil.Process, grace: float = 10) -> None:
    """Does the same for a process that is not a child of this one."""
    family = [process, *process.children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):  # it may have ended by itself
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=grace)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
