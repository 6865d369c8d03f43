"""Half precision: the shared tensors of stage 1 travel as float16 if the plan says so."""

from collections.abc import Mapping

import torch
from torch import Tensor

from feddp.errors import InputError


def narrow(name: str, value: Tensor) -> Tensor:
    """Casts float32 to float16 and leaves other types; raises InputError for a finite value beyond float16's range."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    half = value.half()
    if (half.isinf() & value.isfinite()).any():
        largest = value[value.isfinite()].abs().max().item()
        raise InputError(f"{name} holds {largest:g}, beyond float16's range; export the job with precision=float32")
    return half


def halved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors as they arrive if they travel in half precision; raises as `narrow`."""
    return {name: widen(narrow(name, value)) for name, value in tensors.items()}


def widen(value: Tensor) -> Tensor:
    """Casts float16 to float32 and leaves other types."""
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float16 else value
