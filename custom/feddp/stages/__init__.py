"""The stages of a run without FLARE, one file each: `serve` is the server's half, `answer` the site's half.

The stage `x` is the module `feddp.stages.x`. `feddp.methods.base.STAGES` gives the order of the stages,
`feddp.protocol.TASKS` their tasks.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from feddp import protocol
from feddp.errors import InputError, PolicyError
from feddp.methods.base import STAGES, TRAIN
from feddp.plan.schema import Plan
from feddp.protocol import ADAPT_STAGE, EVALUATE_STAGE, READY_STAGE, Kind
from feddp.stages.message import Message

# admission reads the stages' names without importing torch
if TYPE_CHECKING:
    from feddp.stages.host import Host
    from feddp.stages.server import Server


class Stage(Protocol):
    """The two functions of a stage's module."""

    def serve(self, server: Server) -> None:
        """Runs the stage at the server, from its first task to its last."""

    def answer(self, task: str, message: Message, host: Host) -> Message:
        """Returns a site's answer to a task of the stage."""


def stage_of(name: str) -> Stage:
    """Returns the module of the stage `name`; raises InputError if there is no such stage."""
    if name not in (*STAGES, READY_STAGE, EVALUATE_STAGE, ADAPT_STAGE):
        raise InputError(f"there is no stage {name!r}; export the job with `feddp job`")
    return cast(Stage, import_module(f"{__name__}.{name}"))


def stages_of(plan: Plan, adapts: bool) -> tuple[str, ...]:
    """Returns a job's stages in order: the first question, then the plan's and the evaluation, or only the adaptation."""
    return (READY_STAGE, ADAPT_STAGE) if adapts else (READY_STAGE, *plan.stages, EVALUATE_STAGE)


def served(name: str, server: Server) -> None:
    """Runs a stage's server half, unless an earlier job of this run has completed it.

    The first question and the evaluation are never noted as complete: a job that continues a run asks its own sites, and gives
    the results again.
    """
    from feddp.stages.ready import meet  # imported here: admission reads names alone

    if name not in server.memory.done:
        if name not in (READY_STAGE, TRAIN):  # training asks before each round but the first
            meet(server)
        stage_of(name).serve(server)
        if name not in (READY_STAGE, EVALUATE_STAGE):
            server.memory.finish(name)


def answered(task: str, message: Message, host: Host) -> Message:
    """Returns a site's answer to a task. A site that does not consent neither gives tensors to peers nor takes theirs.

    Raises:
        FedDPError: the task does not exist, brings peers' tensors without the site's consent, or the stage refuses it.
    """
    if task not in protocol.TASKS:
        raise InputError(f"there is no task {task!r}; export the job with `feddp job`")
    spec = protocol.spec_of(task)
    if task not in protocol.tasks_of(stages_of(host.plan, host.request is not None)):
        raise PolicyError(f"site {host.name}: task {task} belongs to no stage of this job; it was not answered")
    from feddp.training.device import FullGPU, memory_of  # imported here: the server's side of a job needs no torch for it

    consents = not spec.consent or host.consents(spec.consent)
    of_run = spec.stage in STAGES  # not of an adaptation, whose own answer to a handshake looks at the unseen site's images
    if spec.kind in (Kind.HANDSHAKE, Kind.COLLECTION):
        if of_run:
            with memory_of(host.name):
                host.open()  # a site that cannot open its images fails here, before it consents
        if not consents or (of_run and spec.kind is Kind.HANDSHAKE):
            return Message(scalars={"consent": consents})
    if spec.kind is Kind.DELIVERY and message.tensors and not consents:
        raise PolicyError(f"site {host.name} does not consent to the exchange {spec.consent!r}, yet it was sent tensors")

    def attempt() -> Message:
        with memory_of(host.name):
            return stage_of(spec.stage).answer(task, message, host)

    answer: Message | None = None
    try:
        answer = attempt()
    except FullGPU as error:
        if not host.release():
            raise
        logging.getLogger("feddp").warning("%s. Its images and CUDA graphs left the GPU, and task %s is repeated", error, task)
    if answer is None:  # not in the handler: a second error would hold on to the first
        answer = attempt()
    return Message(answer.tensors, {"consent": consents, **answer.scalars}) if "consent" in spec.scalars else answer
