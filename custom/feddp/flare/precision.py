"""Half-precision messages: if the plan says so, the tensors of stage 1's rounds travel as float16.

FLARE's own ModelQuantizer raises on integer tensors, which every batch normalisation has, and imports bitsandbytes, a GPU
library, even for float16. On float32 tensors this filter is bit-equal to it (`tests/integration/test_dp_fp16.py`).
"""

import copy

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from feddp.flare import messages
from feddp.stages.precision import narrow, widen


class HalfPrecision(Filter):
    """For a job's filters at both ends: converts outgoing float32 to float16 and incoming float16 to float32.

    It keeps tensors of any other type, the scalars and the message's headers, and does not change its input.

    Raises:
        InputError: a finite value is beyond float16's range, 65504; FLARE's filter would clip it.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if shareable.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            return shareable
        tensors, scalars = messages.unpack(shareable)
        out = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.OUT
        converted = {name: narrow(name, value) if out else widen(value) for name, value in tensors.items()}
        return DXO(DataKind.WEIGHTS, data=converted, meta=scalars).update_shareable(copy.copy(shareable))
