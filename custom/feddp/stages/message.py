"""A message between the server and a site, independent of the transport."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from feddp.partition import Tensors


@dataclass(frozen=True)
class Message:
    """A task, or the answer to one: tensors by name, and scalars or tables of them by name."""

    tensors: Tensors = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
