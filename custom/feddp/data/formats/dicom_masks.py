"""Masks of a DICOM series, from a segmentation (SEG) or from contours (RTSTRUCT), by the names of their structures."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydicom import Dataset

from feddp.data.formats.dicom import BROKEN, load
from feddp.data.formats.dicom_contours import bodies_of, contour_maps, names_of
from feddp.data.formats.dicom_kinds import CONTOURS, mask_kind
from feddp.data.formats.dicom_segments import labels_of, segment_maps
from feddp.data.formats.dicom_series import EXPORT, Series
from feddp.data.formats.guarded import guarded
from feddp.data.formats.notes import Notes
from feddp.data.prepare.source import Source
from feddp.errors import BadFile, Problem
from feddp.limits import STRUCTURES, VOXELS
from feddp.reading import short

_NAME = "Name its structures with --classes"
BODIES = ("body", "external")  # names of the outline of the body, which planning systems need


def joined_maps(tree: Source, names: Sequence[str], origin: Series, classes: Sequence[str], notes: Notes) -> np.ndarray:
    """Returns the maps of `class_maps` from all files of masks of a series, such as one per structure.

    Raises:
        InputError: as `class_maps`, or two files hold a class, or none holds one.
    """
    if len(names) == 1:
        return class_maps(tree.shown(names[0]), load(tree, names[0]), origin, classes, tree.voxels, notes)
    owners: dict[str, str] = {}
    for name in names:
        file, dataset = tree.shown(name), load(tree, name, pixels=False)
        with guarded(file, BROKEN):
            held = {label.casefold() for label in _structures(file, dataset).values()}
        own = [each for each in classes if each.casefold() in held]
        for each in own:
            if (other := owners.setdefault(each, name)) != name:
                what = f"has {each}, and so has {tree.shown(other)} of the same series"
                raise BadFile(Problem(file, what, "Keep one of them, or put both into one file"))
        notes.update([] if own else [("files of masks without a structure of the classes are left out", file)])
    if not owners:
        what = f"is one of {len(names)} files of masks of its series, and none has a structure of the classes"
        raise BadFile(Problem(tree.shown(names[0]), what, _NAME))
    maps = origin.blank_maps(len(classes))
    for name in dict.fromkeys(owners.values()):
        own = [each for each in classes if owners.get(each) == name]
        drawn = class_maps(tree.shown(name), load(tree, name), origin, own, tree.voxels, notes)
        for number, each in enumerate(own):
            maps[classes.index(each)] = drawn[number]
    return maps


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
    a structure is empty. Each segment may have so many `voxels`. Errors name `file`. `notes` gets what a user should know.

    Raises:
        InputError: no structure is a class, or the only one outlines the body; the file is broken or does not fit the series.
    """
    said = Notes() if notes is None else notes
    with guarded(file, "does not fit its series, or is not readable", EXPORT):
        chosen = _chosen(file, _structures(file, dataset), classes, bodies_of(dataset), said)
        if mask_kind(dataset) == CONTOURS:
            return contour_maps(file, dataset, origin, chosen, len(classes), said)
        return segment_maps(file, dataset, origin, chosen, len(classes), voxels, said)


def _structures(file: Path, dataset: Dataset) -> dict[int, str]:
    """Returns {number of a structure: its name}."""
    return names_of(file, dataset) if mask_kind(dataset) == CONTOURS else labels_of(file, dataset)


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
        raise BadFile(Problem(file, f"has no structure of the classes; it has: {listed}", _NAME))
    if len(found) > STRUCTURES:
        raise BadFile(Problem(file, f"has {len(found)} structures of the classes; the limit is {STRUCTURES}", EXPORT))
    return found
