"""Your own images: a folder or zip with one site or several, in the formats that people have.

    SOURCE/<site>/images/...    PNG, JPEG, TIFF or BMP of 8 or 16 bits; NIfTI volumes; DICOM series, each in a folder of its own
    SOURCE/<site>/masks/...     a file of the image's path and name, which may end in _mask, _seg, _segmentation or _label; or a
                                file per class, whose name ends in _CLASS or whose folder is masks/CLASS; of a DICOM series, a
                                SEG or RTSTRUCT that refers to it (it may also lie beside the series)
    SOURCE/<site>/split.csv     if the splits are given: image,patient,split, where image is the file's or series' name

A source that has images/ itself is one site with the source's name. A patient is the PatientID of a series, else the first
folder below images/, else the image itself.

Values of more than 8 bits, and those of NIfTI, become 0 to 255 per picture or volume: from the least value to the 99th
percentile, or in a given window. Volumes are sliced along an axis of the patient (NIfTI), or as they were acquired (DICOM).
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from feddp.data.description import HEADER, LABELS, LISTED, SPLITS, Position, numbered_lines
from feddp.data.folder import RawSample, refuse_occupied, write_site
from feddp.data.formats.find import DICOM, PICTURE, Found, find
from feddp.data.formats.notes import Notes
from feddp.data.formats.scan import Scan, in_channels, resized
from feddp.data.names import composed, require_site, site_name
from feddp.data.pixels import is_around
from feddp.data.preparation import KEY, Preparation, Window
from feddp.data.prepare.folder_options import FolderOptions
from feddp.data.prepare.own_masks import Truths, mask_of, truths_of
from feddp.data.prepare.source import Source, resize
from feddp.data.prepare.split import needed, split_site, splitting_of
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
    truths: Truths
    unused: Sequence[str]  # files in masks/ that are of no image


def prepare(source: Path, out: Path, size: int | None, seed: int, split: str | None, options: FolderOptions) -> list[str]:
    """Writes <out>/<site> for each site of the source; images at size x size, or at their own size if None.

    Patients are split by seed (`split_site`), unless the site has a split.csv. Returns notes for the user.

    Raises:
        InputError: the layout is another one, an image has no mask, a file cannot be read or does not fit its mask, a target is
            not empty, or a site cannot be split so. The first such file ends the preparation; a site is written whole or not.
    """
    tree = Source(source, options.voxels)
    for wrong in tree.unread.values():  # perhaps a site or a patient
        raise wrong
    sites = [_site(tree, name, top, options.classes) for name, top in _tops(tree).items()]
    refuse_occupied(out / site.name for site in sites)
    given = {site.name: _given(tree, site) for site in sites}
    if split is not None and any(given.values()):
        raise InputError(f"{tree.path}: its split.csv gives the splits. Leave --split out, or remove split.csv.")
    notes: dict[str, list[str]] = {}  # the sites of each
    for site in sites:
        entries = site.images.entries
        patients = {entry.name: entry.patient for entry in entries}
        words: Mapping[str, str] = {}
        if rows := given[site.name]:
            patients, words = {name: row[0] for name, row in rows.items()}, dict(rows.values())
        else:
            words = split_site(site.name, patients.values(), seed, split)
        first = entries[0].read(tree, options.axis)
        metadata: dict[str, Any] = {
            "name": Path(site_name(source)).stem,  # of `.` too
            "channels": options.channels or first.channels,
            "classes": list(options.classes),
            "labels": options.labels or LABELS[0],
            "source": "feddp data prepare folder",
            **({} if given[site.name] else splitting_of(seed, split)),
            **({"volumes": LISTED} if first.volume else {}),
        }
        seen = Noticed(options.classes, metadata["labels"])
        write_site(out / site.name, metadata, _samples(tree, site, patients, words, metadata, size, options, seen))
        told = (_notes(site, bool(given[site.name])), _too_few(split, {*words.values()}), seen.notes())
        for note in chain(*told):
            notes.setdefault(note, []).append(site.name)
    return [f"{', '.join(names)}: {note}" for note, names in notes.items()]


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


def _site(tree: Source, name: str, top: str, classes: Sequence[str]) -> SourceSite:
    images, masks = find(tree, f"{top}/images"), find(tree, f"{top}/masks")
    if refused := [*images.refused, *masks.refused]:
        raise refused[0]
    if not images.entries:
        remedy = f"Convert {some(images.unread, 3)} to PNG, TIFF, NIfTI or DICOM" if images.unread else LAYOUT
        raise InputError(f"{tree.path}: {top}/images holds no image of a known format. {remedy}.")
    if {entry.kind == PICTURE for entry in images.entries} == {True, False}:
        raise InputError(f"{tree.path}: {top}/images holds both pictures and volumes. Prepare them as two sources.")
    return SourceSite(name, top, images, masks, *truths_of(tree, images, masks, classes))


def _given(tree: Source, site: SourceSite) -> dict[str, tuple[str, str]]:
    """Returns {image: (patient, split)} of the site's split.csv, if there is one."""
    name = f"{site.top}/split.csv"
    if name not in tree.names:
        return {}
    file = tree.shown(name)
    lines = numbered_lines(tree.read(name, TABLE_BYTES), file)
    (_, header), *rest = lines.items() or [(1, [])]
    if header != HEADER:
        raise BadFile(Problem(file, "is not a table of image,patient,split", "Correct it"))
    if wrong := [number for number, line in rest if len(line) != 3 or not all(line) or line[2] not in SPLITS]:
        what = f"line {wrong[0]} is not an image, its patient and one of train, val and test"
        raise BadFile(Problem(file, what, "Correct it"))
    rest = [(number, [composed(field) for field in line]) for number, line in rest]
    places: dict[str, int] = {}
    for number, (image, *_) in rest:
        if (first := places.setdefault(image, number)) != number:
            raise BadFile(Problem(file, f"lists the image {image} in the lines {first} and {number}", "Keep one of them"))
    rows = {image: (patient, split) for _, (image, patient, split) in rest}
    names = {entry.name for entry in site.images.entries}
    if odd := sorted(names ^ rows.keys()):
        what = f"{'lacks' if odd[0] in names else 'lists, without an image,'} {some(odd, 3)}"
        raise BadFile(Problem(file, what, "Give every image one line, under its name without ending"))
    words: dict[str, str] = {}
    for patient, split in rows.values():
        if words.setdefault(patient, split) != split:
            raise BadFile(Problem(file, f"patient {patient} is in {words[patient]} and {split}", "Keep a patient in one split"))
    return rows


@dataclass
class Noticed:
    """What making a site's samples has shown.

    Args:
        classes, labels: those of its masks.

    Attributes:
        axes: the planes of its volumes.
        stretched: whether an image had more than 8 bits.
        uneven: volumes of several slices whose distance is not known.
        values: those of the masks.
        around: {class: the images that it surrounds (`feddp.data.pixels.is_around`)}, by their volume's name.
        read: what the user should know of how masks were read.
        turned: pictures that viewers show turned, because of the orientation in their files.
        pictures: {digest of pixels: (the first image, its patient)}, without those of one colour.
        twins: pairs of images of two patients with the same pixels.
    """

    classes: Sequence[str]
    labels: str
    axes: set[str] = field(default_factory=set)
    stretched: bool = False
    uneven: list[str] = field(default_factory=list)
    values: set[int] = field(default_factory=set)
    around: dict[str, list[str]] = field(default_factory=dict)
    read: Notes = field(default_factory=Notes)
    turned: list[str] = field(default_factory=list)
    pictures: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    twins: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, patient: str, scan: Scan, pixels: np.ndarray, masks: np.ndarray) -> None:
        """Notes an image: what was read, its 8-bit slices, and their masks."""
        self._compare(name, patient, pixels)
        if scan.orientation > 1:
            self.turned.append(name)
        for each in masks:
            self.values.update(np.unique(each).tolist())
            for value, label in enumerate(self.classes, 1):
                if is_around(each >= value if self.labels == "nested" else each == value):
                    self.around.setdefault(label, []).append(name)
        self.stretched |= scan.deep
        if scan.volume:
            self.axes.add(scan.axis)
            if scan.apart is None and len(scan.pixels) > 1:
                self.uneven.append(name)

    def _compare(self, name: str, patient: str, pixels: np.ndarray) -> None:
        for image in pixels:
            if image.min() < image.max():
                digest = hashlib.sha256(f"{image.shape}".encode() + image.tobytes()).digest()
                first, other = self.pictures.setdefault(digest, (name, patient))
                if other != patient:
                    self.twins.append((first, name))

    def preparation(self, window: Window | None, size: int | None) -> Preparation:
        return Preparation(next(iter(self.axes)) if len(self.axes) == 1 else "", window, self.stretched, size)

    def notes(self) -> Iterator[str]:
        held = self.values if self.labels == "exclusive" else range(max(self.values, default=0) + 1)
        if absent := [name for value, name in enumerate(self.classes, 1) if value not in held]:
            yield f"no mask holds {some(absent, 3)}; masks of that class are empty, unless its name or value is another"
        for label, names in self.around.items():
            what = f"{label} covers more than half of {len(names)} image(s) and of their borders, {names[0]} first"
            yield f"{what}; if that is the background, the masks are inverted"
        yield from self.read.lines()
        if self.turned:
            yield (
                f"{len(self.turned)} picture(s) have an orientation in their files, {self.turned[0]} first; their pixels are"
                " taken as stored, not as a viewer turns them"
            )
        if self.twins:
            yield (
                f"{len(self.twins)} image(s) are copies of another patient's, {' and '.join(self.twins[0])} first; where one"
                " trains and one tests, the test measures what was trained on"
            )
        if len(self.axes) > 1:
            yield f"its volumes lie in several planes ({', '.join(sorted(self.axes - {''}))}); a network sees them all alike"
        if self.uneven:
            yield (
                f"slices are missing, unevenly apart or sheared in {len(self.uneven)} volume(s), {self.uneven[0]} first;"
                " these have no distances by volume"
            )


def _notes(site: SourceSite, given: bool) -> Iterator[str]:
    unread = [*site.images.unread, *site.masks.unread]
    if others := {*site.images.others, *site.masks.others} - {*unread}:
        yield f"left out, as neither images nor masks: {some(sorted(others), 3)}"
    if unread:
        yield f"left out, as of kinds that are not read: {some(unread, 3)}; if they are images, convert them to PNG or TIFF"
    yield from site.images.notes
    yield from site.masks.notes
    if site.unused:
        yield f"{len(site.unused)} file(s) in masks/ are of no image, {site.unused[0]} first"
    if not given and all(entry.kind != DICOM and entry.patient == entry.name for entry in site.images.entries):
        yield "every image counts as a patient; where patients have several, give each a folder, or write split.csv"


def _too_few(split: str | None, words: Collection[str]) -> Iterator[str]:
    if empty := [name for name in needed(split) if name not in words]:
        yield f"there is no patient left for the split {' and '.join(empty)}; a site that trains needs one for each"


def _samples(
    tree: Source,
    site: SourceSite,
    patients: Mapping[str, str],
    words: Mapping[str, str],
    metadata: dict[str, Any],
    size: int | None,
    options: FolderOptions,
    seen: Noticed,
) -> Iterator[RawSample]:
    """Yields the samples of a site; afterwards, `metadata` says how they were made."""
    entries = site.images.entries
    for entry in track(entries, f"Preparing {site.name}", total=len(entries)):
        scan = entry.read(tree, options.axis)
        masks = mask_of(tree, entry, scan, site.truths[entry.name], options, seen.read)
        pixels = in_channels(scan.eight_bits(options.window), metadata["channels"], options.channels is not None)
        if pixels is None:
            what = f"has {scan.channels} channel(s), but the site's first image {metadata['channels']}"
            raise BadFile(Problem(tree.shown(entry.files[0]), what, "Convert all of them with --channels 1 or --channels 3"))
        mm, patient = scan.mm or options.mm, patients[entry.name]
        seen.add(entry.name, patient, scan, pixels, masks)
        for number, (image, mask) in enumerate(zip(pixels, masks, strict=True)):
            stem = entry.name if entry.kind == PICTURE else f"{entry.name}_{number:03d}"
            here = resized(mm, mask.shape, size)
            place = Position(entry.name, number, here, scan.apart) if scan.volume else Position(mm=here)
            yield stem, patient, words[patient], *resize(image, mask, size, entry.files[0]), place
    metadata[KEY] = asdict(seen.preparation(options.window, size))
