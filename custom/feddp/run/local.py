"""A federation without FLARE (`feddp run --env local`), in one process or with workers: the same stages and the same bits."""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from feddp import terminal
from feddp.errors import FedDPError, Stopped, StorageError
from feddp.files import PROGRESS, append_event
from feddp.flare.configuration import APPS, FILES, SERVER
from feddp.flare.context import SiteContext
from feddp.flare.kept import files_of, kept_below
from feddp.jobs.folder import LOCAL
from feddp.run import rounds
from feddp.run.answering import Answering, LocalSites, note
from feddp.run.session import Request
from feddp.run.workers import WorkersServer, started, workers_of
from feddp.stages import served, stages_of
from feddp.stages.memory import ServerMemory
from feddp.stages.message import Message
from feddp.stages.server import Received, Server, Unanswered
from feddp.tracking import VARIABLE, Tracking
from feddp.training.claim import release


class LocalServer(Server, Answering):
    """Asks the sites of this process, one after the other.

    Args:
        sites: the sites by name.
        stopped: set when the run must stop.
    """

    def __init__(self, memory: ServerMemory, sites: Mapping[str, SiteContext], stopped: threading.Event, log: Path):
        Server.__init__(self, memory, sealed=False)
        Answering.__init__(self, sites, memory.plan.federation.half, stopped, log)
        log.touch()

    def joined(self) -> Collection[str]:
        return self._sites.keys()

    def warn(self, message: str) -> None:
        note(self._log, f"WARNING - {message}")

    def send(
        self, task: str, sites: Sequence[str], data: Message | Mapping[str, Message], received: Received
    ) -> dict[str, Unanswered]:
        for site in sites:
            if self._stopped.is_set():
                raise Stopped("the run was stopped")
            received(site, partial(self.reply, task, site, data if isinstance(data, Message) else data[site]))
        return {}


@contextmanager
def tracked(server: Server, name: str) -> Iterator[None]:
    """Writes TensorBoard files; with FEDDP_TRACKING, FLARE's trackers too."""
    memory = server.memory
    if VARIABLE in os.environ:
        from feddp.flare.tracking import tracking

        found = tracking(memory.folder, memory.folder, LOCAL, name, server.warn)
    else:
        found = Tracking(memory.folder, server.warn)
    memory.watch(found)
    try:
        yield
    finally:
        found.close()


class LocalRun:
    """A run whose server is a thread of this process, so that its progress can be followed.

    Args:
        out: the run's folder.
        serve: runs the server; its arguments are the server's folder, its log file and the event that stops it.
    """

    def __init__(self, out: Path, serve: Callable[[Path, Path, threading.Event], None]):
        self.id = LOCAL
        self._workspace, self.log = out / "workspace", out / "local.log"
        self._server = self._workspace / "server"
        self._server.mkdir(parents=True, exist_ok=True)
        self.progress = self._server / PROGRESS
        self._stopped, self._serve = threading.Event(), serve
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feddp run")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._serve(self._server, self.log, self._stopped)
        except FedDPError as error:
            self._failed = error
            if not isinstance(error, StorageError):  # its message may find no place; `outcome` raises it
                append_event(self.progress, "error", message=str(error))
        except BaseException as error:  # a bug: `outcome` raises it in the caller's thread
            self._failed = error

    def logs(self) -> dict[str, Path]:
        return {"server": self.log}

    def finished(self) -> bool:
        return not self._thread.is_alive()

    def outcome(self) -> tuple[bool, Path]:
        self._thread.join()
        if isinstance(self._failed, StorageError) or not isinstance(self._failed, FedDPError | None):
            raise self._failed
        return self._failed is None, self._server

    def store(self, site: str) -> Path:
        return kept_below(self._workspace / site) / LOCAL

    def stop(self) -> None:
        """Ends the run before its next step."""
        self._stopped.set()
        if not self.finished():
            terminal.note("stopping after the present step ...")
        self._thread.join()
        release(self._workspace)


@contextmanager
def followed(out: Path, serve: Callable[[Path, Path, threading.Event], None]) -> Iterator[LocalRun]:
    """Starts a run in this process; the run has ended when the block ends."""
    running = LocalRun(out, serve)
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def local(request: Request, job: Path) -> Iterator[LocalRun]:
    """Runs all stages of `job`: the server's half in this process, the sites' in this one or in workers (`workers_of`)."""
    plan, root = request.plan, request.out / "workspace"

    def serve(server: Path, log: Path, stopped: threading.Event) -> None:
        config = (job / APPS[SERVER] / FILES[SERVER]).parent
        if request.rounds is not None:
            rounds.take(plan, root, request.rounds)
        memory = ServerMemory(plan, LOCAL, server, files_of(kept_below(server), LOCAL), config)
        if request.rounds is not None:
            memory.watch(partial(rounds.keep, memory, root, request.rounds), earlier=False)
        with ExitStack() as stack:
            asked: Server
            if (count := workers_of(request)) == 1:
                asked = LocalServer(memory, LocalSites(plan, request.policies, root), stopped, log)
            else:
                workers = stack.enter_context(started(memory, request.policies, root, count, log))
                asked = WorkersServer(memory, workers, stopped, log)
            stack.enter_context(tracked(asked, plan.method))
            for stage in stages_of(plan, adapts=False):
                served(stage, asked)

    with followed(request.out, serve) as running:
        yield running
