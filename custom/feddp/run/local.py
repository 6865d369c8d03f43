"""A federation in one process without FLARE (`feddp run --env local`): the same stages and the same bits."""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from feddp import protocol
from feddp.errors import ContributionError, FedDPError, Stopped, StorageError
from feddp.files import PROGRESS, append_event
from feddp.flare.configuration import APPS, FILES, SERVER
from feddp.flare.context import SiteContext, files_of, kept_below
from feddp.flare.policy import SitePolicy
from feddp.jobs.folder import LOCAL
from feddp.partition import Tensors
from feddp.plan.schema import Plan
from feddp.protocol import Kind
from feddp.run.session import Request
from feddp.stages import answered, served, stages_of
from feddp.stages.memory import ServerMemory
from feddp.stages.message import Message
from feddp.stages.precision import narrow, widen
from feddp.stages.server import Received, Server
from feddp.stages.tensors import Expected
from feddp.tracking import VARIABLE, Tracking
from feddp.training.store import release


class LocalServer(Server):
    """Asks the sites of this process, one after the other.

    Args:
        sites: the sites by name.
        stopped: set when the run must stop.
    """

    def __init__(self, memory: ServerMemory, sites: Mapping[str, SiteContext], stopped: threading.Event, log: Path):
        super().__init__(memory, sealed=False)
        self._sites, self._stopped, self._log = sites, stopped, log
        log.touch()

    def joined(self) -> Collection[str]:
        return self._sites.keys()

    def warn(self, message: str) -> None:
        self._write(f"WARNING - {message}")

    def _write(self, line: str) -> None:
        with open(self._log, "a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    def send(self, task: str, sites: Sequence[str], data: Message | Mapping[str, Message], received: Received) -> set[str]:
        for site in sites:
            if self._stopped.is_set():
                raise Stopped("the run was stopped")
            received(site, partial(self._reply, task, site, data if isinstance(data, Message) else data[site]))
        return set()

    def _reply(self, task: str, site: str, message: Message) -> Message:
        """Returns a site's answer. A site that fails, for whatever reason, is refused, and the others go on."""
        context = self._sites[site]  # a policy that refuses the job raises here
        try:
            return self._answer(task, context, message)
        except Stopped:  # the whole run, not this site
            raise
        except StorageError as error:
            self._record(context, task, str(error))
            raise ContributionError(f"site {site}: {error}") from error
        except FedDPError as error:
            self._record(context, task, str(error))
            raise
        except Exception as error:  # as in FLARE: of any type; the log has its traceback
            self._record(context, task, f"{type(error).__name__}: {error}")
            self._write(traceback.format_exc())
            raise ContributionError(f"site {site}: {task} ended with {type(error).__name__}; {self._log} says why") from error

    def _record(self, context: SiteContext, task: str, message: str) -> None:
        try:
            context.store.record("error", task=task, message=message)
        except StorageError as error:  # the site's disk is full
            self.warn(str(error))

    def _answer(self, task: str, context: SiteContext, message: Message) -> Message:
        kind, half = protocol.spec_of(task).kind, self.plan.federation.half
        context.stopped = self._stopped.is_set
        if kind is not Kind.START:
            context.enter()
        brought = _carried(message.tensors, half and task in protocol.with_shared())
        answer = answered(task, Message(brought, message.scalars), context)
        return Message(_carried(answer.tensors, half and kind is Kind.ROUND), answer.scalars)


def _carried(tensors: Mapping[str, Tensor], half: bool) -> Tensors:
    """Returns the tensors as they arrive: copies, rounded to half precision if they travel so."""
    copies = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
    return {name: widen(narrow(name, value)) for name, value in copies.items()} if half else copies


@contextmanager
def tracked(server: LocalServer, name: str) -> Iterator[None]:
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


class LocalSites(Mapping[str, SiteContext]):
    """The sites of a run, each made when it is first asked; their folders lie below `root`, as in the simulator.

    Args:
        policies: {site: the properties of its policy}.
    """

    def __init__(self, plan: Plan, policies: Mapping[str, Mapping[str, object]], root: Path):
        self._expected, self._policies, self._root = Expected(plan), policies, root
        self._made: dict[str, SiteContext] = {}

    def __getitem__(self, site: str) -> SiteContext:
        if site not in self._made:
            policy = SitePolicy.of(site, self._policies[site], simulated=True)
            kept = kept_below(self._root / site)
            self._made[site] = SiteContext(site, LOCAL, self._expected, None, policy, kept, simulated=True)
        return self._made[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)


class LocalRun:
    """A run in a thread of this process, so that its progress can be followed.

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
            print("stopping after the present step ...", file=sys.stderr)
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
    """Runs all stages of `job` in this process."""
    plan, root = request.plan, request.out / "workspace"

    def serve(server: Path, log: Path, stopped: threading.Event) -> None:
        config = (job / APPS[SERVER] / FILES[SERVER]).parent
        memory = ServerMemory(plan, LOCAL, server, files_of(kept_below(server), LOCAL), config)
        asked = LocalServer(memory, LocalSites(plan, request.policies, root), stopped, log)
        with tracked(asked, plan.method):
            for stage in stages_of(plan, adapts=False):
                served(stage, asked)

    with followed(request.out, serve) as running:
        yield running
