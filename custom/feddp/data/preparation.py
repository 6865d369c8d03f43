"""How a site's images became PNGs, so that prediction reads images of other formats as the training images were read.

dataset.json holds it as the entry "prepared"; the site's networks have the same entry, as a text, in their files' metadata.
"""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from feddp.limits import SIDE

KEY = "prepared"
PLANES = ("sagittal", "coronal", "axial")  # those that the patient's axes left-right, front-back and feet-head stand on
Window = tuple[float, float]  # the values that become 0 and 255


@dataclass(frozen=True)
class Preparation:
    """The entry of dataset.json.

    Args:
        axis: the one of PLANES in which all slices lie; "" if there are no slices, or some lie elsewhere.
        window: the values that became 0 and 255; None: each picture's or volume's own (`feddp.data.formats.scan.eight_bits`).
        stretched: whether there were values of more than 8 bits; otherwise all images had 8 bits and stayed as they were.
        size: the height and width to which images were resized; None: they kept their own, or an earlier version did not say.
    """

    axis: str = ""
    window: Window | None = None
    stretched: bool = False
    size: int | None = None

    @classmethod
    def of(cls, entry: Any) -> "Preparation":
        """Reads the entry; raises ValueError if it is another one."""
        if not isinstance(entry, dict) or entry.keys() - {"size"} != {"axis", "window", "stretched"}:
            raise ValueError("it must have axis, window and stretched")
        axis, window, stretched, size = entry["axis"], entry["window"], entry["stretched"], entry.get("size")
        if axis not in ("", *PLANES) or not isinstance(stretched, bool) or not (window is None or is_window(window)):
            raise ValueError(f"axis must be one of {', '.join(PLANES)} or empty, window two rising numbers or null")
        if size is not None and not (type(size) is int and 0 < size <= SIDE):
            raise ValueError(f"size must be 1 to {SIDE} pixels or null")
        return cls(axis, None if window is None else (float(window[0]), float(window[1])), stretched, size)

    @property
    def text(self) -> str:
        """The entry as JSON."""
        return json.dumps(asdict(self))


def is_window(value: Any) -> bool:
    """Whether these are two rising, finite numbers."""
    if not isinstance(value, list | tuple) or len(value) != 2 or any(type(each) not in (int, float) for each in value):
        return False
    largest = sys.float_info.max  # a whole number in JSON may be larger, and has no float
    return bool(-largest <= value[0] < value[1] <= largest)  # nan is not
