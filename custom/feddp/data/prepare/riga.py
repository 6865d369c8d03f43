"""RIGA: optic disc and cup in retinal photographs, three sites beside the four of `fundus`.

pFLFE (Xie et al., 2024) has seven fundus clients, which its text does not name. RIGA's three sources with the four sites of
`fundus` are seven: our choice. Both go to the same folder.

Reads RIGA+ (Zenodo record 6325549, RIGAPlus.zip), whose photographs are cut to 800 x 800 pixels around the disc, from a folder
or a zip:

    RIGA/<domain>/<folder>/<n>.tif         of the domains BinRushed, Magrabia, MESSIDOR_Base1, MESSIDOR_Base2 and MESSIDOR_Base3
    RIGA-mask/<domain>/<folder>/<n>-1.tif  to <n>-6.tif, one per ophthalmologist: 0 (background), 255 (disc) and 128 (cup)

A pixel belongs to a class if at least half of the raters agree, as in Drishti-GS. Photographs without masks, which RIGA+ adds
for domain adaptation, are left out. The layout was read from public code that loads RIGA+, not from the archive itself.
"""

import re
from functools import partial
from pathlib import Path

import numpy as np

from feddp.data.prepare.fundus import prepare_eyes
from feddp.data.prepare.fundus_layouts import Eye
from feddp.data.prepare.source import Source
from feddp.errors import InputError

DOMAINS = {
    "BinRushed": ("BinRushed",),
    "Magrabia": ("Magrabia",),
    "MESSIDOR": ("MESSIDOR_Base1", "MESSIDOR_Base2", "MESSIDOR_Base3"),
}
IMAGE = re.compile(r"(?:^|/)RIGA/([^/]+)/(?:[^/]+/)*[^/]+\.tif$")
RATER = re.compile(r"-\d+\.tif$")
CUP, DISC = 128, 255


def prepare(source: Path, out: Path, size: int | None, seed: int, split: str | None) -> list[str]:
    """Writes <out>/BinRushed, Magrabia and MESSIDOR, as `fundus.prepare`; there are no published splits."""
    sites = {site: (partial(_find, domains), _read) for site, domains in DOMAINS.items()}
    return prepare_eyes(sites, source, out, size, seed, split)


def _find(domains: tuple[str, ...], tree: Source, absent: dict[str, bool]) -> dict[str, Eye]:
    masks: dict[str, list[str]] = {}
    for name in sorted(tree.names):
        if "/RIGA-mask/" in f"/{name}" and RATER.search(name):
            masks.setdefault(RATER.sub(".tif", name), []).append(name)
    eyes: dict[str, Eye] = {}
    for domain in domains:
        found: dict[str, Eye] = {}
        for name in sorted(tree.names):
            match = IMAGE.search(name)
            if match and match[1] == domain and (drawn := masks.get(_mask(name))):
                stem = "_".join(Path(name.rsplit(f"RIGA/{domain}/", 1)[1]).with_suffix("").parts)
                eye = found.setdefault(stem if len(domains) == 1 else f"{domain}_{stem}", Eye(name, tuple(drawn)))
                if len(eye.masks) != len(drawn):
                    raise InputError(f"{tree.path} has both {eye.image} and {name}, and their masks differ. Keep one.")
                for first, copy in zip((eye.image, *eye.masks), (name, *drawn), strict=True):
                    tree.require_copy(first, copy)
        if not found:
            absent[f"RIGA/{domain} and RIGA-mask/{domain}"] = False
        eyes |= found
    return eyes


def _mask(name: str) -> str:
    above, below = f"/{name}".rsplit("/RIGA/", 1)
    return f"{above}/RIGA-mask/{below}"[1:]


def _read(tree: Source, eye: Eye) -> tuple[np.ndarray, np.ndarray]:
    drawn = [tree.grey(name) for name in eye.masks]
    if len({mask.shape for mask in drawn}) > 1:
        raise InputError(f"{eye.image}: its masks differ in size. Correct the source.")
    raters = np.stack(drawn)
    if strange := sorted(set(np.unique(raters).tolist()) - {0, CUP, DISC}):
        raise InputError(f"{eye.image}: its masks have the values {strange} beside 0, {CUP} and {DISC}. Correct the source.")
    cup = (raters == CUP).mean(axis=0) >= 0.5
    disc = (raters > 0).mean(axis=0) >= 0.5
    return tree.rgb(eye.image), np.where(cup, 2, disc).astype("uint8")
