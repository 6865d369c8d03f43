"""Reads and writes the PNGs of a site's folder, strictly: every deviation from the format is an error."""

import warnings
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, UnidentifiedImageError

from feddp.errors import BadFile, Problem
from feddp.limits import IMAGE_BYTES, IMAGE_PIXELS, JPEG_SCANS
from feddp.reading import opened, short

MODES = {1: "L", 3: "RGB"}
# above 89 million pixels, Pillow only warns
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)


def decode(stream: IO[bytes], formats: tuple[str, ...], file: Path, remedy: str, mode: str | None = None) -> Image.Image:
    """Decodes the image in `stream` after its header has shown that it is one picture within the size limit.

    Only `formats` are tried: Pillow supports dozens, and some of them start other programs. The image is converted to `mode`,
    if given. Errors use `file` and `remedy`.

    Raises:
        BadFile: the image has another format, is broken, too large or animated, or has values that Pillow would cut.
    """
    try:
        image = Image.open(stream, formats=formats)
        if image.width * image.height > IMAGE_PIXELS:
            what = f"has {image.width} x {image.height} pixels; the limit is {IMAGE_PIXELS}"
            raise BadFile(Problem(file, what, "Scale it down"))
        # a camera's JPEG may hold previews behind its picture (MPO). The number is not counted: in a TIFF this takes hours
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise BadFile(Problem(file, "holds several pictures", "Save one picture per file"))
        if (
            image.format == "PNG" and image.mode not in ("I;16", "I") and _png_bits(stream) == 16
        ):  # Pillow keeps the high bytes alone
            raise BadFile(
                Problem(file, "has 16 bits in colour or with transparency", "Save it with 8 bits, or as a 16-bit TIFF")
            )
        if image.format in ("JPEG", "MPO"):
            here = stream.tell()
            stream.seek(0)
            require_scans(file, stream.read())
            stream.seek(here)
        image.load()
        return image.convert(mode) if mode else image
    except BadFile:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadFile(Problem(file, f"has too many pixels ({error})", "Scale it down")) from None
    except Exception as error:  # the file may hold any bytes, and decoders then raise many kinds of errors
        raise BadFile(Problem(file, _unreadable(error, formats), remedy)) from None


def _png_bits(stream: IO[bytes]) -> int:
    """Returns the bits of a value in the header of a PNG, the byte behind the width and the height."""
    here = stream.tell()
    stream.seek(24)
    (bits,) = stream.read(1)
    stream.seek(here)
    return bits


def require_scans(file: Path, content: bytes) -> None:
    """Raises BadFile if a JPEG, or what holds one, begins more than JPEG_SCANS scans; its coded pixels hold no such mark."""
    if (scans := content.count(b"\xff\xda")) > JPEG_SCANS:
        raise BadFile(Problem(file, f"has {scans} scans; the limit is {JPEG_SCANS}", "Save it again"))


def _open(file: Path, within: Path) -> Image.Image:
    """Returns the decoded image; raises BadFile if the file is missing or incomplete."""
    try:
        with opened(file, IMAGE_BYTES, within) as stream:
            return decode(stream, ("PNG",), file, "Write it again as PNG")
    except FileNotFoundError:
        raise BadFile(Problem(file, "is missing", "Add it, or remove its line from split.csv")) from None


def read_image(file: Path, channels: int, within: Path, network: bool = False) -> np.ndarray:
    """Returns an image as uint8 (H, W, 3) or, with one channel, (H, W).

    Args:
        network: whether the number of channels is a network's and not that of a dataset.json, for the error.

    Raises:
        BadFile: the file is missing, unreadable or too large, has other channels, or is a link out of the folder `within`.
    """
    image = _open(file, within)
    if image.mode != MODES[channels]:
        actual = f"{len(image.getbands())} channel(s) (PNG mode {image.mode})"
        wanted, more = ("the network expects", "") if network else ("dataset.json has", ", or correct dataset.json")
        remedy = f"Save it as 8-bit {MODES[channels]}{more}"
        raise BadFile(Problem(file, f"has {actual}, but {wanted} {channels}", remedy))
    return np.asarray(image)


def _unreadable(error: Exception, formats: tuple[str, ...]) -> str:
    why = short(str(error), 200)
    if isinstance(error, UnidentifiedImageError):  # Pillow names the stream
        why = f"its content is not {' or '.join(formats)}"
    return f"is not a readable image ({why})"


def extent(file: Path, within: Path) -> tuple[int, int]:
    """Returns the height and width in a PNG's header, in pixels. Raises BadFile as `read_image`."""
    try:
        with opened(file, IMAGE_BYTES, within) as stream:
            width, height = Image.open(stream, formats=("PNG",)).size
    except BadFile:
        raise
    except Exception as error:  # as in `decode`
        raise BadFile(Problem(file, _unreadable(error, ("PNG",)), "Write it again as PNG")) from None
    return height, width


def read_mask(file: Path, classes: int, within: Path) -> np.ndarray:
    """Returns a mask as uint8 (H, W) with values 0 to `classes`.

    Raises:
        BadFile: as `read_image`, or the mask is not one 8-bit channel, or has a value out of range.
    """
    mask = _open(file, within)
    if mask.mode not in ("L", "P"):  # P: the indices of the palette are the values
        actual = f"has {len(mask.getbands())} channel(s) (PNG mode {mask.mode})"
        raise BadFile(Problem(file, actual, "Save a mask as one 8-bit channel"))
    values = np.asarray(mask)
    if values.max(initial=0) > classes:
        wrong = np.unique(values[values > classes])
        shown = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        convert = "; `feddp data prepare folder` converts masks of 0 and 255" if wrong[-1] > 127 and classes == 1 else ""
        raise BadFile(Problem(file, f"has the value(s) {shown}", f"Use 0 to {classes} only{convert}"))
    return values


def same_size(image_file: Path, image: np.ndarray, mask: np.ndarray) -> None:
    """Raises BadFile if the image and its mask differ in height or width."""
    if image.shape[:2] != mask.shape:
        (h, w), (mh, mw) = image.shape[:2], mask.shape
        what = f"has {w} x {h} pixels, but its mask {mw} x {mh}"
        raise BadFile(Problem(image_file, what, "Make both the same size"))


def scaled(image: np.ndarray, size: int) -> np.ndarray:
    """Returns an image, uint8 (H, W) or (H, W, 3), in the size size x size. Where it shrinks, each pixel is a weighted mean of
    all that it covers, as in Pillow; `feddp.data.loading.network_input` takes the nearest ones alone."""
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))


def write_png(file: Path, pixels: np.ndarray) -> None:
    """Writes uint8 pixels, (H, W) or (H, W, 3), to a PNG."""
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, format="PNG")
