"""The images below a folder as a network takes them: of every format, slice by slice."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from feddp.data.formats.find import FoundImage, find
from feddp.data.formats.scan import AXES, Scan, Window, eight_bits, in_channels
from feddp.data.prepare.source import Source
from feddp.data.progress import track
from feddp.errors import BadFile, InputError, Problem


@dataclass(frozen=True)
class Reading:
    """How images are read.

    Args:
        axis: along which NIfTI volumes are sliced, as the training images were.
        window: the values that become 0 and 255; by default as in `feddp.data.formats.scan.eight_bits`.
        convert: whether grey images become RGB for a network of three channels, and colour images grey for one of one.
    """

    axis: str = "axial"
    window: Window | None = None
    convert: bool = False

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise InputError(f"--axis {self.axis}: use {' or '.join(AXES)}.")


class Opened(NamedTuple):
    """An image: what was found, its content, and its slices, uint8 (S, H, W) or (S, H, W, 3)."""

    entry: FoundImage
    scan: Scan
    pixels: np.ndarray


class InputImages:
    """The images below `folder`, for a network of `channels` channels.

    Attributes:
        refused: what is wrong with the files that cannot be read, one line each.

    Raises:
        InputError: there is no folder, it is a site's folder, or it holds no image.
    """

    def __init__(self, folder: Path, channels: int, reading: Reading):
        self._tree, self._channels, self._reading = Source(_checked(folder)), channels, reading
        found = find(self._tree, folder.resolve().name)
        self.entries, self.refused = found.entries, [str(error) for error in found.refused]
        if not self.entries and not self.refused:
            raise InputError(f"{folder} holds no image; name a folder with images, such as a site's images/")

    def require(self, format: str, kinds: tuple[str, ...]) -> None:
        """Raises InputError if an image is of none of `kinds`, which alone can have masks in `format`."""
        if odd := [entry for entry in self.entries if entry.kind not in kinds]:
            name = self._tree.shown(odd[0].files[0])
            raise InputError(f"--format {format}: {name} is no {kinds[0]} image and cannot have it. Use --format png.")

    def read(self, what: str) -> Iterator[Opened]:
        """Yields the images, with a bar named `what`; those that cannot be read go to `refused`."""
        for entry in track(self.entries, f"{what} {len(self.entries)} images"):
            try:
                scan = entry.read(self._tree, self._reading.axis)
                opened = Opened(entry, scan, self._fitting(entry, eight_bits(scan.pixels, self._reading.window)))
            except InputError as error:
                self.refused.append(str(error))
                continue
            yield opened

    def _fitting(self, entry: FoundImage, pixels: np.ndarray) -> np.ndarray:
        fitting = in_channels(pixels, self._channels, self._reading.convert)
        if fitting is None:
            what = f"has {3 if pixels.ndim == 4 else 1} channel(s), but the network expects {self._channels}"
            kind = "RGB" if self._channels == 3 else "grey"
            raise BadFile(
                Problem(self._tree.shown(entry.files[0]), what, f"Save it as 8-bit {kind}, or convert all with --convert")
            )
        return fitting


def _checked(folder: Path) -> Path:
    if not os.path.exists(folder):  # unlike Path.exists, also of a name that is too long
        raise InputError(f"{folder} does not exist; name a folder of images")
    if not os.path.isdir(folder):
        raise InputError(f"{folder} is a file; name its folder")
    if os.path.exists(folder / "dataset.json"):
        raise InputError(f"{folder} is a site's folder, with masks; name its images: {folder / 'images'}")
    return folder
