"""Contributions on disk from their arrival until they are combined: the server's memory does not grow with the number of sites.

The rules of aggregation read them tensor by tensor, in the sites' alphabetical order. So they need not wait for one another in
memory, and the bits are those of contributions in memory.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Any

import torch
from torch import Tensor

from feddp.files import writing

WHAT = "the contributions' file"  # it has no name


class Spool:
    """A file without a name: the system frees its space when it is closed and when the process ends, also by a crash.

    Threads may share it: an answer can come while others are read.

    Args:
        folder: the file lies on this folder's disk.
    """

    def __init__(self, folder: Path):
        self._folder, self._lock = folder, Lock()
        with writing(folder / WHAT):
            self._file: IO[bytes] = TemporaryFile(dir=folder)  # noqa: SIM115  # __exit__ closes it

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *error: object) -> None:
        # after a failed write it writes the rest of its buffer, in vain, and would hide the first error's message
        with suppress(OSError):
            self._file.close()

    def put(self, tensors: Mapping[str, Tensor]) -> "Spooled":
        """Writes tensors.

        Raises:
            StorageError: they cannot be written, for example because the disk is full.
        """
        places = {}
        with writing(self._folder / WHAT), self._lock:
            start = self._file.seek(0, os.SEEK_END)
            for name, value in tensors.items():
                self._file.write(_bytes_of(value.detach().contiguous()))
                places[name] = start, value.shape, value.dtype
                start += value.nbytes
            self._file.flush()
        return Spooled(self, places)

    def read(self, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns the tensor whose first byte is `start`."""
        value = torch.empty(shape, dtype=dtype)
        with self._lock:
            self._file.seek(start)
            self._file.readinto(_bytes_of(value))  # type: ignore[attr-defined]  # typeshed's IO lacks it
        return value


class Spooled(Mapping[str, Tensor]):
    """Tensors in a spool; each is read when it is asked for.

    Args:
        places: {name: (first byte, shape, type)}.
    """

    def __init__(self, spool: Spool, places: Mapping[str, tuple[int, torch.Size, torch.dtype]]):
        self._spool, self._places = spool, places

    def __getitem__(self, name: str) -> Tensor:
        return self._spool.read(*self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _bytes_of(value: Tensor) -> Any:
    """Returns the memory of a contiguous tensor."""
    return value.reshape(-1).view(torch.uint8).numpy().data
