"""Reads the header of a safetensors file, the tensors' shapes and the metadata, without reading a tensor."""

from pathlib import Path
from typing import Any

from feddp.errors import BadFile, InputError, Problem
from feddp.files import folder_of
from feddp.limits import HEADER_SHARE, NETWORK_BYTES
from feddp.reading import amount, opened, parse, short

Shapes = dict[str, tuple[int, ...]]

_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
_DIMENSIONS = 8
_METADATA = "__metadata__"


def outline(path: Path, most: int = NETWORK_BYTES) -> tuple[Shapes, dict[str, str]]:
    """Returns ({tensor: shape}, metadata).

    Raises:
        InputError: the file is missing, a link out of the folder of its run, or has more than `most` bytes, or its header is
            invalid, too long, or has tensors of a type that no network here uses.
    """
    try:
        file = opened(path, most, folder_of(path))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; name a .safetensors or PyTorch file of weights") from None
    with file:
        length, longest = int.from_bytes(file.read(8), "little"), most // HEADER_SHARE
        if length > longest:
            raise unreadable(path, f"its header has {length} bytes; the limit is {amount(longest)}")
        try:
            header = parse(file.read(length), path)
        except BadFile as bad:
            raise unreadable(path, bad.problem.what) from bad
    if not isinstance(header, dict):
        raise unreadable(path, "its header holds no tensors")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise unreadable(path, "its metadata are not texts")
    for name, tensor in header.items():
        if not _is_tensor(tensor):
            raise unreadable(path, f"{short(name)} is {short(str(tensor))}")
    return {name: tuple(tensor["shape"]) for name, tensor in header.items()}, metadata


def unreadable(path: Path, why: str) -> BadFile:
    remedy = "A file that contains code is never loaded: save it again as .safetensors, or as a plain state_dict"
    return BadFile(Problem(path, f"cannot be read as tensors ({why})", remedy))


def _is_tensor(tensor: Any) -> bool:
    """Returns whether type and shape are allowed for a network here; safetensors compares them with the bytes."""
    if not isinstance(tensor, dict) or not isinstance(tensor.get("shape"), list):
        return False
    shape = tensor["shape"]
    return tensor.get("dtype") in _DTYPES and len(shape) <= _DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)
