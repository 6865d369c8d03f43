"""A run without FLARE whose sites are divided among processes: as many sites train at once, with the bits of one process.

Processes, because threads could not: torch's generator, from which a site's seeded draws come, is one for all of them. A site
always has the same worker, which keeps its images in memory and its folder locked.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from tempfile import TemporaryFile
from typing import Any, cast

from feddp.errors import ContributionError, FedDPError, Stopped
from feddp.files import writing
from feddp.run.answering import note
from feddp.run.pipe import Closed, Packed, get, pack, put
from feddp.run.session import Request
from feddp.stages.memory import ServerMemory
from feddp.stages.message import Message
from feddp.stages.server import Received, Server, Unanswered
from feddp.training.device import settle

POLL = 0.2  # seconds until the next look whether the run must stop


def workers_of(request: Request) -> int:
    """Returns how many processes answer for the sites, at most one a site; with 1, which is the default, none but the run's."""
    return min(request.threads or 1, len(request.policies))


class Worker:
    """The server's end of a worker.

    Args:
        sites: the sites for which the worker answers.
        folder: the file for the tensors lies on its disk.
        log: takes what the worker writes to stderr; its name in the worker's command line tells which run it belongs to.
    """

    def __init__(self, sites: Sequence[str], folder: Path, log: Path):
        self.sites, self._folder, self._log = sites, folder, log
        with writing(folder):
            self._file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # `end` closes it
        file = self._file.fileno()
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "feddp.run.worker", str(log.resolve()), str(file)],
                cwd="/",
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=[file],
                # a share of a busy machine of its own (Linux's autogroups), and Ctrl-C is the command's
                start_new_session=True,
            )
        # without buffers, both are FileIO
        self._tasks, self.answers = cast(FileIO, self._process.stdin), cast(FileIO, self._process.stdout)

    def give(self, content: Mapping[str, Any], packed: Packed) -> None:
        """Sends the worker something.

        Raises:
            FedDPError: the worker has ended.
            StorageError: the tensors cannot be written.
        """
        try:
            with writing(self._folder):
                put(self._tasks, self._file.fileno(), content, packed)
        except Closed:
            raise self._ended() from None

    def answer(self) -> Message | str:
        """Returns the answer to a task, or why the site has none; raises FedDPError if the worker has ended."""
        try:
            content, tensors = get(self.answers, self._file.fileno())
        except Closed:
            raise self._ended() from None
        return content["error"] if "error" in content else Message(tensors, content["scalars"])

    def end(self) -> None:
        """Ends the worker, also in the middle of a task: its files are each written whole or not at all."""
        self._process.kill()
        self._process.wait()
        self._tasks.close()
        self.answers.close()
        self._file.close()

    def _ended(self) -> FedDPError:
        code = self._process.wait()
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (by the system, if memory ran out: then try a lower --threads)"
        return FedDPError(f"the process of {', '.join(self.sites)} was ended {how}; {self._log} may say more")


@contextmanager
def started(
    memory: ServerMemory, policies: Mapping[str, Mapping[str, Any]], root: Path, count: int, log: Path
) -> Iterator[list[Worker]]:
    """Starts `count` workers, and ends them when the block ends.

    Args:
        policies: {site: the properties of its policy}.
        root: the sites' folders lie below it.
    """
    names, workers = sorted(policies), []
    # as in one process, whose sites settle it: more threads only wait for the workers' cores
    settle(policies[names[0]].get("device", "cpu"), threads=1)
    run = {"plan": memory.plan.to_json(), "root": str(root.resolve())}
    with ExitStack() as stack:
        for number in range(count):
            worker = Worker(names[number::count], memory.folder, log)
            stack.callback(worker.end)
            worker.give({**run, "policies": {site: dict(policies[site]) for site in worker.sites}}, pack({}))
            workers.append(worker)
        yield workers


class WorkersServer(Server):
    """Asks the sites through workers.

    Args:
        stopped: set when the run must stop.
    """

    def __init__(self, memory: ServerMemory, workers: Sequence[Worker], stopped: threading.Event, log: Path):
        super().__init__(memory, sealed=False)
        self._workers, self._stopped, self._log = workers, stopped, log

    def joined(self) -> Collection[str]:
        return [site for worker in self._workers for site in worker.sites]

    def warn(self, message: str) -> None:
        note(self._log, f"WARNING - {message}")

    def send(
        self, task: str, sites: Sequence[str], data: Message | Mapping[str, Message], received: Received
    ) -> dict[str, Unanswered]:
        """As `Server.send`; the answers are received in the order of `sites`.

        Raises:
            FedDPError: a worker has ended.
        """
        shared = pack(data.tensors) if isinstance(data, Message) else None  # once for all sites
        waiting = {worker: [site for site in sites if site in worker.sites] for worker in self._workers}
        asked: dict[Worker, str] = {}
        found: dict[str, Message | str] = {}  # answers that wait for those before them
        with DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.answers, EVENT_READ, worker)
            for site in sites:
                while site not in found:
                    for worker, own in waiting.items():
                        # one answer of each worker may wait: memory does not grow with the number of sites
                        if own and worker not in asked and found.keys().isdisjoint(worker.sites):
                            asked[worker] = own.pop(0)
                            message = data if isinstance(data, Message) else data[asked[worker]]
                            content = {"task": task, "site": asked[worker], "scalars": message.scalars}
                            worker.give(content, shared or pack(message.tensors))
                    if self._stopped.is_set():
                        raise Stopped("the run was stopped")
                    for key, _ in selector.select(POLL):
                        answer = key.data.answer()
                        found[asked.pop(key.data)] = answer
                received(site, partial(_opened, found.pop(site)))
        return {}


def _opened(found: Message | str) -> Message:
    """Raises ContributionError for the reason why a site has no answer."""
    if isinstance(found, str):
        raise ContributionError(found)
    return found
