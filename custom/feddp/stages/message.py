"""A message between the server and a site, independent of the transport."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Message:
    """A task, or the answer to one: tensors by name, and scalars or tables of them by name."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
