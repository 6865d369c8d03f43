"""Reading and writing the PNGs of a site's folder, strictly: what is not as the format says is an error."""

from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from feddp.data.description import BadFile, Problem

MODES = {1: "L", 3: "RGB"}


def _open(file: Path) -> Image.Image:
    """The decoded image; BadFile where there is none, or half of one."""
    try:
        with Image.open(file) as image:
            image.load()
            return image
    except FileNotFoundError:
        raise BadFile(Problem(file, "is missing", "Add it, or remove its line from split.csv")) from None
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise BadFile(Problem(file, f"is not a readable image ({error})", "Write it again as PNG")) from None


def read_image(file: Path, channels: int) -> np.ndarray:
    """uint8, (H, W, 3) or, of one channel, (H, W). BadFile if missing, unreadable, or of another channel count."""
    image = _open(file)
    if image.mode != MODES[channels]:
        found = f"{len(image.getbands())} channel(s) (PNG mode {image.mode})"
        remedy = f"Save it as 8-bit {MODES[channels]}, or correct dataset.json"
        raise BadFile(Problem(file, f"has {found}, dataset.json says {channels}", remedy))
    return np.asarray(image)


def read_mask(file: Path, classes: int) -> np.ndarray:
    """uint8, (H, W), values 0 to `classes`. BadFile if missing, unreadable, not one 8-bit channel, or out of range."""
    mask = _open(file)
    if mask.mode not in ("L", "P"):  # a palette's indices are the values
        found = f"has {len(mask.getbands())} channel(s) (PNG mode {mask.mode})"
        raise BadFile(Problem(file, found, "Save a mask as one 8-bit channel"))
    values = np.asarray(mask)
    if values.max(initial=0) > classes:
        wrong = np.unique(values[values > classes])
        shown = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        raise BadFile(Problem(file, f"holds the value(s) {shown}", f"Use 0 to {classes} only"))
    return values


def same_size(image_file: Path, image: np.ndarray, mask: np.ndarray) -> None:
    """BadFile unless the image and its mask have the same height and width."""
    if image.shape[:2] != mask.shape:
        (h, w), (mh, mw) = image.shape[:2], mask.shape
        what = f"is {w} x {h} pixels, its mask {mw} x {mh}"
        raise BadFile(Problem(image_file, what, "Make both the same size"))


def write_png(file: Path, pixels: np.ndarray) -> None:
    """uint8 pixels, (H, W) or (H, W, 3), to a PNG."""
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, format="PNG")
