"""Folders and mask formats of the four fundus data sets.

The public data sets lie in a folder or zip, each at any depth under its public name:

    DrishtiGS    Drishti-GS1_files/Training/Images/<n>.png, Drishti-GS1_files/Training/GT/<n>/SoftMap/
                 Drishti-GS1_files/Test/Images/<n>.png, Drishti-GS1_files/Test/Test_GT/<n>/SoftMap/ (or Test/GT)
                 each SoftMap with <n>_ODsegSoftmap.png and <n>_cupsegSoftmap.png, the fraction of raters times 255
    RIMONEr3     RIM-ONE r3/{Healthy,Glaucoma and suspects}/Stereo Images/<n>.jpg, left half only
                 RIM-ONE r3/{Healthy,Glaucoma and suspects}/Average_masks/<n>-Disc-Avg.png and <n>-Cup-Avg.png
    REFUGEtrain  Training400/{Glaucoma,Non-Glaucoma}/<n>.jpg, Disc_Cup_Masks/{Glaucoma,Non-Glaucoma}/<n>.bmp
    REFUGEval    REFUGE-Validation400/<n>.jpg, masks REFUGE-Validation400-GT/Disc_Cup_Masks/<n>.bmp
                 REFUGE masks are 0 (cup), 128 (disc) and 255 (background)
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from feddp.data.prepare.source import Source
from feddp.errors import InputError


@dataclass(frozen=True)
class Eye:
    """An image, the files of its mask, and the published split, if any."""

    image: str
    masks: tuple[str, ...]
    published: str = ""


Find = Callable[[Source, dict[str, bool]], dict[str, Eye]]  # notes in the latter what is absent; eyes by stem
Read = Callable[[Source, Eye], tuple[np.ndarray, np.ndarray]]  # image (H, W, 3), mask (H, W) of 0 to 2: uint8


def _folder(tree: Source, absent: dict[str, bool], *tails: str) -> tuple[str, dict[str, str]]:
    """Returns the first existing folder of `tails`, or ("", {}) with a note in `absent`."""
    for tail in tails:
        path, images = tree.folder(tail)
        if images:
            return path, images
    absent[" or ".join(tails)] = False
    return "", {}


def _drishti(tree: Source, absent: dict[str, bool]) -> dict[str, Eye]:
    eyes = {}
    for part, word, truths in (("Training", "train", ("GT",)), ("Test", "test", ("Test_GT", "GT"))):
        path, images = _folder(tree, absent, f"Drishti-GS1_files/{part}/Images")
        base = path.removesuffix("/Images")
        truth = next((t for t in truths if any(n.startswith(f"{base}/{t}/") for n in tree.names)), truths[0])
        for stem, name in images.items():
            soft = f"{base}/{truth}/{stem}/SoftMap/{stem}"
            eyes[stem] = Eye(name, (f"{soft}_ODsegSoftmap.png", f"{soft}_cupsegSoftmap.png"), word)
    return eyes


def _rim_one(tree: Source, absent: dict[str, bool]) -> dict[str, Eye]:
    eyes = {}
    for part in ("Healthy", "Glaucoma and suspects"):
        path, images = _folder(tree, absent, f"RIM-ONE r3/{part}/Stereo Images")
        masks = f"{path.removesuffix('/Stereo Images')}/Average_masks"
        for stem, name in images.items():
            eyes[stem] = Eye(name, (f"{masks}/{stem}-Disc-Avg.png", f"{masks}/{stem}-Cup-Avg.png"))
    return eyes


def _refuge(*parts: tuple[str, tuple[str, ...]]) -> Find:
    def find(tree: Source, absent: dict[str, bool]) -> dict[str, Eye]:
        eyes: dict[str, Eye] = {}
        for folder, truths in parts:
            images, (path, _) = _folder(tree, absent, folder)[1], _folder(tree, absent, *truths)
            eyes |= {stem: Eye(name, (f"{path}/{stem}.bmp",)) for stem, name in images.items()}
        return eyes

    return find


def _read_pair(tree: Source, eye: Eye) -> tuple[np.ndarray, np.ndarray]:
    """Reads disc and cup from two grey maps; a pixel belongs to a class if at least half of the raters (or of 255) agree."""
    disc, cup = (tree.grey(name) >= 127.5 for name in eye.masks)
    if disc.shape != cup.shape:
        raise InputError(f"{eye.image}: its disc and cup masks differ in size. Correct the source.")
    return tree.rgb(eye.image), np.where(cup, 2, disc).astype("uint8")


def _read_stereo(tree: Source, eye: Eye) -> tuple[np.ndarray, np.ndarray]:
    image, mask = _read_pair(tree, eye)
    half = image.shape[1] // 2  # masks are drawn on the left view; some releases pad them to the pair's width
    return image[:, :half], mask[:, :half]


def _read_refuge(tree: Source, eye: Eye) -> tuple[np.ndarray, np.ndarray]:
    grey = tree.grey(eye.masks[0])
    return tree.rgb(eye.image), np.where(grey < 64, 2, grey < 192).astype("uint8")


TRAIN = [(f"Training400/{p}", (f"Disc_Cup_Masks/{p}",)) for p in ("Glaucoma", "Non-Glaucoma")]
VALIDATION = (
    "REFUGE-Validation400",
    ("REFUGE-Validation400-GT/Disc_Cup_Masks", "REFUGE-Validation400-GT", "REFUGE-Validation400/Disc_Cup_Masks"),
)
SITES = {
    "DrishtiGS": (_drishti, _read_pair),
    "RIMONEr3": (_rim_one, _read_stereo),
    "REFUGEtrain": (_refuge(*TRAIN), _read_refuge),
    "REFUGEval": (_refuge(VALIDATION), _read_refuge),
}
