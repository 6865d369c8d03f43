"""What a TIFF's header says of its values, and the TIFFs that Pillow cannot read or whose values it would change.

tifffile reads the header of every TIFF. What it says has to be known, because both decoders read on where it is another: a
fourth ink as a colour, the first slice of a stack as the picture, an unknown channel as nothing.
"""

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from feddp.data.formats.unpacked import require_tiff
from feddp.errors import BadFile, Problem
from feddp.limits import IMAGE_PIXELS

# TIFF's numbers: of tags, of photometric interpretations, of sample formats
_BITS, _PHOTOMETRIC, _ORIENTATION, _SUB_IFDS, _INKS, _EXTRA, _FORMAT, _PALETTE = 258, 262, 274, 330, 332, 338, 339, 320
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, INDEXED, CMYK, YCBCR, LAB = 0, 1, 2, 3, 5, 6, 8
UNSIGNED, _SIGNED = 1, 2
_NAMES = {CMYK: "CMYK", YCBCR: "YCbCr", LAB: "CIELab"}
_COLOURS = {WHITE_IS_ZERO: 1, BLACK_IS_ZERO: 1, RGB: 3, INDEXED: 1, CMYK: 4, YCBCR: 3, LAB: 3}  # channels
_PREVIEW = 1  # the bit of NewSubfileType of a smaller version of another picture
_NOT_CMYK = 2  # of InkSet
_ASSOCIATED, _UNASSOCIATED = 1, 2  # kinds of transparency in ExtraSamples


@dataclass(frozen=True)
class TiffHeader:
    """The first page of a TIFF.

    Args:
        bits: of a value.
        kind: of the values: UNSIGNED or another number of TIFF's sample formats.
        multiplied: whether colours are multiplied by the opacity.
        palette: uint8 (N, 3), of an indexed picture.
        orientation: as of `feddp.data.pixels.Picture`.
    """

    photometric: int
    bits: int
    kind: int
    multiplied: bool
    palette: np.ndarray | None
    orientation: int

    @property
    def is_changed_by_pillow(self) -> bool:
        """Whether Pillow cuts the values to 8 bits, takes signed ones for unsigned, or leaves white as 0."""
        if self.bits <= 8:
            return self.kind == _SIGNED
        return self.photometric == RGB or (self.photometric == WHITE_IS_ZERO and self.bits != 16)


def is_tiff(content: bytes) -> bool:
    return content[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def read_header(content: bytes, file: Path) -> TiffHeader:
    """Returns what the header of a TIFF says.

    Raises:
        BadFile: it holds several pictures, or is of a kind that is not read.
    """
    import tifffile

    with tifffile.TiffFile(io.BytesIO(content)) as tiff:
        page: Any = tiff.pages[0]
        _require_one(tiff, page, content, file)
        if page.imagewidth * page.imagelength > IMAGE_PIXELS:
            what = f"has {page.imagewidth} x {page.imagelength} pixels; the limit is {IMAGE_PIXELS}"
            raise BadFile(Problem(file, what, "Scale it down"))
        photometric = int(page.photometric)
        bits, kind = _widest(page.tags.valueof(_BITS, 1)), _widest(page.tags.valueof(_FORMAT, UNSIGNED))
        extra = _extra(page, photometric, bits, file)
        return TiffHeader(
            photometric,
            bits,
            kind,
            extra == (_ASSOCIATED,),
            _palette(page, file) if photometric == INDEXED else None,
            page.tags.valueof(_ORIENTATION, 1),
        )


def _require_one(tiff: Any, page: Any, content: bytes, file: Path) -> None:
    """Raises BadFile if there are several pictures, or the first one is the preview of another."""
    one = Problem(file, "holds several pictures", "Save one picture per file")
    if tiff.pages.is_multipage:  # their number is not counted: a chain of millions, or a ring, takes hours
        raise BadFile(one)
    if page.imagedepth != 1:
        raise BadFile(one)
    # ImageJ, tifffile and MetaMorph say in the first page how many follow its pixels, and write no other page. Those who
    # save a single slice may keep this, so the pixels must be there, too. OME may name other files, which are not opened
    if (page.is_imagej or page.is_shaped or page.is_stk) and not (page.is_ome or page.is_micromanager):
        there = content[page.dataoffsets[0] :] if page.dataoffsets else b""
        if math.prod(tiff.series[0].shape) > page.size and len(there) >= 2 * page.nbytes:
            raise BadFile(one)
    if page.subfiletype & _PREVIEW and _SUB_IFDS in page.tags:
        raise BadFile(Problem(file, "begins with the preview of another picture", "Save that picture alone"))


def _extra(page: Any, photometric: int, bits: int, file: Path) -> tuple[int, ...]:
    """Returns the meaning of the channels behind the colours: nothing, or one of transparency.

    Raises:
        BadFile: there are other channels, or colours that cannot be read so.
    """
    depth = "with the bits " + ", ".join(map(str, page.bitspersample)) if isinstance(page.bitspersample, tuple) else ""
    if photometric not in _COLOURS or depth:
        what = depth or f"of the kind {getattr(page.photometric, 'name', photometric)}"
        raise BadFile(Problem(file, f"is a TIFF {what}, which is not read", "Save it as grey or RGB"))
    inks = page.tags.valueof(_INKS, 1) == _NOT_CMYK and photometric == CMYK
    if inks or (bits > 8 and photometric in _NAMES):
        name = "other inks than CMYK" if inks else f"{_NAMES[photometric]} of {bits} bits"
        raise BadFile(Problem(file, f"is a TIFF in {name}, which is not read", "Save it as grey or RGB"))
    count = page.samplesperpixel - _COLOURS[photometric]
    kinds = tuple(int(kind) for kind in page.extrasamples) or (_UNASSOCIATED,) * count
    if count not in (0, 1) or (count and kinds[0] not in (_ASSOCIATED, _UNASSOCIATED)):
        what = f"has {page.samplesperpixel} channels, and not all are colours or transparency"
        raise BadFile(Problem(file, what, "Save it with one or three channels"))
    return kinds[:count]


def _widest(values: Any) -> int:
    return int(max(values)) if isinstance(values, tuple) else int(values)


def _palette(page: Any, file: Path) -> np.ndarray:
    """Returns the colours as uint8 (N, 3). TIFF's have 16 bits; programs that write them as 8 use the low byte alone."""
    values = np.asarray(page.tags.valueof(_PALETTE, ()))
    if values.size == 0 or values.size % 3:
        raise BadFile(Problem(file, "has no palette for its indices", "Save it as grey or RGB"))
    colours = values.reshape(3, -1).T
    return (colours if colours.max() < 256 else colours >> 8).astype(np.uint8)


def pillow_reads(content: bytes) -> bool:
    try:
        with Image.open(io.BytesIO(content), formats=("TIFF",)):
            return True
    except Exception:  # whatever Pillow says of it: tifffile then says what is wrong
        return False


def by_tifffile(content: bytes, file: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the values of a TIFF whose header was read, (H, W) or (H, W, 3), and its opacity (H, W) if it has any.

    Raises:
        BadFile: its colours are no grey or RGB, it is compressed in another way than by deflate, LZW or PackBits, or its values
            are no numbers.
    """
    import tifffile

    with tifffile.TiffFile(io.BytesIO(content)) as tiff:
        page: Any = tiff.pages[0]
        if page.dtype is None or page.dtype.itemsize > 8 or page.dtype.kind not in "uif":
            raise BadFile(Problem(file, f"has values of {page.dtype}", "Save it with whole or floating point numbers"))
        if page.photometric in _NAMES:  # tifffile leaves inks as they are, which would be taken for red, green and blue
            what = f"is a TIFF in {_NAMES[page.photometric]} of a kind that is not read"
            raise BadFile(Problem(file, what, "Save it as grey or RGB"))
        require_tiff(file, page, content)
        values: np.ndarray = page.asarray()
        if values.ndim == 3 and page.planarconfig == 2:
            values = np.moveaxis(values, 0, -1)
        if page.photometric == WHITE_IS_ZERO:
            if values.dtype.kind != "u":
                raise BadFile(Problem(file, f"has values of {values.dtype} with white as 0", "Save it with black as 0"))
            values = (1 << page.bitspersample) - 1 - values
    colours = _COLOURS[page.photometric]
    if values.ndim == 2:
        return values, None
    return (values[..., 0] if colours == 1 else values[..., :3]), (values[..., -1] if values.shape[-1] > colours else None)
