"""Fundus: optic disc and cup in retinal photographs, four sites.

Reads the public layouts of `fundus_layouts` from a folder or a zip.

Masks are written as 0 (background), 1 (disc) and 2 (cup), cropped with the image to 800 x 800 pixels (or the image's shorter
side) around the disc. Drishti's published test images are its test split, unless another split is asked for by its shares; a
fifth of its training images is val, or none where the split is `published`. None of the data sets tells which eyes belong to
one patient.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from feddp.data.folder import refuse_occupied, write_site
from feddp.data.prepare.fundus_layouts import SITES, Eye, Find, Read
from feddp.data.prepare.source import Source, require_same_size, resize
from feddp.data.prepare.split import PUBLISHED, Published, hold_out, split_site, splitting_of
from feddp.data.progress import track
from feddp.errors import InputError

CROP = 800  # pixels
# (Wang et al., TMI 2024); Drishti's are those of its own publication, 50 for training and 51 for testing
NUMBERS = {
    "DrishtiGS": Published(50, 101),
    "RIMONEr3": Published(99, 159),
    "REFUGEtrain": Published(320, 400),
    "REFUGEval": Published(320, 400),
}


def prepare(source: Path, out: Path, size: int | None, seed: int, split: str | None) -> list[str]:
    """Writes <out>/DrishtiGS, RIMONEr3, REFUGEtrain and REFUGEval; crops at size x size, or at their own size if None.

    Returns notes for the user. Raises InputError if data sets or masks are missing (names all), a mask has no disc, a
    target is not empty, or a site cannot be split so.
    """
    return prepare_eyes(SITES, source, out, size, seed, split)


def prepare_eyes(
    layouts: Mapping[str, tuple[Find, Read]], source: Path, out: Path, size: int | None, seed: int, split: str | None
) -> list[str]:
    """As `prepare`, for the sites of `layouts`: how each site's eyes are found, and read."""
    tree = Source(source)
    absent: dict[str, bool] = {}
    sites = {site: find(tree, absent) for site, (find, _) in layouts.items()}
    tree.demand(absent, "folders")
    tree.demand_files(mask for eyes in sites.values() for eye in eyes.values() for mask in eye.masks)
    refuse_occupied(out / site for site in sites)
    divided = {site: _splits(site, eyes, seed, split) for site, eyes in sites.items()}
    for site, eyes in sites.items():
        splits = divided[site]
        metadata = {
            "name": "Fundus",
            "channels": 3,
            "classes": ["disc", "cup"],
            "labels": "nested",
            "patients": "unknown: image level",
            **splitting_of(seed, split),
        }
        read = layouts[site][1]
        samples = (
            (stem, f"{site}-{stem}", splits[stem], *resize(*crop(*read(tree, eye), eye.image), size, eye.image))
            for stem, eye in track(eyes.items(), f"Preparing {site}", total=len(eyes))
        )
        write_site(out / site, metadata, samples)
    return []


def crop(image: np.ndarray, mask: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Crops a square of CROP pixels (or the shorter side), inside the image, around the centre of the disc's box.

    (H, W, 3) and (H, W) -> (s, s, 3) and (s, s). Raises InputError with `name` if there is no disc or the sizes differ.
    """
    require_same_size(image, mask, name)
    if not mask.any():
        raise InputError(f"{name}: its mask has no optic disc, so it cannot be cropped. Correct the source.")
    side = min(CROP, *mask.shape)
    window = []
    for axis, length in enumerate(mask.shape):
        where = np.flatnonzero(mask.any(axis=1 - axis))
        start = (where[0] + where[-1] + 1 - side) // 2
        start = min(max(start, 0), length - side)
        window.append(slice(start, start + side))
    return image[tuple(window)], mask[tuple(window)]


def _splits(site: str, eyes: dict[str, Eye], seed: int, split: str | None) -> dict[str, str]:
    published = {stem: eye.published for stem, eye in eyes.items()}
    divided = split_site(site, eyes, seed, split, NUMBERS.get(site))
    if split == PUBLISHED and any(published.values()):
        return published
    if split is not None or not any(published.values()):
        return divided
    training = hold_out((stem for stem, word in published.items() if word == "train"), seed)
    return {stem: training.get(stem, "test") for stem in eyes}
