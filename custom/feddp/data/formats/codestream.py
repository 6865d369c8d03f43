"""What a frame of JPEG, JPEG-LS or JPEG 2000 says of itself, read before it is decoded.

The marks of JPEG and JPEG-LS are those of ITU-T T.81, B.1 and T.87, C.1; those of JPEG 2000 are of ITU-T T.800, A.5.1 and I.4.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_ALONE = (0x01, *range(0xD0, 0xD9))  # marks without a length
_FRAME = (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0), 0xF7)
_SCAN, _JFIF, _ADOBE = 0xDA, 0xE0, 0xEE
_RGB = (b"RGB", b"rgb")  # numbers of components that say what they are
_BOXES, _BOX = b"\0\0\0\x0cjP  ", b"jp2c"  # the start of a file of JPEG 2000, and what holds its codestream
_SIZE = b"\xff\x4f\xff\x51"  # the start of a codestream of JPEG 2000


@dataclass(frozen=True)
class Codestream:
    """A frame's own header.

    Args:
        content: the frame, without a file's boxes around it.
        bits: of a value.
        signed: whether values are; JPEG and JPEG-LS know no sign.
        ybr: whether three components are luminance and two differences, if the frame says so.
        tiles: how many parts are decoded by themselves.
    """

    content: bytes
    height: int
    width: int
    components: int
    bits: int
    signed: bool = False
    ybr: bool | None = None
    tiles: int = 1


def of_jpeg(frame: bytes) -> Codestream:
    """Returns the header of a frame of JPEG or JPEG-LS; raises ValueError if there is none before the pixels."""
    ybr = None
    for mark, segment in _segments(frame):
        if mark == _JFIF and segment.startswith(b"JFIF"):
            ybr = True
        if mark == _ADOBE and segment.startswith(b"Adobe") and len(segment) >= 12 and segment[11] == 1:
            ybr = True
        if mark in _FRAME and len(segment) >= 6:
            bits, height, width, components = struct.unpack(">BHHB", segment[:6])
            if bytes(segment[6:][: 3 * components : 3]) in _RGB:
                ybr = False
            return Codestream(frame, height, width, components, bits, ybr=ybr)
    raise ValueError("the packed picture has no header")


def _segments(frame: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the marks of a frame up to its pixels, with what belongs to each."""
    place = 0
    while place + 4 <= len(frame) and frame[place] == 0xFF:
        mark = frame[place + 1]
        if mark == 0xFF or mark in _ALONE:
            place += 1 if mark == 0xFF else 2
            continue
        if mark == _SCAN:
            return
        (length,) = struct.unpack(">H", frame[place + 2 : place + 4])
        yield mark, frame[place + 4 : place + 2 + length]
        place += 2 + max(length, 2)


def of_jpeg_2000(frame: bytes) -> Codestream:
    """Returns the header of a frame of JPEG 2000; raises ValueError if it is broken."""
    content = _unboxed(frame) if frame.startswith(_BOXES) else frame
    if not content.startswith(_SIZE) or len(content) < 43:
        raise ValueError("the packed picture has no header")
    right, low, left, top, *tile, components, bits = struct.unpack(">8I H B", content[8:43])
    width, height, across, down = right - left, low - top, tile[0], tile[1]
    if min(width, height, across, down) < 1:
        raise ValueError("the packed picture has no pixels")
    tiles = -(-(right - tile[2]) // across) * -(-(low - tile[3]) // down)
    return Codestream(content, height, width, components, (bits & 0x7F) + 1, bits > 0x7F, None, tiles)


def _unboxed(frame: bytes) -> bytes:
    place = 0
    while place + 16 <= len(frame):
        length, kind = struct.unpack(">I4s", frame[place : place + 8])
        start = place + (16 if length == 1 else 8)
        if kind == _BOX:
            return frame[start : place + length if length > 1 else None]
        if length == 1:
            (length,) = struct.unpack(">Q", frame[place + 8 : place + 16])
        place += max(length, 8) if length else len(frame)
    raise ValueError("the packed picture is in no box")
