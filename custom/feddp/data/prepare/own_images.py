"""Your own images: a folder or zip with one site or several, in the formats that people have.

    SOURCE/<site>/images/...    PNG, JPEG, TIFF or BMP of 8 or 16 bits; NIfTI volumes; DICOM series, each in a folder of its own
    SOURCE/<site>/masks/...     a file of the image's path and name, which may end in _mask, _seg, _segmentation or _label; of a
                                DICOM series, a SEG or RTSTRUCT that refers to it (it may also lie beside the series)
    SOURCE/<site>/split.csv     if the splits are given: image,patient,split, where image is the file's or series' name

A source that has images/ itself is one site with the source's name. A patient is the PatientID of a series, else the first
folder below images/, else the image itself.

Values of more than 8 bits, and those of NIfTI, become 0 to 255 per picture or volume: from the least value to the 99th
percentile, or in a given window. Volumes are sliced along an axis of the patient (NIfTI), or as they were acquired (DICOM).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from feddp.data.description import HEADER, LISTED, SPLITS, Position, read_lines
from feddp.data.folder import RawSample, refuse_occupied, write_site
from feddp.data.formats.find import DICOM, NIFTI, PICTURE, Found, FoundImage, find
from feddp.data.formats.labels import by_colour, by_value, in_one
from feddp.data.formats.scan import Scan, eight_bits, in_channels, resized
from feddp.data.names import require_site
from feddp.data.prepare.folder_options import FolderOptions
from feddp.data.prepare.source import Source, resize
from feddp.data.prepare.split import split_site, splitting_of
from feddp.data.progress import track
from feddp.errors import BadFile, InputError, Problem
from feddp.limits import TABLE_BYTES
from feddp.partition import some

LAYOUT = "Make the folders SOURCE/SITE/images and SOURCE/SITE/masks, or SOURCE/images and SOURCE/masks"


@dataclass(frozen=True)
class SourceSite:
    """A site of the source: its images, what its masks/ holds, and the mask of each image."""

    name: str
    top: str
    images: Found
    masks: Found
    truths: Mapping[str, str]  # {image's name: name of its mask's file}


def prepare(source: Path, out: Path, size: int | None, seed: int, split: str | None, options: FolderOptions) -> list[str]:
    """Writes <out>/<site> for each site of the source; images at size x size, or at their own size if None.

    Patients are split by seed (`split_site`), unless the site has a split.csv. Returns notes for the user.

    Raises:
        InputError: the layout is another one, an image has no mask, a file cannot be read or does not fit its mask, a target is
            not empty, or a site cannot be split so. The first such file ends the preparation; a site is written whole or not.
    """
    tree = Source(source)
    sites = [_site(tree, name, top) for name, top in _tops(tree).items()]
    refuse_occupied(out / site.name for site in sites)
    given = {site.name: _given(tree, site) for site in sites}
    if split is not None and any(given.values()):
        raise InputError(f"{tree.path}: its split.csv gives the splits. Leave --split out, or remove split.csv.")
    notes = []
    for site in sites:
        entries = site.images.entries
        patients = {entry.name: entry.patient for entry in entries}
        words: Mapping[str, str] = {}
        if rows := given[site.name]:
            patients, words = {name: row[0] for name, row in rows.items()}, dict(rows.values())
        else:
            words = split_site(site.name, patients.values(), seed, split)
        first = entries[0].read(tree, options.axis)
        channels = options.channels or first.channels
        metadata: dict[str, Any] = {
            "name": source.stem,
            "channels": channels,
            "classes": list(options.classes),
            "labels": options.labels,
            "source": "feddp data prepare folder",
            "intensities": list(options.window) if options.window else "8 bits as they are, more to the 99th percentile",
            **({} if given[site.name] else splitting_of(seed, split)),
            **({"volumes": LISTED} if first.volume else {}),
            **({"axis": options.axis} if any(entry.kind == NIFTI for entry in entries) else {}),
        }
        samples = (
            sample
            for entry in track(entries, f"Preparing {site.name}", total=len(entries))
            for sample in _samples(tree, site, entry, patients[entry.name], words, channels, size, options)
        )
        write_site(out / site.name, metadata, samples)
        if others := [*site.images.others, *site.masks.others]:
            notes.append(f"{site.name}: left out, as neither images nor masks: {some(sorted(others), 3)}")
    return notes


def _tops(tree: Source) -> dict[str, str]:
    """Returns {site: its folder in the source}; a zip may hold the folder of the sites instead of the sites themselves."""
    tops = sorted({name.split("/images/", 1)[0] for name in tree.names if "/images/" in name})
    above = {top.rpartition("/")[0] for top in tops}
    if len(above) != 1:
        what = "has no folder images with files" if not tops else f"has folders images in {some(tops, 3)}, at different levels"
        raise InputError(f"{tree.path} {what}. {LAYOUT}.")
    sites = {top.rpartition("/")[2]: top for top in tops}
    for name in sites:
        require_site(tree.path, name)
    return sites


def _site(tree: Source, name: str, top: str) -> SourceSite:
    images, masks = find(tree, f"{top}/images"), find(tree, f"{top}/masks")
    if refused := [*images.refused, *masks.refused]:
        raise refused[0]
    if not images.entries:
        raise InputError(f"{tree.path}: {top}/images holds no image of a known format. {LAYOUT}.")
    if {entry.kind == PICTURE for entry in images.entries} == {True, False}:
        raise InputError(f"{tree.path}: {top}/images holds both pictures and volumes. Prepare them as two sources.")
    return SourceSite(name, top, images, masks, _truths(tree, images, masks))


def _truths(tree: Source, images: Found, masks: Found) -> dict[str, str]:
    """Returns the mask's file of each image; raises InputError if images have none, or a series several."""
    truths: dict[str, str] = {}
    annotations = _annotations(tree, [*masks.annotations, *images.annotations])
    for entry in images.entries:
        if (found := masks.mask_of(entry)) and entry.kind != DICOM:
            truths[entry.name] = found.files[0]
        elif listed := annotations.get(entry.series):
            if len(listed) > 1:
                raise InputError(f"{tree.path}: {some(listed, 3)} are masks of one series. Keep one of them.")
            truths[entry.name] = listed[0]
    lost = [entry.files[0] for entry in images.entries if entry.name not in truths]
    if lost:
        raise InputError(f"{tree.path}: {len(lost)} image(s) have no mask, {lost[0]} first. Add masks of the same names.")
    return truths


def _annotations(tree: Source, names: Iterable[str]) -> dict[str, list[str]]:
    """Returns {series: the files of masks that refer to it}."""
    found: dict[str, list[str]] = {}
    for name in names:
        from feddp.data.formats.dicom_masks import series_of

        for series in series_of(tree, name):
            found.setdefault(series, []).append(name)
    return found


def _given(tree: Source, site: SourceSite) -> dict[str, tuple[str, str]]:
    """Returns {image: (patient, split)} of the site's split.csv, if there is one."""
    name = f"{site.top}/split.csv"
    if name not in tree.names:
        return {}
    file = tree.shown(name)
    lines = read_lines(tree.read(name, TABLE_BYTES), file)
    if not lines or lines[0] != HEADER or any(len(line) != 3 or line[2] not in SPLITS for line in lines[1:]):
        raise BadFile(Problem(file, "is not a table of image,patient,split with the splits train, val and test", "Correct it"))
    rows = {image: (patient, split) for image, patient, split in lines[1:]}
    names = {entry.name for entry in site.images.entries}
    if odd := sorted(names ^ rows.keys()):
        what = f"{'lacks' if odd[0] in names else 'lists, without an image,'} {some(odd, 3)}"
        raise BadFile(Problem(file, what, "Give every image one line, under its name without ending"))
    words: dict[str, str] = {}
    for patient, split in rows.values():
        if words.setdefault(patient, split) != split:
            raise BadFile(Problem(file, f"patient {patient} is in {words[patient]} and {split}", "Keep a patient in one split"))
    return rows


def _samples(
    tree: Source,
    site: SourceSite,
    entry: FoundImage,
    patient: str,
    words: Mapping[str, str],
    channels: int,
    size: int | None,
    options: FolderOptions,
) -> Iterator[RawSample]:
    scan = entry.read(tree, options.axis)
    truth = site.truths[entry.name]
    masks = _mask(tree, entry, scan, truth, options)
    pixels = in_channels(eight_bits(scan.pixels, options.window), channels, options.channels is not None)
    if pixels is None:
        what = f"has {scan.channels} channel(s), but the site's first image {channels}"
        raise BadFile(Problem(tree.shown(entry.files[0]), what, "Convert all of them with --channels 1 or --channels 3"))
    mm = scan.mm or options.mm
    for number, (image, mask) in enumerate(zip(pixels, masks, strict=True)):
        stem = entry.name if entry.kind == PICTURE else f"{entry.name}_{number:03d}"
        here = resized(mm, mask.shape, size)
        place = Position(entry.name, number, here, scan.apart) if scan.volume else Position(mm=here)
        yield stem, patient, words[patient], *resize(image, mask, size, entry.files[0]), place


def _mask(tree: Source, entry: FoundImage, scan: Scan, truth: str, options: FolderOptions) -> np.ndarray:
    """Returns the mask of an image: uint8 (S, H, W) of 0 to C."""
    file = tree.shown(truth)
    if entry.kind == DICOM:
        from feddp.data.formats.dicom import load
        from feddp.data.formats.dicom_masks import class_maps

        return in_one(class_maps(file, load(tree, truth), scan.origin, options.classes), options.labels, file)
    if entry.kind == NIFTI:
        from feddp.data.formats.nifti import read_truth

        return by_value(file, read_truth(tree, truth, scan.origin), len(options.classes), options.threshold)
    from feddp.data.formats.pictures import read_labels, read_picture

    values = read_picture(tree, truth).pixels[0] if options.colours else read_labels(tree, truth)
    if options.colours:
        values = values if values.ndim == 3 else np.repeat(values[..., None], 3, axis=-1)
        mask = by_colour(file, eight_bits(values, None), options.colours)
    elif values.ndim == 3 and (values != values[..., :1]).any():
        what = "has colours, and none is declared"
        raise BadFile(Problem(file, what, "Give the colours of the classes with --colour CLASS=RED,GREEN,BLUE"))
    else:
        mask = by_value(file, values[..., 0] if values.ndim == 3 else values, len(options.classes), options.threshold)
    if mask.shape != scan.pixels.shape[1:3]:
        (h, w), (mh, mw) = scan.pixels.shape[1:3], mask.shape
        raise BadFile(Problem(file, f"has {mw} x {mh} pixels, but its image {w} x {h}", "Make both the same size"))
    return mask[None]
