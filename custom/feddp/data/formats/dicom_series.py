"""Reads DICOM series as stacks of slices: one file per slice, or one file of several frames, sorted by their position."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from pydicom import Dataset

from feddp.data.formats.attributes import given, items_of, lacking, numbers_of, text_of, value_of
from feddp.data.formats.dicom import largest, opened
from feddp.data.formats.dicom_frames import frames_of, require_size, values_of
from feddp.data.formats.dicom_values import scaled_by
from feddp.data.formats.guarded import guarded
from feddp.data.formats.scan import Scan, finite, known
from feddp.data.formats.stack import Stack, room
from feddp.data.preparation import PLANES
from feddp.data.prepare.source import Source
from feddp.errors import BadFile, Problem
from feddp.limits import SERIES_BYTES
from feddp.reading import amount

EXPORT = "Export it again for this series"
# of one series: by how much directions (as parts of unit vectors) and spacings (relatively) may differ, as texts are rounded
# in different places: 0.488281 mm beside 0.48828125. Over 500 pixels, that much is half a pixel
ALIKE = 1e-3
PLACE = ("ImagePositionPatient", "ImageOrientationPatient")
_SPACINGS = ("PixelSpacing", "ImagerPixelSpacing")
EVEN = 0.1  # of the distance between slices: how far one may lie from its place; files round positions to tenths of mm
UPRIGHT = 0.0175  # the sine of 1 degree: how far the line through the slices may lean from their normal
ALONG = 0.87  # the cosine of 30 degrees: how far a slice may be turned out of a plane of the patient


@dataclass(frozen=True)
class Series:
    """The slices of a series in their order, each with the attributes of a file of one image.

    Args:
        slices: of files of one image, the files' data sets.
        files: the file of each slice, as errors name it.
        file: the file of several frames, of which the slices are the frames `numbers`, from 1.
    """

    slices: tuple[Dataset, ...]
    files: tuple[Path, ...]
    file: Dataset | None = None
    numbers: tuple[int, ...] = ()

    @cached_property
    def uids(self) -> Mapping[str, Sequence[int]]:
        """The UIDs of its images, with the indices of the slices: several of a file of several frames."""
        found: dict[str, list[int]] = {}
        for number, each in enumerate(self.slices):
            if uid := text_of(each, "SOPInstanceUID"):
                found.setdefault(uid, []).append(number)
        return found

    @cached_property
    def places(self) -> np.ndarray:
        """Where the slices lie, as of `place`: (S, 3)."""
        return np.stack([place(each) for each in self.slices])

    @cached_property
    def gap(self) -> float:
        """The least distance between slices in mm; 1 if there is one slice."""
        heights = self.places @ axes(self.slices[0])[2]
        return float(np.diff(heights).min()) if len(heights) > 1 else 1.0

    def blank_maps(self, classes: int) -> np.ndarray:
        """Returns maps (classes, S, H, W) of the slices, all False."""
        first = self.slices[0]
        maps = room((classes, len(self.slices), int(first.Rows), int(first.Columns)), bool)
        maps[:] = False
        return maps

    def named(self, uids: Collection[str]) -> list[int]:
        """Returns the indices of the slices of these images; of all slices, if no image is named."""
        return sorted(number for uid in uids for number in self.uids.get(uid, ())) if uids else [*range(len(self.slices))]

    @property
    def series(self) -> str:
        """Its UID."""
        return text_of(self.slices[0], "SeriesInstanceUID")

    def is_source(self, number: int, frame: Dataset) -> bool:
        """Whether a frame of a SEG refers to the slice of this index."""
        uid = text_of(self.slices[number], "SOPInstanceUID")
        sources = [
            each for item in items_of(frame, "DerivationImageSequence") for each in items_of(item, "SourceImageSequence")
        ]
        own = [each for each in sources if text_of(each, "ReferencedSOPInstanceUID") == uid]
        if not self.numbers:
            return bool(own)
        listed = [value_of(each, "ReferencedFrameNumber") for each in own]  # without one, it refers to all frames
        return any(value is None or self.numbers[number] in np.atleast_1d(value) for value in listed)

    def as_in_files(self, maps: np.ndarray) -> np.ndarray:
        """Returns maps (S, ...) of its slices in the order of the files, or of the frames of the one file."""
        return maps if self.file is None else maps[np.argsort(self.numbers)]


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
            for frame in frames:
                _require_readable(tree.shown(name), frame)
            slices += [(frame, name) for frame in frames]
            _require_alike(tree, name, frames, *slices[0])
            with guarded(tree.shown(name), "has no readable pixels"):
                for values in values_of(tree.shown(name), dataset, pixels, frames):
                    stack.add(values, len(frames) * len(names))
    first = slices[0][0]
    places = _places(tree, slices)
    order = np.arange(len(slices)) if places is None else _order(tree, slices, places)
    ordered, shown = tuple(slices[i][0] for i in order), tuple(tree.shown(slices[i][1]) for i in order)
    numbers = tuple(int(i) + 1 for i in order) if several else ()
    origin = Series(ordered, shown, several, numbers)
    mm = spacing_of(tree.shown(slices[0][1]), first) if any(given(first, each) for each in _SPACINGS) else None
    apart, axis = (None, "") if places is None else (_apart(places[order], axes(first)[2]), plane(first))
    values = stack.ordered(order)
    padded = stack.eight and values.dtype != np.uint8
    return Scan(values, mm if mm and known(*mm) else None, apart, places is not None, axis, origin, padded=padded)


def _require_readable(file: Path, frame: Dataset) -> None:
    """Raises BadFile if what says where a slice lies, or how large its pixels are, is not what DICOM allows. Names `file`."""
    if any(given(frame, keyword) for keyword in _SPACINGS):
        spacing_of(file, frame)
    if not is_placed(frame):
        return
    numbers_of(file, frame, "ImagePositionPatient", 3)
    row, column = numbers_of(file, frame, "ImageOrientationPatient", 6).reshape(2, 3)
    if not np.allclose([row @ row, column @ column, row @ column], [1, 1, 0], atol=10 * ALIKE):
        raise BadFile(Problem(file, "has an ImageOrientationPatient that is no pair of perpendicular directions", EXPORT))


def _require_alike(tree: Source, name: str, frames: Sequence[Dataset], first: Dataset, of: str) -> None:
    sizes = ("Rows", "Columns", "SamplesPerPixel")
    for frame in frames:
        alike = all(value_of(frame, key) == value_of(first, key) for key in sizes)
        if not alike or not is_spaced_as(frame, first) or scaled_by(frame) != scaled_by(first):
            what = f"differs from {of} in size, channels or spacing, or in whether it has units"
            raise BadFile(Problem(tree.shown(name), what, "Put each series into a folder of its own"))


def is_spaced_as(frame: Dataset, first: Dataset) -> bool:
    """Whether both have the same PixelSpacing, or none."""
    own, other = value_of(frame, "PixelSpacing"), value_of(first, "PixelSpacing")
    if own is None or other is None:
        return own is other
    return bool(np.allclose(np.array(own, float), np.array(other, float), rtol=ALIKE, atol=0))


def spacing_of(file: Path, dataset: Dataset) -> tuple[float, float]:
    """Returns the millimetres between rows and between columns; raises BadFile if they are not said. Names `file`."""
    keyword = next((each for each in _SPACINGS if given(dataset, each)), _SPACINGS[0])
    down, across = numbers_of(file, dataset, keyword, 2)
    if not min(down, across) > 0:
        raise BadFile(Problem(file, f"has a {keyword} of {down:g} and {across:g} mm", EXPORT))
    return float(down), float(across)


def is_placed(dataset: Dataset) -> bool:
    """Whether a slice says where in the patient it lies."""
    return all(given(dataset, keyword) for keyword in PLACE)


def require_placed(series: Series) -> None:
    """Raises BadFile if a slice does not say where in the patient it lies. Names its file and the attribute."""
    for dataset, file in zip(series.slices, series.files, strict=True):
        if lost := [keyword for keyword in PLACE if not given(dataset, keyword)]:
            raise lacking(file, dataset, lost[0])


def is_turned(dataset: Dataset, first: Dataset) -> bool:
    """Whether a slice lies in another plane than the first one."""
    return bool(np.abs(np.subtract(axes(dataset), axes(first))).max() > ALIKE)


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
    if not all(is_placed(d) for d, _ in slices):
        return None
    turned = [is_turned(d, slices[0][0]) for d, _ in slices]
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
