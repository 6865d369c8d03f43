"""A site's own privacy filter on the changes of a training round."""

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from feddp import protocol
from feddp.domains import VARIANCE
from feddp.errors import PolicyError
from feddp.flare import messages
from feddp.flare.site import site_component
from feddp.methods.aggregation import Spec


class UpdatePrivacy(Filter):
    """For a site's privacy.json, before the guard: FLARE's PercentilePrivacy or SVTPrivacy on γ_k − γ^t.

    FLARE's filters take differences as numpy arrays; from our messages they would clip the weights themselves. This class
    gives them the differences γ_k − γ^t of a training result and sends γ^t plus the filtered differences. It computes in
    float64, so values that the filter does not change keep their bits. It does not change integer tensors, scalars and other
    tasks' results. It clips running variances at 0 after the noise; this uses only the filter's output and costs no privacy.

    SVTPrivacy draws from numpy's global generator, which the operating system seeds in every process. Therefore the job's seed
    does not reveal the noise, and such a run is not reproducible to the bit.

    Args:
        mechanism: FLARE's filter, nested in privacy.json with its own `path` and `args`.
    """

    def __init__(self, mechanism: DXOFilter):
        super().__init__()
        if not isinstance(mechanism, DXOFilter):
            raise PolicyError(f"UpdatePrivacy's mechanism is {mechanism!r}, not a filter; give it its own `path` and `args`")
        self.mechanism = mechanism

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        code = shareable.get_return_code(ReturnCode.OK)
        if code != ReturnCode.OK or fl_ctx.get_prop(FLContextKey.TASK_NAME) != protocol.TRAIN:
            return shareable
        site = fl_ctx.get_identity_name()
        tensors, scalars = messages.unpack(shareable)
        received = fl_ctx.get_prop(messages.RECEIVED) or {}
        if unknown := sorted(tensors.keys() - received.keys()):
            raise PolicyError(
                f"site {site}: the result has {len(unknown)} tensors that the task did not bring ({unknown[0]}, ...), so they"
                " have no difference to filter; nothing was sent"
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
        kinds = site_component(fl_ctx).expected.domains
        for name in (name for name in changes if kinds.get(name) is VARIANCE):
            sent[name].clamp_(min=0)
        return messages.pack(sent, **scalars)

    def _filtered(self, site: str, changes: dict[str, np.ndarray], fl_ctx: FLContext) -> dict[str, np.ndarray]:
        message = DXO(DataKind.WEIGHT_DIFF, data=changes).to_shareable()
        filtered = from_shareable(self.mechanism.process(message, fl_ctx))
        if not filtered.get_filter_history():  # FLARE's filter passes everything if its arguments are out of range
            name = type(self.mechanism).__name__
            raise PolicyError(f"site {site}: {name} filtered nothing; correct its args in privacy.json; nothing was sent")
        data: dict[str, np.ndarray] = filtered.data
        return data
