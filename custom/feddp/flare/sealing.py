"""A site's part in sealed exchanges: the guard seals the tensors that leave, the executor opens those that arrive.

With certificates both are mandatory: a stage gets only peers' tensors that were sealed for this site. FLARE's simulator has
neither certificates nor guard: its exchanges are in the clear.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from torch import Tensor

from feddp import protocol
from feddp.adaptation.choices import GLOBAL
from feddp.errors import PolicyError, SealingError
from feddp.flare.agreement import note_of
from feddp.flare.context import SiteContext
from feddp.partition import Tensors
from feddp.protocol import Kind
from feddp.reading import short
from feddp.sealing.ends import of_peer, warnings
from feddp.sealing.envelope import recipients_of
from feddp.sealing.identity import Identity
from feddp.sealing.kit import Kit
from feddp.sealing.kit_certificates import certificate_problems
from feddp.sealing.peers import LeftOut
from feddp.sealing.session import Session
from feddp.stages.message import Message
from feddp.training.store import by_site, together


def simulated(fl_ctx: FLContext) -> bool:
    """Whether this site runs in FLARE's simulator."""
    return bool(fl_ctx.get_prop(FLContextKey.SIMULATE_MODE))


def identity_of(fl_ctx: FLContext) -> Identity:
    """Returns this site's identity, read from the startup kit of its process.

    Raises:
        SealingError: its certificate, key or root certificate is missing or invalid.
    """
    kit = Kit.open(Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir()))
    site = fl_ctx.get_identity_name()
    if problems := certificate_problems(kit):
        raise SealingError(f"site {site}: it cannot seal or open tensors: {'; '.join(map(str, problems))}")
    return Identity.read(site, kit.certificate, kit.key, kit.root, kit.server_identity)


def arriving(context: SiteContext, seals: Callable[[], Session], task: str, message: Message) -> Mapping[str, Tensor]:
    """Returns a task's tensors for the site's half of the stage, without the peers whose envelope is not valid or that the
    policy's `senders` does not name.

    Args:
        seals: returns this site's session of the job's sealed exchanges; called only if needed.

    Raises:
        SealingError: no handshake or no envelope is valid, an envelope is of a site that gives nothing in this job, or as
            `Session.open`.
    """
    spec, left_out = protocol.spec_of(task), partial(context.left_out, task)
    if context.simulated:
        return together(_used(context, by_site(message.tensors), left_out)) if spec.kind is Kind.DELIVERY else message.tensors
    epoch = message.scalars.get("epoch", 0)
    if type(epoch) is not int:
        raise SealingError(f"site {context.name}: it was asked for epoch {epoch!r}, which is not a whole number")
    if epoch and task not in (protocol.COLLECT_HEADS, protocol.CALIBRATE_HEADS):
        raise SealingError(f"site {context.name}: it was asked for epoch {epoch} of {task}, which has no epochs")
    if spec.kind is Kind.COLLECTION:
        if context.consents(spec.consent):
            session = seals()
            before = session.met.keys() | set()
            met = session.meet(spec.consent, task, epoch, by_site(message.tensors), _recipients(context), left_out)
            for line in warnings(of_peer(peer, session.met[peer]) for peer in met if peer not in before):
                context.audit(line)
        return {}
    if spec.kind is Kind.DELIVERY:
        peers = by_site(message.tensors)
        brought = {GLOBAL: peers.pop(GLOBAL)} if task == protocol.ADAPT and GLOBAL in peers else {}  # from the job, not sealed
        if not peers:
            return together(brought)
        if strangers := sorted(peers.keys() - _senders(context)):
            whose = "donors" if context.request else "sites"
            raise SealingError(
                f"site {context.name}: {task} brought tensors of {short(', '.join(strangers))}, not among this job's {whose};"
                " nothing was opened. Ask the server's operator where they come from"
            )
        peers = _used(context, peers, left_out)
        opened = seals().open(spec.consent, spec.delivers, epoch, peers, left_out)
        context.store.record("open", task=task, epoch=epoch, senders=list(opened))
        return together(opened | brought)
    return message.tensors


def ends(context: SiteContext, task: str, message: Message) -> bool:
    """Returns whether an exchange is over with this task's tensors: with its delivery, of the heads with the last epoch's."""
    if protocol.spec_of(task).kind is not Kind.DELIVERY:
        return False
    return task != protocol.CALIBRATE_HEADS or message.scalars.get("epoch") == context.plan.heads.heads_epochs


def _used(context: SiteContext, peers: Mapping[str, Tensors], left_out: LeftOut) -> dict[str, Tensors]:
    """Returns what a delivery brought, without the sites that the policy's `senders` does not name; `left_out` is told each."""
    named = context.policy.senders
    used = [peer for peer in peers if named is None or peer in {*named, GLOBAL}]
    for peer in sorted(peers.keys() - set(used)):
        left_out(peer, PolicyError(f"site {peer}: `senders` in this site's privacy.json does not name it"))
    return {peer: peers[peer] for peer in used}


def _senders(context: SiteContext) -> set[str]:
    """Returns the sites that may give this site tensors: the job's sites, or the donors of its unseen site."""
    return set(context.request.donors if context.request else context.plan.sites)


def _recipients(context: SiteContext) -> set[str]:
    """Returns the sites that may open this site's tensors: the job's sites, or its unseen site, if the policy names them."""
    named = context.policy.recipients
    job = {context.request.newcomer} if context.request else set(context.plan.sites)
    return job if named is None else job & set(named)


def leaving(context: SiteContext, seals: Callable[[], Session], task: str, tensors: Tensors) -> Tensors:
    """Returns the tensors of a checked result as they leave the site: sealed, if they go to peers; with a note, if one is
    asked for.

    Raises:
        SealingError: there is no recipient to seal them for, or this site's certificate is missing or invalid.
    """
    if context.simulated:
        return tensors
    spec = protocol.spec_of(task)
    if spec.kind is Kind.AGREEMENT:
        return note_of(context, seals())
    if spec.kind is Kind.HANDSHAKE:
        return seals().introduce(spec.consent) if context.consents(spec.consent) else {}
    if spec.kind is Kind.COLLECTION and tensors:
        sealed = seals().seal(task, tensors)
        for envelope in sealed.values():
            recipients = recipients_of(context.name, envelope.numpy().tobytes())
            context.store.record("seal", task=task, recipients=recipients)
        return sealed
    return tensors
