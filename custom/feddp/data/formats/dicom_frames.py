"""The frames of a DICOM file, one or several, and their values."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from pydicom import Dataset
from pydicom.encaps import generate_frames
from pydicom.pixels.decoders.base import get_decoder
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut
from pydicom.pixels.utils import as_pixel_options, get_expected_length
from pydicom.uid import (
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    RLELossless,
)

from feddp.data.formats.decoding import CODECS, unpacked_frame
from feddp.data.formats.dicom import StoredPixels, whole
from feddp.data.formats.guarded import AGAIN
from feddp.data.formats.scan import finite, too_many
from feddp.data.formats.unpacked import require_rle
from feddp.data.prepare.source import Source
from feddp.errors import BadFile, Problem
from feddp.limits import IMAGE_PIXELS, SERIES_FILES

_OF_ALL = (
    *("Rows", "Columns", "SamplesPerPixel", "SOPInstanceUID", "SeriesInstanceUID", "PixelSpacing", "ImagerPixelSpacing"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),  # a functional group replaces them
)
_BY_PYDICOM = (ImplicitVRLittleEndian, ExplicitVRLittleEndian, ExplicitVRBigEndian, RLELossless)
_GREY = ("MONOCHROME1", "MONOCHROME2", "PALETTE COLOR")
_COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_RCT", "YBR_ICT")
_DECODERS = "Decompress it, for example with `gdcmconv --raw` of GDCM, or a video with `ffmpeg`"
# of the files of one image per frame, what an enhanced file has in these groups (PS3.3 C.7.6.16)
_GROUPS = ("PlanePositionSequence", "PlaneOrientationSequence", "PixelMeasuresSequence", "PixelValueTransformationSequence")


def require_size(tree: Source, name: str, dataset: Dataset, pixels: StoredPixels | None, files: int) -> StoredPixels:
    """Returns its pixels; raises BadFile if a file, one of so many of its series, holds no image, or one too large."""
    rows, columns, frames = (whole(dataset, key) for key in ("Rows", "Columns", "NumberOfFrames"))
    samples, images = whole(dataset, "SamplesPerPixel") or 1, max(frames, files)
    wrong, size = "", f"{columns} x {rows} pixels"
    if pixels is None or rows < 1 or columns < 1:
        wrong, remedy = "holds no image", "Leave it out of the folder"
    elif images > SERIES_FILES or rows * columns > IMAGE_PIXELS:
        wrong, remedy = f"is one of {images} images of {size}, too many", "Give fewer, or scale them down"
    elif images > 1 and rows * columns * images > tree.voxels:
        wrong, remedy = too_many(f"is one of {images} images of {size}", tree.voxels)
    elif samples not in (1, 3):
        wrong, remedy = f"has {samples} channels", "Save it with one or three"
    if pixels is None or wrong:
        raise BadFile(Problem(tree.shown(name), wrong, remedy))
    return pixels


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


def values_of(file: Path, dataset: Dataset, pixels: StoredPixels, frames: Sequence[Dataset]) -> Iterator[np.ndarray]:
    """Yields the frames of a file, (H, W) each, or (H, W, 3) in colour.

    They are uint8 as stored, or float32 in the modality's units; black is low, whatever the file's photometry.

    Raises:
        BadFile: the frames cannot be read, or are more or fewer than `frames`. Names `file`.
        Exception: whatever pydicom raises.
    """
    found = 0
    for stored in _stored(file, dataset, pixels):
        if (found := found + 1) > len(frames):
            break
        values = _in_units(stored, dataset, frames[found - 1])
        if not finite(values):
            what = "has values that are not finite, or huge"
            raise BadFile(Problem(file, what, "Export the series again"))
        yield values
    if found != len(frames):
        more = "more frames" if found > len(frames) else f"{found} frames"
        what = f"holds {more}, but its header says {len(frames)}"
        raise BadFile(Problem(file, what, AGAIN))


def _in_units(stored: np.ndarray, dataset: Dataset, frame: Dataset) -> np.ndarray:
    photometry = dataset.get("PhotometricInterpretation")
    if photometry == "PALETTE COLOR":
        coloured = apply_color_lut(stored, dataset)
        return coloured if coloured.dtype == np.uint8 else (coloured >> 8).astype(np.uint8)
    if stored.ndim == 3:
        return stored if stored.dtype == np.uint8 else stored.astype(np.float32)
    if photometry == "MONOCHROME1":  # white is the least value that BitsStored bits can hold
        white = -1 if stored.dtype.kind == "i" else (1 << int(dataset.BitsStored)) - 1
        stored = (white - stored.astype(np.int64)).astype(stored.dtype)
    units = apply_modality_lut(stored, frame)
    return stored if stored.dtype == np.uint8 and (units == stored).all() else units.astype(np.float32)


def _stored(file: Path, dataset: Dataset, pixels: StoredPixels) -> Iterator[np.ndarray]:
    """Yields the frames as numbers of the dataset's type; luminance and colour differences become red, green and blue."""
    syntax = dataset.file_meta.TransferSyntaxUID
    _require_photometry(file, dataset)
    pixels.stream.seek(pixels.start)
    if syntax in CODECS:
        for packed in _packed(dataset, pixels):
            yield unpacked_frame(file, dataset, packed)
        return
    if syntax not in _BY_PYDICOM:
        what = f"has pixels in {getattr(syntax, 'name', syntax)} ({syntax}), which cannot be read here"
        raise BadFile(Problem(file, what, _DECODERS))
    if syntax == RLELossless:
        size = whole(dataset, "Rows") * whole(dataset, "Columns") * (whole(dataset, "SamplesPerPixel") or 1)
        for packed in _packed(dataset, pixels):
            require_rle(file, packed, size * whole(dataset, "BitsAllocated") // 8)
        pixels.stream.seek(pixels.start)
    else:
        _require_length(file, dataset, pixels)
    options = as_pixel_options(dataset, pixel_keyword="PixelData", pixel_vr=pixels.kind, allow_excess_frames=False)
    for values, _ in get_decoder(syntax).iter_array(pixels.stream, **options):
        yield values


def _require_photometry(file: Path, dataset: Dataset) -> None:
    """Raises BadFile if it is not known here what values mean, or they are fewer or more than that."""
    photometry, samples = str(dataset.get("PhotometricInterpretation") or ""), whole(dataset, "SamplesPerPixel") or 1
    if photometry not in (_GREY if samples == 1 else _COLOUR):
        what = f"has {samples} value(s) per pixel in {photometry or 'no photometric interpretation'}"
        raise BadFile(Problem(file, what, f"Save it in {_GREY[1]} or RGB"))


def _packed(dataset: Dataset, pixels: StoredPixels) -> Iterator[bytes]:
    options = as_pixel_options(dataset)
    frames, places = options["number_of_frames"], options.get("extended_offsets")
    return generate_frames(pixels.stream, number_of_frames=frames, extended_offsets=places)


def _require_length(file: Path, dataset: Dataset, pixels: StoredPixels) -> None:
    """Raises BadFile if a file has fewer bytes of pixels than its size needs, or so many that its colours are others."""
    needed, there = get_expected_length(dataset), pixels.stream.seek(0, os.SEEK_END) - pixels.start
    pixels.stream.seek(pixels.start)
    there = min(there, pixels.length or 0)
    if there < needed:
        raise BadFile(Problem(file, f"has {there} bytes of pixels, but its header says {needed}", AGAIN))
    if dataset.get("PhotometricInterpretation") == "YBR_FULL_422" and there >= needed // 2 * 3:
        what = "says that half of its colours are left out (YBR_FULL_422), but holds all"
        raise BadFile(Problem(file, what, "Correct its PhotometricInterpretation to YBR_FULL or RGB"))
