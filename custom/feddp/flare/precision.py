"""Half-precision messages: what the rounds of stage 1 exchange travels as float16 where the plan says so.

FLARE's own ModelQuantizer raises on integer tensors, which every batch normalisation has, and imports bitsandbytes, a GPU
library, for float16 too; on float32 tensors this filter's bits are those of FLARE's (`tests/test_dp_fp16.py`).
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
    """For a job's filters at both ends: float32 goes out as float16, and float16 that comes in is float32 again.

    Tensors of any other type, the scalars and the message's headers are left as they are; so is the input.

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
