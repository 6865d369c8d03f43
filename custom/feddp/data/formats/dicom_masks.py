"""Masks of a DICOM series, from a segmentation (SEG) or from contours (RTSTRUCT), by the names of their structures."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from pydicom import Dataset

from feddp.data.formats.dicom import BROKEN, CONTOURS, load
from feddp.data.formats.dicom_frames import frames_of
from feddp.data.formats.dicom_series import Series, axes, place
from feddp.data.formats.guarded import guarded
from feddp.data.formats.scan import finite
from feddp.data.prepare.source import Source
from feddp.errors import BadFile, Problem
from feddp.limits import CONTOUR_STEPS, STRUCTURES, VOXELS
from feddp.reading import short

EXPORT = "Export it again for this series"
NEAR = 0.5  # the largest distance of a contour from its slice: of the distance between slices, or in mm if there is one slice
LEVEL = 0.01  # mm: contours of a slice that differ less in height belong together
MOVED = 0.5  # pixels: how far a segment's frame may lie from its slice
_CLOSED = ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR")


def series_of(tree: Source, name: str) -> set[str]:
    """Returns the UIDs of the series that a SEG or RTSTRUCT refers to.

    A SEG may also list series on which nothing was drawn. Where it says which images are of which series, those series count
    whose images its frames refer to.
    """
    dataset = load(tree, name, pixels=False)
    with guarded(tree.shown(name), BROKEN):
        listed: dict[str, set[str]] = {}
        for element in dataset.iterall():
            for item in element.value if element.VR == "SQ" else ():
                if "SeriesInstanceUID" in item:
                    listed.setdefault(str(item.SeriesInstanceUID), set()).update(_values(item, "ReferencedSOPInstanceUID"))
        drawn = _drawn_on(dataset)
        return {uid for uid, images in listed.items() if images & drawn} or set(listed)


def _drawn_on(dataset: Dataset) -> set[str]:
    """Returns the UIDs of the images that the frames of a SEG refer to; none of an RTSTRUCT."""
    frames = dataset.get("PerFrameFunctionalGroupsSequence") or ()
    sources = (each for frame in frames for each in frame.get("DerivationImageSequence") or ())
    return {uid for each in sources for uid in _values(each, "ReferencedSOPInstanceUID")}


def _values(dataset: Dataset, keyword: str) -> set[str]:
    """Returns the values of an element at any depth."""
    return {str(element.value) for element in dataset.iterall() if element.keyword == keyword}


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
    _require_placed(file, frames_of(dataset), origin.slices)
    uids = [str(each.SOPInstanceUID) for each in origin.slices]
    if (drawn := _drawn_on(dataset)) and not drawn & set(uids):  # the lookup takes a slice without a frame for empty
        raise BadFile(Problem(file, "has frames, but none of them refers to a slice of its series", EXPORT))
    lookup = (
        partial(read.get_pixels_by_source_frame, uids[0], origin.numbers)
        if origin.numbers
        else partial(read.get_pixels_by_source_instance, uids)
    )
    maps = np.zeros((len(classes), len(origin.slices), *size), bool)
    chosen = _chosen(file, names, classes)
    _require_few(file, len(chosen))
    for number, index in chosen.items():
        values = lookup(segment_numbers=[number], ignore_spatial_locations=True, assert_missing_frames_are_empty=True)
        maps[index] |= values[..., 0] > 0.5
    return maps


def _require_placed(file: Path, frames: Iterable[Dataset], slices: Sequence[Dataset]) -> None:
    """Raises BadFile if a frame lies elsewhere than the slices, or is turned against them; references do not tell."""
    if any("ImagePositionPatient" not in each or "ImageOrientationPatient" not in each for each in slices):
        return
    places, first = np.stack([place(each) for each in slices]), slices[0]
    most = MOVED * float(min(first.get("PixelSpacing") or (1, 1)))
    for frame in frames:
        if "ImagePositionPatient" not in frame or "ImageOrientationPatient" not in frame:
            continue
        moved = np.linalg.norm(places - place(frame), axis=1).min()
        if moved > most or np.abs(np.subtract(axes(frame), axes(first))).max() > 1e-3:
            raise BadFile(Problem(file, f"has a frame {moved:.1f} mm from the nearest slice of its series, or turned", EXPORT))


def _contours(file: Path, dataset: Dataset, origin: Series, classes: Sequence[str]) -> np.ndarray:
    names = {int(item.ROINumber): str(item.get("ROIName") or "") for item in dataset.StructureSetROISequence}
    first = origin.slices[0]
    maps = np.zeros((len(classes), len(origin.slices), int(first.Rows), int(first.Columns)), bool)
    chosen = _chosen(file, names, classes)
    drawings = [each for each in dataset.ROIContourSequence if int(each.ReferencedROINumber) in chosen]
    _require_few(file, len(drawings))
    places, left = np.stack([place(each) for each in origin.slices]), CONTOUR_STEPS
    for structure in drawings:
        found = [_on_slice(file, points, origin, places) for points in _closed(structure.get("ContourSequence") or ())]
        nearest: dict[int, float] = {}
        for number, away, _ in found:
            nearest[number] = min(away, nearest.get(number, away))
        drawn = np.zeros(maps.shape[1:], bool)
        for number, away, corners in found:
            left -= len(corners) * math.prod(high - low for low, high in zip(*_around(corners, drawn.shape[1:]), strict=True))
            if left < 0:
                raise BadFile(Problem(file, "has contours of too many corners", "Leave out the structures that are no class"))
            if away <= nearest[number] + LEVEL:  # contours between two slices are of no slice
                drawn[number] ^= filled(corners, drawn.shape[1:])  # a hole is a contour inside another
        maps[chosen[int(structure.ReferencedROINumber)]] |= drawn
    return maps


def _require_few(file: Path, structures: int) -> None:
    if structures > STRUCTURES:
        what = f"has {structures} structures of the classes; the limit is {STRUCTURES}"
        raise BadFile(Problem(file, what, EXPORT))


def _closed(contours: Iterable[Dataset]) -> Iterator[np.ndarray]:
    for contour in contours:
        if contour.get("ContourGeometricType", "CLOSED_PLANAR") in _CLOSED:
            yield np.array(contour.ContourData, float).reshape(-1, 3)


def _on_slice(file: Path, points: np.ndarray, origin: Series, places: np.ndarray) -> tuple[int, float, np.ndarray]:
    """Returns the index of a contour's slice, how far it is away in mm, and its corners (N, 2) as rows and columns of pixels.

    The centre of a pixel has whole coordinates (DICOM PS3.3 C.7.6.2.1.1).
    """
    first = origin.slices[0]
    row, column, normal = axes(first)
    positions, heights = places @ normal, points @ normal
    number = int(np.abs(positions - heights.mean()).argmin())
    offset = points - places[number]
    down, across = (float(value) for value in first.PixelSpacing)
    corners = np.stack([offset @ column / down, offset @ row / across], axis=1)
    if not finite(corners):
        raise BadFile(Problem(file, "has a contour with a corner that is no number", EXPORT))
    most = NEAR * (float(np.diff(positions).min()) if len(positions) > 1 else 1.0) + 1e-3
    if (away := abs(float(positions[number] - heights.mean()))) > most:
        raise BadFile(Problem(file, f"has a contour {away:.1f} mm away from the nearest slice of its series", EXPORT))
    if np.ptp(heights) > most:
        raise BadFile(Problem(file, "has a contour that is not parallel to the slices of its series", EXPORT))
    return number, away, corners


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
