"""The images below a folder as a network takes them: of every format, slice by slice, read as its training images were."""

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from feddp.data.formats.find import NIFTI, PICTURE, FoundImage, find, is_beside
from feddp.data.formats.scan import AXES, Scan, in_channels
from feddp.data.pixels import scaled
from feddp.data.preparation import PLANES, Preparation, Window
from feddp.data.prepare.source import Source
from feddp.data.progress import track
from feddp.errors import BadFile, InputError, Problem
from feddp.limits import VOXELS
from feddp.partition import some

AXIAL = PLANES[-1]
_NUMBERED = re.compile(r"(.+)_\d{3,}", re.DOTALL)  # the name of a volume's slice (`feddp.data.formats.write.names`)


@dataclass(frozen=True)
class Reading:
    """How images are read: as the network's training images were, unless the user says otherwise.

    Args:
        axis: along which NIfTI volumes are sliced, if the user says so.
        window: the values that become 0 and 255, if the user says so.
        convert: whether grey images become RGB for a network of three channels, and colour images grey for one of one.
        trained: how the training images were made, if the network's file says so.
        voxels: the most of a volume or series.
    """

    axis: str | None = None
    window: Window | None = None
    convert: bool = False
    trained: Preparation | None = None
    voxels: int = VOXELS

    def __post_init__(self) -> None:
        if self.axis is not None and self.axis not in AXES:
            raise InputError(f"--axis {self.axis}: use {' or '.join(AXES)}.")

    def pixels(self, scan: Scan) -> np.ndarray:
        """Returns the slices of 8 bits. What has 8 bits already stays: it may be a picture that a window has made."""
        trained = self.trained.window if self.trained and scan.deep else None
        return scan.eight_bits(self.window or trained)

    def sized(self, image: np.ndarray) -> np.ndarray:
        """Returns a slice in the size to which the training images were resized before the run, if they were."""
        return scaled(image, self.trained.size) if self.trained and self.trained.size else image

    def read(self, tree: Source, entry: FoundImage) -> Scan:
        """Returns an image; raises InputError if it cannot be read."""
        return entry.read(tree, self.axis or (self.trained.axis if self.trained else "") or AXIAL)

    def doubts(self, entry: FoundImage, scan: Scan) -> Iterator[str]:
        """Yields in what an image is not like the network's training images, or may not be."""
        trained = self.trained or Preparation()
        if scan.orientation > 1:
            yield "read as stored, and their masks are too; an orientation in their files tells viewers to turn them"
        if scan.axis and trained.axis and scan.axis != trained.axis:
            yield f"{scan.axis} slices, but the network was trained on {trained.axis} ones"
        elif entry.kind == NIFTI and not trained.axis and self.axis is None:
            yield "sliced as axial, because the network's file does not say how its training images were; see --axis"
        if self.window is not None:
            if self.window != trained.window and (trained.window or trained.stretched):
                yield f"read with another --window than the network's training images: {_shown(trained.window)}"
        elif not scan.deep:
            if trained.window and not trained.stretched:
                yield f"of 8 bits, and left as they are; the training images were made with --window={_shown(trained.window)}"
        elif trained.window is None and not trained.stretched:
            theirs = "had 8 bits" if self.trained else "are not described in its file"
            yield f"made of the least value to the 99th percentile; the network's training images {theirs}: see --window"


def _shown(window: Window | None) -> str:
    return "from the least value to the 99th percentile" if window is None else "{:.10g},{:.10g}".format(*window)


class Opened(NamedTuple):
    """An image: what was found, its content, and its slices, uint8 (S, H, W) or (S, H, W, 3)."""

    entry: FoundImage
    scan: Scan
    pixels: np.ndarray


class InputImages:
    """The images below `folder`, for a network of `channels` channels.

    Attributes:
        refused: what is wrong with the files that cannot be read, or are of another format, one line each.

    Raises:
        InputError: there is no folder, it is a site's folder, or it holds no image.
    """

    def __init__(self, folder: Path, channels: int, reading: Reading):
        self._tree, self._channels, self._reading = Source(_checked(folder), reading.voxels), channels, reading
        found = find(self._tree, folder.resolve().name)
        self.entries, self.refused = found.entries, [str(error) for error in found.refused]
        masks = [f"left out, as masks of images: {some(found.annotations, 3)}"] if found.annotations else []
        self._asides = (*found.notes, *masks)
        self._beside = [name for name in found.others if is_beside(name)]
        remedy = "Convert it to PNG, TIFF, NIfTI or DICOM, or leave it out"
        self.refused += [str(Problem(self._tree.shown(name), "is no image of a known format", remedy)) for name in found.unread]
        self._doubts: dict[str, list[str]] = defaultdict(list)  # the images of each
        if not self.entries and not self.refused:
            left_out = "".join(f" ({note})" for note in self._asides)
            raise InputError(f"{folder} holds no image{left_out}; name a folder with images, such as a site's images/")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What speaks against the images that were read, one line for all of which the same is true; and what was left out."""
        left_out = [f"left out, as no images: {some(sorted(self._beside), 3)}"] if self._beside else []
        return (
            *(f"{len(names)} of the images, {names[0]} first: {text}" for text, names in self._doubts.items()),
            *left_out,
            *self._asides,
        )

    def require(self, format: str, kinds: tuple[str, ...]) -> None:
        """Raises InputError if an image is of none of `kinds`, which alone can have masks in `format`, or two have one mask."""
        if odd := [entry for entry in self.entries if entry.kind not in kinds]:
            name = self._tree.shown(odd[0].files[0])
            raise InputError(f"--format {format}: {name} is no {kinds[0]} image and cannot have it. Use --format png.")
        volumes = {entry.name.casefold(): entry for entry in self.entries if entry.kind != PICTURE}
        for entry in self.entries:
            numbered = _NUMBERED.fullmatch(entry.name)
            if entry.kind == PICTURE and numbered and (volume := volumes.get(numbered[1].casefold())):
                both = " and ".join(str(self._tree.shown(each.files[0])) for each in (volume, entry))
                raise InputError(f"{both} may both have the mask {entry.name}.png. Rename one, or put them into two folders.")

    def read(self, what: str) -> Iterator[Opened]:
        """Yields the images, with a bar named `what`; those that cannot be read go to `refused`."""
        for entry in track(self.entries, f"{what} {len(self.entries)} images"):
            try:
                scan = self._reading.read(self._tree, entry)
                opened = Opened(entry, scan, self._fitting(entry, self._reading.pixels(scan)))
            except InputError as error:
                self.refused.append(str(error))
                continue
            for doubt in self._reading.doubts(entry, scan):
                self._doubts[doubt].append(entry.name)
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
    for below in (folder, *folder.iterdir()):
        if os.path.isdir(below / "images") and os.path.isdir(below / "masks"):
            raise InputError(f"{folder} holds masks besides images; name the images: {below / 'images'}")
    return folder
