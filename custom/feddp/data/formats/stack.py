"""The slices of a volume as one array: in memory or, of a large one, in a temporary file, so that a CT of 2000 slices fits."""

import math
import os
from collections.abc import Callable
from tempfile import TemporaryFile, gettempdir
from typing import Any

import numpy as np

from feddp.errors import InputError
from feddp.limits import IN_MEMORY
from feddp.reading import amount


def room(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an array without values; one of more than IN_MEMORY bytes is a file that has no name and ends with the array.

    Raises:
        InputError: there is no room on the disk.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= IN_MEMORY:
        return np.empty(shape, dtype)
    try:
        with TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk would otherwise end the process when it is written
            return np.memmap(file, dtype, "w+", shape=shape)
    except OSError as error:
        what = f"a volume needs {amount(size)} in a temporary file ({error.strerror})"
        raise InputError(f"{gettempdir()}: {what}. Set TMPDIR to a folder on a disk with room.") from None


def by_slice(make: Callable[[np.ndarray], np.ndarray], values: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns an array of the same shape, made of one slice of `values` after the other, so that one is in memory."""
    made = room(values.shape, dtype)
    for number, each in enumerate(values):
        made[number] = make(each)
    return made


class Stack:
    """Gathers slices of one size; as 8 bits as long as all of them are and nothing is masked, else as 32-bit floating point.

    Attributes:
        eight: whether all values have 8 bits.
    """

    def __init__(self) -> None:
        self.eight, self._filled, self._values = True, 0, np.empty(0)

    def add(self, values: np.ndarray, slices: int) -> None:
        """Adds the next of so many slices, (H, W) or (H, W, 3), of 8 bits or of any other numbers; masked ones become NaN."""
        self.eight &= values.dtype == np.uint8
        if np.ma.is_masked(values):
            values = np.ma.filled(values.astype(np.float32), np.nan)
        eight = values.dtype == np.uint8 and (not self._filled or self._values.dtype == np.uint8)
        kind = np.uint8 if eight else np.float32
        if not self._filled or self._values.dtype != kind:
            former, self._values = self._values, room((slices, *values.shape), kind)
            for number in range(self._filled):
                self._values[number] = former[number]
        self._values[self._filled] = values
        self._filled += 1

    def ordered(self, order: np.ndarray) -> np.ndarray:
        """Returns the slices in another order: the one that was added as `order[0]`-th first. The stack is then used up."""
        values, moved = self._values, np.zeros(len(order), bool)
        for first in range(len(order)):
            if moved[first] or order[first] == first:
                continue
            kept, place = values[first].copy(), first
            while (source := int(order[place])) != first:  # along a cycle of the permutation, in place
                values[place] = values[source]
                moved[place], place = True, source
            values[place], moved[place] = kept, True
        return values
