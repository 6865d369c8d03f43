"""What a site does on the way in and on the way out of a sealed exchange.

On the way out the guard of the site's own policy seals, last of all; on the way in the executors' base opens. Where there are
certificates neither can be left out: an executor of ours gets no tensor of a peer's that was not sealed for this site. FLARE's
simulator has no certificates, and applies no guard: there the exchange is in the clear.
"""

from collections.abc import Callable
from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

from feddp import protocol
from feddp.adaptation.models import GLOBAL
from feddp.errors import SealingError
from feddp.flare.context import SiteContext
from feddp.protocol import Kind
from feddp.sealing.envelope import recipients_of
from feddp.sealing.identity import Identity
from feddp.sealing.kit import Kit
from feddp.sealing.kit_certificates import certificate_problems
from feddp.sealing.session import Session
from feddp.stages.message import Message
from feddp.training.store import Tensors, by_site, together


def simulated(fl_ctx: FLContext) -> bool:
    """Whether this site is one of FLARE's simulator."""
    return bool(fl_ctx.get_prop(FLContextKey.SIMULATE_MODE))


def identity_of(fl_ctx: FLContext) -> Identity:
    """This site's, from the startup kit that its process runs in.

    Raises:
        SealingError: there is something wrong with its certificate, its key or its root.
    """
    kit = Kit.open(Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir()))
    site = fl_ctx.get_identity_name()
    if problems := certificate_problems(kit):
        raise SealingError(f"site {site}: it cannot exchange anything: {'; '.join(map(str, problems))}")
    return Identity.read(site, kit.certificate, kit.key, kit.root, kit.server_identity)


def arriving(context: SiteContext, seals: Callable[[], Session], task: str, message: Message) -> Tensors:
    """The tensors of a task as the site's half of the stage is to see them.

    Args:
        seals: gives this site's part in the job's sealed exchanges, where it is needed.

    Raises:
        SealingError: an introduction or an envelope is not what it should be.
    """
    if context.simulated:
        return message.tensors
    epoch = message.scalars.get("epoch", 0)
    if type(epoch) is not int:
        raise SealingError(f"site {context.name}: it was asked for epoch {epoch!r}, which is no number of one")
    spec = protocol.spec_of(task)
    if spec.kind is Kind.COLLECTION:
        if context.consents(spec.consent):
            seals().meet(spec.consent, task, epoch, by_site(message.tensors), _recipients(context))
        return {}
    if spec.kind is Kind.DELIVERY:
        peers = by_site(message.tensors)
        brought = {GLOBAL: peers.pop(GLOBAL)} if task == protocol.ADAPT and GLOBAL in peers else {}  # the job's own
        if not peers:
            return together(brought)
        opened = seals().open(spec.consent, spec.delivers, epoch, peers)
        context.store.record("open", task=task, epoch=epoch, senders=list(opened))
        return together(opened | brought)
    return message.tensors


def _recipients(context: SiteContext) -> set[str]:
    """Whom this site seals for: of the job's own sites those that its policy names; of a newcomer's job, the newcomer."""
    named = context.policy.recipients
    job = {context.request.newcomer} if context.request else set(context.plan.sites)
    return job if named is None else job & set(named)


def leaving(context: SiteContext, seals: Callable[[], Session], task: str, tensors: Tensors) -> Tensors:
    """The tensors of a result that the guard lets pass, as they leave the site.

    Raises:
        SealingError: they are to be sealed and there is nobody to seal them for, or this site's certificate is no good.
    """
    if context.simulated:
        return tensors
    spec = protocol.spec_of(task)
    if spec.kind is Kind.HANDSHAKE:
        return seals().introduce(spec.consent) if context.consents(spec.consent) else {}
    if spec.kind is Kind.COLLECTION and tensors:
        sealed = seals().seal(task, tensors)
        for envelope in sealed.values():
            recipients = recipients_of(context.name, envelope.numpy().tobytes())
            context.store.record("seal", task=task, recipients=recipients)
        return sealed
    return tensors
