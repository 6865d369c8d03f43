"""Reads PNG, JPEG, TIFF and BMP of 8 or 16 bits, one picture per file.

Pillow decodes them, except TIFFs that Pillow cannot read or whose values it would change (`_needs_tifffile`), which tifffile
decodes.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from feddp.data.formats.guarded import AGAIN, guarded
from feddp.data.formats.scan import Scan, finite
from feddp.data.formats.unpacked import require_tiff
from feddp.data.pixels import decode
from feddp.data.prepare.source import FORMATS, Source
from feddp.errors import BadFile, Problem
from feddp.limits import IMAGE_PIXELS

GREY, COLOUR = (
    ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I", "F"),
    ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"),
)
UNREADABLE = "is not a readable image"
_WHITE_IS_ZERO, _UNSIGNED, _SIGNED = 0, 1, 2  # TIFF's numbers of photometric interpretations and of sample formats


def read_picture(tree: Source, name: str) -> Scan:
    """Returns a picture; transparency is left out, an indexed one is taken as colour. EXIF orientation is not applied.

    Raises:
        InputError: the file is too large, broken or of another kind. Names the file.
    """
    return Scan(_pixels(tree, name, "colour")[None])


def read_labels(tree: Source, name: str) -> np.ndarray:
    """Returns a mask's values (H, W), or its colours (H, W, 3); the indices of an indexed picture are its values.

    Raises as `read_picture`.
    """
    return _pixels(tree, name, "index")


def _pixels(tree: Source, name: str, indexed: str) -> np.ndarray:
    content, file = tree.read(name), tree.shown(name)
    with guarded(file, UNREADABLE):
        values = _decoded(content, file, indexed)
        if not finite(values):
            raise BadFile(Problem(file, "has values that are not finite, or huge", "Correct it"))
        return values


def _decoded(content: bytes, file: Path, indexed: str) -> np.ndarray:
    tiff = content[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
    if tiff and _needs_tifffile(content):
        return _by_tifffile(content, file)
    image = decode(io.BytesIO(content), FORMATS, file, AGAIN)
    if image.mode == "P" and indexed == "index":
        return np.asarray(image)
    if image.mode.startswith(("I", "F")):
        return _as_stored(image, file)
    return np.asarray(image.convert("L" if image.mode in GREY else "RGB"))


def _as_stored(image: Image.Image, file: Path) -> np.ndarray:
    """Returns grey values of 16 or 32 bits. Pillow takes unsigned ones of 32 bits for signed, and leaves white as 0."""
    values = np.asarray(image)
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    if values.dtype == np.int32 and tags.get(258) == (32,) and tags.get(339, (_UNSIGNED,))[0] == _UNSIGNED:
        values = values.view(np.uint32)
    if tags.get(262) == _WHITE_IS_ZERO:
        if values.dtype != np.uint16:
            raise BadFile(Problem(file, f"has values of {values.dtype} with white as 0", "Save it with black as 0"))
        values = np.uint16(65535) - values
    return values


def _needs_tifffile(content: bytes) -> bool:
    """Whether Pillow cannot read this TIFF, or would change its values: it cuts colours of more than 8 bits, and takes signed
    values of 8 bits for unsigned."""
    try:
        with Image.open(io.BytesIO(content), formats=("TIFF",)) as image:
            tags = image.tag_v2  # type: ignore[attr-defined]
            bits, kind = max(tags.get(258, (1,))), tags.get(339, (_UNSIGNED,))[0]
            if bits <= 8:
                return bool(kind == _SIGNED)
            return image.mode in COLOUR or (tags.get(262) == _WHITE_IS_ZERO and bits != 16)
    except Exception:  # whatever Pillow says of it: tifffile then says what is wrong
        return True


def _by_tifffile(content: bytes, file: Path) -> np.ndarray:
    import tifffile

    with tifffile.TiffFile(io.BytesIO(content)) as tiff:
        pages: Any = tiff.pages
        page = pages[0]
        if pages.is_multipage:  # their number is not counted: a chain of millions, or a ring, takes hours
            raise BadFile(Problem(file, "holds several pictures", "Save one picture per file"))
        if page.imagewidth * page.imagelength > IMAGE_PIXELS:
            what = f"has {page.imagewidth} x {page.imagelength} pixels; the limit is {IMAGE_PIXELS}"
            raise BadFile(Problem(file, what, "Scale it down"))
        if page.imagedepth != 1 or page.samplesperpixel not in (1, 2, 3, 4) or page.dtype is None or page.dtype.itemsize > 8:
            what = f"has {page.samplesperpixel} channels of {page.dtype}"
            raise BadFile(Problem(file, what, "Save it with one or three channels"))
        require_tiff(file, page, content)
        values: np.ndarray = page.asarray()
        if values.ndim == 3 and page.planarconfig == 2:
            values = np.moveaxis(values, 0, -1)
        if values.dtype.kind not in "uif" or values.ndim not in (2, 3):
            raise BadFile(Problem(file, f"has values of {values.dtype}", "Save it with whole or floating point numbers"))
        if page.photometric == _WHITE_IS_ZERO:
            if values.dtype.kind != "u":
                raise BadFile(Problem(file, f"has values of {values.dtype} with white as 0", "Save it with black as 0"))
            values = (1 << page.bitspersample) - 1 - values
        return values if values.ndim == 2 else values[..., 0] if values.shape[-1] < 3 else values[..., :3]
