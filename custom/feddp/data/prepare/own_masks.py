"""The masks of your own images: which file or files belong to an image, and their values as classes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from feddp.data.formats.find import DICOM, NIFTI, Found, FoundImage
from feddp.data.formats.labels import ALL_ABOVE, GIVE_COLOURS, by_colour, by_value, in_one, require_nested
from feddp.data.formats.notes import Notes
from feddp.data.formats.scan import Scan
from feddp.data.formats.stack import room
from feddp.data.pixels import QUARTERS
from feddp.data.prepare.folder_options import FolderOptions
from feddp.data.prepare.source import Source
from feddp.errors import BadFile, InputError, Problem
from feddp.partition import some

# {image's name: its mask's file, or one file of each class, in their order; of a series, all files of its masks}
Truths = Mapping[str, tuple[str, ...]]


def truths_of(tree: Source, images: Found, masks: Found, classes: Sequence[str]) -> tuple[Truths, list[str]]:
    """Returns the masks of every image, and the files in masks/ that are of none.

    Raises:
        InputError: images have no mask or lack those of some classes.
    """
    truths: dict[str, tuple[str, ...]] = {}
    annotations, unplaced = _annotations(tree, [*masks.annotations, *images.annotations], images.entries)
    for entry in images.entries:
        if entry.kind == DICOM:
            truths[entry.name] = tuple(annotations.get(entry.name, []))
        elif found := masks.mask_of(entry):
            truths[entry.name] = found.files
        else:
            truths[entry.name] = _by_class(tree, masks, entry, classes)
    if lost := [entry for entry in images.entries if not truths[entry.name]]:
        remedy = "a SEG or RTSTRUCT that refers to the series" if lost[0].kind == DICOM else "masks of the same names"
        what = f"{len(lost)} image(s) have no mask, {lost[0].files[0]} first"
        causes = "".join(f"; {name} {why}" for name, why in [*unplaced.items()][:3])
        if masks.unread:
            causes += f"; of kinds that are not read: {some(masks.unread, 3)}"
            remedy += ", as PNG, TIFF or NIfTI"
        raise InputError(f"{tree.path}: {what}{causes}. Add {remedy}.")
    used = {file for files in truths.values() for file in files}
    unused = [file for entry in masks.entries for file in entry.files if file not in used]
    return truths, [*unused, *unplaced]


def _by_class(tree: Source, masks: Found, entry: FoundImage, classes: Sequence[str]) -> tuple[str, ...]:
    found = [masks.of_class(entry, name) for name in classes]
    files = tuple(each.files[0] for each in found if each)
    if 0 < len(files) < len(classes):
        lacking = [name for name, each in zip(classes, found, strict=True) if each is None]
        what = f"is the mask of one class of {entry.files[0]}, which has none of {some(lacking, 3)}"
        raise BadFile(Problem(tree.shown(files[0]), what, "Add one for every class, an empty one where there is nothing"))
    return files


def _annotations(
    tree: Source, names: Sequence[str], entries: Sequence[FoundImage]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Returns {series' name: the files of masks that belong to it}, and {file that belongs to none: why}."""
    found: dict[str, list[str]] = {}
    unplaced: dict[str, str] = {}
    series = [entry for entry in entries if entry.kind == DICOM]
    for name in names:
        from feddp.data.formats.dicom_references import references_of

        references = references_of(tree, name)
        own = references.of(series)
        for entry in own:
            found.setdefault(entry.name, []).append(name)
        if not own:
            unplaced[name] = "refers to no series" if references.none else "refers to none of these series"
    return {series: _distinct(tree, listed) for series, listed in found.items()}, unplaced


def _distinct(tree: Source, names: Sequence[str]) -> list[str]:
    """Returns the files without copies of one before."""
    first: dict[bytes | None, str] = {}
    for name in names:
        first.setdefault(tree.digest(name) if len(names) > 1 else None, name)
    return [*first.values()]


def mask_of(
    tree: Source,
    entry: FoundImage,
    scan: Scan,
    truths: Sequence[str],
    options: FolderOptions,
    notes: Notes,
) -> np.ndarray:
    """Returns the mask of an image: uint8 (S, H, W) of 0 to C. `notes` gets what a user should know of a file.

    Raises:
        BadFile: a file cannot be read, does not fit the image, or has values that are no classes.
    """
    if entry.kind == DICOM:
        from feddp.data.formats.dicom_masks import joined_maps

        maps = joined_maps(tree, truths, scan.origin, options.classes, notes)
        return in_one(maps, options.labels, options.classes, tree.shown(truths[0]))
    if len(truths) == 1:
        mask = _values(tree, entry, scan, truths[0], options, len(options.classes))
        if options.labels is None:
            require_nested(tree.shown(truths[0]), mask, options.classes)
        return mask
    maps = room((len(truths), *scan.pixels.shape[:3]), bool)
    for number, truth in enumerate(truths):
        maps[number] = _values(tree, entry, scan, truth, options, 1)
    return in_one(maps, options.labels, options.classes, tree.shown(truths[0]))


def _values(tree: Source, entry: FoundImage, scan: Scan, truth: str, options: FolderOptions, classes: int) -> np.ndarray:
    """Returns the values (S, H, W) of one file that holds so many classes."""
    file = tree.shown(truth)
    if entry.kind == NIFTI:
        from feddp.data.formats.nifti import read_truth

        return by_value(file, read_truth(tree, truth, scan.origin), classes, options.threshold)
    mask, orientation = _picture(tree, truth, file, options, classes)
    shape = scan.pixels.shape[1:3]
    _require_alike(file, scan.orientation, orientation, shape)
    if mask.shape != shape:
        (h, w), (mh, mw) = shape, mask.shape
        what, remedy = f"has {mw} x {mh} pixels, but its image {w} x {h}", "Make both the same size"
        if mask.shape == shape[::-1] and (scan.orientation in QUARTERS) != (orientation in QUARTERS):
            turned, number = ("its image", scan.orientation) if scan.orientation in QUARTERS else ("the mask", orientation)
            what += f": viewers show {turned} turned by its orientation tag, {number}, and pixels are taken as stored"
            remedy = "Turn the pixels of images and masks first, for example with ImageMagick's -auto-orient"
        raise BadFile(Problem(file, what, remedy))
    return mask[None]


def _require_alike(file: Path, image: int, mask: int, shape: tuple[int, ...]) -> None:
    """Raises BadFile if viewers turn an image and its mask differently, so that nobody knows which pixels belong together.

    The pixels of both are taken as they are stored. A quarter turn of one alone, of an image (H, W) that is no square, is left
    to the check of the sizes.
    """
    quarter = min(image, mask) == 1 and max(image, mask) in QUARTERS
    if image != mask and not (quarter and shape[0] != shape[1]):
        what = f"has the orientation {mask} in its file, and its image {image}, so one is shown turned and the other is not"
        remedy = "Save both turned as they belong, without an orientation"
        raise BadFile(Problem(file, what, remedy))


def _picture(tree: Source, truth: str, file: Path, options: FolderOptions, classes: int) -> tuple[np.ndarray, int]:
    """Returns the mask (H, W) in one file of so many classes, and its orientation."""
    from feddp.data.formats.pictures import read_colours, read_labels

    if options.colours:
        drawn = read_colours(tree, truth)
        return by_colour(file, drawn.values, options.colours), drawn.orientation
    drawn = read_labels(tree, truth)
    values = drawn.values
    # the indices of grey levels are no levels, but of all above 0, the threshold takes each alike
    if drawn.palette is not None and values.max(initial=0) > classes and options.threshold != 0:
        values = drawn.colours
    if values.ndim == 3 and (values != values[..., :1]).any():
        remedy = GIVE_COLOURS if drawn.palette is None or classes > 1 else f"{GIVE_COLOURS}; {ALL_ABOVE}"
        raise BadFile(Problem(file, "has colours, and none is declared", remedy))
    return by_value(file, values[..., 0] if values.ndim == 3 else values, classes, options.threshold), drawn.orientation
