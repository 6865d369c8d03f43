"""Half precision: what the rounds of stage 1 exchange travels as float16 where the plan says so."""

import torch
from torch import Tensor

from feddp.errors import InputError


def narrow(name: str, value: Tensor) -> Tensor:
    """A float32 tensor as float16, any other as it is. InputError for a finite value beyond float16's range."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    half = value.half()
    if (half.isinf() & value.isfinite()).any():
        largest = value[value.isfinite()].abs().max().item()
        raise InputError(f"{name} holds {largest:g}, beyond float16's range; export the job with precision=float32")
    return half


def widen(value: Tensor) -> Tensor:
    """A float16 tensor as float32, any other as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float16 else value
