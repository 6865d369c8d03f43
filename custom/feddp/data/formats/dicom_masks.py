"""Masks of a DICOM series, from a segmentation (SEG) or from contours (RTSTRUCT), by the names of their structures."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydicom import Dataset

from feddp.data.formats.dicom import BROKEN, CONTOURS, Series, axes, load
from feddp.data.formats.guarded import guarded
from feddp.data.formats.scan import finite
from feddp.data.prepare.source import Source
from feddp.errors import BadFile, Problem
from feddp.limits import CONTOUR_STEPS, STRUCTURES, VOXELS
from feddp.reading import short

EXPORT = "Export it again for this series"
NEAR = 0.5  # the largest distance of a contour from its slice: of the distance between slices, or in mm if there is one slice


def series_of(tree: Source, name: str) -> set[str]:
    """Returns the UIDs of the series that a SEG or RTSTRUCT refers to."""
    dataset = load(tree, name, pixels=False)
    with guarded(tree.shown(name), BROKEN):
        uids = {str(element.value) for element in dataset.iterall() if element.keyword == "SeriesInstanceUID"}
        return uids - {str(dataset.get("SeriesInstanceUID"))}


def class_maps(file: Path, dataset: Dataset, origin: Series, classes: Sequence[str]) -> np.ndarray:
    """Returns boolean maps (classes, S, H, W) of the structures whose names are the classes', in any case of letters.

    With one class and one structure, the structure is the class. Structures of other names are left out; a class without
    a structure is empty. Errors name `file`.

    Raises:
        InputError: no structure is a class, or the file is broken or does not fit the series.
    """
    with guarded(file, "does not fit its series, or is not readable", EXPORT):
        contours = dataset.get("Modality") == CONTOURS
        return (_contours if contours else _segments)(file, dataset, origin, classes)


def _chosen(file: Path, names: Mapping[int, str], classes: Sequence[str]) -> dict[int, int]:
    """Returns {number of a structure: index of its class}."""
    wanted = {name.casefold(): index for index, name in enumerate(classes)}
    if len(names) == len(classes) == 1:
        return dict.fromkeys(names, 0)
    found = {number: wanted[name.strip().casefold()] for number, name in names.items() if name.strip().casefold() in wanted}
    if not found:
        listed = short(", ".join(names.values()) or "none")
        raise BadFile(Problem(file, f"has no structure of the classes; it has: {listed}", "Name its structures with --classes"))
    return found


def _segments(file: Path, dataset: Dataset, origin: Series, classes: Sequence[str]) -> np.ndarray:
    from highdicom.seg import Segmentation

    first = origin.slices[0]
    size = int(first.Rows), int(first.Columns)
    if (dataset.Rows, dataset.Columns) != size:
        what = f"has {dataset.Columns} x {dataset.Rows} pixels, but its series {size[1]} x {size[0]}"
        raise BadFile(Problem(file, what, EXPORT))
    if math.prod(size) * len(origin.slices) > VOXELS or int(dataset.NumberOfFrames) * math.prod(size) > VOXELS:
        raise BadFile(Problem(file, f"has more than {VOXELS} voxels", "Leave out the segments that are no class"))
    names = {int(item.SegmentNumber): str(item.get("SegmentLabel") or "") for item in dataset.SegmentSequence}
    read = Segmentation.from_dataset(dataset, copy=False)
    maps = np.zeros((len(classes), len(origin.slices), *size), bool)
    chosen = _chosen(file, names, classes)
    _require_few(file, len(chosen))
    for number, index in chosen.items():
        values = read.get_pixels_by_source_instance(
            [str(each.SOPInstanceUID) for each in origin.slices],
            segment_numbers=[number],
            ignore_spatial_locations=True,
            assert_missing_frames_are_empty=True,
        )
        maps[index] |= values[..., 0] > 0.5
    return maps


def _contours(file: Path, dataset: Dataset, origin: Series, classes: Sequence[str]) -> np.ndarray:
    names = {int(item.ROINumber): str(item.get("ROIName") or "") for item in dataset.StructureSetROISequence}
    first = origin.slices[0]
    maps = np.zeros((len(classes), len(origin.slices), int(first.Rows), int(first.Columns)), bool)
    chosen = _chosen(file, names, classes)
    drawings = [each for each in dataset.ROIContourSequence if int(each.ReferencedROINumber) in chosen]
    _require_few(file, len(drawings))
    heights, left = _heights(origin), CONTOUR_STEPS
    for structure in drawings:
        drawn = np.zeros(maps.shape[1:], bool)
        for points in _closed(structure.get("ContourSequence") or ()):
            place, corners = _on_slice(file, points, origin, heights)
            left -= len(corners) * math.prod(high - low for low, high in zip(*_around(corners, drawn.shape[1:]), strict=True))
            if left < 0:
                raise BadFile(Problem(file, "has contours of too many corners", "Leave out the structures that are no class"))
            drawn[place] ^= filled(corners, drawn.shape[1:])
        maps[chosen[int(structure.ReferencedROINumber)]] |= drawn
    return maps


def _require_few(file: Path, structures: int) -> None:
    if structures > STRUCTURES:
        what = f"has {structures} structures of the classes; the limit is {STRUCTURES}"
        raise BadFile(Problem(file, what, EXPORT))


def _closed(contours: Iterable[Dataset]) -> Iterator[np.ndarray]:
    for contour in contours:
        if contour.get("ContourGeometricType", "CLOSED_PLANAR") == "CLOSED_PLANAR":
            yield np.array(contour.ContourData, float).reshape(-1, 3)


def _heights(origin: Series) -> np.ndarray:
    """Returns the slices' positions along their normal in millimetres."""
    normal = axes(origin.slices[0])[2]
    return np.array([np.dot(np.array(each.ImagePositionPatient, float), normal) for each in origin.slices])


def _on_slice(file: Path, points: np.ndarray, origin: Series, heights: np.ndarray) -> tuple[int, np.ndarray]:
    """Returns the index of a contour's slice, and its corners (N, 2) as rows and columns of pixels.

    The centre of a pixel has whole coordinates (DICOM PS3.3 C.7.6.2.1.1).
    """
    first = origin.slices[0]
    row, column, normal = axes(first)
    height = float((points @ normal).mean())
    place = int(np.abs(heights - height).argmin())
    apart = float(np.diff(heights).min()) if len(heights) > 1 else 1.0
    offset = points - np.array(origin.slices[place].ImagePositionPatient, float)
    down, across = (float(value) for value in first.PixelSpacing)
    corners = np.stack([offset @ column / down, offset @ row / across], axis=1)
    if not finite(corners):
        raise BadFile(Problem(file, "has a contour with a corner that is no number", EXPORT))
    if abs(heights[place] - height) > NEAR * apart + 1e-3:
        what = f"has a contour {abs(heights[place] - height):.1f} mm away from the nearest slice of its series"
        raise BadFile(Problem(file, what, EXPORT))
    return place, corners


def filled(corners: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the pixels (H, W) whose centres lie inside a polygon with these corners (N, 2), rows and columns."""
    from matplotlib.path import Path as Outline

    inside = np.zeros(shape, bool)
    low, high = _around(corners, shape)
    if len(corners) < 3 or (high <= low).any():
        return inside
    window = np.mgrid[low[0] : high[0], low[1] : high[1]]
    within = Outline(corners).contains_points(window.reshape(2, -1).T)
    inside[low[0] : high[0], low[1] : high[1]] = within.reshape(window.shape[1:])
    return inside


def _around(corners: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first row and column of the image (H, W) that a polygon reaches, and those behind its last ones."""
    low, high = np.floor(corners.min(axis=0)), np.ceil(corners.max(axis=0)) + 1
    return np.clip(low, 0, shape).astype(int), np.clip(high, 0, shape).astype(int)
