"""A federation as a consortium runs it: kits of `nvflare provision`, mTLS on loopback, FLARE's own scripts.

Its project is provisioning/rehearsal.yml, as the tutorial types it, with ports and folders of the test's own. One
federation serves one file of tests, which provisions it, may edit the kits as hospitals do, and starts it:

    with deployment(root) as federation:
        federation.up()
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pexpect
import pytest
from nvflare.fuel.flare_api.flare_api import Session

from feddp.data.synthesize import synthesize
from feddp.kit.approve import Approval
from feddp.run.keeper import end_below
from feddp.run.poc import connect, free_ports
from support import ROOT
from support.command import ended

SHIPPED = ROOT / "provisioning"
TUTORIAL = "docs/tutorials/first-real-site.md"  # its commands are typed here
HOSPITALS, NEWCOMER = [f"hospital-{letter}" for letter in "abcd"], "hospital-e"
SERVER, LEAD = "server.example.org", "lead@consortium.org"
LOOPBACK = "localhost"
LIMIT = 300  # seconds that anything here may take
PROMPT = "\r\n> $"  # at the end of what is shown


class Console:
    """FLARE's admin console, as a person sees it."""

    def __init__(self, kit: Path, env: dict[str, str], within: tuple[str, ...] = ()):
        self.person = kit.name
        program, *words = [*within, "bash", str(kit / "startup/fl_admin.sh")]
        self.process = pexpect.spawn(program, words, env=env, encoding="utf-8", echo=False, dimensions=(100, 400), timeout=60)
        self.process.expect("User Name: ")
        self.process.sendline(self.person)
        self.process.expect(PROMPT)
        self.welcome = self.process.before

    def __call__(self, command: str) -> str:
        """Types a command, and what it asks for to be confirmed; returns what is shown until the next prompt."""
        self.process.sendline(command)
        while (asked := self.process.expect([PROMPT, pexpect.EOF, "User Name: $", r"\(y/N\): $"])) > 1:
            self.process.sendline(self.person if asked == 2 else "y")
        return self.process.before

    def close(self) -> None:
        self.process.close(force=True)


@dataclass
class Deployment:
    """Its kits, and what people do with them."""

    folder: Path  # a copy of provisioning/, where all commands are typed
    env: dict[str, str]
    workspace: str = "kits"  # of the kits, below `folder`
    server: str = SERVER  # its kit's name
    started: list[Path] = field(default_factory=list)
    session: Session | None = None  # the lead's, when it is up

    @property
    def kits(self) -> Path:
        return self.folder / self.workspace / "feddp/prod_00"

    def shell(self, command: str) -> str:
        """A command; what it prints. Stdout is a file: what it starts in the background would hold a pipe open."""
        output = self.folder / "output.txt"
        with open(output, "w", encoding="utf-8") as out:
            code = subprocess.call(["bash", "-c", command], cwd=self.folder, env=self.env, stdout=out, stderr=subprocess.STDOUT)
        said = output.read_text(encoding="utf-8")
        assert code == 0, f"{command}: {said[-2000:]}"
        return said

    def feddp(self, command: str) -> str:
        """A `feddp` command that ends well, typed where `shell` types it, but with the environment of this process."""
        program, *_ = words = shlex.split(command)
        assert program == "feddp"
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
            patch.chdir(self.folder)
            code = ended(words)
        assert code == 0, f"{command}: {said.getvalue()[-2000:]}"
        return said.getvalue()

    def start(self, kit: Path) -> None:
        """A participant, with its kit's own script, as from a login with the usual umask."""
        with open(kit / "console.log", "w", encoding="utf-8") as console:
            script = ["bash", str(kit / "startup/start.sh")]
            subprocess.run(script, env=self.env, stdout=console, stderr=subprocess.STDOUT, check=True, umask=0o022)
        self.started.append(kit)

    def up(self, hospitals: list[str] = HOSPITALS) -> None:
        """Starts the server and the hospitals; returns when all have joined."""
        for name in (self.server, *hospitals):
            self.start(self.kits / name)
        self.session = connect(self.kits, hospitals, LEAD)

    def down(self) -> None:
        if self.session is not None:
            self.session.close()
        for kit in reversed(self.started):
            self.kill(kit)

    @staticmethod
    def kill(kit: Path) -> None:
        """Ends a participant: the script, which would start FLARE again, and all below it."""
        daemon = kit / "daemon_pid.fl"
        until(daemon.exists, f"{kit.name} never started")
        end_below(kit)

    @contextmanager
    def console(self, person: str = LEAD) -> Iterator[Console]:
        console = Console(self.kits / person, self.env)
        try:
            yield console
        finally:
            console.close()

    def joined(self) -> set[str]:
        return {client.name for client in self.session.get_system_info().client_info}

    def log(self, participant: str, job: str = "") -> str:
        return (self.kits / participant / job / "log.txt").read_text(encoding="utf-8")

    def store(self, hospital: str, job: str) -> Path:
        """A hospital's own files of a job."""
        return self.kits / hospital / "feddp" / job

    def audited(self, hospital: str, job: str) -> list[str]:
        """What of ours a hospital's audit file of a job holds: what was stopped, withheld, or failed."""
        lines = (self.kits / hospital / job / "audit.log").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if re.search(r"\[(egress guard|task failed)", line)]

    def refused(self, hospital: str, job: str) -> str:
        """The line of a hospital's audit file about a job that was not deployed there."""
        lines = (self.kits / hospital / "audit.log").read_text(encoding="utf-8").splitlines()
        (line,) = [line for line in lines if f"[job {job} refused: " in line]
        return line

    def finished(self, job: str) -> dict[str, Any]:
        """A job's meta data, when it has ended."""

        def ended():
            meta = self.session.get_job_meta(job)
            # FLARE writes down that a job could not run, and only then why
            told = meta["status"] != "FINISHED:FAILED_TO_RUN" or "job_deploy_detail" in meta
            return meta if meta["status"].startswith("FINISHED") and told else None

        return until(ended, f"job {job} did not end")

    def results(self, job: str) -> Path:
        """The server's files of a finished job, downloaded."""
        return Path(self.session.download_job_result(job)) / "workspace"


def decided(kit: Path, **properties: Any) -> None:
    """A hospital changes its policy, in every scope."""
    path = kit / "local/privacy.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for scope in content["scopes"]:
        scope["properties"] |= properties
    path.write_text(json.dumps(content), encoding="utf-8")


def approved(job: Path, *kits: Path) -> Path:
    """The job, once these hospitals have approved it as `feddp kit approve` does."""
    for kit in kits:
        approval = Approval.of(job, kit)
        assert approval.problems == [], kit.name
        if not approval.given:
            approval.write()
    return job


def until(holds: Callable[[], Any], otherwise: str) -> Any:
    """Waits for something; returns it."""
    deadline = time.monotonic() + LIMIT
    while not (result := holds()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.3)
    return result


def local(text: str, ports: tuple[int, int], root: Path) -> str:
    """A file of provisioning/ for one machine; the folder of every hospital's data is its own."""
    for old, new in ((SERVER, LOOPBACK), ("8002", ports[0]), ("8003", ports[1]), ("/data/server", root / "server")):
        text = text.replace(old, str(new))
    text = text.replace('"cuda:0"', "cpu")
    text = re.sub(r"num_of_gpus: \d+", "num_of_gpus: 0", text)
    for name in re.findall(r"name: (hospital-\w)$", text, re.MULTILINE):
        assert "/data/site" in text, name
        text = text.replace("/data/site", str(root / "data" / name), 1)
    assert not re.search(r"example\.org|800[23]|cuda|/data/s", text.replace(str(root), ""))
    return text


def rehearsed(text: str, ports: tuple[int, int], root: Path) -> str:
    """rehearsal.yml with other ports and folders: each hospital's data are in `root`/data/<its name>."""
    own = {"8002": ports[0], "8003": ports[1], "/tmp/rehearsal-server": root / "server"}
    own |= {f"/tmp/rehearsal/site-{i}": root / "data" / name for i, name in enumerate(HOSPITALS, 1)}
    for old, new in own.items():
        assert text.count(old) == 1, old
        text = text.replace(old, str(new))
    return text


def environment(root: Path) -> dict[str, str]:
    """Of everything that is started: nobody's home, a temporary folder of its own, in which FLARE leaves the job of every
    refused submission, and this Python's commands."""
    for name in ("home", "tmp"):
        (root / name).mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "HOME": str(root / "home"), "TMPDIR": str(root / "tmp"), "TERM": "dumb", "PATH": path}


@contextmanager
def deployment(root: Path, kind: Callable[..., Deployment] = Deployment, host: str = LOOPBACK) -> Iterator[Deployment]:
    """Provisions a federation of four hospitals, each with 36 images: 20 to train on, 8 to validate, 8 to test. Whatever has
    been started is stopped when the block ends. `host`: where the server is."""
    folder = Path(shutil.copytree(SHIPPED, root / "provisioning"))
    synthesize(root / "data", sites=5, images=36, size=32)
    for site, name in zip(sorted((root / "data").iterdir()), [*HOSPITALS, NEWCOMER], strict=True):
        site.rename(root / "data" / name)
    ports = free_ports()
    for written, source, change in (("project", "rehearsal", rehearsed), ("hospital-e", "hospital-e", local)):
        text = change((folder / f"{source}.yml").read_text(encoding="utf-8"), ports, root)
        text = text.replace(f"default_host: {LOOPBACK}", f"default_host: {host}")
        (folder / f"{written}.yml").write_text(text, encoding="utf-8")
    federation = kind(folder, environment(root))
    federation.shell("nvflare provision -p project.yml -w kits")
    try:
        yield federation
    finally:
        federation.down()
