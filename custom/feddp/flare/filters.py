"""Two filters over one rule: the job's strips private tensors from what is sent, the site's lets pass what may leave."""

from typing import Any

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from torch import Tensor

from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.flare.sealing import NEEDS, leaving
from feddp.flare.site import site_component
from feddp.methods import base, spectra
from feddp.methods.aggregation import Spec
from feddp.partition import select


class StripPrivate(Filter):
    """For a job's `task_result_filters`: sends what is left without the method's private tensors.

    Consented collections of personal tensors are another task, on which the job does not put this filter.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        code = shareable.get_return_code(ReturnCode.OK)
        if code != ReturnCode.OK:
            return make_reply(code)  # an error carries nothing else
        private = set(site_component(fl_ctx).partition.private)
        tensors, scalars = messages.unpack(shareable)
        if not private & tensors.keys():
            return shareable
        count = len(private & tensors.keys())
        self.log_warning(fl_ctx, f"stripped {count} private tensors that the executor was sending", fire_event=False)
        return messages.pack({name: value for name, value in tensors.items() if name not in private}, **scalars)


class PrivateTensorGuard(Filter):
    """For a site's privacy.json: whatever the job, what leaves is the tensors that its task may send, and known numbers.

    A training result may hold shared tensors, a collection the ones that are exchanged (FedLC's: the head; FedDG's: the centres
    of amplitude spectra, nothing larger), and only with consent; what is given to a hospital outside is exactly a whole
    network, with consent to that. A role that the site's policy names in `private` leaves in none of them. The message is
    written anew, so nothing rides along with it. What other sites are to have is sealed for them here, last of all; with an
    introduction goes this site's certificate, which no executor has a hand in.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        code = shareable.get_return_code(ReturnCode.OK)
        if code != ReturnCode.OK:
            return make_reply(code)
        component = site_component(fl_ctx)
        site, task = fl_ctx.get_identity_name(), fl_ctx.get_prop(FLContextKey.TASK_NAME)
        tensors, scalars = messages.unpack(shareable)
        policy, partition = component.policy(fl_ctx), component.partition
        word = NEEDS.get(task)
        if word and tensors and not policy.consents(word):
            raise FedDPError(f"site {site}: its policy does not consent to the {word} exchange; nothing was sent")
        allowed: tuple[str, ...] = ()
        if task == messages.TRAIN:
            allowed = partition.shared
        elif task == messages.COLLECT:
            allowed = component.plan.exchanged(partition)
        elif task == messages.COLLECT_HEADS:
            allowed = component.plan.heads(component.network)
        elif task == messages.GIVE_MODEL:
            allowed = partition.shared + partition.private
        elif task == messages.COLLECT_SPECTRA and base.SPECTRA in component.plan.stages:
            allowed = (spectra.AMPLITUDE,)
        never = set().union(*(select(component.network, role) for role in policy.private))
        if wrong := sorted(tensors.keys() - (set(allowed) - never)):
            raise FedDPError(
                f"site {site}: task {task} tried to send {len(wrong)} tensors that may not leave ({wrong[0]}, ...);"
                " nothing was sent"
            )
        if wrong := [name for name, value in tensors.items() if not isinstance(value, Tensor)]:
            raise FedDPError(f"site {site}: task {task} tried to send {wrong[0]}, which is no tensor; nothing was sent")
        if task == messages.GIVE_MODEL and tensors:
            Spec.of(component.network.state_dict(), allowed).check(site, tensors)
        if task == messages.COLLECT_SPECTRA and tensors:
            spectra.check(component.plan, site, tensors)
        _only_known_numbers(site, task, scalars)
        return messages.pack(leaving(component, task, tensors, fl_ctx), **scalars)


def _only_known_numbers(site: str, task: str, scalars: dict[str, Any], known: frozenset[str] = messages.SCALARS) -> None:
    for name, value in scalars.items():
        if known and name not in known:
            raise FedDPError(f"site {site}: task {task} tried to send {name[:20]!r} among its scalars; nothing was sent")
        if isinstance(value, dict):
            # the peers' results are under the peers' names
            _only_known_numbers(site, task, value, frozenset() if name == "peers" else messages.SCALARS)
        elif not isinstance(value, int | float):
            kind = type(value).__name__
            raise FedDPError(f"site {site}: task {task} tried to send a {kind} among its scalars ({name}); nothing was sent")
