"""The values or colours of a mask, as the classes of a site's folder: 0 (background) to C."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from feddp.errors import BadFile, InputError, Problem
from feddp.reading import short

Colour = tuple[int, int, int]
THRESHOLD = 127  # of 255: a mask of one class is foreground above it
CLOSE = 64.0  # the largest distance of a pixel from a declared colour, in steps of RGB: JPEG blends colours at edges
BLACK: Colour = (0, 0, 0)


def colours_of(texts: Sequence[str], classes: Sequence[str]) -> dict[Colour, int]:
    """Reads CLASS=R,G,B of every class; returns {colour: value in a mask}; raises InputError if a text or a class is wrong."""
    found: dict[Colour, int] = {}
    for text in texts:
        name, _, values = text.partition("=")
        parts = values.split(",")
        if name not in classes or len(parts) != 3 or not all(p.strip().isdigit() and int(p) < 256 for p in parts):
            raise InputError(
                f"--colour {text}: give CLASS=RED,GREEN,BLUE, each 0 to 255; the classes are {', '.join(classes)}."
            )
        red, green, blue = (int(part) for part in parts)
        if (red, green, blue) in found or (red, green, blue) == BLACK:
            raise InputError(f"--colour {text}: this is also the colour of another class or, if black, of the background.")
        found[red, green, blue] = classes.index(name) + 1
    if found and set(found.values()) != set(range(1, len(classes) + 1)):
        raise InputError("--colour: give the colours of all classes, or of none.")
    return found


def by_colour(file: Path, pixels: np.ndarray, colours: Mapping[Colour, int]) -> np.ndarray:
    """Returns a mask (..., H, W) of the nearest declared colour, or black, of each pixel (..., H, W, 3).

    Raises:
        BadFile: a pixel is farther than CLOSE from all of them. Names `file`.
    """
    known = {BLACK: 0, **colours}
    seen, places = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True)
    apart = np.linalg.norm(seen[:, None].astype(float) - np.array(list(known), float)[None], axis=2)
    if (apart.min(axis=1) > CLOSE).any():
        red, green, blue = seen[apart.min(axis=1).argmax()]
        what = f"has the colour {red},{green},{blue}, which is of no class"
        raise BadFile(Problem(file, what, "Give the colours of the classes with --colour CLASS=RED,GREEN,BLUE"))
    values = np.array(list(known.values()), np.uint8)[apart.argmin(axis=1)]
    mask: np.ndarray = values[places.ravel()].reshape(pixels.shape[:-1])
    return mask


def by_value(file: Path, values: np.ndarray, classes: int, threshold: int) -> np.ndarray:
    """Returns a mask (..., H, W): values of 0 to `classes` as they are; otherwise, of one class, those above `threshold`.

    The threshold counts in steps of 255: of 16-bit values, it is 257 times as high.

    Raises:
        BadFile: there are several classes and a value is none of them, or no value is above the threshold. Names `file`.
    """
    low, top = values.min(initial=0), values.max(initial=0)
    if low >= 0 and top <= classes and (np.mod(values, 1) == 0).all():
        return values.astype(np.uint8)
    above = threshold * (1 if top <= 255 else 257)
    if classes == 1 and low >= 0 and above < top <= 65535:
        return (values > above).astype(np.uint8)
    wrong = np.unique(values[(values < 0) | (values > classes) | (np.mod(values, 1) != 0)])
    shown = short(", ".join(f"{value:g}" for value in wrong[:5]) + (", ..." if len(wrong) > 5 else ""))
    remedy = f"Use 0 to {classes}, one value for each of --classes, or declare colours with --colour"
    raise BadFile(Problem(file, f"has the value(s) {shown}", remedy))


def in_one(maps: np.ndarray, labels: str, file: Path) -> np.ndarray:
    """Returns boolean maps (C, ...) as one mask of 0 to C. With nested labels, the last class of a pixel counts.

    Raises:
        BadFile: the labels are exclusive and two classes overlap.
    """
    if labels == "exclusive" and (maps.sum(axis=0) > 1).any():
        raise BadFile(Problem(file, "has structures that overlap", "Use --labels nested, or classes that do not overlap"))
    order = np.arange(1, len(maps) + 1, dtype=np.uint8).reshape(-1, *[1] * (maps.ndim - 1))
    mask: np.ndarray = (maps * order).max(axis=0).astype(np.uint8)
    return mask
