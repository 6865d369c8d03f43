"""Masks of a DICOM series from the contours of an RTSTRUCT."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydicom import Dataset

from feddp.data.formats.attributes import items_of, lacking, named, number_of, numbers_of, text_of
from feddp.data.formats.dicom_series import EXPORT, Series, axes, require_placed, spacing_of
from feddp.data.formats.notes import Notes
from feddp.data.formats.outlines import exclusive, reach, united
from feddp.data.formats.scan import finite
from feddp.errors import BadFile, Problem
from feddp.limits import CONTOUR_STEPS
from feddp.reading import short

# in parts of the distance between slices, or in mm if there is one slice:
NEAR = 0.5  # the largest distance of a contour from its slice
LEVEL = 0.1  # contours of a slice that differ less in height belong together
BETWEEN = "contours between slices are left out where the slice has its own"
STRANGE = "contours on images that are not in the series are left out"
OPEN = "contours of points and open lines are left out"
EMPTY = "contours that hold no centre of a pixel leave their slice empty"
_CLOSED, _EXCLUSIVE = "CLOSED_PLANAR", "CLOSEDPLANAR_XOR"
_NO_AREA = ("POINT", "OPEN_PLANAR", "OPEN_NONPLANAR")


@dataclass(frozen=True)
class Contour:
    """A closed contour on a slice.

    Args:
        number: the index of its slice.
        away: how far it lies from the slice in mm.
        corners: rows and columns of pixels, whose centres have whole coordinates: (N, 2).
        exclusive: whether it is combined with the others by exclusive or.
    """

    number: int
    away: float
    corners: np.ndarray
    exclusive: bool


def names_of(file: Path, dataset: Dataset) -> dict[int, str]:
    """Returns {number of a structure: its name}."""
    return named(file, items_of(dataset, "StructureSetROISequence"), "ROINumber", "ROIName")


def bodies_of(dataset: Dataset) -> frozenset[str]:
    """Returns the numbers, as texts, of structures of the type EXTERNAL: outlines of the body."""
    observed = items_of(dataset, "RTROIObservationsSequence")
    outer = [item for item in observed if text_of(item, "RTROIInterpretedType").upper() == "EXTERNAL"]
    return frozenset(text_of(item, "ReferencedROINumber") for item in outer)


def drawn_on(contour: Dataset) -> set[str]:
    """Returns the UIDs of the images on which a contour says that it was drawn."""
    return {text_of(item, "ReferencedSOPInstanceUID") for item in items_of(contour, "ContourImageSequence")} - {""}


def spaces_of(dataset: Dataset) -> dict[str, frozenset[str]]:
    """Returns {frame of reference: the UIDs of the series that an RTSTRUCT lists for it}."""
    found: dict[str, frozenset[str]] = {}
    for space in items_of(dataset, "ReferencedFrameOfReferenceSequence"):
        studies = items_of(space, "RTReferencedStudySequence")
        listed = [item for study in studies for item in items_of(study, "RTReferencedSeriesSequence")]
        own = frozenset(text_of(item, "SeriesInstanceUID") for item in listed) - {""}
        frame = text_of(space, "FrameOfReferenceUID")
        found[frame] = found.get(frame, frozenset()) | own
    return found


def frames_of_structures(dataset: Dataset) -> dict[str, str]:
    """Returns {number of a structure, as a text: the UID of the frame of reference in which it was drawn}, where it is said."""
    structures = items_of(dataset, "StructureSetROISequence")
    found = {text_of(item, "ROINumber"): text_of(item, "ReferencedFrameOfReferenceUID") for item in structures}
    return {number: frame for number, frame in found.items() if frame}


def contour_maps(
    file: Path, dataset: Dataset, origin: Series, chosen: Mapping[int, int], classes: int, notes: Notes
) -> np.ndarray:
    """Returns boolean maps (classes, S, H, W) of structures, `chosen` as {number of a structure: index of its class}.

    A contour that says on which images it was drawn counts for these alone. Contours that surround no area are left out.
    `notes` gets what is left out, and what may be meant otherwise.

    Raises:
        BadFile: a contour lies beside the slices or across them, is no list of points or of an unknown kind, or none of a
            structure surrounds an area or belongs to the series. Names `file`; or the slices do not say where they lie.
    """
    require_placed(origin)
    said = Counter[str]()
    maps = origin.blank_maps(classes)
    left, lost = CONTOUR_STEPS, []
    structures = items_of(dataset, "ROIContourSequence")
    if not structures:  # there is one, perhaps without contours, even if nothing is drawn
        raise lacking(file, dataset, "ROIContourSequence")
    for structure in structures:
        number = int(number_of(file, structure, "ReferencedROINumber"))
        if number not in chosen:
            continue
        given = items_of(structure, "ContourSequence")
        elsewhere = _is_elsewhere(dataset, text_of(structure, "ReferencedROINumber"), origin)
        own = [each for each in given if drawn_on(each) & origin.uids.keys() or not (drawn_on(each) or elsewhere)]
        if given and not own:
            lost.append(number)
        said[STRANGE] += len(given) - len(own)
        for place_number, contours in _by_slice(file, own, origin, said).items():
            left -= _steps(contours, maps.shape[2:])
            if left < 0:
                raise BadFile(Problem(file, "has contours of too many corners", "Leave out the structures that are no class"))
            pixels = pixels_of(contours, maps.shape[2:], said)
            said[EMPTY] += 0 if pixels.any() else len(contours)
            maps[chosen[number], place_number] |= pixels
    notes.update({(what, file): count for what, count in said.items() if count})
    if lost and len(lost) == len(chosen):
        raise BadFile(Problem(file, "has contours, but none of them refers to a slice of its series", EXPORT))
    return maps


def _is_elsewhere(dataset: Dataset, number: str, origin: Series) -> bool:
    """Whether a structure lies in a frame of reference for which the file lists other series, and the series for another."""
    frame, spaces = frames_of_structures(dataset).get(number, ""), spaces_of(dataset)
    listed = frozenset[str]().union(*spaces.values())
    return frame in spaces and origin.series in listed and origin.series not in spaces[frame]


def pixels_of(contours: Sequence[Contour], shape: tuple[int, ...], doubts: Counter[str]) -> np.ndarray:
    """Returns the pixels (H, W) of a structure on a slice, from all its contours there (DICOM PS3.3 C.8.8.6.3).

    Those of CLOSED_PLANAR make one area, with holes where one of them lies in another and is drawn in the other direction.
    With this area, those of CLOSEDPLANAR_XOR are combined by exclusive or. Every line belongs to the structure.
    `doubts` is that of `united`.
    """
    plain = [each.corners for each in contours if not each.exclusive]
    whole = united(plain, shape, doubts) if plain else np.zeros(shape, bool)
    return exclusive(whole, [each.corners for each in contours if each.exclusive])


def _by_slice(file: Path, contours: Sequence[Dataset], origin: Series, said: Counter[str]) -> dict[int, list[Contour]]:
    """Returns the closed contours of a structure by the index of their slice, without those that lie between slices.

    `said` counts what is left out.
    """
    found = list(_closed(file, contours, origin))
    if contours and not found:
        kinds = ", ".join(sorted({text_of(each, "ContourGeometricType") for each in contours}))
        raise BadFile(Problem(file, f"has a structure of the classes that surrounds no area: {kinds}", EXPORT))
    nearest: dict[int, float] = {}
    for each in found:
        nearest[each.number] = min(each.away, nearest.get(each.number, each.away))
    slices: dict[int, list[Contour]] = defaultdict(list)
    for each in found:
        if each.away <= nearest[each.number] + LEVEL * origin.gap:
            slices[each.number].append(each)
    said[OPEN] += len(contours) - len(found)
    said[BETWEEN] += len(found) - sum(map(len, slices.values()))
    return slices


def _closed(file: Path, contours: Sequence[Dataset], origin: Series) -> Iterator[Contour]:
    for contour in contours:
        kind = (text_of(contour, "ContourGeometricType") or _CLOSED).upper()
        if kind in _NO_AREA:
            continue
        if kind != _CLOSED and kind.replace("_", "") != _EXCLUSIVE.replace("_", ""):
            raise BadFile(Problem(file, f"has a contour of an unknown kind, {short(kind, 40)}", EXPORT))
        points = numbers_of(file, contour, "ContourData", 0).reshape(-1, 3)
        yield Contour(*_placed(file, points, origin, drawn_on(contour)), kind != _CLOSED)


def _placed(file: Path, points: np.ndarray, origin: Series, drawn: set[str]) -> tuple[int, float, np.ndarray]:
    """Returns the index of a contour's slice, how far it is away in mm, and its corners (N, 2) as rows and columns of pixels.

    The slice is the nearest of those on which the contour was `drawn`; of all, if it does not say so. The centre of a pixel
    has whole coordinates (DICOM PS3.3 C.7.6.2.1.1).
    """
    row, column, normal = axes(origin.slices[0])
    own, heights = origin.named(drawn), points @ normal
    apart = np.abs(origin.places[own] @ normal - heights.mean())
    number, away = own[int(apart.argmin())], float(apart.min())
    offset = points - origin.places[number]
    down, across = spacing_of(origin.files[0], origin.slices[0])
    corners = np.stack([offset @ column / down, offset @ row / across], axis=1)
    if not finite(corners) or not finite(heights):
        raise BadFile(Problem(file, "has a contour with a corner that is no number", EXPORT))
    most = NEAR * origin.gap + 1e-3
    if away > most:
        which = "the slice to which it refers" if drawn else "the nearest slice of its series"
        raise BadFile(Problem(file, f"has a contour {away:.1f} mm away from {which}", EXPORT))
    if np.ptp(heights) > most:
        raise BadFile(Problem(file, "has a contour that is not parallel to the slices of its series", EXPORT))
    return number, away, corners


def _steps(contours: Sequence[Contour], shape: tuple[int, ...]) -> int:
    """Returns about how many pixels, edges and pairs of corners are looked at to fill the contours of a slice."""
    steps = sum(len(each.corners) for each in contours) ** 2 if len(contours) > 1 else 0
    for each in contours:
        rows, columns = (int(high - low) for low, high in zip(*reach(each.corners, shape), strict=True))
        steps += rows * columns + len(each.corners) * (rows + columns)
    return steps
