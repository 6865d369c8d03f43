"""Reads PNG, JPEG, TIFF and BMP of 8 or 16 bits, one picture per file.

Pillow decodes them, except TIFFs that Pillow cannot read or whose values it would change, which tifffile decodes
(`feddp.data.formats.tiff`). Pixels are taken as they are stored, whatever TIFF's or EXIF's orientation says.
"""

import io
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from feddp.data.formats.guarded import AGAIN, UNREADABLE, guarded
from feddp.data.formats.scan import Scan, finite
from feddp.data.formats.tiff import (
    UNSIGNED,
    WHITE_IS_ZERO,
    TiffHeader,
    by_tifffile,
    is_tiff,
    pillow_reads,
    read_header,
)
from feddp.data.pixels import alpha_of, border_of, decode, require_drawn, require_shown
from feddp.data.prepare.source import FORMATS, Source
from feddp.errors import BadFile, Problem

GREY = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I", "F")
_INDEXED = ("P", "PA")
_PLAIN = "Save it as grey values with 0 as the background, or give --colour of each class"
_DARK = 64  # of 255: what looks like a background


@dataclass(frozen=True)
class Stored:
    """The pixels of a picture as they are stored.

    Args:
        values: grey values or indices (H, W), or colours (H, W, 3).
        palette: the colours uint8 (N, 3) of the indices, if they are any; of values of 2 or 4 bits, their grey levels (N,).
        alpha: uint8 (H, W), how opaque a pixel is; None: all are wholly.
        orientation: as of `feddp.data.pixels.Picture`.
        multiplied: whether the colours are multiplied by `alpha`.
        turned: whether the file has white as 0, and these values are turned around.
    """

    values: np.ndarray
    palette: np.ndarray | None = None
    alpha: np.ndarray | None = None
    orientation: int = 1
    multiplied: bool = False
    turned: bool = False

    @property
    def colours(self) -> np.ndarray:
        """Grey values (H, W) or colours (H, W, 3)."""
        return self.values if self.palette is None else self.palette[self.values]


def read_picture(tree: Source, name: str) -> Scan:
    """Returns a picture; transparency is left out, an indexed one is taken as colour.

    Raises:
        InputError: the file is too large, broken or of another kind, or shows what it shows by transparency. Names the file.
    """
    stored, file = _stored(tree, name), tree.shown(name)
    require_shown(file, stored.colours, stored.alpha)
    if stored.multiplied and stored.alpha is not None:
        what = "has colours that are multiplied by their transparency"
        raise BadFile(Problem(file, what, "Save it without transparency"))
    return Scan(stored.colours[None], orientation=stored.orientation)


def read_labels(tree: Source, name: str) -> Stored:
    """Returns a mask; the indices of an indexed picture are its values.

    Raises:
        InputError: as `read_picture`, its transparency says something else than its values, or its palette shows an index
            as the background that is none. Names the file.
    """
    stored, file = _stored(tree, name), tree.shown(name)
    require_drawn(file, stored.values, stored.alpha)
    if stored.palette is not None and stored.palette.ndim == 2:
        _require_background(file, stored.values, stored.palette)
    if stored.turned and 2 * (border_of(stored.colours) > stored.colours.max() / 2).mean() > 1:
        what = "has white as 0, and most of its border is white, so which is the background is not known"
        raise BadFile(Problem(file, what, _PLAIN))
    return stored


def read_colours(tree: Source, name: str) -> Stored:
    """Returns a mask whose values are its colours, uint8 (H, W, 3).

    Raises:
        InputError: as `read_labels`; it may have any palette.
    """
    stored, file = _stored(tree, name), tree.shown(name)
    values = stored.colours if stored.colours.ndim == 3 else np.repeat(stored.colours[..., None], 3, axis=-1)
    require_drawn(file, values, stored.alpha)
    if values.dtype == np.uint16 and values.max(initial=0) > 255:
        values = values >> 8
    if values.max(initial=0) > 255 or values.min(initial=0) < 0 or np.mod(values, 1).any():
        raise BadFile(
            Problem(
                file,
                f"has colours up to {values.max():.7g}, which are not whole numbers of 0 to 255",
                "Save its colours with 8 or 16 bits",
            )
        )
    return Stored(values.astype(np.uint8), orientation=stored.orientation)


def _require_background(file: Path, indices: np.ndarray, palette: np.ndarray) -> None:
    """Raises BadFile if an index that is used, other than 0, looks like the background.

    It does if it is black, or dark where 0 is not, or is most of the image's border where 0 is not dark.
    """
    used = np.unique(indices)
    shown = palette[used].max(axis=-1)
    dark = 1 if palette[0].max() < _DARK else _DARK
    if len(odd := used[(used > 0) & (shown < dark)]):
        first, zero = (",".join(map(str, palette[index].tolist())) for index in (odd[0], 0))
        what = (
            f"has a palette that shows the index {odd[0]} as {first} and 0 as {zero}, so which is the background is not known"
        )
        raise BadFile(Problem(file, what, _PLAIN))
    border = border_of(indices)
    kinds, counts = np.unique(border, return_counts=True)
    most = kinds[counts.argmax()]
    if palette[0].max() >= _DARK and most > 0 and 2 * counts.max() > border.size:
        colour, zero = (",".join(map(str, palette[index].tolist())) for index in (most, 0))
        what = f"has a palette that shows 0 as {zero}, and most of its border is the index {most}, shown as {colour},"
        raise BadFile(Problem(file, f"{what} so which is the background is not known", _PLAIN))


def _stored(tree: Source, name: str) -> Stored:
    content, file = tree.read(name), tree.shown(name)
    with guarded(file, UNREADABLE):
        stored = _tiff(content, file) if is_tiff(content) else _by_pillow(content, file)
        if stored.palette is not None and stored.values.max(initial=0) >= len(stored.palette):
            raise BadFile(Problem(file, "has indices that its palette does not hold", AGAIN))
        if not finite(stored.values):
            raise BadFile(Problem(file, "has values that are not finite, or huge", "Correct it"))
        return stored


def _tiff(content: bytes, file: Path) -> Stored:
    header = read_header(content, file)
    if not header.is_changed_by_pillow and pillow_reads(content):
        return replace(_by_pillow(content, file, header), turned=header.photometric == WHITE_IS_ZERO)
    values, alpha = by_tifffile(content, file)
    if alpha is not None:  # wholly transparent and wholly opaque stay so
        most = np.iinfo(alpha.dtype).max if alpha.dtype.kind in "ui" else 1
        alpha = np.where(alpha >= most, 255, np.clip(alpha.astype(float) / most * 254, 0, 254)).astype(np.uint8)
        alpha = None if (alpha == 255).all() else alpha
    turned = header.photometric == WHITE_IS_ZERO
    return Stored(values, header.palette, alpha, header.orientation, header.multiplied, turned)


def _by_pillow(content: bytes, file: Path, header: TiffHeader | None = None) -> Stored:
    picture = decode(io.BytesIO(content), FORMATS, file, AGAIN)
    image, alpha = picture.image, alpha_of(picture.image)
    if image.mode in _INDEXED:
        palette = header.palette if header else np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
        return Stored(np.asarray(image.getchannel(0)), palette, alpha, picture.orientation)
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image) if header is None else _unsigned(np.asarray(image), header, file)
        return Stored(values, None, alpha, picture.orientation)
    if image.mode == "La":  # grey values that are multiplied by the opacity, as Pillow does not convert them
        return Stored(np.asarray(image.getchannel(0)), None, alpha, picture.orientation, multiplied=True)
    values = np.asarray(image.convert("L" if image.mode in GREY else "RGB"))
    if (bits := header.bits if header else picture.bits) in (2, 4):  # Pillow has made 0 to 255 of them, and labels are lower
        levels = np.linspace(0, 255, 1 << bits).astype(np.uint8)
        return Stored(values // levels[1], levels, alpha, picture.orientation)
    return Stored(values, None, alpha, picture.orientation)


def _unsigned(values: np.ndarray, header: TiffHeader, file: Path) -> np.ndarray:
    """Returns grey values of 16 or 32 bits. Pillow takes unsigned ones of 32 bits for signed, and leaves white as 0."""
    if values.dtype == np.int32 and header.bits == 32 and header.kind == UNSIGNED:
        values = values.view(np.uint32)
    if header.photometric == WHITE_IS_ZERO:
        if values.dtype != np.uint16:
            raise BadFile(Problem(file, f"has values of {values.dtype} with white as 0", "Save it with black as 0"))
        values = np.uint16(65535) - values
    return values
