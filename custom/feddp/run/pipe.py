"""Messages over a pipe between the process of a run without FLARE and its workers: JSON, then tensors as safetensors."""

import json
import struct
from collections.abc import Mapping
from io import FileIO
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from feddp.partition import Tensors

_LENGTHS = struct.Struct("!QQ")
_NAMES = "names"


class Closed(Exception):
    """The process at the other end has ended."""


def put(pipe: FileIO, content: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    """Writes a message.

    Raises:
        Closed: nobody reads it.
    """
    # a copy each: safetensors takes no tensors that share memory
    copies = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in (tensors or {}).items()}
    head, body = json.dumps({**content, _NAMES: list(copies)}).encode(), save(copies)
    try:
        for part in (_LENGTHS.pack(len(head), len(body)), head, body):
            left = memoryview(part)
            while left:
                left = left[pipe.write(left) :]
    except BrokenPipeError:
        raise Closed from None


def get(pipe: FileIO) -> tuple[dict[str, Any], Tensors]:
    """Reads a message; its tensors have their order.

    Raises:
        Closed: there is none, and none will come.
    """
    head, body = _LENGTHS.unpack(_exactly(pipe, _LENGTHS.size))
    content, tensors = json.loads(_exactly(pipe, head)), load(_exactly(pipe, body))
    return content, {name: tensors[name] for name in content.pop(_NAMES)}


def _exactly(pipe: FileIO, count: int) -> bytes:
    content = bytearray(count)
    left = memoryview(content)
    while left:
        read = pipe.readinto(left)
        if not read:
            raise Closed
        left = left[read:]
    return bytes(content)
