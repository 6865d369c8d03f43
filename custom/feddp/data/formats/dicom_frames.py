"""The frames of a DICOM file, one or several, and their values."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from pydicom import Dataset
from pydicom.encaps import generate_frames
from pydicom.pixels.decoders.base import get_decoder
from pydicom.pixels.utils import as_pixel_options, get_expected_length
from pydicom.uid import (
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    RLELossless,
)

from feddp.data.formats.attributes import lacking, text_of, value_of
from feddp.data.formats.decoding import CODECS, unpacked_frame
from feddp.data.formats.dicom import StoredPixels, whole
from feddp.data.formats.dicom_values import in_units, without_padding
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
_OF_PIXELS = ("SamplesPerPixel", "BitsAllocated", "BitsStored", "PixelRepresentation")
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
    if pixels is None:
        wrong, remedy = "holds no image", "Leave it out of the folder"
    elif rows < 1 or columns < 1:
        raise lacking(tree.shown(name), dataset, "Columns" if rows > 0 else "Rows")
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

    They are uint8 as stored, or float32 in the modality's units; black is low, whatever the file's photometry. Frames with
    padding are masked arrays.

    Raises:
        BadFile: the frames cannot be read, or are more or fewer than `frames`. Names `file`.
        Exception: whatever pydicom raises.
    """
    found = 0
    for stored in stored_of(file, dataset, pixels):
        if (found := found + 1) > len(frames):
            break
        values = in_units(file, dataset, frames[found - 1], stored)
        if not finite(values):
            what = "has values that are not finite, or huge"
            raise BadFile(Problem(file, what, "Export the series again"))
        yield without_padding(file, dataset, stored, values)
    if found != len(frames):
        more = "more frames" if found > len(frames) else f"{found} frames"
        what = f"holds {more}, but its header says {len(frames)}"
        raise BadFile(Problem(file, what, AGAIN))


def stored_of(file: Path, dataset: Dataset, pixels: StoredPixels) -> Iterator[np.ndarray]:
    """Yields the frames of a file as numbers of its type, (H, W), or in red, green and blue, (H, W, 3).

    Those that are not compressed, or by run lengths, keep all bits of their words (`feddp.data.formats.dicom_values`). Raises
    as `values_of`.
    """
    if lost := [keyword for keyword in _OF_PIXELS if value_of(dataset, keyword) is None]:
        raise lacking(file, dataset, lost[0])
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
    if whole(dataset, "BitsAllocated") == 1 and syntax.is_little_endian:
        yield from _bits(dataset, pixels)
        return
    options = as_pixel_options(dataset, pixel_keyword="PixelData", pixel_vr=pixels.kind, allow_excess_frames=False)
    options["correct_unused_bits"] = False  # pydicom would keep the lowest bits, whatever HighBit says
    for values, _ in get_decoder(syntax).iter_array(pixels.stream, **options):
        yield values


def _bits(dataset: Dataset, pixels: StoredPixels) -> Iterator[np.ndarray]:
    """Yields frames of one bit per pixel, which follow each other without a gap: pydicom loses bits of those between bytes."""
    rows, columns, frames = (whole(dataset, key) for key in ("Rows", "Columns", "NumberOfFrames"))
    size = rows * columns
    for number in range(max(1, frames)):
        place, first = divmod(number * size, 8)
        pixels.stream.seek(pixels.start + place)
        content = np.frombuffer(pixels.stream.read((first + size + 7) // 8), np.uint8)
        yield np.unpackbits(content, bitorder="little")[first : first + size].reshape(rows, columns)


def _require_photometry(file: Path, dataset: Dataset) -> None:
    """Raises BadFile if it is not known here what values mean, or they are fewer or more than that."""
    photometry, samples = text_of(dataset, "PhotometricInterpretation"), whole(dataset, "SamplesPerPixel") or 1
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
    if text_of(dataset, "PhotometricInterpretation") == "YBR_FULL_422" and there >= needed // 2 * 3:
        what = "says that half of its colours are left out (YBR_FULL_422), but holds all"
        raise BadFile(Problem(file, what, "Correct its PhotometricInterpretation to YBR_FULL or RGB"))
