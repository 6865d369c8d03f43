"""FLARE's POC mode on this machine: mTLS with real certificates, a server process and a process for every site."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from nvflare.fuel.flare_api.flare_api import Session

from feddp.errors import FedDPError
from feddp.files import PROGRESS
from feddp.flare.admin_session import is_final, opened_session, session_errors
from feddp.provision import POLICY
from feddp.run.keeper import watched
from feddp.run.session import POC, Request
from feddp.terminal import note

PROJECT, SERVER, LEAD = "feddp", "localhost", "lead@feddp.org"
READY = 90  # seconds within which every site must have joined
WORKSPACE = "NVFLARE_POC_WORKSPACE"  # FLARE's environment variable
TRIES = 3  # starts of a site after a signal ended it


class PocJob:
    """A job submitted to a running POC.

    Args:
        resume: the id of the run that the job continues.
    """

    def __init__(self, kits: Path, session: Session, job: Path, resume: str = ""):
        self.kits, self.session = kits, session
        self.log = kits / SERVER / "log.txt"
        with self._asked():
            self.id: str = session.submit_job(str(job.resolve()))
        self._run = resume or self.id
        self.progress = kits / SERVER / self.id / PROGRESS
        self._checked, self._status = 0.0, ""

    def logs(self) -> dict[str, Path]:
        """The logs of every participant's process, and of its process of this job."""
        files = (*self.kits.glob("*/log.txt"), *self.kits.glob(f"*/{self.id}/log.txt"))
        return {"/".join(path.relative_to(self.kits).parts[:-1]): path for path in sorted(files)}

    def finished(self) -> bool:
        if time.monotonic() - self._checked > 1:
            self._checked = time.monotonic()
            with self._asked():
                self._status = self.session.get_job_meta(self.id)["status"]
        return is_final(self._status)

    def outcome(self) -> tuple[bool, Path]:
        with self._asked():
            downloaded = Path(self.session.download_job_result(self.id)) / "workspace"
        return self._status == "FINISHED:COMPLETED", downloaded

    def _asked(self) -> AbstractContextManager[None]:
        return session_errors("the POC server does not answer", f"see {self.log}")

    def store(self, site: str) -> Path:
        return self.kits / site / "feddp" / self._run


def project(request: Request, ports: tuple[int, int], lead: str = LEAD, org: str = "hospital") -> dict[str, Any]:
    """Returns the POC's project file: a server, the sites and a lead; our builder writes the allow-lists and the policies.

    Args:
        org: the sites' organisation; a lead of the same one, "consortium", may end their processes.
    """
    return {
        "api_version": 3,
        "name": PROJECT,
        "description": "FedDP on one machine",
        "participants": [
            {"name": SERVER, "type": "server", "org": "consortium", "fed_learn_port": ports[0], "admin_port": ports[1]},
            *({"name": site, "type": "client", "org": org, POLICY: dict(request.policies[site])} for site in request.sites),
            {"name": lead, "type": "admin", "org": "consortium", "role": "project_admin"},
        ],
        "builders": [
            {"path": "nvflare.lighter.impl.workspace.WorkspaceBuilder"},
            {"path": "nvflare.lighter.impl.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": "nvflare.lighter.impl.cert.CertBuilder"},
            {"path": "feddp.provision.SitePolicyBuilder"},
        ],
    }


@contextmanager
def federation(request: Request) -> Iterator[tuple[Path, Session]]:
    """Provisions and starts every participant; yields the kits and the lead's session; stops everything at the end."""
    kits, env = provisioned(request)
    with watched(Path(env[WORKSPACE])), restarted([SERVER, *request.sites], partial(_start, kits, env)):
        session = connect(kits, request.sites)
        try:
            yield kits, session
        finally:
            session.close()


def provisioned(request: Request) -> tuple[Path, dict[str, str]]:
    """Makes every participant's kit, unless an earlier attempt has; returns the kits and the processes' environment."""
    workspace, home = request.out.resolve() / "poc", request.out.resolve() / "home"
    home.mkdir(parents=True, exist_ok=True)
    # FLARE stores its user configuration in the home folder; this one belongs to the run
    env = {**os.environ, "HOME": str(home), WORKSPACE: str(workspace)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    kits = request.out.resolve() / POC
    if not (kits / SERVER).exists():
        prepare(request, workspace, kits, env)
    return kits, env


def _start(kits: Path, env: dict[str, str], name: str) -> subprocess.Popen[bytes]:
    """Starts a participant's FLARE process."""
    with open(kits / name / "console.log", "a", encoding="utf-8") as console:
        command = ["bash", str(kits / name / "startup" / "sub_start.sh"), "--once"]
        return subprocess.Popen(command, cwd=kits / name, env=env, stdout=console, stderr=subprocess.STDOUT)


@contextmanager
def restarted(names: list[str], start: Callable[[str], subprocess.Popen[bytes]]) -> Iterator[None]:
    """Starts the server, the first of `names`, and the sites; a site that a signal ends is started again, TRIES times at most.

    FLARE's script does so too, but first waits five seconds. The server is not: its jobs end with it.
    """
    processes = {name: start(name) for name in names}
    done = threading.Event()

    def watch() -> None:
        left = dict.fromkeys(names[1:], TRIES)
        while not done.wait(1):
            for name in [name for name in left if (processes[name].poll() or 0) < 0]:
                ended = f"{name}: signal {-processes[name].returncode} ended its FLARE client"
                if left[name]:
                    left[name] -= 1
                    note(f"{ended}; started again")
                    processes[name] = start(name)
                else:
                    del left[name]
                    note(f"{ended}; it was started again {TRIES} times, so the site is given up")

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()


@contextmanager
def poc(request: Request, job: Path) -> Iterator[PocJob]:
    """Starts a POC for one job, which the lead submits."""
    with federation(request) as (kits, session):
        yield PocJob(kits, session, job, request.resume)


def prepare(request: Request, workspace: Path, kits: Path, env: dict[str, str]) -> None:
    """Runs `nvflare poc prepare` with our project file; `kits` then has every participant's kit."""
    path = workspace.parent / "project.yml"
    path.write_text(yaml.safe_dump(project(request, free_ports()), sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "nvflare.cli", "poc", "prepare", "-i", str(path), "--force"]
    done = subprocess.run(command, cwd=workspace.parent, env=env, capture_output=True, text=True, check=False)
    if done.returncode or not (kits / SERVER).exists():
        raise FedDPError(f"nvflare poc prepare failed: {(done.stderr or done.stdout).strip()[-500:]}")


def connect(kits: Path, sites: list[str], lead: str = LEAD) -> Session:
    """Returns a lead's session, once the server runs and every site has joined."""
    deadline, last = time.monotonic() + READY, None
    while time.monotonic() < deadline:
        with ExitStack() as unneeded:
            try:
                session = opened_session(lead, kits / lead, connect=5.0)
                unneeded.callback(_closed, session)
                while time.monotonic() < deadline:
                    if {client.name for client in session.get_system_info().client_info} >= set(sites):
                        unneeded.pop_all()
                        return session
                    time.sleep(0.5)
            except Exception as error:
                # a server that listens but is not ready refuses, or sends an incomplete answer on which FLARE fails
                last = error
        time.sleep(0.5)
    reason = f" (last: {type(last).__name__}: {last})" if last else ""
    raise FedDPError(
        f"the federation did not start within {READY} s{reason}; see console.log in the participants' folders of {kits}"
    ) from last


def _closed(session: Session) -> None:
    """Closes a session, whose server may be gone."""
    with suppress(Exception):
        session.close()


def free_ports() -> tuple[int, int]:
    """Returns two free ports."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
