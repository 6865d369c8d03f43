"""FLARE's simulator with the allow-list enforced. It applies no scopes; an environment variable passes their properties."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from feddp.files import PROGRESS, write_text
from feddp.flare.configuration import SERVER_CLASSES, SITE_CLASSES
from feddp.flare.kept import kept_below
from feddp.flare.policy import SIMULATED_POLICIES
from feddp.flare.workspace import SIMULATED_FILES
from feddp.jobs.folder import SIMULATED_JOB
from feddp.provision import restrict
from feddp.run import session
from feddp.run.keeper import watched
from feddp.run.session import Request

PROGRAM = "feddp.run.patient_simulator"


class Simulation:
    """A simulator's process, its workspace and the folder of all participants' files."""

    id = SIMULATED_JOB

    def __init__(self, process: subprocess.Popen[bytes], workspace: Path, files: Path, log: Path):
        self.process, self.workspace, self.files, self.log = process, workspace, files, log
        self.progress = self._server / PROGRESS

    @property
    def _server(self) -> Path:
        return self.workspace / "server" / SIMULATED_JOB

    def logs(self) -> dict[str, Path]:
        return {"FLARE": self.log}

    def finished(self) -> bool:
        return self.process.poll() is not None

    def outcome(self) -> tuple[bool, Path]:
        return self.process.returncode == 0, self._server

    def store(self, site: str) -> Path:
        return kept_below(self.files / site) / SIMULATED_JOB


@contextmanager
def simulator(request: Request, job: Path) -> Iterator[Simulation]:
    """Runs `job` in the simulator; ends its processes when the block ends."""
    workspace = request.out.resolve() / "workspace"
    (workspace / "local").mkdir(parents=True, exist_ok=True)
    classes = sorted([*SERVER_CLASSES.values(), *SITE_CLASSES.values()])
    write_text(workspace / "local" / "resources.json", json.dumps(restrict({"format_version": 2}, classes), indent=2))
    log = request.out / "simulator.log"
    threads = min(request.threads or len(request.sites), len(request.sites))
    command = [sys.executable, "-m", PROGRAM, str(job.resolve())]
    command += ["-w", str(workspace), "-c", ",".join(request.sites), "-t", str(threads)]
    home = request.out.resolve() / "home"
    home.mkdir(exist_ok=True)
    files = request.out.resolve() / session.SIMULATOR
    env = {**os.environ, "HOME": str(home), SIMULATED_POLICIES: json.dumps(dict(request.policies)), SIMULATED_FILES: str(files)}
    with watched(workspace), open(log, "a", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=request.out, stdout=output, stderr=subprocess.STDOUT, env=env)
        yield Simulation(process, workspace, files, log)
