"""Reads DICOM series as stacks of slices: one file per slice, or one file of several frames, sorted by their position."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydicom import Dataset

from feddp.data.formats.dicom import largest, opened
from feddp.data.formats.dicom_frames import frames_of, require_size, values_of
from feddp.data.formats.guarded import guarded
from feddp.data.formats.scan import Scan, finite, known
from feddp.data.formats.stack import Stack
from feddp.data.preparation import PLANES
from feddp.data.prepare.source import Source
from feddp.errors import BadFile, Problem
from feddp.limits import SERIES_BYTES
from feddp.reading import amount

EVEN = 0.1  # of the distance between slices: how far one may lie from its place; files round positions to tenths of mm
UPRIGHT = 0.0175  # the sine of 1 degree: how far the line through the slices may lean from their normal
ALONG = 0.87  # the cosine of 30 degrees: how far a slice may be turned out of a plane of the patient


@dataclass(frozen=True)
class Series:
    """The slices of a series in their order, each with the attributes of a file of one image.

    Args:
        slices: of files of one image, the files' data sets.
        file: the file of several frames, of which the slices are the frames `numbers`, from 1.
    """

    slices: tuple[Dataset, ...]
    file: Dataset | None = None
    numbers: tuple[int, ...] = ()

    def as_in_files(self, maps: np.ndarray) -> tuple[Sequence[Dataset], np.ndarray]:
        """Returns the series' files, and maps (S, ...) of its slices in the order of the files or of the one file's frames."""
        return (self.slices, maps) if self.file is None else ([self.file], maps[np.argsort(self.numbers)])


def read_series(tree: Source, names: Sequence[str]) -> Scan:
    """Returns the images of a series as slices, in the units of its modality, such as Hounsfield units.

    Slices are sorted along their normal if all of them say where they lie; several that do not say so are no volume.

    Raises:
        InputError: a file is broken or too large; or the slices differ in size, orientation or spacing, or two of them lie at
            one place. Names a file.
    """
    with guarded(tree.shown(names[0]), "is of a series that is not readable"):
        return _series(tree, names)


def _series(tree: Source, names: Sequence[str]) -> Scan:
    slices: list[tuple[Dataset, str]] = []
    stack, several, left = Stack(), None, SERIES_BYTES
    for name in names:
        with opened(tree, name, largest(tree)) as (dataset, found):
            pixels = require_size(tree, name, dataset, found, len(names))
            left -= pixels.start
            if left < 0:
                what = f"is of a series of more than {amount(SERIES_BYTES)} besides pixels"
                raise BadFile(Problem(tree.shown(name), what, "Give fewer files"))
            frames = frames_of(dataset)
            if frames[0] is not dataset:
                several = dataset
            if several and len(names) > 1:
                what = f"is an enhanced file, and one of {len(names)} of its series"
                raise BadFile(Problem(tree.shown(name), what, "Put it into a folder of its own"))
            slices += [(frame, name) for frame in frames]
            _require_alike(tree, name, frames, *slices[0])
            with guarded(tree.shown(name), "has no readable pixels"):
                for values in values_of(tree.shown(name), dataset, pixels, frames):
                    stack.add(values, len(frames) * len(names))
    first = slices[0][0]
    places = _places(tree, slices)
    order = np.arange(len(slices)) if places is None else _order(tree, slices, places)
    origin = Series(tuple(slices[i][0] for i in order), several, tuple(int(i) + 1 for i in order) if several else ())
    spacing = first.get("PixelSpacing") or first.get("ImagerPixelSpacing")
    mm = (float(spacing[0]), float(spacing[1])) if spacing is not None and len(spacing) == 2 else None
    apart, axis = (None, "") if places is None else (_apart(places[order], axes(first)[2]), plane(first))
    return Scan(stack.ordered(order), mm if mm and known(*mm) else None, apart, places is not None, axis, origin)


def _require_alike(tree: Source, name: str, frames: Sequence[Dataset], first: Dataset, of: str) -> None:
    keys = ("Rows", "Columns", "SamplesPerPixel", "PixelSpacing")
    if any(frame.get(key) != first.get(key) for frame in frames for key in keys):
        what = f"differs from {of} in size, channels or spacing"
        raise BadFile(Problem(tree.shown(name), what, "Put each series into a folder of its own"))


def axes(dataset: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the unit vectors in the patient along a row (to the next column), along a column, and along the slices."""
    row, column = np.array(dataset.ImageOrientationPatient, float).reshape(2, 3)
    return row, column, np.cross(row, column)


def place(dataset: Dataset) -> np.ndarray:
    """Returns where in the patient the centre of a slice's first pixel lies: (3,), in millimetres to left, back and head."""
    return np.array(dataset.ImagePositionPatient, float)


def plane(dataset: Dataset) -> str:
    """Returns the one of PLANES in which a slice lies; "" if it is turned out of all of them."""
    leaning = np.abs(axes(dataset)[2])
    return PLANES[int(leaning.argmax())] if leaning.max() >= ALONG else ""


def _places(tree: Source, slices: Sequence[tuple[Dataset, str]]) -> np.ndarray | None:
    """Returns the slices' places (S, 3); None if one of them does not say where it lies."""
    if any("ImagePositionPatient" not in d or "ImageOrientationPatient" not in d for d, _ in slices):
        return None
    turned = [np.abs(np.subtract(axes(d), axes(slices[0][0]))).max() > 1e-3 for d, _ in slices]
    if any(turned):
        what = f"lies in another plane than {slices[0][1]}"
        raise BadFile(Problem(tree.shown(slices[turned.index(True)][1]), what, "Leave localizers out of the folder"))
    places = np.stack([place(d) for d, _ in slices])
    if not finite(places):
        lost = slices[int(np.isfinite(places).all(axis=1).argmin())][1]
        raise BadFile(Problem(tree.shown(lost), "lies at a place that is no number", "Export the series again"))
    return places


def _order(tree: Source, slices: Sequence[tuple[Dataset, str]], places: np.ndarray) -> np.ndarray:
    """Returns the slices' indices sorted along their normal; raises BadFile if two lie at one place."""
    heights = places @ axes(slices[0][0])[2]
    order = np.argsort(heights, kind="stable")
    steps = np.diff(heights[order])
    if len(steps) and steps.min() < 1e-3:
        twin = slices[order[int(steps.argmin()) + 1]][1]
        raise BadFile(Problem(tree.shown(twin), "lies at the place of another slice", "Keep one image of each place"))
    return order


def _apart(places: np.ndarray, normal: np.ndarray) -> float | None:
    """Returns the millimetres between slices in order; None of a single one, or if one is missing or the stack leans.

    A stack leans where the gantry was tilted: then a voxel is no box, and distances in it are no distances in the patient.
    """
    if len(places) < 2:
        return None
    way = (places[-1] - places[0]) / (len(places) - 1)
    distance = float(way @ normal)
    even = places[0] + np.arange(len(places))[:, None] * way
    leaning = float(np.linalg.norm(np.cross(way, normal)))
    straight = leaning <= UPRIGHT * distance and np.linalg.norm(places - even, axis=1).max() <= EVEN * distance
    distance = round(distance, 6)  # positions are decimal texts
    return distance if straight and known(distance) else None
