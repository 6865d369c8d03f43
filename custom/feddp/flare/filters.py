"""Two filters over one rule: the job's strips private tensors from what is sent, the site's refuses to send them."""

import json
from typing import Any

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.flare.site import site_component
from feddp.partition import resolve


class StripPrivate(Filter):
    """For a job's `task_result_filters`: sends what is left without the method's private tensors.

    Consented collections of personal tensors are another task, on which the job does not put this filter.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if shareable.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            return shareable
        private = set(site_component(fl_ctx).partition.private)
        tensors, scalars = messages.unpack(shareable)
        if not private & tensors.keys():
            return shareable
        count = len(private & tensors.keys())
        self.log_warning(fl_ctx, f"stripped {count} private tensors that the executor was sending", fire_event=False)
        return messages.pack({name: value for name, value in tensors.items() if name not in private}, **scalars)


class PrivateTensorGuard(Filter):
    """For a site's privacy.json: whatever the job, no private tensor leaves, and nothing but tensors and numbers does.

    Private is what the job's method keeps private, and whatever else the site's policy names in `private`.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if shareable.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            return shareable
        component = site_component(fl_ctx)
        site, task = fl_ctx.get_identity_name(), fl_ctx.get_prop(FLContextKey.TASK_NAME)
        tensors, scalars = messages.unpack(shareable)
        _only_numbers(site, task, scalars)
        policy = component.policy(fl_ctx)
        private = set(component.partition.private)
        if policy.private:
            private |= set(resolve(component.network, policy.private).private)
        if task == messages.COLLECT:
            if tensors and not policy.calibrates:
                raise FedDPError(f"site {site}: its policy does not consent to the calibration exchange; nothing was sent")
            return shareable
        if leaking := sorted(private & tensors.keys()):
            raise FedDPError(
                f"site {site}: task {task} tried to send {len(leaking)} private tensors ({leaking[0]}, ...); nothing was sent"
            )
        if tensors and task != messages.TRAIN:
            raise FedDPError(f"site {site}: task {task} tried to send tensors; only {messages.TRAIN} may; nothing was sent")
        return shareable


def _only_numbers(site: str, task: str, value: Any) -> None:
    if isinstance(value, dict):
        for part in value.values():
            _only_numbers(site, task, part)
    elif not isinstance(value, int | float):
        text = json.dumps(value, default=lambda v: type(v).__name__)[:40]
        raise FedDPError(f"site {site}: task {task} tried to send {text} among its scalars; nothing was sent")
