"""The two result filters: the job's filter strips private tensors, the site's guard sends only what may leave."""

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
from feddp.errors import ContributionError, FedDPError, PolicyError
from feddp.flare import messages, numbers
from feddp.flare.audit import audit
from feddp.flare.context import SiteContext
from feddp.flare.sealing import leaving
from feddp.flare.site import site_component
from feddp.partition import select
from feddp.protocol import STD_WITHHELD, WITHHELD, Kind
from feddp.stages import stages_of


class StripPrivate(Filter):
    """For a job's `task_result_filters`: removes the method's private tensors from a result.

    The job does not put this filter on the tasks that collect personal tensors with consent.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        code = shareable.get_return_code(ReturnCode.OK)
        if code != ReturnCode.OK:
            return make_reply(code)  # an error result holds only its code
        private = set(site_component(fl_ctx).expected.partition.private)
        tensors, scalars = messages.unpack(shareable)
        if not private & tensors.keys():
            return shareable
        count = len(private & tensors.keys())
        self.log_warning(fl_ctx, f"stripped {count} private tensors from the executor's result", fire_event=False)
        return messages.pack({name: value for name, value in tensors.items() if name not in private}, **scalars)


class PrivateTensorGuard(Filter):
    """For a site's privacy.json: from any job, only the tensors that the task may send and known numbers leave the site.

    Tensors: a training result holds exactly the shared tensors. A collection holds, with consent only, exactly the exchanged
    tensors: personal tensors, FedLC's heads, FedDG's centres of mean amplitude spectra, or a whole network for an unseen site.
    Tensors of a role in the policy's `private` never leave, nor values outside a tensor's domain (`feddp.domains`).
    Numbers: the guard withholds numbers measured over fewer than `min_images` images and standard deviations over fewer than
    `std_images`. It rounds the others and counts the result against the policy's `budget`.

    The guard builds a new message, so nothing else travels with it. Everything stopped or withheld is in the site's log and
    audit file. Last, the guard seals what peers receive. It also adds this site's certificate to a handshake; the executor
    does not handle it.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        try:
            site, task = fl_ctx.get_identity_name(), fl_ctx.get_prop(FLContextKey.TASK_NAME)
            code = shareable.get_return_code(ReturnCode.OK)
            if code not in messages.CODES:
                raise PolicyError(f"site {site}: task {task} tried to send a return code that is not FLARE's; nothing was sent")
            if code != ReturnCode.OK:
                return make_reply(code)
            component = site_component(fl_ctx)
            context = component.context(fl_ctx)
            policy, plan = context.policy, context.plan
            tensors, scalars = messages.unpack(shareable)
            sent = _tensors(task, tensors, context)
            values = numbers.checked(site, task, scalars, plan)
            if few := numbers.too_few(task, values, plan, policy.data, policy.min_images):
                what = f"{', '.join(sorted(few))}: measured over fewer than {policy.min_images} images or cases"
                self._note(fl_ctx, f"withheld {what}")
                values = {name: value for name, value in values.items() if name not in few}
                values[WITHHELD] = policy.min_images
            means = numbers.without_std(task, values, plan, policy.data, policy.std_images)
            if means != values:
                values = means | {STD_WITHHELD: policy.std_images}
            if protocol.MEASURED & values.keys() or (sent and task == protocol.TRAIN):
                context.measured()
            values = {name: protocol.rounded(name, value) for name, value in values.items()}
            return messages.pack(leaving(context, partial(component.seals, fl_ctx), task, sent), **values)
        except Exception as error:  # of any type: nothing was sent, and the site's own files hold the reason
            self._note(fl_ctx, f"stopped: {error if isinstance(error, FedDPError) else type(error).__name__}")
            raise

    def _note(self, fl_ctx: FLContext, what: str) -> None:
        self.log_warning(fl_ctx, audit(fl_ctx, f"egress guard {what}"), fire_event=False)


def _tensors(task: str, tensors: Mapping[str, Any], context: SiteContext) -> dict[str, Tensor]:
    """Returns copies of the tensors; each copy has its own storage, which holds nothing else.

    Raises:
        PolicyError: the policy does not consent, or these are not exactly the tensors that the task sends.
        ContributionError: a tensor has another shape or type, or holds a value outside its domain.
    """
    if not tensors:
        return {}
    site, spec = context.name, protocol.spec_of(task)
    if spec.kind is Kind.COLLECTION and not context.consents(spec.consent):
        raise PolicyError(f"site {site}: its policy does not consent to the {spec.consent} exchange; nothing was sent")
    expected = context.expected
    # a task of another job's stage sends no tensors
    stages = stages_of(context.plan, context.request is not None)
    names = expected.names(spec.tensors) if spec.stage in stages else ()
    never = set().union(*(select(expected.network, role) for role in context.policy.private))
    if wrong := sorted(tensors.keys() - (set(names) - never), key=str):
        raise PolicyError(
            f"site {site}: task {task} tried to send {len(wrong)} tensors that may not leave ({wrong[0]}, ...);"
            " nothing was sent"
        )
    # a subclass may hold code and further attributes; a sparse tensor holds more than values
    if wrong := [n for n, value in tensors.items() if type(value) is not Tensor or value.layout is not torch.strided]:
        raise PolicyError(f"site {site}: task {task} tried to send {wrong[0]}, which is not a plain tensor; nothing was sent")
    try:
        expected.check(spec.tensors, site, tensors)
    except ContributionError as error:  # honest software sends such tensors only after a training that diverged
        remedy = "if the training diverged, export the job with a lower lr, or check this site's images"
        raise ContributionError(f"{error}; nothing was sent; {remedy}") from None
    return {name: tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in names}
