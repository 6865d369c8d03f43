"""Reading and writing the PNGs of a site's folder, strictly: what is not as the format says is an error."""

import warnings
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from feddp.errors import BadFile, Problem
from feddp.limits import IMAGE_BYTES, IMAGE_PIXELS
from feddp.reading import opened, short

MODES = {1: "L", 3: "RGB"}
# of a picture of 89 million pixels Pillow only warns
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)


def decode(stream: IO[bytes], formats: tuple[str, ...], file: Path, remedy: str, mode: str | None = None) -> Image.Image:
    """The image in `stream`, decoded once its header says that it is one picture of a bearable size.

    Only `formats` are tried: Pillow knows dozens, among them some that start other programs. With `mode` it is converted to
    that. `file` and `remedy` are for errors.

    Raises:
        BadFile: it is none of them, broken, too large or animated.
    """
    try:
        image = Image.open(stream, formats=formats)
        if image.width * image.height > IMAGE_PIXELS:
            what = f"has {image.width} x {image.height} pixels, and {IMAGE_PIXELS} is the most that is read"
            raise BadFile(Problem(file, what, "Scale it down"))
        # a camera's JPEG may hold previews behind its picture (MPO)
        pictures: int = getattr(image, "n_frames", 1)
        if image.format != "MPO" and pictures > 1:
            raise BadFile(Problem(file, f"holds {pictures} pictures", "Save one picture a file"))
        image.load()
        return image.convert(mode) if mode else image
    except BadFile:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadFile(Problem(file, f"has too many pixels ({error})", "Scale it down")) from None
    except Exception as error:  # the file may hold any bytes: decoders fail in as many ways
        raise BadFile(Problem(file, f"is not a readable image ({short(str(error), 200)})", remedy)) from None


def _open(file: Path, within: Path) -> Image.Image:
    """The decoded image; BadFile where there is none, or half of one."""
    try:
        with opened(file, IMAGE_BYTES, within) as stream:
            return decode(stream, ("PNG",), file, "Write it again as PNG")
    except FileNotFoundError:
        raise BadFile(Problem(file, "is missing", "Add it, or remove its line from split.csv")) from None


def read_image(file: Path, channels: int, within: Path) -> np.ndarray:
    """uint8, (H, W, 3) or, of one channel, (H, W).

    Raises:
        BadFile: it is missing, unreadable, too large, of another channel count, or a link out of the folder `within`.
    """
    image = _open(file, within)
    if image.mode != MODES[channels]:
        found = f"{len(image.getbands())} channel(s) (PNG mode {image.mode})"
        remedy = f"Save it as 8-bit {MODES[channels]}, or correct dataset.json"
        raise BadFile(Problem(file, f"has {found}, dataset.json says {channels}", remedy))
    return np.asarray(image)


def read_mask(file: Path, classes: int, within: Path) -> np.ndarray:
    """uint8, (H, W), values 0 to `classes`.

    Raises:
        BadFile: as `read_image`; or it is not one 8-bit channel, or holds a value out of range.
    """
    mask = _open(file, within)
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
