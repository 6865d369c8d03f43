"""Two filters over one rule: the job's strips private tensors from what is sent, the site's lets pass what may leave."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from torch import Tensor

from feddp import protocol
from feddp.errors import FedDPError, PolicyError
from feddp.flare import messages, numbers
from feddp.flare.audit import audit
from feddp.flare.context import SiteContext
from feddp.flare.sealing import leaving
from feddp.flare.site import site_component
from feddp.partition import select
from feddp.protocol import STD_WITHHELD, WITHHELD, Kind

CODES = frozenset(code for name, code in vars(ReturnCode).items() if name.isupper())


class StripPrivate(Filter):
    """For a job's `task_result_filters`: sends what is left without the method's private tensors.

    Consented collections of personal tensors are another task, on which the job does not put this filter.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        code = shareable.get_return_code(ReturnCode.OK)
        if code != ReturnCode.OK:
            return make_reply(code)  # an error carries nothing else
        private = set(site_component(fl_ctx).expected.partition.private)
        tensors, scalars = messages.unpack(shareable)
        if not private & tensors.keys():
            return shareable
        count = len(private & tensors.keys())
        self.log_warning(fl_ctx, f"stripped {count} private tensors that the executor was sending", fire_event=False)
        return messages.pack({name: value for name, value in tensors.items() if name not in private}, **scalars)


class PrivateTensorGuard(Filter):
    """For a site's privacy.json: whatever the job, what leaves is the tensors that its task may send, and known numbers.

    A training result holds exactly the shared tensors, a collection exactly the ones that are exchanged (FedLC's: the head;
    FedDG's: the centres of amplitude spectra, nothing larger), and only with consent; what is given to a hospital outside is
    exactly a whole network, with consent to that. A role that the site's policy names in `private` leaves in none of them. Of
    what is measured over fewer images than the policy's `min_images`, the answer says only that it is withheld, and over
    fewer than its `std_images`, no standard deviation; what is left is rounded (`flare.numbers`), and counted against the
    policy's `budget`. The message is written anew, so nothing rides along with it; what is stopped or withheld is in the
    site's log and in its audit file. What other sites are to have is sealed for them here, last of all; with an introduction
    goes this site's certificate, which no executor has a hand in.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        try:
            site, task = fl_ctx.get_identity_name(), fl_ctx.get_prop(FLContextKey.TASK_NAME)
            code = shareable.get_return_code(ReturnCode.OK)
            if code not in CODES:
                raise PolicyError(f"site {site}: task {task} tried to send a return code that is not FLARE's; nothing was sent")
            if code != ReturnCode.OK:
                return make_reply(code)
            component = site_component(fl_ctx)
            context = component.context(fl_ctx)
            policy, plan = context.policy, context.plan
            tensors, scalars = messages.unpack(shareable)
            sent = _tensors(task, tensors, context)
            said = numbers.checked(site, task, scalars, plan)
            if few := numbers.too_few(task, said, plan, policy.data, policy.min_images):
                what = f"{', '.join(sorted(few))}: over fewer than {policy.min_images} images or cases"
                self._note(fl_ctx, f"withheld {what}")
                said = {name: value for name, value in said.items() if name not in few}
                said[WITHHELD] = policy.min_images
            means = numbers.without_std(task, said, plan, policy.data, policy.std_images)
            if means != said:
                said = means | {STD_WITHHELD: policy.std_images}
            if protocol.MEASURED & said.keys() or (sent and task == protocol.TRAIN):
                context.measured()
            said = {name: protocol.rounded(name, value) for name, value in said.items()}
            return messages.pack(leaving(context, partial(component.seals, fl_ctx), task, sent), **said)
        except Exception as error:  # of whatever kind: nothing was sent, and the site's own files say why
            self._note(fl_ctx, f"stopped: {error if isinstance(error, FedDPError) else type(error).__name__}")
            raise

    def _note(self, fl_ctx: FLContext, what: str) -> None:
        self.log_warning(fl_ctx, audit(fl_ctx, f"egress guard {what}"), fire_event=False)


def _tensors(task: str, tensors: Mapping[str, Any], context: SiteContext) -> dict[str, Tensor]:
    """Copies of the tensors, each with a storage of its own that holds nothing else.

    Raises:
        PolicyError: the policy does not consent, or these are not exactly the tensors that the task sends.
    """
    if not tensors:
        return {}
    site, spec = context.name, protocol.spec_of(task)
    if spec.kind is Kind.COLLECTION and not context.consents(spec.consent):
        raise PolicyError(f"site {site}: its policy does not consent to the {spec.consent} exchange; nothing was sent")
    expected = context.expected
    # all of them or none, where the job has the task's stage
    names = expected.names(spec.tensors) if spec.stage in (*context.plan.stages, protocol.ADAPT_STAGE) else ()
    never = set().union(*(select(expected.network, role) for role in context.policy.private))
    if wrong := sorted(tensors.keys() - (set(names) - never), key=str):
        raise PolicyError(
            f"site {site}: task {task} tried to send {len(wrong)} tensors that may not leave ({wrong[0]}, ...);"
            " nothing was sent"
        )
    # a subclass has code and attributes of its own, a sparse tensor parts that are no values
    if wrong := [n for n, value in tensors.items() if type(value) is not Tensor or value.layout is not torch.strided]:
        raise PolicyError(f"site {site}: task {task} tried to send {wrong[0]}, which is no tensor; nothing was sent")
    expected.check(spec.tensors, site, tensors)
    return {name: tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in names}
