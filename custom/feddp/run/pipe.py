"""Messages between the process of a run without FLARE and a worker: JSON through a pipe, tensors in a file that both have open.

A pipe holds 64 KiB: through it, 20 MB of tensors would need both processes to take turns 300 times, each time as long as a busy
machine lets them wait. One file suffices, because a worker answers before it is given the next tensors. It has no name, so
that the system frees its space when the processes end, in whatever way.
"""

import json
import os
import struct
from collections.abc import Mapping
from io import FileIO
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from feddp.partition import Tensors

_LENGTH = struct.Struct("!Q")
_NAMES, _BYTES = "names", "bytes"

Packed = tuple[list[str], bytes]  # the names in their order, and the content


class Closed(Exception):
    """The process at the other end has ended."""


def pack(tensors: Mapping[str, Tensor]) -> Packed:
    # a copy each: safetensors takes no tensors that share memory
    copies = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    return list(copies), save(copies) if copies else b""


def put(pipe: FileIO, file: int, content: Mapping[str, Any], packed: Packed) -> None:
    """Writes a message.

    Raises:
        Closed: nobody reads it.
        OSError: the disk is full.
    """
    names, body = packed
    left, at = memoryview(body), 0
    while left:
        count = os.pwrite(file, left, at)
        left, at = left[count:], at + count
    head = json.dumps({**content, _NAMES: names, _BYTES: len(body)}).encode()
    left = memoryview(_LENGTH.pack(len(head)) + head)
    try:
        while left:
            left = left[pipe.write(left) :]
    except BrokenPipeError:
        raise Closed from None


def get(pipe: FileIO, file: int) -> tuple[dict[str, Any], Tensors]:
    """Reads a message; its tensors have their order.

    Raises:
        Closed: there is none, and none will come.
    """
    content = json.loads(_exactly(pipe, _LENGTH.unpack(_exactly(pipe, _LENGTH.size))[0]))
    names, size, body = content.pop(_NAMES), content.pop(_BYTES), b""
    while len(body) < size:
        if not (part := os.pread(file, size - len(body), len(body))):
            raise EOFError(f"{len(body)} of {size} bytes of a message's tensors")
        body += part
    tensors = load(body) if names else {}
    return content, {name: tensors[name] for name in names}


def _exactly(pipe: FileIO, count: int) -> bytes:
    content = b""
    while len(content) < count:
        read = pipe.read(count - len(content))
        if not read:
            raise Closed
        content += read
    return content
