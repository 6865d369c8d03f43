"""Reads DICOM files, and their headers, which group them into series."""

import io
import math
from dataclasses import dataclass

from pydicom import Dataset
from pydicom.filereader import read_dataset, read_partial, read_preamble
from pydicom.tag import BaseTag
from pydicom.uid import DeflatedExplicitVRLittleEndian

from feddp.data.formats.attributes import text_of, value_of
from feddp.data.formats.dicom_kinds import aside_kind, mask_kind, other_kind
from feddp.data.formats.guarded import guarded
from feddp.data.prepare.source import Source
from feddp.errors import BadFile, Problem
from feddp.limits import DICOM_BYTES, HEAD_BYTES
from feddp.reading import amount

_SYNTAX, _META, _PIXELS = 0x00020010, 2, 0x7FE0  # an element, and groups
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
    return tree.start(name, 132, DICOM_BYTES)[128:] == b"DICM"


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


def load(tree: Source, name: str, pixels: bool = True) -> Dataset:
    """Returns a file's data set up to its pixels, without these if they are not asked for, and without what is behind them.

    Raises:
        InputError: the file is too large or broken, or compressed as a whole, so that its size is unknown. Names the file.
    """
    return parsed(tree, name, tree.read(name, DICOM_BYTES), pixels)


def parsed(tree: Source, name: str, content: bytes, pixels: bool = True) -> Dataset:
    """Returns the data set of a file's bytes, as `load`."""
    with guarded(tree.shown(name), BROKEN):
        stream = io.BytesIO(content)
        read_preamble(stream, force=False)
        meta = read_dataset(stream, False, True, stop_when=lambda tag, vr, length: tag.group != _META)
        syntax = meta.get(_SYNTAX)
        if syntax is not None and syntax.value == DeflatedExplicitVRLittleEndian:
            raise BadFile(Problem(tree.shown(name), "is a deflated DICOM file", "Export it without this compression"))
        reached: list[int] = []

        def at_pixels(tag: BaseTag, vr: str | None, length: int) -> bool:
            if tag.group >= _PIXELS:
                reached.append(tag)
            return bool(reached)

        # an element of eight bytes takes hundreds in memory: these are counted first
        dataset = read_partial(io.BytesIO(content[:HEAD_BYTES]), at_pixels)
        if len(content) > HEAD_BYTES and not reached:
            what = f"has more than {amount(HEAD_BYTES)} besides pixels, which is the limit"
            raise BadFile(Problem(tree.shown(name), what, "Leave out the structures that are no class"))
        return read_partial(io.BytesIO(content), lambda tag, vr, length: tag.group > _PIXELS) if pixels else dataset


def whole(dataset: Dataset, key: str) -> int:
    """Returns a whole number; 0 if it is missing or no number."""
    value = value_of(dataset, key)
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0
