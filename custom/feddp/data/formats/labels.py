"""The values or colours of a mask, as the classes of a site's folder: 0 (background) to C."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddp.data.formats.stack import by_slice, room
from feddp.errors import BadFile, InputError, Problem
from feddp.reading import short

Colour = tuple[int, int, int]
THRESHOLD = 127  # of 255: a mask of one class is foreground above it
CLOSE = 64.0  # the largest distance of a pixel from a declared colour, in steps of RGB: JPEG blends colours at edges
SAME = 16.0  # and of an area of one colour: JPEG moves it by some steps
BLACK: Colour = (0, 0, 0)
NEAR = 1e-3  # the largest distance of a label from a whole number: programs that resample leave 0.99999
# of a mask of two levels, in shares of its pixels that are not dark: flat areas of other values. JPEGs of qualities from 10 to
# 100 and scaled masks have none, votes of five raters 3 %, and 200 objects of 8 x 8 pixels 43 %
FLAT = 0.01
BETWEEN = 2 / 3  # and values in between: of 1 to N alike, 6/7 are; in a disc of radius 4 of JPEG quality 30, a half
# a small or thin structure of one value: so many pixels, and such a share of all with this value, have none beside but 0.
# Above a fourth, JPEGs of qualities from 5, scaled and blurred masks have values with shares up to two thirds, at lines
ALONE, SHARE = 6, 3 / 4
# of so few values in all, any share is enough: a second class, or thin lines that were scaled, which need --threshold
LEVELS = 3
FEW, KINDS = 64, 16  # pixels in between, and values, that a small or thin structure may have: it is all edge
BESIDE = 0.25  # of the outline of an inner class: as much may leave the outer one, where the two end together
TWO_LEVELS = "Save a mask of 0 and 1, or 0 and 255"
ALL_ABOVE = "where all above 0 is foreground, give --threshold 0"
GIVE_COLOURS = "Give the colours of the classes with --colour CLASS=RED,GREEN,BLUE"
BLENDED = (
    "Its edges are blended, as by smoothing or JPEG: save it without smoothing as PNG; if it is the colour of a class, "
    "give it with --colour"
)
NOT_NESTED = "If classes lie beside each other, give --labels exclusive; if each is inside the one before, --labels nested"


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
        BadFile: a pixel is farther than CLOSE from all of them, or an area, or a thin or small structure, farther than SAME;
            or, in a mask of few colours, one is nearly black besides black. Names `file`.
    """
    known = {BLACK: 0, **colours}
    seen, places = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True)
    apart = np.linalg.norm(seen[:, None].astype(float) - np.array(list(known), float)[None], axis=2)
    least = apart.min(axis=1)
    other = least > SAME
    if len(seen) <= KINDS and not seen[0].any():  # beside true black, and without JPEG's blends, black is no other colour
        other |= (apart.argmin(axis=1) == 0) & (least > 0)
    if other.any():
        codes = places.reshape(pixels.shape[:-1]) + (1 if seen[0].any() else 0)  # black, the first if it is there, is 0
        areas = np.bincount(codes[_is_alone(codes)] - codes.min(), minlength=len(seen)) >= ALONE
        odd = areas & other
        if odd.any() or least.max() > CLOSE:
            red, green, blue = seen[np.where(odd, least, 0).argmax() if odd.any() else least.argmax()]
            what = f"has the colour {red},{green},{blue}, which is of no class"
            raise BadFile(Problem(file, what, GIVE_COLOURS if odd.any() else BLENDED))
    values = np.array(list(known.values()), np.uint8)[apart.argmin(axis=1)]
    mask: np.ndarray = values[places.ravel()].reshape(pixels.shape[:-1])
    return mask


def by_value(file: Path, values: np.ndarray, classes: int, threshold: int | None) -> np.ndarray:
    """Returns a mask (..., H, W): values of 0 to `classes` as they are; otherwise, of one class, those above `threshold`.

    Values within NEAR of a whole number are that number. The threshold counts in steps of 255: of 16-bit values, it is 257
    times as high, of fractions below 1 a 255th. None is THRESHOLD, of masks of two levels (`_require_two_levels`).

    Raises:
        BadFile: there are several classes and a value is none of them, no value is above the threshold, or the mask holds
            more than two levels. Names `file`.
    """
    if values.dtype.kind == "f":
        values = by_slice(_rounded, values, values.dtype)
    low, top = values.min(initial=0), values.max(initial=0)
    whole = all((np.mod(each, 1) == 0).all() for each in values)
    if low >= 0 and top <= classes and whole:
        return by_slice(lambda each: each, values, np.uint8)
    if classes == 1 and low >= 0 and top <= 65535 and (whole or threshold is not None or top > 1):
        step = 1 / 255 if top <= 1 else 1 if top <= 255 else 257
        above = (THRESHOLD if threshold is None else threshold) * step
        if top > above:
            if threshold is None:
                _require_two_levels(file, values, above)
            return by_slice(lambda each: each > above, values, np.uint8)
    wrong = np.unique(values[(values < 0) | (values > classes) | (np.mod(values, 1) != 0)])
    remedy = f"Use 0 to {classes}, one value for each of --classes, or declare colours with --colour"
    if classes == 1 and top <= 65535 and ((values == 0) | (values == top)).all():
        remedy = "Where all above 0 is foreground, give --threshold 0; otherwise save a mask of 0 and 1"
    elif classes == 1:
        remedy += f"; {ALL_ABOVE}"
    raise BadFile(Problem(file, f"has the value(s) {_listed(wrong)}", remedy))


def _rounded(values: np.ndarray) -> np.ndarray:
    near = np.rint(values)
    return np.where(np.abs(values - near) <= NEAR, near, values)


def _require_two_levels(file: Path, values: np.ndarray, above: float) -> None:
    """Raises BadFile if a mask (..., H, W) holds more than a dark and a bright level, and what lies between at their edges.

    JPEG, scaling and smooth edges leave values between the levels, but no flat areas of such values: labels of classes or of
    single objects have these. Nor do they leave more of them than of the bright level, as distances and probabilities have.
    """
    top = float(values.max())
    if ((values == 0) | (values == top)).all():
        return
    drawn = int((values > top / 8).sum())
    flat, counts = np.unique(values[_is_flat(values)], return_counts=True)
    bright, is_drawn = flat > above, len(np.unique(values)) <= KINDS
    levels = 0
    # JPEG keeps a level as one value or some that are close; of a mask of few values, dark ones that are close are labels
    for side, close in ((bright, top / 32), (~bright, 0.0 if is_drawn else top / 64)):
        if side.any():
            level = float(flat[side][counts[side].argmax()])
            levels += counts[side & (np.abs(flat - level) <= close)].sum()
    if counts.sum() - levels > FLAT * drawn:
        what = f"has flat areas of the values {_listed(flat)}, as labels of classes or of single objects have"
        raise BadFile(Problem(file, what, f"{TWO_LEVELS}; {ALL_ABOVE}"))
    if len(alone := _values_alone(values, top)):
        what = (
            f"has structures of the value(s) {_listed(alone)} besides {top:.7g}, as labels of classes or of single objects have"
        )
        remedy = f"{TWO_LEVELS}; {ALL_ABOVE}; of thin structures with soft edges, --threshold {THRESHOLD}"
        raise BadFile(Problem(file, what, remedy))
    between = values[(values > top / 8) & (values < top * 7 / 8)]
    if between.size > max(FEW, BETWEEN * drawn) and len(kinds := np.unique(between)) > KINDS:
        what = f"has {len(kinds)} values in between, {_listed(kinds)}, in {between.size} of {drawn} pixels that are not dark,"
        what += " as distances or probabilities have"
        remedy = f"Of thin structures with soft edges, give --threshold {THRESHOLD}; of other grey levels, their limit"
        raise BadFile(Problem(file, what, f"{remedy}. {TWO_LEVELS}, where you can"))


def _is_flat(values: np.ndarray) -> np.ndarray:
    """Returns bool (..., H, W): whether a pixel and its four neighbours have one value."""
    flat = np.zeros(values.shape, bool)
    middle = values[..., 1:-1, 1:-1]
    flat[..., 1:-1, 1:-1] = (
        (middle == values[..., :-2, 1:-1])
        & (middle == values[..., 2:, 1:-1])
        & (middle == values[..., 1:-1, :-2])
        & (middle == values[..., 1:-1, 2:])
    )
    return flat


def _values_alone(values: np.ndarray, top: float) -> np.ndarray:
    """Returns the values below the bright level that form structures (..., H, W) of their own, thin or small ones too.

    Beside a pixel of a soft edge, one is brighter or darker. Of dark values, JPEG leaves lines; a mask of labels has few.
    """
    alone = _is_alone(np.where(values == values.min(), 0, values))  # some draw on grey
    kinds, uses = np.unique(values, return_counts=True)
    kept, counts = np.unique(values[alone], return_counts=True)
    least = top / 32 if len(kinds) <= KINDS else top / 4
    share = 0.0 if len(kinds) <= LEVELS else SHARE
    often = (counts >= ALONE) & (counts >= share * uses[np.searchsorted(kinds, kept)])
    found: np.ndarray = kept[often & (kept > least) & (kept < top * 7 / 8)]
    return found


def _is_alone(values: np.ndarray) -> np.ndarray:
    """Returns bool (..., H, W): whether a pixel is not 0, and its eight neighbours are 0 or have its value."""
    from scipy.ndimage import maximum_filter, minimum_filter

    size = (*[1] * (values.ndim - 2), 3, 3)
    brightest = maximum_filter(values, size, mode="nearest")
    darkest = minimum_filter(np.where(values > 0, values, values.max(initial=0)), size, mode="nearest")
    alone: np.ndarray = (values > 0) & (brightest == values) & (darkest == values)
    return alone


def _listed(values: Iterable[Any]) -> str:
    """Returns some values as text, with all digits that tell them from others."""
    found = list(values)
    shown = [str(int(value)) if value == int(value) else f"{value:.7g}" for value in found[:5]]
    return short(", ".join(shown) + (", ..." if len(found) > 5 else ""))


def in_one(maps: np.ndarray, labels: str | None, classes: Sequence[str], file: Path) -> np.ndarray:
    """Returns boolean maps (C, ...) of the classes as one mask of 0 to C. With nested labels, the last class of a pixel counts.

    Args:
        labels: what the user says; None: they are nested, and each class lies inside the one before it.

    Raises:
        BadFile: the labels are exclusive and two classes overlap, or nobody says that they are nested, and they are not.
    """
    order = np.arange(1, len(maps) + 1, dtype=np.uint8).reshape(-1, *[1] * (maps.ndim - 2))
    mask = room(maps.shape[1:], np.uint8)
    drawn, outside = np.zeros(len(maps), int), np.zeros(len(maps), int)
    for number in range(len(mask)):
        each = maps[:, number]
        if labels == "exclusive" and (each.sum(axis=0) > 1).any():
            raise BadFile(Problem(file, "has structures that overlap", "Use --labels nested, or classes that do not overlap"))
        if labels is None:
            within = tuple(range(1, each.ndim))
            drawn += each.sum(axis=within)
            outside[1:] += (each[1:] & ~each[:-1]).sum(axis=within)
        mask[number] = (each * order).max(axis=0)
    for number in np.flatnonzero(outside)[:1]:
        what = f"of {classes[number]}, {outside[number]} of {drawn[number]} pixels lie outside {classes[number - 1]}"
        raise BadFile(Problem(file, what, NOT_NESTED))
    return mask


def require_nested(file: Path, mask: np.ndarray, classes: Sequence[str]) -> None:
    """Raises BadFile if a mask (..., H, W) of 0 to C shows that a class lies beside the class before it and not inside it.

    Such a mask cannot hold both, but an inner class has the outer one around it: more than BESIDE of the outline of what is c
    or higher must not touch what is lower than c - 1. Edges of the image do not count.
    """
    for value in range(2, len(classes) + 1):
        outline = touching = 0
        for each in mask.reshape(-1, *mask.shape[-2:]):
            inner, lower = each >= value, each < value - 1
            for axis in (-2, -1):
                for one, other in ((slice(None, -1), slice(1, None)), (slice(1, None), slice(None, -1))):
                    within = inner[_along(axis, one)]
                    outline += int((within & ~inner[_along(axis, other)]).sum())
                    touching += int((within & lower[_along(axis, other)]).sum())
        if touching > BESIDE * outline:
            what = f"has {classes[value - 1]} beside {classes[value - 2]} and not inside it"
            raise BadFile(Problem(file, what, NOT_NESTED))


def _along(axis: int, part: slice) -> tuple[Any, ...]:
    return (..., part, slice(None)) if axis == -2 else (..., part)
