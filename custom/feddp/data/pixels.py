"""Reads and writes the PNGs of a site's folder, strictly: every deviation from the format is an error."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from feddp.errors import BadFile, Problem
from feddp.limits import IMAGE_BYTES, IMAGE_PIXELS, JPEG_SCANS
from feddp.reading import opened, told

MODES = {1: "L", 3: "RGB"}
_TURN = Image.Transpose
# {how a viewer turns stored pixels: what turns them back}
_BACK = {
    **{2: _TURN.FLIP_LEFT_RIGHT, 3: _TURN.ROTATE_180, 4: _TURN.FLIP_TOP_BOTTOM},
    **{5: _TURN.TRANSPOSE, 6: _TURN.ROTATE_90, 7: _TURN.TRANSVERSE, 8: _TURN.ROTATE_270},
}
QUARTERS = (5, 6, 7, 8)  # orientations in which rows become columns
# above 89 million pixels, Pillow only warns
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)


@dataclass(frozen=True)
class Picture:
    """A decoded picture, its pixels as they are stored.

    Args:
        orientation: TIFF's and EXIF's number of how a viewer turns the stored pixels; 1 if it shows them as they are.
        bits: of a value of a PNG; 8 of other formats.
    """

    image: Image.Image
    orientation: int
    bits: int = 8


def decode(stream: IO[bytes], formats: tuple[str, ...], file: Path, remedy: str) -> Picture:
    """Decodes the image in `stream` after its header has shown that it is one picture within the size limit.

    Only `formats` are tried: Pillow supports dozens, and some of them start other programs. Errors use `file` and `remedy`.

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
        bits = _png_bits(stream) if image.format == "PNG" else 8
        if image.format == "PNG":
            _require_whole_values(image, bits, file)
        if image.format == "BMP":
            _require_plain_bmp(image, stream, file)
        if image.format in ("JPEG", "MPO"):
            here = stream.tell()
            stream.seek(0)
            require_scans(file, stream.read())
            stream.seek(here)
        if image.format != "TIFF":
            image.load()
            return Picture(image, _orientation(image), bits)
        orientation = _orientation(image)
        image.load()  # turns a TIFF, and only that
        return Picture(image.transpose(_BACK[orientation]) if orientation in _BACK else image, orientation)
    except BadFile:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadFile(Problem(file, f"has too many pixels ({error})", "Scale it down")) from None
    except Exception as error:  # the file may hold any bytes, and decoders then raise many kinds of errors
        raise BadFile(Problem(file, _unreadable(error, formats), remedy)) from None


def _orientation(image: Image.Image) -> int:
    """Returns the number in a TIFF's tag, in EXIF or in XMP, as Pillow finds it."""
    try:
        number = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # of the description alone: the picture itself can be read
        return 1
    return number if number in _BACK else 1


def _require_whole_values(image: Image.Image, bits: int, file: Path) -> None:
    """Raises BadFile if Pillow would keep only the high bytes of a PNG's values; scales a transparent grey as its values."""
    if bits == 16 and image.mode not in ("I;16", "I"):
        remedy = "Save it with 8 bits, or as a 16-bit TIFF"
        raise BadFile(Problem(file, "has 16 bits in colour or with transparency", remedy))
    if bits < 8 and image.mode == "L" and isinstance(image.info.get("transparency"), int):
        image.info["transparency"] *= 255 // ((1 << bits) - 1)


def _require_plain_bmp(image: Image.Image, stream: IO[bytes], file: Path) -> None:
    """Raises BadFile if Pillow would read a BMP's pixels as narrower than they are, or leave out their fourth channel.

    It takes a palette of two greys for one of one bit, and of sixteen for one of eight, whatever the header says.
    """
    here = stream.tell()
    stream.seek(0)
    head = stream.read(34)
    start, size = int.from_bytes(head[10:14], "little"), int.from_bytes(head[14:18], "little")
    bits = int.from_bytes(head[24:26] if size == 12 else head[28:30], "little")
    if bits == 32 and image.mode == "RGB" and head[30:34] == bytes(4):
        stream.seek(start)
        if len(set(stream.read(4 * image.width * image.height)[3::4])) > 1:
            raise BadFile(Problem(file, "has a fourth channel that BMP gives no meaning", "Save it as PNG, as grey or RGB"))
    if (image.mode, bits) not in (("1", 1), ("L", 8)) and image.mode in ("1", "L"):
        raise BadFile(
            Problem(file, f"is a BMP of {bits} bits with a palette of few greys, which is not read", "Save it as PNG")
        )
    stream.seek(here)


def alpha_of(image: Image.Image) -> np.ndarray | None:
    """Returns how opaque each pixel is, uint8 (H, W) of 0 to 255; None if all are wholly opaque."""
    key = image.info.get("transparency")
    if image.getbands()[-1] in ("A", "a"):
        alpha = np.asarray(image.getchannel(len(image.getbands()) - 1))
    elif key is None:
        return None
    elif isinstance(key, int) and image.mode != "P":  # of grey values, which Pillow cannot compare in all modes
        alpha = np.where(np.asarray(image.convert("L") if image.mode == "1" else image) == key, 0, 255).astype(np.uint8)
    else:
        alpha = np.asarray(image.convert("RGBA").getchannel("A"))
    return None if (alpha == 255).all() else alpha


def require_shown(file: Path, colours: np.ndarray, alpha: np.ndarray | None) -> None:
    """Raises BadFile if an image is of one colour (H, W) or (H, W, 3), and shows what it shows by transparency alone."""
    if alpha is not None and alpha.min() != alpha.max() and (colours == colours[:1, :1]).all():
        what = "is of one colour, and shows everything by its transparency, which is not read"
        raise BadFile(Problem(file, what, "Save it without transparency"))


def require_drawn(file: Path, values: np.ndarray, alpha: np.ndarray | None) -> None:
    """Raises BadFile if a mask's transparency says anything else than its values or colours, (H, W) or (H, W, 3).

    Both say the same where exactly the black pixels, or those of value 0, are wholly transparent, and the others wholly opaque.
    """
    if alpha is None:
        return
    drawn = values.any(axis=-1) if values.ndim == 3 else values != 0
    if not (np.where(drawn, 255, 0) == alpha).all():
        what = "is transparent in places, and says something else by this than by its values, so what counts is not known"
        remedy = "Save it without transparency, a mask with 0 as the background and one value for each class"
        raise BadFile(Problem(file, what, remedy))


def border_of(pixels: np.ndarray) -> np.ndarray:
    """Returns the pixels (N, ...) along the border of an image (H, W, ...)."""
    return np.concatenate([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]])


def is_around(drawn: np.ndarray) -> bool:
    """Whether a class, bool (H, W), covers more than half of an image and of its border, as the background does."""
    return bool(2 * drawn.mean() > 1 and 2 * border_of(drawn).mean() > 1)


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


def _open(file: Path, within: Path) -> Picture:
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
    image = _open(file, within).image
    if image.mode != MODES[channels]:
        actual = f"{len(image.getbands())} channel(s) (PNG mode {image.mode})"
        wanted, more = ("the network expects", "") if network else ("dataset.json has", ", or correct dataset.json")
        remedy = f"Save it as 8-bit {MODES[channels]}{more}"
        raise BadFile(Problem(file, f"has {actual}, but {wanted} {channels}", remedy))
    return np.asarray(image)


def _unreadable(error: Exception, formats: tuple[str, ...]) -> str:
    named = isinstance(error, UnidentifiedImageError)  # Pillow names the stream
    why = f"its content is not {' or '.join(formats)}" if named else told(error)
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
    picture = _open(file, within)
    mask, few = picture.image, picture.bits < 8
    # P: the indices of the palette are the values; grey values of few bits would be read as others
    if mask.mode != "P" and (mask.mode != "L" or few):
        actual = f"has {len(mask.getbands())} channel(s){f' of {picture.bits} bits' if few else ''} (PNG mode {mask.mode})"
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
