"""What the controllers have in common: ask sites for an answer, and keep those that are good."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from torch import Tensor

from feddp import protocol
from feddp.errors import ContributionError, FedDPError, InputError, Stopped
from feddp.flare import messages
from feddp.flare.numbers import MEASURED, rounded
from feddp.flare.persistor import SharedTensorPersistor
from feddp.methods.results import STD_WITHHELD, WITHHELD

POLL = 0.05  # seconds; FLARE's default of 0.5 s would be felt in every round


@dataclass(frozen=True)
class Answer:
    """What a site sent: tensors, and scalars by name."""

    tensors: dict[str, Any]
    scalars: dict[str, Any]


class Stage(Controller):
    """A workflow of a job: `run` reads like the paper, `ask` does the talking."""

    def __init__(self):
        super().__init__(task_check_period=POLL)

    def start_controller(self, fl_ctx: FLContext) -> None:
        persistor = fl_ctx.get_engine().get_component("persistor")
        if not isinstance(persistor, SharedTensorPersistor):
            raise InputError("the job's server has no component `persistor` of ours; export it with `feddp job`")
        self.persistor = persistor
        self.plan = persistor.plan

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        self.abort_signal, self.fl_ctx = abort_signal, fl_ctx
        try:
            self.run()
        except Stopped:
            self.log_info(fl_ctx, "stopped: the job was aborted", fire_event=False)
        except FedDPError as error:
            self.progress("error", message=str(error))
            self.system_panic(str(error), fl_ctx)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        self.cancel_all_tasks()

    def run(self) -> None:
        """The stage, from its first task to its last."""
        raise FedDPError(f"{type(self).__name__} has no stage to run")

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.progress("refused", site=client.name, task=task_name, reason="the answer came after its task had ended")

    def sites(self) -> list[str]:
        """The job's sites, but for those that were lost, in the order everything is done in."""
        return sorted({client.name for client in self.fl_ctx.get_engine().get_clients()} - self.persistor.lost.keys())

    def ask(
        self,
        task: str,
        data: Shareable | Mapping[str, Shareable],
        numbers: Sequence[str],
        check: Callable[[str, Answer], None] = lambda site, answer: None,
        **facts: Any,
    ) -> dict[str, Answer]:
        """Sends a task to every site, or to each site its own, and waits for the answers.

        Args:
            task: the task's name.
            data: one message for all, the same bytes for each, or {site: message}, which asks these sites alone.
            numbers: the scalars that an answer must hold, as finite numbers; it may say that its policy withholds a mean.
            check: raises ContributionError for an answer that must not count.
            facts: what the progress says of this task.

        Returns:
            The accepted answers by site, in alphabetical order. The others are in the progress, with the reason.

        Raises:
            ContributionError: fewer than `min_sites` answers were accepted; names the sites and the reasons.
            Stopped: the job was aborted.
        """
        half = task in protocol.with_shared() and self.plan.federation.half
        each = isinstance(data, Mapping) and not isinstance(data, Shareable)
        sites = [site for site in self.sites() if not each or site in data]
        accepted: dict[str, Answer] = {}
        refused: dict[str, str] = {}

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            site, result = client_task.client.name, client_task.result
            client_task.result = None  # frees the tensors once the round is over
            code = result.get_return_code(ReturnCode.OK)
            try:
                if code != ReturnCode.OK:
                    raise ContributionError(f"site {site}: {task} ended with {code}; its own audit.log says why")
                answer = Answer(*messages.unpack(result))
                _check_numbers(site, answer.scalars, numbers)
                check(site, answer)
            except FedDPError as error:
                reason = str(error) if site in str(error) else f"site {site}: {error}"
                refused[site] = reason
                self.progress("refused", site=site, task=task, reason=reason, **facts)
                self.log_warning(fl_ctx, f"refused: {reason}", fire_event=False)
            else:
                accepted[site] = answer
                scalars = {n: answer.scalars[n] for n in (*numbers, WITHHELD) if n in answer.scalars}
                self.progress("answer", site=site, task=task, **facts, bytes=nbytes(answer.tensors, half), scalars=scalars)

        parts = [(site, data[site]) for site in sites] if each else [(None, data)]
        sent = {target: nbytes(messages.unpack(m)[0], half) for site, m in parts for target in ([site] if site else sites)}
        self.progress("ask", task=task, sites=sites, **facts, bytes=sent)
        tasks = []
        for site, message in parts:
            limit = self.plan.federation.task_timeout
            tasks.append(Task(name=task, data=message, result_received_cb=received, timeout=limit))
            targets = sites if site is None else [site]
            self.broadcast(task=tasks[-1], fl_ctx=self.fl_ctx, targets=targets, min_responses=len(targets))
        while any(t.completion_status is None for t in tasks):
            if self.abort_signal.triggered:
                raise Stopped("the job was aborted")
            time.sleep(POLL)
        dead = any(t.completion_status == TaskCompletionStatus.CLIENT_DEAD for t in tasks)
        for site in sites:
            if site not in accepted and site not in refused:
                refused[site] = f"site {site}: no answer to {task}"
                self.progress("refused", site=site, task=task, reason=refused[site], **facts)
                if dead and self.get_client_disconnect_time(site):
                    # FLARE forgets the dead with each workflow, and the next one would wait for this site for ever
                    self.persistor.lost[site] = f"site {site} was lost at {task}"
        if len(accepted) < self.plan.federation.min_sites:
            raise ContributionError(
                f"{task}: {len(accepted)} of {len(sites)} sites answered well, "
                f"min_sites={self.plan.federation.min_sites}. {'; '.join(refused[s] for s in sorted(refused))}"
            )
        return {site: accepted[site] for site in sorted(accepted)}

    def hand_over(self) -> None:
        """Before anything else is asked, once a job: every site gets the network that the job brought along, if it did.

        It travels as it is, in half-precision runs too: every site holds its bits against the plan's fingerprint.

        Raises:
            FedDPError: the job's tensors are no whole network, or fewer than `min_sites` took it.
        """
        if self.persistor.handed_over or (initial := self.persistor.brought(self.fl_ctx)) is None:
            return
        self.persistor.network_spec.check("the job", initial)
        self.ask(protocol.INITIAL, messages.pack(initial), (), no_tensor)
        self.persistor.handed_over = True

    def progress(self, event: str, **facts: Any) -> None:
        self.persistor.progress(self.fl_ctx, event, **facts)


def _check_numbers(site: str, scalars: Mapping[str, Any], names: Sequence[str]) -> None:
    withheld = MEASURED - scalars.keys() if WITHHELD in scalars else frozenset()
    for name in (*names, *(word for word in (WITHHELD, STD_WITHHELD) if word in scalars)):
        value = scalars.get(name)
        if name not in withheld and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise ContributionError(f"site {site}: its answer's {name} is {value!r}, not a finite number")


def nbytes(tensors: Mapping[str, Tensor], half: bool) -> int:
    """The tensors' own bytes as they travel, `half` of float32's in half precision, without what the transport adds."""
    found = [value for value in tensors.values() if isinstance(value, Tensor)]
    return sum(value.nbytes // (2 if half and value.dtype == torch.float32 else 1) for value in found)


def no_tensor(site: str, answer: Answer) -> None:
    """ContributionError for an answer with tensors."""
    if answer.tensors:
        raise ContributionError(f"site {site}: it sent {len(answer.tensors)} tensors where numbers were asked for")


def mean_of(answers: Mapping[str, Answer], name: str) -> float | None:
    """The uniform mean of one scalar over the sites that sent it; None where all withhold it.

    Of rounded values, whether a site's guard has rounded them or, in the simulator, there is none: the same runs compare alike.
    """
    values = [rounded(name, answer.scalars[name]) for answer in answers.values() if name in answer.scalars]
    return sum(values) / len(values) if values else None
