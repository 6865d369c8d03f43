"""Prostate MRI: T2-weighted volumes with prostate masks, six sources (Liu et al., MS-Net, TMI 2020; SAML, MICCAI 2020).

Reads the layout of liuquande.github.io/SAML from a folder or a zip. A source's folder may be at any depth and has one of these
names:

    BIDMC, HK, UCL             PROMISE12
    I2CVB or HCRUDB            I2CVB
    ISBI or RUNMC              NCI-ISBI 2013, 3 T
    ISBI_1.5 or BMC            NCI-ISBI 2013, 1.5 T: the site ISBI_15, because names in a FLARE federation have no dot

    <source>/Case<n>.nii.gz    <source>/Case<n>_segmentation.nii.gz (or _Segmentation; either also as .nii)

Labels 1 and 2 (two zones, in NCI-ISBI) are one prostate, as in MS-Net's and IOP-FL's code. The output consists of the axial
slices with prostate, as in IOP-FL's preprocessing. Grey values go from the volume's minimum (0) to its 99th percentile (255),
as in IOP-FL's conversion to PNG. A stem is case and slice, counted in the volume from the feet upwards: Case07_012.

`--split published` has the cases that IOP-FL's released lists give to training, validation and test (med-air/IOP-FL, commit
0f5fe60, dataset/Prostate/preprocessed); a case has the same number here and there.

Deviation: IOP-FL uses a slice and its two neighbours as three channels; here a slice is one channel.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from feddp.data.description import SPLITS, VOLUMES, Position
from feddp.data.folder import RawSample, refuse_occupied, write_site
from feddp.data.formats.nifti import read_truth, read_volume
from feddp.data.formats.scan import BRIGHT, Scan, eight_bits, resized
from feddp.data.preparation import KEY, Preparation
from feddp.data.prepare.source import Source, resize
from feddp.data.prepare.split import PUBLISHED, SHARES, split_site, splitting_of
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.partition import some

FOLDERS = {
    "BIDMC": ("BIDMC",),
    "HK": ("HK",),
    "I2CVB": ("I2CVB", "HCRUDB"),
    "ISBI": ("ISBI", "RUNMC"),
    "ISBI_15": ("ISBI_1.5", "BMC"),
    "UCL": ("UCL",),
}
ORIGINS = {"I2CVB": "I2CVB", "ISBI": "NCI-ISBI 2013", "ISBI_15": "NCI-ISBI 2013"}  # the others: PROMISE12
# (Jiang et al., TMI 2023): the numbers of the cases in train, val and test
CASES: dict[str, tuple[str, str, str]] = {
    "BIDMC": ("00 02 04 05 06 11 12", "07 09", "03 08 10"),
    "HK": ("39 40 41 42 43 46 47", "38 44", "45 48 49"),
    "I2CVB": ("00 01 03 05 08 09 10 11 13 15 16 17", "02 04 07", "06 12 14 18"),
    "ISBI": ("00 01 06 08 09 11 12 14 16 18 19 20 21 22 24 25 26 27 28", "02 03 10 23 29", "04 05 07 13 15 17"),
    "ISBI_15": ("00 01 02 04 05 06 08 09 10 11 12 13 14 15 19 21 22 23 26", "07 20 24 25 28", "03 16 17 18 27 29"),
    "UCL": ("01 26 27 28 29 30 31 34", "32 35", "33 36 37"),
}
FILE = re.compile(r"(?:^|/)([^/]+)/(Case\d+)(_segmentation)?\.nii(?:\.gz)?$", re.IGNORECASE)


def prepare(source: Path, out: Path, size: int | None, seed: int, split: str | None) -> list[str]:
    """Writes <out>/BIDMC, HK, I2CVB, ISBI, ISBI_15 and UCL; slices at size x size, or at their published size if None.

    A patient is a case, split by seed (`split_site`; every case counts as one image), or as published. Returns notes for the
    user.

    Raises:
        InputError: sources, images or masks are missing, a file is not a volume, a mask does not fit its image or is empty, or
            a target is not empty, or a source cannot be split so. Names all missing sources or files.
    """
    tree = Source(source)
    sites = _find(tree)
    tree.demand({" or ".join(FOLDERS[site]): bool(cases) for site, cases in sites.items()}, "sources")
    alone = [name for cases in sites.values() for files in cases.values() if len(files) < 2 for name in files.values()]
    if alone:
        raise InputError(
            f"{tree.path}: image or segmentation is missing beside {some(alone, 5)}. Complete them, or remove them."
        )
    refuse_occupied(out / site for site in sites)
    splits = {
        site: _published(tree, site, cases) if split == PUBLISHED else split_site(site, cases, seed, split)
        for site, cases in sites.items()
    }
    left_out = dict.fromkeys(sites, 0)

    def samples(site: str) -> Iterator[RawSample]:
        cases = sites[site]
        for case, files in track(cases.items(), f"Preparing {site}", total=len(cases)):
            scan, image, mask = _pixels(tree, files[""], files["_segmentation"])
            mm = resized(scan.mm, mask.shape[1:], size)
            for number in np.flatnonzero(mask.any(axis=(1, 2))):
                pair = resize(image[number], mask[number], size, files[""])
                yield f"{case}_{number:03d}", case, splits[site][case], *pair, Position(case, int(number), mm, scan.apart)
            left_out[site] += int((~mask.any(axis=(1, 2))).sum())

    for site in sites:
        metadata = {
            "name": "Prostate-MRI",
            "channels": 1,
            "classes": ["prostate"],
            "labels": "nested",
            "sequences": ["T2"],
            "source": f"{ORIGINS.get(site, 'PROMISE12')}, by liuquande.github.io/SAML",
            "patients": "cases",
            "volumes": VOLUMES,
            "slices": "axial, with prostate only, numbered in the volume from the feet upwards",
            KEY: asdict(Preparation("axial", stretched=True, size=size)),
            **splitting_of(seed, split),
        }
        write_site(out / site, metadata, samples(site))
    listed = ", ".join(f"{site} {count}" for site, count in left_out.items())
    return [f"Slices left out, without prostate: {listed}"] if any(left_out.values()) else []


def _find(tree: Source) -> dict[str, dict[str, dict[str, str]]]:
    """Returns {site: {case: {"": image, "_segmentation": mask}}}, sorted by case.

    Raises:
        InputError: two files of one case differ. Copies are one.
    """
    names = {folder: site for site, folders in FOLDERS.items() for folder in folders}
    sites: dict[str, dict[str, dict[str, str]]] = {site: {} for site in FOLDERS}
    for name in sorted(tree.names):
        match = FILE.search(name)
        if match and (site := names.get(match[1])):
            files = sites[site].setdefault(match[2], {})
            kind = (match[3] or "").lower()
            tree.require_copy(files.setdefault(kind, name), name)
    return sites


def _published(tree: Source, site: str, cases: Collection[str]) -> dict[str, str]:
    """Returns {case: its published split}; raises InputError if the source has other cases than the published ones."""
    numbers = {case[len("Case") :]: case for case in cases}
    words = {number: word for word, listed in zip(SPLITS, CASES[site], strict=True) for number in listed.split()}
    if numbers.keys() != words.keys():
        missing = [f"Case{number} is missing" for number in sorted(words.keys() - numbers.keys())]
        unlisted = [f"{numbers[number]} is in none of its lists" for number in sorted(numbers.keys() - words.keys())]
        raise InputError(
            f"{tree.path}: {site} has other cases than --split {PUBLISHED} divides: {some(missing + unlisted, 5)}. "
            f"Give the whole data set, or use --split {', '.join(SHARES)}."
        )
    return {case: words[case[len("Case") :]] for case in cases}


def _pixels(tree: Source, image: str, mask: str) -> tuple[Scan, np.ndarray, np.ndarray]:
    """Returns the volume, its image, 0 to 255, and mask, 0 or 1: (S, H, W), uint8 each."""
    scan = read_volume(tree, image, "axial")
    labels = read_truth(tree, mask, scan.origin)
    low, high = float(scan.pixels.min()), float(np.quantile(scan.pixels, BRIGHT))
    if low == high:
        raise InputError(
            f"{tree.path}: {image} has no contrast: all voxels except the brightest 1 % are {low:g}. Correct the source."
        )
    if not (labels > 0).any():
        raise InputError(f"{tree.path}: {mask} is empty. Correct it, or remove the case.")
    return scan, eight_bits(scan.pixels, (low, high)), (labels > 0).astype("uint8")
