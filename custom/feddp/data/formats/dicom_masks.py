"""Masks of a DICOM series, from a segmentation (SEG) or from contours (RTSTRUCT), by the names of their structures."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydicom import Dataset

from feddp.data.formats.dicom_contours import bodies_of, contour_maps, names_of
from feddp.data.formats.dicom_kinds import CONTOURS, mask_kind
from feddp.data.formats.dicom_segments import labels_of, segment_maps
from feddp.data.formats.dicom_series import EXPORT, Series
from feddp.data.formats.guarded import guarded
from feddp.errors import BadFile, Problem
from feddp.limits import STRUCTURES, VOXELS
from feddp.reading import short

BODIES = ("body", "external")  # names of the outline of the body, which planning systems need
Notes = Counter[tuple[str, Path]]  # how often a file gives rise to a note


def class_maps(
    file: Path,
    dataset: Dataset,
    origin: Series,
    classes: Sequence[str],
    voxels: int = VOXELS,
    notes: Notes | None = None,
) -> np.ndarray:
    """Returns boolean maps (classes, S, H, W) of the structures whose names are the classes', in any case of letters.

    With one class and one structure, the structure is the class. Structures of other names are left out; a class without
    a structure is empty. A segmentation may have so many `voxels`. Errors name `file`. `notes` gets what a user should know.

    Raises:
        InputError: no structure is a class, or the only one outlines the body; the file is broken or does not fit the series.
    """
    said: Notes = Counter() if notes is None else notes
    with guarded(file, "does not fit its series, or is not readable", EXPORT):
        if mask_kind(dataset) == CONTOURS:
            chosen = _chosen(file, names_of(file, dataset), classes, bodies_of(dataset), said)
            return contour_maps(file, dataset, origin, chosen, len(classes))
        chosen = _chosen(file, labels_of(file, dataset), classes, frozenset(), said)
        return segment_maps(file, dataset, origin, chosen, len(classes), voxels)


def _chosen(
    file: Path, names: Mapping[int, str], classes: Sequence[str], bodies: Collection[str], notes: Notes
) -> dict[int, int]:
    """Returns {number of a structure: index of its class}; `bodies` are the numbers of those that outline the body."""
    wanted = {name.casefold(): index for index, name in enumerate(classes)}
    found = {number: wanted[name.casefold()] for number, name in names.items() if name.casefold() in wanted}
    if len(names) == len(classes) == 1 and not found:
        ((number, name),) = names.items()
        shown = short(name, 64) or "without a name"
        if str(number) in bodies or name.casefold() in BODIES:
            what = f"has one structure, {shown}, which is the outline of the body and not {classes[0]}"
            raise BadFile(Problem(file, what, "Export the structures of the classes, or name it with --classes"))
        found = {number: 0}
        notes[f"the only structure, {shown}, is taken as {classes[0]}", file] += 1
    if not found:
        listed = short(", ".join(names.values()) or "none")
        raise BadFile(Problem(file, f"has no structure of the classes; it has: {listed}", "Name its structures with --classes"))
    if len(found) > STRUCTURES:
        raise BadFile(Problem(file, f"has {len(found)} structures of the classes; the limit is {STRUCTURES}", EXPORT))
    return found
