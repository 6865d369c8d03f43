"""The stages of a run, one file each, without FLARE: `serve` is the server's half, `answer` the site's beside it.

A stage is found by its name: the module of that name here. Its place in the order is in `feddp.methods.base.STAGES`, its tasks
are in `feddp.protocol.TASKS`.
"""

from importlib import import_module
from typing import Protocol

from feddp import protocol
from feddp.errors import InputError, PolicyError
from feddp.methods.base import STAGES
from feddp.plan.schema import Plan
from feddp.protocol import ADAPT_STAGE, EVALUATE_STAGE, Kind
from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.server import Server


class Stage(Protocol):
    """What a stage's module holds."""

    def serve(self, server: Server) -> None:
        """The server's half, from the stage's first task to its last."""

    def answer(self, task: str, message: Message, host: Host) -> Message:
        """The site's half: its answer to a task of the stage."""


def stage_of(name: str) -> Stage:
    """The stage called `name`. InputError where there is none."""
    if name not in (*STAGES, EVALUATE_STAGE, ADAPT_STAGE):
        raise InputError(f"there is no stage {name!r}; export the job with `feddp job`")
    return import_module(f"{__name__}.{name}")  # type: ignore[return-value]  # mypy does not compare a module found by name


def stages_of(plan: Plan, adapts: bool) -> tuple[str, ...]:
    """The stages of a job in their order: those of its plan and the evaluation, or the adaptation alone."""
    return (ADAPT_STAGE,) if adapts else (*plan.stages, EVALUATE_STAGE)


def answered(task: str, message: Message, host: Host) -> Message:
    """A site's answer to a task. Without its consent it gives nothing to other sites, and takes nothing from them.

    Raises:
        FedDPError: there is no such task; it brought other sites' tensors to a site that does not consent; or as its stage.
    """
    if task not in protocol.TASKS:
        raise InputError(f"there is no task {task!r}; export the job with `feddp job`")
    spec = protocol.spec_of(task)
    consents = not spec.consent or host.consents(spec.consent)
    if spec.kind is Kind.INTRODUCTION and spec.stage in STAGES:
        host.open()  # a site that cannot take part says so before it consents
    if spec.kind is Kind.INTRODUCTION or (spec.kind is Kind.COLLECTION and not consents):
        return Message(scalars={"consent": consents})
    if spec.kind is Kind.DELIVERY and message.tensors and not consents:
        raise PolicyError(f"site {host.name} does not consent to the exchange {spec.consent!r}, yet it was sent tensors")
    answer = stage_of(spec.stage).answer(task, message, host)
    return Message(answer.tensors, {"consent": consents, **answer.scalars}) if "consent" in spec.scalars else answer
