"""LGG-MRI: brain MRI with FLAIR-abnormality (tumour) masks, four hospitals (Buda et al., 2019; TCGA-LGG).

Reads the tree kaggle_3m, at any depth, from the unchanged published zip or from a folder:

    kaggle_3m/TCGA_<site>_<patient>_<date>/TCGA_<site>_<patient>_<date>_<slice>.tif         (256, 256, 3) uint8
    kaggle_3m/TCGA_<site>_<patient>_<date>/TCGA_<site>_<patient>_<date>_<slice>_mask.tif    (256, 256) uint8, 0 or 255

The zip as it is downloaded holds this tree twice; identical copies are one.
The three channels are pre-contrast, FLAIR and post-contrast. The federation consists of the sites CS, DU, FG and HT. Other site
codes of the full release have too few patients to train on; they are left out and counted.
"""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from feddp.data.description import VOLUMES
from feddp.data.folder import refuse_occupied, write_site
from feddp.data.prepare.source import Source, resize
from feddp.data.prepare.split import split_site, splitting_of
from feddp.data.progress import track

SITES = ("CS", "DU", "FG", "HT")
SLICE = re.compile(r"(?:^|/)kaggle_3m/(TCGA_([^_/]+)_[^_/]+)_\d+/(\1_\d+_\d+)\.tif$")


def prepare(source: Path, out: Path, size: int | None, seed: int, split: str | None) -> list[str]:
    """Writes <out>/CS, DU, FG and HT; images and masks at size x size, or at their published size if None.

    A patient is TCGA_<site>_<patient>, split by seed (`split_site`). Returns notes for the user.

    Raises:
        InputError: a site or a mask is missing, two slices of one name differ, `out` already contains one of the sites, or a
            site cannot be split so.
    """
    tree = Source(source)
    slices: dict[str, list[tuple[str, str, str]]] = {site: [] for site in SITES}
    others: Counter[str] = Counter()
    seen: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    for name in sorted(tree.names):
        if match := SLICE.search(name):
            patient, site, stem = match.groups()
            if (first := seen.setdefault(stem, name)) != name:
                copies.append((first, name))
            elif site in slices:
                slices[site].append((stem, patient, name))
            else:
                others[site] += 1
    tree.demand({f"kaggle_3m/TCGA_{site}_*": bool(found) for site, found in slices.items()}, "hospitals")
    tree.demand_files(_mask(name) for found in slices.values() for _, _, name in found)
    refuse_occupied(out / site for site in SITES)
    for first, copy in track(copies, "Comparing copies"):
        tree.require_copy(first, copy)
        if _mask(copy) in tree.names:
            tree.require_copy(_mask(first), _mask(copy))
    splits = {site: split_site(site, (patient for _, patient, _ in found), seed, split) for site, found in slices.items()}

    for site, found in slices.items():
        write_site(
            out / site,
            {
                "name": "LGG-MRI",
                "channels": 3,
                "classes": ["tumour"],
                "labels": "nested",
                "sequences": ["pre-contrast", "FLAIR", "post-contrast"],
                "patients": "TCGA barcode",
                "volumes": VOLUMES,
                "licence": "CC BY-NC-SA 4.0",
                **splitting_of(seed, split),
            },
            (
                (stem, patient, splits[site][patient], *_pixels(tree, name, size))
                for stem, patient, name in track(found, f"Preparing {site}")
            ),
        )
    if not others:
        return []
    return ["Left out, of other sites: " + ", ".join(f"{s} ({n} images)" for s, n in sorted(others.items()))]


def _mask(name: str) -> str:
    return name.removesuffix(".tif") + "_mask.tif"


def _pixels(tree: Source, name: str, size: int | None) -> tuple[np.ndarray, np.ndarray]:
    mask = (tree.grey(_mask(name)) > 127).astype("uint8")
    return resize(tree.rgb(name), mask, size, name)
