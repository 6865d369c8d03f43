"""A hospital's own privacy filter on what a round of training changed."""

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from torch import Tensor, nn

from feddp import protocol
from feddp.errors import PolicyError
from feddp.flare import messages
from feddp.flare.site import site_component
from feddp.methods.aggregation import Spec


class UpdatePrivacy(Filter):
    """For a site's privacy.json, before the guard: FLARE's PercentilePrivacy or SVTPrivacy on γ_k − γ^t.

    FLARE's filters take differences as numpy arrays, and would clip the weights themselves if they were given a message of
    ours. This hands them the difference of the tensors in a training result to those that the task brought, and sends γ^t
    with what they leave of it. In float64, so that a value that they leave alone is sent to the bit. Integer tensors are sent
    as they are. A running variance is sent as no less than 0, whatever the noise: it uses their output only, so it costs no
    privacy. Other tasks' results pass. The scalars are not changed.

    SVTPrivacy draws from numpy's global generator, which the system seeds in every process and nothing here does: nobody who
    knows the job's seed knows the noise, and a run with it does not repeat to the bit.

    Args:
        mechanism: the filter of FLARE's, nested in privacy.json by its own path and args.
    """

    def __init__(self, mechanism: DXOFilter):
        super().__init__()
        if not isinstance(mechanism, DXOFilter):
            raise PolicyError(f"UpdatePrivacy's mechanism is {mechanism!r}, no filter; give it a `path` and `args` of its own")
        self.mechanism = mechanism

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        code = shareable.get_return_code(ReturnCode.OK)
        if code != ReturnCode.OK or fl_ctx.get_prop(FLContextKey.TASK_NAME) != protocol.TRAIN:
            return shareable
        site = fl_ctx.get_identity_name()
        tensors, scalars = messages.unpack(shareable)
        received = fl_ctx.get_prop(messages.RECEIVED) or {}
        if strange := sorted(tensors.keys() - received.keys()):
            raise PolicyError(
                f"site {site}: {len(strange)} tensors have no difference to what the task brought, which lacks them"
                f" ({strange[0]}, ...); nothing was sent"
            )
        Spec.of(received, tuple(tensors)).check(site, tensors)
        changes = {
            name: np.atleast_1d((value.double() - received[name].double()).numpy())  # FLARE's filters skip single numbers
            for name, value in tensors.items()
            if value.is_floating_point()
        }
        if not changes:
            return shareable
        sent = dict(tensors)
        for name, change in self._filtered(site, changes, fl_ctx).items():
            before = received[name]
            sent[name] = (before.double() + torch.from_numpy(change).reshape(before.shape)).to(before.dtype)
        for name in running_variances(site_component(fl_ctx).expected.network) & changes.keys():
            sent[name].clamp_(min=0)
        return messages.pack(sent, **scalars)

    def _filtered(self, site: str, changes: dict[str, np.ndarray], fl_ctx: FLContext) -> dict[str, np.ndarray]:
        message = DXO(DataKind.WEIGHT_DIFF, data=changes).to_shareable()
        filtered = from_shareable(self.mechanism.process(message, fl_ctx))
        if not filtered.get_filter_history():  # FLARE's passes everything where its arguments are out of range
            name = type(self.mechanism).__name__
            raise PolicyError(f"site {site}: {name} filtered nothing; correct its args in privacy.json; nothing was sent")
        data: dict[str, np.ndarray] = filtered.data
        return data


def running_variances(network: nn.Module) -> set[str]:
    """The names of the batch normalisations' running variances."""
    return {
        f"{name}.running_var"
        for name, module in network.named_modules()
        if isinstance(getattr(module, "running_var", None), Tensor)
    }
