"""What travels: tensors and scalars in one DXO, as PyTorch tensors on both ends."""

from collections.abc import Mapping
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.shareable import Shareable
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from torch import Tensor

from feddp.errors import ContributionError

# what a training task brought, in the context of its answer: the difference to it is what a site's privacy filter looks at
RECEIVED = "feddp_received"


def register_tensors() -> None:
    """Lets torch tensors travel as they are; every process that sends or receives calls it."""
    fobs.register(TensorDecomposer)


def pack(tensors: Mapping[str, Tensor] | None = None, **scalars: Any) -> Shareable:
    """A message of tensors (none is an empty mapping) and scalars."""
    return DXO(DataKind.WEIGHTS, data=dict(tensors or {}), meta=scalars).to_shareable()


def unpack(message: Shareable) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the scalars of a message.

    Raises:
        ContributionError: the message is not one of `pack`'s.
    """
    try:
        dxo = from_shareable(message)
    except ValueError as error:
        raise ContributionError(f"a message holds no tensors or scalars: {error}") from None
    if dxo.data_kind != DataKind.WEIGHTS or not isinstance(dxo.data, dict):
        raise ContributionError(f"a message of kind {dxo.data_kind} is not one of ours")
    return dxo.data, dict(dxo.meta or {})
