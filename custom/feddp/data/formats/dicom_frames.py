"""The frames of a DICOM file, one or several, and their values."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydicom import Dataset
from pydicom.encaps import generate_frames
from pydicom.pixels.utils import pixel_array
from pydicom.uid import RLELossless

from feddp.data.formats.attributes import lacking, value_of
from feddp.data.formats.dicom import whole
from feddp.data.formats.dicom_values import in_units, without_padding
from feddp.data.formats.guarded import guarded
from feddp.data.formats.scan import finite
from feddp.data.formats.unpacked import require_rle
from feddp.data.pixels import require_scans
from feddp.data.prepare.source import Source
from feddp.errors import BadFile, Problem
from feddp.limits import IMAGE_PIXELS, SERIES_FILES, VOXELS

_OF_ALL = (
    *("Rows", "Columns", "SamplesPerPixel", "SOPInstanceUID", "SeriesInstanceUID", "PixelSpacing", "ImagerPixelSpacing"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),  # a functional group replaces them
)
_OF_PIXELS = ("SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored", "PixelRepresentation")
# of the files of one image per frame, what an enhanced file has in these groups (PS3.3 C.7.6.16)
_GROUPS = ("PlanePositionSequence", "PlaneOrientationSequence", "PixelMeasuresSequence", "PixelValueTransformationSequence")


def require_size(tree: Source, name: str, dataset: Dataset, files: int) -> None:
    """Raises BadFile if a file, one of so many of its series, holds no image, or one too large."""
    rows, columns, frames = (whole(dataset, key) for key in ("Rows", "Columns", "NumberOfFrames"))
    samples, images = whole(dataset, "SamplesPerPixel") or 1, max(frames, files)
    wrong = ""
    if "PixelData" not in dataset:
        wrong, remedy = "holds no image", "Leave it out of the folder"
    elif rows < 1 or columns < 1:
        raise lacking(tree.shown(name), dataset, "Columns" if rows > 0 else "Rows")
    elif images > SERIES_FILES or rows * columns > IMAGE_PIXELS or (images > 1 and rows * columns * images > VOXELS):
        wrong, remedy = f"is one of {images} images of {columns} x {rows} pixels, too many", "Give fewer, or scale them down"
    elif samples not in (1, 3):
        wrong, remedy = f"has {samples} channels", "Save it with one or three"
    if wrong:
        raise BadFile(Problem(tree.shown(name), wrong, remedy))


def frames_of(dataset: Dataset) -> list[Dataset]:
    """Returns a data set per frame, which says what that of a file with one image would; a file of one image is its own."""
    count = whole(dataset, "NumberOfFrames")
    own: Sequence[Dataset] = dataset.get("PerFrameFunctionalGroupsSequence") or ()
    if count < 2 and not own:
        return [dataset]
    if own and len(own) != count:
        raise ValueError(f"{len(own)} of {count} frames are described")
    shared = (dataset.get("SharedFunctionalGroupsSequence") or [Dataset()])[0]
    return [_frame(dataset, shared, each) for each in own or [Dataset()] * count]


def _frame(dataset: Dataset, shared: Dataset, own: Dataset) -> Dataset:
    frame = Dataset()
    frame.set_original_encoding(*dataset.original_encoding)  # a modality table is read with it
    for keyword in _OF_ALL:
        if keyword in dataset:
            frame[keyword] = dataset[keyword]
    for group in _GROUPS:
        for part in (shared, own):
            frame.update((part.get(group) or [Dataset()])[0])
    return frame


def values_of(tree: Source, name: str, dataset: Dataset, frames: Sequence[Dataset]) -> np.ndarray:
    """Returns the frames of a file (F, H, W), or (F, H, W, 3) in colour.

    They are uint8 as stored, or float32 in the modality's units; black is low, whatever the file's photometry. Padding is 0 in
    uint8 and NaN in float32.
    """
    with guarded(tree.shown(name), "has no readable pixels"):
        if lost := [keyword for keyword in _OF_PIXELS if value_of(dataset, keyword) is None]:
            raise lacking(tree.shown(name), dataset, lost[0])
        require_packed(tree.shown(name), dataset)
        # of values as they are stored, `dicom_values` needs all bits: pydicom takes the lowest ones, whatever HighBit says
        stored = pixel_array(dataset, correct_unused_bits=dataset.file_meta.TransferSyntaxUID.is_encapsulated)
        stored = stored if whole(dataset, "NumberOfFrames") > 1 else stored[None]
        values = in_units(tree.shown(name), dataset, frames, stored)
        if not finite(values):
            raise BadFile(Problem(tree.shown(name), "has values that are not finite, or huge", "Export the series again"))
        return without_padding(tree.shown(name), dataset, stored, values)


def require_packed(file: Path, dataset: Dataset) -> None:
    """Raises BadFile if a frame's compressed pixels ask for far more work or memory than its size."""
    syntax = dataset.file_meta.TransferSyntaxUID
    if not syntax.is_compressed:
        return
    size = whole(dataset, "Rows") * whole(dataset, "Columns") * (whole(dataset, "SamplesPerPixel") or 1)
    for frame in generate_frames(dataset.PixelData, number_of_frames=max(1, whole(dataset, "NumberOfFrames"))):
        if syntax == RLELossless:
            require_rle(file, frame, size * whole(dataset, "BitsAllocated") // 8)
        else:
            require_scans(file, frame)
