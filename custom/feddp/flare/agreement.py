"""A site's part in the agreement on the shared tensors: the executor checks the others' notes, the guard signs this site's."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from feddp import protocol
from feddp.errors import SharedError
from feddp.flare.context import SiteContext
from feddp.networks.weights import fingerprint
from feddp.protocol import Kind
from feddp.sealing.note import Told
from feddp.sealing.session import Session
from feddp.stages.message import Message
from feddp.stages.movement import most_samples


def agreeing(context: SiteContext, seals: Callable[[], Session], task: str, message: Message) -> Message:
    """Returns the message for the site's half of the stage.

    Of a request for a note it stores what the note must state. Of shared tensors it requires the notes of enough sites. The
    number of images of the site with most is then the largest one that the sites have signed, not the server's.

    Args:
        seals: returns this site's session of the job; called only if needed.

    Raises:
        SharedError: the sites have not all been told of the same tensors, or too few of them have.
        SealingError: the request holds wrong values.
    """
    if context.simulated:
        return message
    plan, name = context.plan, context.name
    if protocol.spec_of(task).kind is Kind.AGREEMENT:
        told = Told.of(message.scalars)
        if name not in told.sites or not set(told.sites) <= set(plan.sites) or told.brought_by not in protocol.with_shared():
            raise SharedError(f"site {name}: it was asked to sign a note of a task or of sites that its plan does not have")
        seals().notes.tell(told)
    elif task in protocol.with_shared():
        said = {"brought_by": task, "phase": 0, "sites": (), **message.scalars, "shared": fingerprint(message.tensors)}
        given, notes = message.scalars.get("notes"), seals().notes
        theirs = given if isinstance(given, dict) else {}
        left_out = partial(context.left_out, task)
        notes.require_same(Told.of(said), plan.digest(), theirs, plan.federation.min_sites, left_out)
        own = {name: context.samples}
        return replace(message, scalars={**message.scalars, "samples": most_samples(notes.samples | own)})
    return message
