"""Masks of a DICOM series from the frames of a SEG: binary, fractional, or a map of labels."""

import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from pydicom import DataElement, Dataset

from feddp.data.formats.attributes import given, items_of, lacking, named, number_of, text_of, value_of
from feddp.data.formats.dicom import StoredPixels, whole
from feddp.data.formats.dicom_frames import frames_of, stored_of
from feddp.data.formats.dicom_references import source_of
from feddp.data.formats.dicom_series import EXPORT, Series, axes, is_placed, is_spaced_as, is_turned, place, spacing_of
from feddp.data.formats.notes import Notes
from feddp.data.formats.scan import too_many
from feddp.errors import BadFile, Problem

MOVED = 0.5  # pixels: how far a frame may lie from its slice
STRANGE = "frames of images that are not in the series are left out"
HALF = 0.5  # of a pixel that is foreground: a fractional segment holds shares


def labels_of(file: Path, dataset: Dataset) -> dict[int, str]:
    """Returns {number of a segment: its label}, without the background of a map of labels."""
    found = named(file, items_of(dataset, "SegmentSequence"), "SegmentNumber", "SegmentLabel")
    if _is_map(dataset):
        found.pop(whole(dataset, "PixelPaddingValue"), None)
    return found


def segment_maps(
    file: Path, dataset: Dataset, origin: Series, chosen: Mapping[int, int], classes: int, voxels: int, notes: Notes
) -> np.ndarray:
    """Returns boolean maps (classes, S, H, W) of segments, `chosen` as {number of a segment: index of its class}.

    A frame is that of the slice to which it refers; of the slice where it lies, if it refers to none. Its rows and columns
    may run the other way than those of the slices. `notes` gets the frames of images that are not in the series.

    Raises:
        BadFile: the frames have another size or spacing than the slices, or lie elsewhere; none refers to a slice; or there
            are too many. Names `file`.
    """
    first = origin.slices[0]
    size, own = (int(first.Rows), int(first.Columns)), (whole(dataset, "Rows"), whole(dataset, "Columns"))
    if own != size:
        what = f"has {own[1]} x {own[0]} pixels, but its series {size[1]} x {size[0]}"
        raise BadFile(Problem(file, what, "Put the structures into one file that covers whole slices"))
    count, most = max(1, whole(dataset, "NumberOfFrames")), voxels * max(1, len(labels_of(file, dataset)))
    if count * math.prod(size) > most:
        raise BadFile(Problem(file, *too_many(f"has {count} frames of {size[1]} x {size[0]} pixels", most)))
    if not given(dataset, "PixelData"):
        raise lacking(file, dataset, "PixelData")
    content = StoredPixels(io.BytesIO(dataset.PixelData), 0, dataset["PixelData"].VR, len(dataset.PixelData))
    maps = origin.blank_maps(classes)
    placed = False
    for described, pixels in zip(_described(file, dataset, count), stored_of(file, dataset, content), strict=True):
        pixels = _turned_back(described, pixels, origin)
        number = _slice_of(file, described, origin)
        areas = list(_areas(file, dataset, described, pixels, chosen))
        if number is None:
            notes.update([(STRANGE, file)] if areas else [])
            continue
        placed = True
        for segment, area in areas:
            maps[chosen[segment], number] |= area
    if not placed:  # slices without a frame are empty, so all of them would be
        raise BadFile(Problem(file, "has frames, but none of them refers to a slice of its series", EXPORT))
    return maps


def _areas(
    file: Path, dataset: Dataset, described: Dataset, pixels: np.ndarray, chosen: Mapping[int, int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the segments that a frame (H, W) holds, with their pixels."""
    if _is_map(dataset):
        for segment in chosen:
            yield segment, pixels == segment
        return
    (item,) = items_of(described, "SegmentIdentificationSequence") or [Dataset()]
    segment = int(number_of(file, item, "ReferencedSegmentNumber"))
    if segment in chosen:
        fractional = text_of(dataset, "SegmentationType").upper() == "FRACTIONAL"
        most = number_of(file, dataset, "MaximumFractionalValue") if fractional else 1.0
        yield segment, pixels > HALF * most


def _is_map(dataset: Dataset) -> bool:
    return text_of(dataset, "SegmentationType").upper() == "LABELMAP"


def _described(file: Path, dataset: Dataset, count: int) -> list[Dataset]:
    """Returns what the file says of each frame: where it lies, its segment, and to which images it refers."""
    own = items_of(dataset, "PerFrameFunctionalGroupsSequence")
    if len(own) != count:
        raise BadFile(Problem(file, f"describes {len(own)} of its {count} frames", EXPORT))
    shared = (items_of(dataset, "SharedFunctionalGroupsSequence") or [Dataset()])[0]
    described = frames_of(dataset)
    for frame, groups in zip(described, own, strict=True):
        for keyword in ("SegmentIdentificationSequence", "DerivationImageSequence"):
            if items := items_of(groups, keyword) or items_of(shared, keyword):
                setattr(frame, keyword, list(items))
    return described


def _turned_back(frame: Dataset, pixels: np.ndarray, origin: Series) -> np.ndarray:
    """Returns the pixels (H, W) of a frame so that its rows and columns run as the series', and lets the frame say so.

    A frame may state the same pixels from another corner, as programs do that turn NIfTI masks into SEGs.
    """
    first = origin.slices[0]
    if not is_placed(frame) or not is_placed(first):
        return pixels
    row, column, _ = axes(frame)
    start, (down, across) = place(frame), pixels.shape
    high, wide = spacing_of(origin.files[0], first)
    if row @ axes(first)[0] < 0:
        start, row, pixels = start + (across - 1) * wide * row, -row, pixels[:, ::-1]
    if column @ axes(first)[1] < 0:
        start, column, pixels = start + (down - 1) * high * column, -column, pixels[::-1]
    places = {"ImagePositionPatient": start, "ImageOrientationPatient": np.concatenate([row, column])}
    for keyword, values in places.items():  # new elements: frames share those of the file
        frame[keyword] = DataElement(keyword, "DS", [round(float(value), 6) for value in values])
    return pixels


def _slice_of(file: Path, frame: Dataset, origin: Series) -> int | None:
    """Returns the index of a frame's slice; None if it refers to images of other series.

    Raises:
        BadFile: it lies elsewhere than the slices, is turned against them, or does not say where it lies. Names `file`.
    """
    refers = source_of(frame)
    own = [number for number in origin.named(refers) if not refers or origin.is_source(number, frame)]
    if not own:
        return None
    if not is_placed(frame) or not is_placed(origin.slices[0]):
        if len(own) == 1:
            return own[0]
        raise BadFile(Problem(file, "has a frame that neither lies somewhere nor refers to one slice", EXPORT))
    first = origin.slices[0]
    sizes = [value_of(each, "PixelSpacing") for each in (frame, first)]
    if None not in sizes and not is_spaced_as(frame, first):
        own_size, size = (" x ".join(f"{float(part):g}" for part in each) for each in sizes)
        raise BadFile(Problem(file, f"has pixels of {own_size} mm, but its series of {size} mm", EXPORT))
    apart = np.linalg.norm(origin.places[own] - place(frame), axis=1)
    if apart.min() > MOVED * min(spacing_of(origin.files[0], first)) or is_turned(frame, first):
        what = f"has a frame {apart.min():.1f} mm from the nearest slice of its series, or turned"
        raise BadFile(Problem(file, what, EXPORT))
    return own[int(apart.argmin())]
