"""The workflow that runs a stage's server half over FLARE."""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from cryptography import x509
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from feddp import protocol
from feddp.errors import ContributionError, FedDPError, Stopped, StorageError
from feddp.flare import messages
from feddp.flare.persistor import persistor_of
from feddp.flare.streams import moved
from feddp.flare.transfers import Transfer
from feddp.flare.unread import unread
from feddp.sealing.identity import Authority
from feddp.sealing.kit import Kit
from feddp.stages import served, stage_of
from feddp.stages.memory import ServerMemory
from feddp.stages.message import Message
from feddp.stages.server import Received, Server, Unanswered, nbytes

POLL = 0.05  # seconds; FLARE's default of 0.5 s would delay every round
# seconds without a sign of life after which a site is skipped, if enough others have answered; and after which none is waited
# for. A site's job process gives one every 10 s, also while it computes, and each part of a stream is one; a connection that
# died without a word is noticed within 60 s. After GONE seconds in which no tensors moved that should, a site is given up too
SILENT, GONE = 90.0, 600.0
SIGNS = 30.0  # seconds that three such signs take: who gave none for so long may have gone
LOOK = 1.0  # seconds between two looks at what has moved
STARTING = 120.0  # the same as SILENT while it starts: packages take a minute from a slow disk, a container too
CLIENTS = 5.0  # seconds between two looks, while the server waits, at which clients have registered anew
REPEATS = 10  # how often the server notes the same sign of a site while it waits: a site may repeat one without end
TRIES = 5  # answers to a task that the server could not read, after which it waits for the site no more


class StageController(Controller):
    """Runs one stage of the job.

    Args:
        stage: the stage's name (`feddp.stages`).
    """

    def __init__(self, stage: str):
        super().__init__(task_check_period=POLL)
        stage_of(stage)
        self.stage = stage

    def start_controller(self, fl_ctx: FLContext) -> None:
        self.memory = persistor_of(fl_ctx).memory(fl_ctx)
        self.heard: dict[str, float] = {}  # {site: the time of its last sign of life in this stage}
        self.noted: Counter[tuple[str, str]] = Counter()  # {(event, site): how often since the last request}
        self.transfers: dict[str, Transfer] = {}  # of the sites that have not answered the present task
        told, wanted = self.communicator.client_is_active, self.communicator.process_task_check

        def client_is_active(client_name: str, reason: str, fl_ctx: FLContext) -> None:
            self.heard[client_name] = time.monotonic()
            told(client_name, reason, fl_ctx)

        def process_task_check(task_id: str, fl_ctx: FLContext) -> ClientTask | None:
            found: ClientTask | None = wanted(task_id, fl_ctx)
            # FLARE forgets a task that is over at its next look; a site that was given up may ask about it until then
            if found and found.task.completion_status is None and found.result_received_time is None:
                self.note("computed", found.client.name)
                if transfer := self.transfers.get(found.client.name):
                    transfer.computed()
            return found

        self.communicator.client_is_active = client_is_active  # FLARE calls it for every request of a site's job process
        # and this one when a site, which has an answer, asks whether the server still wants it
        self.communicator.process_task_check = process_task_check

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        try:
            served(self.stage, FlareServer(self, self.memory, abort_signal, fl_ctx))
        except Stopped:
            self.log_info(fl_ctx, "stopped: the job was aborted", fire_event=False)
        except FedDPError as error:
            full = isinstance(error, StorageError)
            again = f"; then submit the job again, exported with `feddp job --resume {self.memory.run}`" if full else ""
            self.system_panic(f"{error}{again}", fl_ctx)
            try:
                self.memory.progress("error", message=str(error))
            except StorageError as unwritten:  # the log has the error
                self.log_error(fl_ctx, str(unwritten), fire_event=False)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        self.cancel_all_tasks()

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.note_late(client.name, task_name)

    def note_late(self, site: str, task: str) -> None:
        known = task if isinstance(task, str) and task in protocol.TASKS else "unknown"  # a site writes what it likes there
        self.note("refused", site, task=known, reason="the answer came after the end of its task", late=True)

    def note(self, event: str, site: str, **metadata: Any) -> None:
        """Appends a line to the run's progress for a sign of a site that the server did not ask for."""
        self.noted[event, site] += 1
        if self.noted[event, site] <= REPEATS:
            self.memory.progress(event, site=site, **metadata)


class FlareServer(Server):
    """Sends tasks to FLARE's clients with the controller's broadcasts."""

    def __init__(self, controller: StageController, memory: ServerMemory, abort_signal: Signal, fl_ctx: FLContext):
        # sealed, unless FLARE runs without certificates
        super().__init__(memory, fl_ctx.get_prop(FLContextKey.SECURE_MODE) is not False, str(fl_ctx.get_job_id()))
        self._controller, self._abort_signal, self._fl_ctx = controller, abort_signal, fl_ctx
        self._asked = float("-inf")  # the time of the last request
        self._learned = time.monotonic()  # the time of the last look at the clients' tokens
        self._looked = float("-inf")  # and of the last one at what has moved
        self._unread = unread()  # before the last request

    def joined(self) -> list[str]:
        return [client.name for client in self._fl_ctx.get_engine().get_clients()]

    def warn(self, message: str) -> None:
        self._controller.log_warning(self._fl_ctx, message, fire_event=False)

    def accept(self, site: str, pem: str) -> x509.Certificate:
        return self._authority.accept(site, pem)

    @cached_property
    def _authority(self) -> Authority:
        kit = Kit.open(Path(self._fl_ctx.get_engine().get_workspace().get_root_dir()))
        return Authority(x509.load_pem_x509_certificate(kit.root.read_bytes()), kit.name)

    def present(self) -> list[str]:
        heard = self._controller.heard
        for site in [site for site in self.memory.lost if site in heard and self._silence(site) < SILENT]:
            del self.memory.lost[site]
            self.progress("returned", site=site)
        return super().present()

    def send(
        self, task: str, sites: Sequence[str], data: Message | Mapping[str, Message], received: Received
    ) -> dict[str, Unanswered]:
        answered: set[str] = set()
        over, complete = threading.Event(), threading.Event()

        def result_received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            site, result = client_task.client.name, client_task.result
            client_task.result = None  # frees the tensors once the round is over
            if over.is_set():  # it was on its way when the task was given up
                self._controller.note_late(site, task)
                return
            answered.add(site)
            self._controller.transfers.pop(site, None)
            received(site, partial(_reply, site, task, result))
            if len(answered) == len(sites):
                complete.set()

        def sent(client_task: ClientTask, fl_ctx: FLContext) -> None:
            if fl_ctx.get_prop(FLContextKey.IS_CLIENT_TASK_RESEND):
                self._controller.note("again", client_task.client.name, task=task)
                if transfer := self._controller.transfers.get(client_task.client.name):
                    transfer.again()

        self._controller.noted.clear()
        self._unread = unread()
        self._controller.transfers = self._transfers(task, sites, data)
        # the first question of a job, which has limits of its own, and that of sites which come later: the others go on without
        first = task == protocol.READY
        later = first and not isinstance(data, Message)
        parcels = [(list(sites), data)] if isinstance(data, Message) else [([site], data[site]) for site in sites]
        tasks = []
        for targets, message in parcels:
            limit = 0 if first else self.plan.federation.task_timeout
            content = messages.pack(message.tensors, **message.scalars)
            each = Task(task, content, timeout=limit, before_task_sent_cb=sent, result_received_cb=result_received)
            each.task_done_cb = _released
            tasks.append(each)
            self._controller.broadcast(task=each, fl_ctx=self._fl_ctx, targets=targets, min_responses=len(targets))
        self._asked = time.monotonic()
        patience = STARTING if first and not later else SILENT
        overdue = False
        while any(each.completion_status is None for each in tasks):
            if self._abort_signal.triggered:
                raise Stopped("the job was aborted")
            if complete.wait(POLL):
                complete.clear()
                self._end(tasks)
            self._learn_clients()
            self._look(task)
            silence = min((self._silence(site) for site in sites if site not in answered), default=0.0)
            # no site computes for the first question: one that lives and does not answer it is not waited for either
            overdue = first and time.monotonic() - self._asked > (patience if later else GONE)
            if overdue or silence > (patience if later or len(answered) >= self.plan.federation.min_sites else GONE):
                for each in tasks:
                    self._controller.cancel_task(each)
                break
        with ExitStack() as finished:
            for each in tasks:  # FLARE holds the lock while it hands over an answer
                finished.enter_context(each.cb_lock)
            over.set()
        for each in tasks:
            if error := getattr(each, "exception", None):  # FLARE puts there what `received` raised: no site is to blame
                raise error
        found = {site: self._why(site, SIGNS if overdue else SILENT) for site in sites if site not in answered}
        self._unread, self._controller.transfers = unread(), {}  # such a site is asked again, if it lives
        return found

    def _why(self, site: str, silent: float) -> Unanswered:
        """Returns why a site has not answered the present task: it vanished, silent for so long, or it had no more time."""
        vanished = self._silence(site) > silent
        limit = 0 if vanished else self.plan.federation.task_timeout
        return Unanswered(vanished, self._controller.transfers[site].told(limit))

    def _transfers(self, task: str, sites: Sequence[str], data: Message | Mapping[str, Message]) -> dict[str, Transfer]:
        half = task in protocol.with_shared() and self.plan.federation.half
        back = self.memory.expected.spec(protocol.spec_of(task).tensors).nbytes // (2 if half else 1)
        messages = {site: data if isinstance(data, Message) else data[site] for site in sites}
        return {site: Transfer(site, nbytes(message.tensors, half), back) for site, message in messages.items()}

    def _look(self, task: str) -> None:
        """Notes what has moved, and reports transfers that take long."""
        if time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        for site, transfer in list(self._controller.transfers.items()):  # others end them in FLARE's threads
            if report := transfer.look():
                self.progress("transfer", site=site, task=task, **report)

    def _end(self, tasks: Sequence[Task]) -> None:
        """Has FLARE end tasks that all sites have answered, now and not at the next look of its monitor."""
        for each in tasks:
            with each.cb_lock:  # FLARE notes the answer before it releases the lock
                pass
        self._controller.communicator.check_tasks()

    def _learn_clients(self) -> None:
        """Asks the parent process for the clients' tokens: a client whose parent process was started again has a new one."""
        if time.monotonic() - self._learned < CLIENTS:
            return
        try:
            self._fl_ctx.get_engine().sync_clients_from_main_process()
        except RuntimeError as error:  # the parent process did not answer for 30 s
            self.warn(f"the clients' tokens are not known ({error}); asked again")
        self._learned = time.monotonic()

    def _silence(self, site: str) -> float:
        """Returns the seconds since a site's last sign of life, or since it was asked if there was none.

        A site whose answers to a task cannot be read is as good as silent, and one that lives but whose task does not reach it.
        """
        transfer = self._controller.transfers.get(site)
        if unread()[site] - self._unread[site] >= TRIES or (transfer and transfer.still() > GONE):
            return float("inf")
        return time.monotonic() - max(self._controller.heard.get(site, self._asked), moved(site).last)


def _released(task: Task, fl_ctx: FLContext) -> None:
    """Unties a finished task from its clients' tasks.

    Each names the other, so only Python's cyclic garbage collector would free them, with γ and all answers. It runs seldom:
    the process held the tensors of dozens of rounds.
    """
    task.client_tasks.clear()
    task.last_client_task_map.clear()


def _reply(site: str, task: str, result: Shareable) -> Message:
    code = result.get_return_code(ReturnCode.OK)
    if not isinstance(code, str) or code != ReturnCode.OK:  # a site writes what it likes there, an array too
        if isinstance(code, str) and code == messages.SHARED_REFUSED:
            raise ContributionError(
                f"site {site}: it refused the shared tensors of {task}: they are further from those before than the job's"
                " `movement` or `statistics` allow, or not those of the other sites. The site's audit.log has the reason"
            )
        known = code if isinstance(code, str) and code in messages.CODES else "a code that FLARE does not have"
        raise ContributionError(f"site {site}: {task} ended with {known}; the site's audit.log has the reason")
    return Message(*messages.unpack(result))
