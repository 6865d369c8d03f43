"""Reads DICOM files, and their headers, which group them into series."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

from pydicom import Dataset
from pydicom.filereader import read_dataset, read_partial, read_preamble
from pydicom.tag import BaseTag
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian

from feddp.data.formats.attributes import text_of, value_of
from feddp.data.formats.dicom_kinds import aside_kind, mask_kind, other_kind
from feddp.data.formats.guarded import guarded
from feddp.data.formats.unpacked import inflated
from feddp.data.prepare.source import Source, settled
from feddp.errors import BadFile, Problem
from feddp.limits import DICOM_BYTES, HEAD_BYTES
from feddp.reading import amount

_SYNTAX, _META, _PIXELS = 0x00020010, 2, 0x7FE0  # an element, and groups
_VALUES, _PIXEL_DATA = 0x7FE00008, 0x7FE00010  # the first element of pixels, and that of whole numbers
_UNKNOWN = 0xFFFFFFFF  # the length of an element that says where it ends
WIDEST = 4  # bytes per value of a pixel
DEFLATED = DeflatedExplicitVRLittleEndian.encode()
BROKEN = "is not a readable DICOM file"


@dataclass(frozen=True)
class Header:
    """What groups the files of a source into series.

    Args:
        series, study, image, frame: the UIDs of its series, study, image and frame of reference.
        masks: whether it holds masks of another series.
        other: what it is if it holds no image, such as a plan; "" of images.
        aside: what it is if it accompanies other images of its study, such as a localizer; "" of others.
        number, instance, frames: of the series in the study, of the image in the series, in the image.
    """

    name: str
    series: str
    study: str
    image: str
    frame: str
    masks: bool
    other: str
    aside: str
    patient: str
    number: int
    instance: int
    frames: int


def is_dicom(tree: Source, name: str) -> bool:
    """Whether a file has DICOM's mark after its preamble."""
    return tree.start(name, 132, largest(tree))[128:] == b"DICM"


def read_header(tree: Source, name: str) -> Header:
    """Returns what a file says of its series; raises InputError if it is not DICOM. Names the file."""
    dataset = load(tree, name, pixels=False)
    with guarded(tree.shown(name), BROKEN):  # pydicom decodes an element when it is asked for
        other = other_kind(dataset)
        series = text_of(dataset, "SeriesInstanceUID")
        if not series and not other:
            raise BadFile(Problem(tree.shown(name), "has no SeriesInstanceUID", "Export the series again"))
        return Header(
            name,
            series,
            text_of(dataset, "StudyInstanceUID"),
            text_of(dataset, "SOPInstanceUID"),
            text_of(dataset, "FrameOfReferenceUID"),
            mask_kind(dataset) != "",
            other,
            aside_kind(dataset),
            text_of(dataset, "PatientID"),
            *(whole(dataset, key) for key in ("SeriesNumber", "InstanceNumber", "NumberOfFrames")),
        )


@dataclass(frozen=True)
class StoredPixels:
    """Where in an opened file its pixels start, their value representation, and their bytes, if the file says how many."""

    stream: BinaryIO
    start: int
    kind: str
    length: int | None


def load(tree: Source, name: str, pixels: bool = True) -> Dataset:
    """Returns a file's data set up to its pixels, without these if they are not asked for, and without what is behind them.

    Raises:
        InputError: the file is too large or broken. Names the file.
    """
    with opened(tree, name, largest(tree, each=1) if pixels else largest(tree)) as (dataset, found):
        if found is None or not pixels:
            return dataset
        with guarded(tree.shown(name), BROKEN):
            found.stream.seek(0)
            return read_partial(found.stream, lambda tag, vr, length: tag.group > _PIXELS)


def largest(tree: Source, each: int = WIDEST) -> int:
    """Returns how many bytes a file of images may have, with so many for each voxel."""
    return max(DICOM_BYTES, HEAD_BYTES + each * tree.voxels)


@contextmanager
def opened(tree: Source, name: str, most: int) -> Iterator[tuple[Dataset, StoredPixels | None]]:
    """Opens a file of at most `most` bytes; yields its data set up to its pixels, and these, if any.

    Raises as `load`.
    """
    with tree.seekable(name, most) as packed:
        with guarded(tree.shown(name), BROKEN):
            stream = _inflated(cast(BinaryIO, packed), most, tree.shown(name))
            dataset, pixels = _head(stream, tree.shown(name))
        yield dataset, pixels


def _head(stream: BinaryIO, file: Path) -> tuple[Dataset, StoredPixels | None]:
    # an element of eight bytes takes hundreds in memory: these are bounded first
    head, reached = io.BytesIO(stream.read(HEAD_BYTES)), []

    def at_pixels(tag: BaseTag, vr: str | None, length: int) -> bool:
        if tag >= _VALUES:
            reached.append((tag, StoredPixels(stream, head.tell(), vr or "OW", None if length == _UNKNOWN else length)))
        return bool(reached)

    dataset = read_partial(head, at_pixels)
    head.truncate(0)  # the data set keeps it, and a series keeps its data sets: it would keep all pixels
    if not reached and stream.read(1):
        what = f"has more than {amount(HEAD_BYTES)} besides pixels, which is the limit"
        raise BadFile(Problem(file, what, "Leave out the structures that are no class"))
    return dataset, reached[0][1] if reached and reached[0][0] == _PIXEL_DATA else None


def _inflated(stream: BinaryIO, most: int, file: Path) -> BinaryIO:
    """Returns a file as it is or, if it is deflated behind its first group (PS3.5, A.5), as it was before.

    pydicom would inflate it whatever its size.
    """
    read_preamble(stream, force=False)
    meta = read_dataset(stream, False, True, stop_when=lambda tag, vr, length: tag.group != _META)
    syntax, end = meta.get(_SYNTAX), stream.tell()
    stream.seek(0)
    if syntax is None or syntax.value != DeflatedExplicitVRLittleEndian:
        return stream
    plain = stream.read(end).replace(DEFLATED, ExplicitVRLittleEndian.encode().ljust(len(DEFLATED), b"\0"))
    return cast(BinaryIO, settled(chain([plain], inflated(stream)), most, file))


def whole(dataset: Dataset, key: str) -> int:
    """Returns a whole number; 0 if it is missing or no number."""
    value = value_of(dataset, key)
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0
