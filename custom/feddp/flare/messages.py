"""Messages: tensors and scalars in one DXO, with PyTorch tensors at both ends."""

from collections.abc import Mapping
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from torch import Tensor

from feddp.errors import ContributionError
from feddp.reading import shown

# the key of a training task's tensors in the context of its answer: a site's privacy filter works on the difference to them
RECEIVED = "feddp_received"
# a return code beside FLARE's: the server may know that a site's disk is full or read-only, and not which folder it is
STORAGE_FAILED = "STORAGE_FAILED"
SHARED_REFUSED = "SHARED_REFUSED"  # the site does not accept the shared tensors that the server sent
# what an error says to the server, and no other word
CODES = frozenset(code for name, code in vars(ReturnCode).items() if name.isupper()) | {STORAGE_FAILED, SHARED_REFUSED}


def register_tensors() -> None:
    """Lets FLARE send torch tensors without conversion; every process that sends or receives calls it."""
    fobs.register(TensorDecomposer)


def pack(tensors: Mapping[str, Tensor] | None = None, **scalars: Any) -> Shareable:
    """Returns a message with tensors (none: an empty mapping) and scalars."""
    return DXO(DataKind.WEIGHTS, data=dict(tensors or {}), meta=scalars).to_shareable()


def unpack(message: Shareable) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors and the scalars of a message.

    Raises:
        ContributionError: `pack` did not build the message.
    """
    try:
        dxo = from_shareable(message)
    except Exception as error:  # of any type: FLARE compares what the sender wrote, and a tensor raises its own
        raise ContributionError(f"a message cannot be read as tensors and scalars ({type(error).__name__})") from None
    kind = dxo.data_kind
    if not isinstance(kind, str) or kind != DataKind.WEIGHTS or not isinstance(dxo.data, dict):
        raise ContributionError(f"a message has the kind {shown(kind)}, which FedDP does not use")
    if not all(isinstance(name, str) for name in dxo.data):
        raise ContributionError("a message names a tensor by something that is not a text, which FedDP does not do")
    return dxo.data, dict(dxo.meta or {})
