"""A site's part in the agreement on the shared tensors: the executor checks the others' notes, the guard signs this site's."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from feddp import protocol
from feddp.errors import SharedError
from feddp.flare.context import SiteContext
from feddp.networks.weights import fingerprint
from feddp.protocol import Kind
from feddp.sealing.note import NOTE, Told
from feddp.sealing.session import Session, as_tensor
from feddp.stages.message import Message
from feddp.stages.order import require


def agreeing(context: SiteContext, seals: Callable[[], Session], task: str, message: Message) -> Message:
    """Returns the message for the site's half of the stage.

    Of a request for a note it stores what the note must state. Of shared tensors it requires the notes of enough sites; the
    sites' numbers of images are then those that they have signed, now or earlier in this job, not the server's.

    Args:
        seals: returns this site's session of the job; called only if needed.

    Raises:
        SharedError: the sites were not all told of the same tensors, too few of them were, or none has made the step before.
        PolicyError: the plan has no such round or phase.
        SealingError: the request holds wrong values.
    """
    if context.simulated or not context.expected.partition.shared:
        return message
    plan, name = context.plan, context.name
    if protocol.spec_of(task).kind is Kind.AGREEMENT:
        told = Told.of(message.scalars)
        if name not in told.sites or not set(told.sites) <= set(plan.sites) or told.brought_by not in protocol.with_shared():
            raise SharedError(f"site {name}: it was asked to sign a note of a task or of sites that its plan does not have")
        _require_step(context, told.round, told.phase)  # it keeps what it signs, and no more than a plan has
        seals().notes.tell(told)
    elif task in protocol.with_shared():
        notes, given = seals().notes, message.scalars.get("notes")
        said: Mapping[str, Any] = {"round": None, "phase": 0, "sites": (), **message.scalars}
        _require_step(context, said["round"], said["phase"])
        told = Told.of({**said, "brought_by": task, "shared": fingerprint(message.tensors)})
        theirs, left_out = given if isinstance(given, dict) else {}, partial(context.left_out, task)
        made = notes.require_same(told, plan.digest(), theirs, plan.federation.min_sites, left_out)
        earlier = message.scalars.get("earlier")
        of_plan = {site: earlier[site] for site in plan.sites if site in earlier} if isinstance(earlier, dict) else {}
        notes.remember(plan.digest(), of_plan, left_out)
        step = told.round * plan.phases + told.phase
        if step > made and step > context.store.latest():
            raise SharedError(
                f"site {name}: it was sent shared tensors of {task}, round {told.round}, and no site has made the step before;"
                " this site answers nothing. Ask the server's operator why"
            )
        return replace(message, scalars={**message.scalars, "samples": context.known_samples(notes.samples)})
    return message


def _require_step(context: SiteContext, round: object, phase: object) -> None:
    """Raises PolicyError unless the plan has this round, or the state after its last one, and this phase."""
    require(context.name, "round", round, 0, context.plan.rounds)
    require(context.name, "phase", phase, 0, context.plan.phases - 1)


def note_of(context: SiteContext, session: Session) -> dict[str, Any]:
    """Returns this site's signed note of what it was told, as the tensor that leaves."""
    note = session.notes.sign(context.plan.digest(), context.samples, context.store.latest())
    return {NOTE: as_tensor(note)}
