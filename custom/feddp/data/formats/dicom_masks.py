"""Masks of a DICOM series, from a segmentation (SEG) or from contours (RTSTRUCT), by the names of their structures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydicom import Dataset

from feddp.data.formats.dicom_contours import contour_maps, names_of
from feddp.data.formats.dicom_kinds import CONTOURS, mask_kind
from feddp.data.formats.dicom_segments import labels_of, segment_maps
from feddp.data.formats.dicom_series import EXPORT, Series
from feddp.data.formats.guarded import guarded
from feddp.errors import BadFile, Problem
from feddp.limits import STRUCTURES, VOXELS
from feddp.reading import short


def class_maps(file: Path, dataset: Dataset, origin: Series, classes: Sequence[str], voxels: int = VOXELS) -> np.ndarray:
    """Returns boolean maps (classes, S, H, W) of the structures whose names are the classes', in any case of letters.

    With one class and one structure, the structure is the class. Structures of other names are left out; a class without
    a structure is empty. A segmentation may have so many `voxels`. Errors name `file`.

    Raises:
        InputError: no structure is a class, or the file is broken or does not fit the series.
    """
    with guarded(file, "does not fit its series, or is not readable", EXPORT):
        if mask_kind(dataset) == CONTOURS:
            chosen = _chosen(file, names_of(file, dataset), classes)
            return contour_maps(file, dataset, origin, chosen, len(classes))
        chosen = _chosen(file, labels_of(file, dataset), classes)
        return segment_maps(file, dataset, origin, chosen, len(classes), voxels)


def _chosen(file: Path, names: Mapping[int, str], classes: Sequence[str]) -> dict[int, int]:
    """Returns {number of a structure: index of its class}."""
    wanted = {name.casefold(): index for index, name in enumerate(classes)}
    found = {number: wanted[name.casefold()] for number, name in names.items() if name.casefold() in wanted}
    if len(names) == len(classes) == 1:
        found = dict.fromkeys(names, 0)
    if not found:
        listed = short(", ".join(names.values()) or "none")
        raise BadFile(Problem(file, f"has no structure of the classes; it has: {listed}", "Name its structures with --classes"))
    if len(found) > STRUCTURES:
        raise BadFile(Problem(file, f"has {len(found)} structures of the classes; the limit is {STRUCTURES}", EXPORT))
    return found
