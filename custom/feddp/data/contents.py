"""What a site's images and masks show: each class's share of images and of pixels by split, and what can hardly be meant.

A run takes a site whose masks are all empty, or whose images are all black, and nothing of it can be learnt there. These are
warnings, not problems: a site may have a reason, and `feddp.data.check` refuses only what a run refuses.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from feddp.data.description import SPLITS, Row
from feddp.errors import Problem
from feddp.reading import counted

LOOK = "Look at some of them, and prepare the folder again, or leave the site out"
FEW = "its scores over these images are withheld, so it has no part in the choice of the best round"


@dataclass
class Tally:
    """Counts over the images of a split.

    Args:
        empty, full: masks without a pixel of a class, and without a pixel of the background.
        shown, drawn: {class: images that show it}, {class: its pixels in all images}.
        around: {class: images of which it covers more than half, and more than half of the border too}.
        flat: images of one value; `odd` are those of them whose mask shows a structure.
        copied: images that show nothing but their mask.
        repeated: images that are also in another split, which is named beside.
    """

    images: int = 0
    pixels: int = 0
    empty: int = 0
    full: int = 0
    shown: Counter[str] = field(default_factory=Counter)
    drawn: Counter[str] = field(default_factory=Counter)
    around: Counter[str] = field(default_factory=Counter)
    flat: int = 0
    odd: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    repeated: list[tuple[str, str]] = field(default_factory=list)


class Contents:
    """Takes a site's images with their masks (`add`) in any order; then tells what they show.

    Args:
        site: the site's folder.
        classes, labels: those of its dataset.json.
        unseen: whether no round trains there, so none is selected by its images.
    """

    def __init__(self, site: Path, classes: tuple[str, ...], labels: str, unseen: bool):
        self.site, self.classes, self.labels, self.unseen = site, classes, labels, unseen
        self.splits = {split: Tally() for split in SPLITS}
        self._pictures: dict[bytes, str] = {}  # {digest of an image: the first split with it}
        self._masks: set[bytes] = set()

    def add(self, row: Row, image: np.ndarray, mask: np.ndarray) -> None:
        """Counts an image, uint8 (H, W) or (H, W, 3), and its mask, uint8 (H, W)."""
        tally = self.splits[row.split]
        counts = np.bincount(mask.ravel(), minlength=len(self.classes) + 1)
        tally.images += 1
        tally.pixels += mask.size
        tally.empty += int(counts[0] == mask.size)
        tally.full += int(counts[0] == 0)
        for value, name in enumerate(self.classes, 1):
            drawn = int(counts[value:].sum() if self.labels == "nested" else counts[value])
            tally.drawn[name] += drawn
            tally.shown[name] += drawn > 0
            tally.around[name] += surrounds(mask >= value if self.labels == "nested" else mask == value)
        self._masks.add(_digest(mask))
        if image.min() == image.max():
            tally.flat += 1
            if counts[0] < mask.size:
                tally.odd.append(row.image)
            return  # a black slice may be there twice
        if _is_drawn_from(image, mask):
            tally.copied.append(row.image)
        if (first := self._pictures.setdefault(_digest(image), row.split)) != row.split:
            tally.repeated.append((row.image, first))

    @property
    def filled(self) -> dict[str, Tally]:
        """The splits with images."""
        return {split: tally for split, tally in self.splits.items() if tally.images}

    @property
    def scored(self) -> tuple[str, int]:
        """The split by whose images rounds are selected, and their number."""
        split = "val" if self.splits["val"].images else "test"
        return split, self.splits[split].images

    def lines(self) -> Iterator[str]:
        """Yields a line for each split: of each class, the share of images that show it, and its share of all their pixels."""
        for split, tally in self.filled.items():
            shares = [(name, tally.shown[name] / tally.images, tally.drawn[name] / tally.pixels) for name in self.classes]
            said = (f"{name} in {images:.1%} of images, {pixels:.2%} of pixels" for name, images, pixels in shares)
            yield f"{self.site.name} {split}, {counted(tally.images, 'image')}: {'; '.join(said)}"

    def warnings(self, least: int) -> Iterator[Problem]:
        """Yields what can hardly be meant.

        Args:
            least: the number of images over which a site lets means leave, by its policy (`min_images`).
        """
        if not self.filled:
            return
        yield from self._of_masks()
        yield from self._of_images()
        split, images = self.scored
        if images < least and not self.unseen:
            what = f"split {split} has {counted(images, 'image')}, fewer than min_images={least} of a site's policy: {FEW}"
            yield Problem(self.site / "split.csv", what, f"Give it at least {least} images")

    def _of_masks(self) -> Iterator[Problem]:
        masks, tallies = self.site / "masks", self.filled
        images = sum(tally.images for tally in tallies.values())
        empty = [split for split, tally in tallies.items() if tally.empty == tally.images]
        full = [split for split, tally in tallies.items() if tally.full == tally.images]
        if empty:
            what = f"all{_which(empty, tallies)} masks are empty: no pixel is {' or '.join(self.classes)}"
            yield Problem(masks, what, LOOK)
        if full:
            yield Problem(masks, f"all{_which(full, tallies)} masks are full: no pixel is background", LOOK)
        for name in self.classes:
            around = [split for split, tally in tallies.items() if tally.around[name] == tally.images and split not in full]
            if around:
                what = f"{name} covers more than half of each{_which(around, tallies)} image and of its border,"
                yield Problem(masks, f"{what} so it may be the background, and the masks inverted", LOOK)
            missing = [split for split, tally in tallies.items() if not tally.shown[name]]
            if len(missing) == len(tallies) > len(empty):
                yield Problem(masks, f"no mask shows {name}", "Leave the class out at all sites, or correct the masks")
            elif missing := [split for split in missing if split not in empty]:
                what = f"no {' or '.join(missing)} mask shows {name}, and others do"
                yield Problem(masks, what, "Divide the patients so that each split shows it, or expect no score of it there")
        if len(self._masks) == 1 and images > 1 and not empty and not full:
            yield Problem(masks, f"all {images} masks are the same", LOOK)

    def _of_images(self) -> Iterator[Problem]:
        folder, tallies = self.site / "images", self.filled
        images = sum(tally.images for tally in tallies.values())
        flat = [split for split, tally in tallies.items() if tally.flat == tally.images]
        if flat:
            yield Problem(folder, f"all{_which(flat, tallies)} images are of one value each, as black ones are", LOOK)
        odd = [name for split, tally in tallies.items() if split not in flat for name in tally.odd]
        if odd:
            yield Problem(folder / f"{odd[0]}.png", f"is of one value, but its mask shows a structure{_more(odd)}", LOOK)
        if len(self._pictures) == 1 and images > 1 and not any(tally.flat for tally in tallies.values()):
            yield Problem(folder, f"all {images} images are the same", LOOK)
            return
        copied = [name for tally in tallies.values() for name in tally.copied]
        if copied:
            yield Problem(folder / f"{copied[0]}.png", f"shows nothing but its mask{_more(copied)}", LOOK)
        if repeated := [found for tally in tallies.values() for found in tally.repeated]:
            name, other = repeated[0]
            what = f"is pixel for pixel an image of split {other}{_more(repeated)}"
            yield Problem(folder / f"{name}.png", what, "Keep all images of a patient in one split")


def _which(splits: list[str], tallies: Mapping[str, Tally]) -> str:
    """Returns the names of the splits, or nothing if it is all of them."""
    return "" if len(splits) == len(tallies) else f" {' and '.join(splits)}"


def _more(found: list[str] | list[tuple[str, str]]) -> str:
    return f" (and {len(found) - 1} more alike)" if len(found) > 1 else ""


def surrounds(drawn: np.ndarray) -> bool:
    """Whether a class, bool (H, W), covers more than half of an image and of its border, as the background mostly does."""
    border = np.concatenate([drawn[0], drawn[-1], drawn[1:-1, 0], drawn[1:-1, -1]])
    return bool(2 * drawn.sum() > drawn.size and 2 * border.sum() > border.size)


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).digest()


def _is_drawn_from(image: np.ndarray, mask: np.ndarray) -> bool:
    """Whether the image has one value wherever the mask has one."""
    values = np.flatnonzero(np.bincount(mask.ravel()))
    if len(values) < 2:
        return False
    parts = (image[mask == value] for value in values)
    return all(bool((part == part[0]).all()) for part in parts)
