"""EndoPolyp: polyps in colonoscopy, four sites of a federation and an unseen site.

The public data sets lie in a folder or zip, each at any depth under its public name:

    Kvasir      Kvasir-SEG/images/<n>.jpg, Kvasir-SEG/masks/<n>.jpg
    ClinicDB    CVC-ClinicDB/Original/<n>.tif, CVC-ClinicDB/Ground Truth/<n>.tif (or either under PNG/ or TIF/),
                and CVC-ClinicDB/metadata.csv, if present, with the video sequence of each frame
    ColonDB     CVC-ColonDB/images/<n>.png, CVC-ColonDB/masks/<n>.png
    ETIS        ETIS-LaribPolypDB/images/<n>.png, ETIS-LaribPolypDB/masks/<n>.png
                or ETIS-LaribPolypDB/ETIS-LaribPolypDB/<n>.tif, ETIS-LaribPolypDB/Ground Truth/p<n>.tif
    PolypGenC1  PolypGen2021_MultiCenterData_v3/data_C1/images_C1/<n>.jpg, .../masks_C1/<n>_mask.jpg   (unseen)

Masks are thresholded at 127, because JPEG leaves grey pixels at edges. ETIS is read only from its own folder, and two sites
that share an image are refused.

`--split published` has the numbers of images of (Wang et al., TMI 2024). Of ColonDB and ETIS the released code lists the test
images by number (jcwang123/PFL-Seg-Trans, commit d715417, utils/prepare_dataset.py), so the seed chooses nothing there.

Deviations: the released code reads ETIS's images, in training and in testing, from ColonDB's folder; here its numbers are those
of ETIS's own images. Its list leaves out ColonDB's image 380, so that 327 train; here 328 do, as the paper says. It takes
Kvasir's and ClinicDB's from the folders of a download (TrainDataset, TestDataset), whose lists we do not have: the seed chooses
as many. It counts every pixel above 0 as polyp, and leaves out images of PolypGen with less than 10 such pixels.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from feddp.data.description import read_lines
from feddp.data.folder import refuse_occupied, write_site
from feddp.data.prepare.source import Source, resize
from feddp.data.prepare.split import PUBLISHED, SHARES, Published, split_site, splitting_of
from feddp.data.preview import write_preview
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.limits import TABLE_BYTES


@dataclass(frozen=True)
class Layout:
    """The folders of a site's images and masks, and the name of an image's mask."""

    site: str
    images: str
    masks: str
    mask: str = "{stem}"
    unseen: bool = False


CLINIC, ETIS, C1 = "CVC-ClinicDB", "ETIS-LaribPolypDB", "PolypGen2021_MultiCenterData_v3/data_C1"
LAYOUTS = (
    Layout("Kvasir", "Kvasir-SEG/images", "Kvasir-SEG/masks"),
    Layout("ClinicDB", f"{CLINIC}/Original", f"{CLINIC}/Ground Truth"),
    Layout("ClinicDB", f"{CLINIC}/PNG/Original", f"{CLINIC}/PNG/Ground Truth"),
    Layout("ClinicDB", f"{CLINIC}/TIF/Original", f"{CLINIC}/TIF/Ground Truth"),
    Layout("ColonDB", "CVC-ColonDB/images", "CVC-ColonDB/masks"),
    Layout("ETIS", f"{ETIS}/images", f"{ETIS}/masks"),
    Layout("ETIS", f"{ETIS}/{ETIS}", f"{ETIS}/Ground Truth", mask="p{stem}"),
    Layout("PolypGenC1", f"{C1}/images_C1", f"{C1}/masks_C1", mask="{stem}_mask", unseen=True),
)
# (Wang et al., TMI 2024)
NUMBERS = {
    "Kvasir": Published(900, 1000),
    "ColonDB": Published(328, 380),
    "ETIS": Published(170, 196),
    "ClinicDB": Published(550, 612),
}
# the images that its released code tests on, by number; the others train
TESTED = {"ColonDB": range(221, 273), "ETIS": range(171, 197)}


@dataclass(frozen=True)
class Frames:
    """The names (image, mask) of a site's frames by stem."""

    layout: Layout
    pairs: dict[str, tuple[str, str]]


def prepare(source: Path, out: Path, size: int | None, seed: int, split: str | None) -> list[str]:
    """Writes <out>/Kvasir, ClinicDB, ColonDB and ETIS, and <out>-unseen/PolypGenC1 with all rows in split test.

    The sites are split by `split_site`, or as published. Images have size x size pixels, or their published size if None. The
    unseen site lies outside `out`, so no federation over `out` can train on it. Returns notes for the user.

    Raises:
        InputError: data sets (names all) or masks are missing, two sites share an image, a target is not empty, or a site
            cannot be split so.
    """
    tree = Source(source)
    sites = _find(tree)
    unseen = Path(os.path.realpath(out))  # realpath does not fail on a loop of links
    unseen = unseen.with_name(f"{unseen.name}-unseen")
    targets = {site: (unseen if frames.layout.unseen else out) / site for site, frames in sites.items()}
    refuse_occupied(targets.values())
    _refuse_shared(tree, sites)
    described = {site: _patients(tree, site, frames) for site, frames in sites.items()}
    divided = {
        site: dict.fromkeys(patients.values(), "test")
        if sites[site].layout.unseen
        else _splits(site, sites[site], patients, seed, split)
        for site, (patients, _) in described.items()
    }
    for site, frames in sites.items():
        (patients, known), splits = described[site], divided[site]
        metadata = {"name": "EndoPolyp", "channels": 3, "classes": ["polyp"], "labels": "nested", "patients": known}
        metadata |= {"unseen": True} if frames.layout.unseen else splitting_of(seed, split)
        samples = (
            (stem, patients[stem], splits[patients[stem]], *_pixels(tree, *pair, size))
            for stem, pair in track(frames.pairs.items(), f"Preparing {site}", total=len(frames.pairs))
        )
        write_site(targets[site], metadata, samples)
    write_preview(unseen)
    return [f"The unseen site is outside the federation: {targets['PolypGenC1']}"]


def _find(tree: Source) -> dict[str, Frames]:
    sites: dict[str, Frames] = {}
    wanted: dict[str, list[str]] = {}
    for layout in LAYOUTS:
        wanted.setdefault(layout.site, []).append(f"{layout.images} and {layout.masks}")
        (_, images), (_, masks) = tree.folder(layout.images), tree.folder(layout.masks)
        if layout.site in sites or not (images and masks):
            continue
        named = {stem: layout.mask.format(stem=stem) for stem in images}
        if lost := [images[stem] for stem, mask in named.items() if mask not in masks]:
            raise InputError(f"{tree.path}: {len(lost)} image(s) have no mask, {lost[0]} first. Complete {layout.masks}.")
        sites[layout.site] = Frames(layout, {stem: (images[stem], masks[mask]) for stem, mask in named.items()})
    tree.demand({f"{site} ({' or '.join(folders)})": site in sites for site, folders in wanted.items()}, "sets")
    return sites


def _refuse_shared(tree: Source, sites: dict[str, Frames]) -> None:
    seen: dict[bytes, tuple[str, str]] = {}
    images = [(site, pair[0]) for site, frames in sites.items() for pair in frames.pairs.values()]
    for site, name in track(images, "Looking for images that two sites share"):
        other, first = seen.setdefault(hashlib.sha256(tree.read(name)).digest(), (site, name))
        if other != site:
            raise InputError(
                f"{tree.path}: {first} ({other}) and {name} ({site}) are the same image. "
                "Put each data set's own images under its name."
            )


def _patients(tree: Source, site: str, frames: Frames) -> tuple[dict[str, str], str]:
    """Returns {stem: patient}, and a description of what defines a patient in this data set."""
    alone = {stem: f"{site}-{stem}" for stem in frames.pairs}
    tables = [name for name in tree.names if f"/{name}".endswith(f"/{CLINIC}/metadata.csv")]
    if site != "ClinicDB" or not tables:
        return alone, "unknown: image level"
    lines = read_lines(tree.read(min(tables), TABLE_BYTES), Path(min(tables)))
    heads = lines[0] if lines else []
    if not {"png_image_path", "sequence_id"} <= set(heads):
        raise InputError(f"{min(tables)}: no columns png_image_path and sequence_id. Correct it, or remove the file.")
    image, sequence = heads.index("png_image_path"), heads.index("sequence_id")
    whole = [line for line in lines[1:] if len(line) > max(image, sequence)]
    sequences = {PurePosixPath(line[image]).stem: line[sequence] for line in whole}
    if lost := sorted(set(frames.pairs) - set(sequences)):
        raise InputError(f"{min(tables)}: frame {lost[0]} is not listed. Complete it, or remove the file.")
    return {stem: f"{site}-sequence-{sequences[stem]}" for stem in frames.pairs}, "video sequences of metadata.csv"


def _splits(site: str, frames: Frames, patients: dict[str, str], seed: int, split: str | None) -> dict[str, str]:
    """Returns the split of each patient: by `split_site`, or by number where the released code lists numbers.

    Raises:
        InputError: as `split_site`, or an image's name is none of the published numbers.
    """
    divided = split_site(site, patients.values(), seed, split, NUMBERS[site])  # it checks the number of images, too
    if split != PUBLISHED or site not in TESTED:
        return divided
    images = NUMBERS[site].images
    if strange := sorted(patients.keys() - {str(number) for number in range(1, images + 1)}):
        raise InputError(
            f"{site}: {frames.pairs[strange[0]][0]} is none of 1 to {images}, the numbers that --split {PUBLISHED} divides. "
            f"Name the files as published, or use --split {', '.join(SHARES)}."
        )
    return {patient: "test" if int(stem) in TESTED[site] else "train" for stem, patient in patients.items()}


def _pixels(tree: Source, image: str, mask: str, size: int | None) -> tuple[np.ndarray, np.ndarray]:
    return resize(tree.rgb(image), (tree.grey(mask) > 127).astype("uint8"), size, image)
