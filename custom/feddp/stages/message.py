"""A message between the server and a site, independent of the transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Message:
    """A task, or the answer to one: tensors by name, and scalars or tables of them by name."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
