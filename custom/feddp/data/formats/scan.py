"""A picture or volume as it is read, before it becomes 8-bit images, and how its values become 0 to 255."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from feddp.data.description import MM
from feddp.data.formats.stack import room
from feddp.data.preparation import Window, is_window
from feddp.errors import InputError

VOXELS_OPTION = "--voxels"
LARGEST = 1e37  # of a value: differences and products of such values stay finite in 32 bits
BRIGHT = 0.99  # the quantile that becomes white
# of canonical voxels (right, front, head): the axes of slices, rows and columns, and the axes that are turned around, for each
# of `feddp.data.preparation.PLANES`. Slices go to the head, to the front or to the right; in a slice, rows go from front to
# back or from head to feet, and columns from the patient's right to the left or from front to back, as in radiology
AXES = {
    "axial": ((2, 1, 0), (0, 1)),
    "coronal": ((1, 2, 0), (0, 2)),
    "sagittal": ((0, 2, 1), (1, 2)),
}


@dataclass(frozen=True)
class Scan:
    """A picture, or the slices of a volume.

    Args:
        pixels: (S, H, W), or (S, H, W, 3) in colour; whole or floating point numbers. A picture has S = 1. NaN is padding, no
            part of the image.
        mm: millimetres between rows and between columns, if known.
        apart: millimetres between slices, if known.
        volume: whether it is a volume, though it may have a single slice.
        axis: the one of AXES in which its slices lie; "" if they lie in none, or nobody knows.
        origin: what a mask needs to be written in the image's own format (`feddp.data.formats.write`); None for pictures.
        orientation: of a picture, as of `feddp.data.pixels.Picture`: viewers may show it turned.
        padded: whether its values have 8 bits, and are floating point numbers only because some are padding.
    """

    pixels: np.ndarray
    mm: tuple[float, float] | None = None
    apart: float | None = None
    volume: bool = False
    axis: str = ""
    origin: Any = None
    orientation: int = 1
    padded: bool = False

    @property
    def channels(self) -> int:
        return 3 if self.pixels.ndim == 4 else 1

    @property
    def deep(self) -> bool:
        """Whether its values are not of 8 bits, so that a window, or their own range, makes them so."""
        return self.pixels.dtype != np.uint8 and not self.padded

    def eight_bits(self, window: Window | None) -> np.ndarray:
        """Returns its slices as of `eight_bits`; values of 8 bits beside padding stay as they are, too."""
        return eight_bits(self.pixels, (0, 255) if self.padded and window is None else window)


def too_many(what: str, most: int) -> tuple[str, str]:
    """Returns what is wrong with a volume of too many voxels, and the remedy."""
    return f"{what}; the limit is {most:,} voxels in all", f"Give fewer slices, or a larger {VOXELS_OPTION}"


def finite(values: np.ndarray) -> bool:
    """Whether all values are numbers below LARGEST."""
    return bool(values.min(initial=0) > -LARGEST and values.max(initial=0) < LARGEST)


def eight_bits(pixels: np.ndarray, window: Window | None) -> np.ndarray:
    """Returns values as uint8: 8-bit values as they are, others from `window`. Padding (NaN) becomes 0, and counts for nothing.

    Without a window, the least value becomes 0 and the 99th percentile of the whole array 255. If these are equal, the largest
    value becomes 255; an array without contrast becomes 0.
    """
    if pixels.dtype == np.uint8 and window is None:
        return pixels
    low, high = window if window else stretch(pixels)
    made = room(pixels.shape, np.uint8)
    for number, each in enumerate(pixels):
        scaled = np.zeros(()) if low == high else np.rint((each.astype(np.float32) - low) / (high - low) * 255).clip(0, 255)
        made[number] = np.nan_to_num(scaled)
    return made


def stretch(pixels: np.ndarray) -> Window:
    """Returns the values of an array (S, ...) that become black and white if no window is given; NaN counts for nothing.

    As `np.quantile`, but with one of S and the largest hundredth in memory.
    """
    count = sum(int(np.isfinite(each).sum()) for each in pixels)
    if not count:
        return 0.0, 0.0
    place = BRIGHT * (count - 1)  # of the quantile among all values in their order
    most = count - int(place)  # so many of the largest are needed: those from this place on
    kept, low = np.empty(0, pixels.dtype), math.inf
    for each in pixels:
        values = each[np.isfinite(each)]
        if not values.size:
            continue
        low = min(low, float(values.min()))
        kept = np.concatenate([kept, values if len(kept) < most else values[values > kept[0]]])
        kept = np.partition(kept, max(0, len(kept) - most))[-most:]  # the least of these comes first
    high = float(np.quantile(np.sort(kept)[:2], place % 1))
    return low, float(kept.max()) if high == low else high


def in_channels(pixels: np.ndarray, channels: int, convert: bool) -> np.ndarray | None:
    """Returns uint8 (S, H, W) or (S, H, W, 3) as slices of so many channels; None if they have others and may not be converted.

    Grey becomes three equal channels; colour becomes grey by the weights of ITU-R 601, as in Pillow.
    """
    actual = 3 if pixels.ndim == 4 else 1
    if actual == channels:
        return pixels
    if not convert:
        return None
    shape = pixels.shape[:3]
    made = room((*shape, 3) if channels == 3 else shape, np.uint8)
    for number, each in enumerate(pixels):
        made[number] = each[..., None] if channels == 3 else np.rint(each @ np.array([0.299, 0.587, 0.114]))
    return made


def resized(mm: tuple[float, float] | None, shape: tuple[int, ...], size: int | None) -> tuple[float, float] | None:
    """Returns the millimetres between rows and between columns of an image (H, W) that is resized to size x size, if at all.

    It keeps its extent in the patient.
    """
    return mm if mm is None or size is None else (mm[0] * shape[0] / size, mm[1] * shape[1] / size)


def known(*distances: float) -> bool:
    """Whether these are distances in millimetres that a site's folder may hold."""
    return all(math.isfinite(value) and MM[0] <= value <= MM[1] for value in distances)


def window_of(text: str | None) -> Window | None:
    """Reads LOW,HIGH; raises InputError if these are not two rising numbers."""
    if text is None:
        return None
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = 0.0
    if not is_window((low, high)):
        raise InputError(f"--window {text}: give the values that become black and white, such as --window=-160,240.")
    return low, high
