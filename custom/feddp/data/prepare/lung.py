"""Lung: chest X-rays with lung masks, two sites (Jaeger et al., 2014): Montgomery County, USA, and Shenzhen, China.

Reads images and masks of one name, at any depth, as the repository rochadiego/MultiResUNet-lung-segmentation (commit 234c65b)
holds them, reduced to 512 x 512 pixels whatever shape the X-ray had:

    cxr/MCUCXR_<number>_<finding>.png    masks/MCUCXR_<number>_<finding>.png    Montgomery: 138
    cxr/CHNCXR_<number>_<finding>.png    masks/CHNCXR_<number>_<finding>.png    Shenzhen: 566, those of its 662 that have a mask

Masks are thresholded at 127, because their reduction left grey pixels at edges. A patient is a number; there is one image of
each. The finding, 1 for tuberculosis, is not used.
"""

import re
from pathlib import Path

import numpy as np

from feddp.data.folder import refuse_occupied, write_site
from feddp.data.prepare.source import Source, resize
from feddp.data.prepare.split import split_site, splitting_of
from feddp.data.progress import track

SITES = {"MCUCXR": "Montgomery", "CHNCXR": "Shenzhen"}
STEM = re.compile(rf"(({'|'.join(SITES)})_\d+)_[01]$")


def prepare(source: Path, out: Path, size: int | None, seed: int, split: str | None) -> list[str]:
    """Writes <out>/Montgomery and Shenzhen; images and masks at size x size, or at their published size if None.

    Patients are split by seed (`split_site`). Returns notes for the user. Raises InputError if a site or a mask is missing, if
    a target is not empty, or if a site cannot be split so.
    """
    tree = Source(source)
    (_, images), (masks, _) = tree.folder("cxr"), tree.folder("masks")
    found: dict[str, dict[str, str]] = {site: {} for site in SITES.values()}  # site -> stem -> patient
    for stem in images:
        if match := STEM.match(stem):
            found[SITES[match[2]]][stem] = match[1]
    tree.demand({f"cxr/{prefix}_*": bool(found[site]) for prefix, site in SITES.items()}, "images")
    named = {stem: f"{masks or 'masks'}/{stem}.png" for stems in found.values() for stem in stems}
    tree.demand_files(named.values())
    refuse_occupied(out / site for site in found)
    splits = {site: split_site(site, stems.values(), seed, split) for site, stems in found.items()}
    for site, stems in found.items():
        metadata = {
            "name": "Lung X-ray",
            "channels": 1,
            "classes": ["lungs"],
            "labels": "nested",
            "patients": "numbers of the file names",
            **splitting_of(seed, split),
        }
        samples = (
            (stem, patient, splits[site][patient], *_pixels(tree, images[stem], named[stem], size))
            for stem, patient in track(stems.items(), f"Preparing {site}", total=len(stems))
        )
        write_site(out / site, metadata, samples)
    return []


def _pixels(tree: Source, image: str, mask: str, size: int | None) -> tuple[np.ndarray, np.ndarray]:
    return resize(tree.grey(image), (tree.grey(mask) > 127).astype("uint8"), size, image)
