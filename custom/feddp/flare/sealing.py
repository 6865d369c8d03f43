"""Which tasks are a sealed exchange, and what a site does on the way in and on the way out of one.

On the way out the guard of the site's own policy seals, last of all; on the way in the executors' base opens. Where there are
certificates neither can be left out: an executor of ours gets no tensor of a peer's that was not sealed for this site. FLARE's
simulator has no certificates, and applies no guard: there the exchange is in the clear.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.flare.policy import CALIBRATION, OUTSIDE, SPECTRA
from feddp.kit.certificates import certificate_problems
from feddp.kit.kit import Kit
from feddp.outside.models import GLOBAL
from feddp.sealing.envelope import recipients_of
from feddp.sealing.identity import Identity
from feddp.training.store import Tensors, by_site, together

if TYPE_CHECKING:
    from feddp.flare.site import SiteComponent

# an exchange is three tasks, each with the word of the consent it needs: introductions, a collection, what is handed out of it
INTRODUCES = {messages.INTRODUCE_SPECTRA: SPECTRA, messages.INTRODUCE: CALIBRATION, messages.JOIN: OUTSIDE}
# the consent without which no tensor leaves in a task
NEEDS = {
    messages.COLLECT_SPECTRA: SPECTRA,
    messages.COLLECT: CALIBRATION,
    messages.COLLECT_HEADS: CALIBRATION,
    messages.GIVE_MODEL: OUTSIDE,
}
HANDS_OUT = {
    messages.TAKE_SPECTRA: messages.COLLECT_SPECTRA,
    messages.CALIBRATE: messages.COLLECT,
    messages.CALIBRATE_HEADS: messages.COLLECT_HEADS,
    messages.ADAPT: messages.GIVE_MODEL,
}


def simulated(fl_ctx: FLContext) -> bool:
    """Whether this site is one of FLARE's simulator."""
    return bool(fl_ctx.get_prop(FLContextKey.SIMULATE_MODE))


def identity_of(fl_ctx: FLContext) -> Identity:
    """This site's, from the startup kit that its process runs in.

    Raises:
        FedDPError: there is something wrong with its certificate, its key or its root.
    """
    kit = Kit.open(Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir()))
    site = fl_ctx.get_identity_name()
    if problems := certificate_problems(kit):
        raise FedDPError(f"site {site}: it cannot exchange anything: {'; '.join(map(str, problems))}")
    return Identity.read(site, kit.certificate, kit.key, kit.root, kit.server_identity)


def arriving(component: "SiteComponent", task: str, tensors: Tensors, scalars: dict[str, Any], fl_ctx: FLContext) -> Tensors:
    """The tensors of a task as its executor is to see them.

    Raises:
        FedDPError: an introduction or an envelope is not what it should be.
    """
    if simulated(fl_ctx):
        return tensors
    epoch = scalars.get("epoch", 0)
    if type(epoch) is not int:
        raise FedDPError(f"site {fl_ctx.get_identity_name()}: it was asked for epoch {epoch!r}, which is no number of one")
    if task in NEEDS:
        policy, word = component.policy(fl_ctx), NEEDS[task]
        if policy.consents(word):
            component.seals(fl_ctx).meet(word, task, epoch, by_site(tensors), _recipients(component, policy.recipients))
        return {}
    if task in HANDS_OUT:
        collection = HANDS_OUT[task]
        peers = by_site(tensors)
        brought = {GLOBAL: peers.pop(GLOBAL)} if task == messages.ADAPT and GLOBAL in peers else {}  # the job's own
        if not peers:
            return together(brought)
        opened = component.seals(fl_ctx).open(NEEDS[collection], collection, epoch, peers)
        component.store(fl_ctx).record("open", task=task, epoch=epoch, senders=list(opened))
        return together(opened | brought)
    return tensors


def _recipients(component: "SiteComponent", named: tuple[str, ...] | None) -> set[str]:
    """Whom this site seals for: of the job's own sites those that its policy names; of a newcomer's job, the newcomer."""
    job = {component.outside["newcomer"]} if component.outside else set(component.plan.sites)
    return job if named is None else job & set(named)


def leaving(component: "SiteComponent", task: str, tensors: Tensors, fl_ctx: FLContext) -> Tensors:
    """The tensors of a result that the guard lets pass, as they leave the site.

    Raises:
        FedDPError: they are to be sealed and there is nobody to seal them for, or this site's certificate is no good.
    """
    if simulated(fl_ctx):
        return tensors
    if task in INTRODUCES:
        word = INTRODUCES[task]
        return component.seals(fl_ctx).introduce(word) if component.policy(fl_ctx).consents(word) else {}
    if task in NEEDS and tensors:
        sealed = component.seals(fl_ctx).seal(task, tensors)
        for envelope in sealed.values():
            recipients = recipients_of(fl_ctx.get_identity_name(), envelope.numpy().tobytes())
            component.store(fl_ctx).record("seal", task=task, recipients=recipients)
        return sealed
    return tensors
