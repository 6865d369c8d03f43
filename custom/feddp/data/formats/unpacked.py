"""What packed pixels unpack to, counted before they are unpacked: these decoders make whatever a file asks for."""

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from feddp.errors import BadFile, Problem
from feddp.limits import IMAGE_PIXELS, MIB

PLAIN, DEFLATE, LZW, PACKBITS = 1, (8, 32946), 5, 32773  # TIFF's numbers of compressions
_WIDEST = 4 * 8  # bytes of a TIFF's pixel: four channels of 64 bits
_SEGMENTS = 15  # of a frame of DICOM's RLE


def require_tiff(file: Path, page: Any, content: bytes) -> None:
    """Raises BadFile if a strip or tile of a page of tifffile unpacks to more than its size, or is packed another way."""
    if page.compression == PLAIN:
        return
    size, largest = math.prod(page.chunks) * page.dtype.itemsize, IMAGE_PIXELS * _WIDEST
    if page.compression in (LZW, PACKBITS):  # tifffile has these unpacked to no more than this size
        if size > largest:
            raise BadFile(Problem(file, f"has parts of {size} bytes, more than {largest}", "Save it again, in strips"))
        return
    if page.compression not in DEFLATE:
        how = getattr(page.compression, "name", page.compression)
        raise BadFile(Problem(file, f"is compressed by {how}", "Save it uncompressed, or compressed by deflate or LZW"))
    most = min(size, largest)
    for start, count in zip(page.dataoffsets, page.databytecounts, strict=False):
        if len(zlib.decompressobj().decompress(content[start : start + count], most + 1)) > most:
            raise BadFile(Problem(file, f"unpacks to more than the {most} bytes of a part", "Save it again"))


def inflated(stream: IO[bytes]) -> Iterator[bytes]:
    """Yields what the rest of a stream unpacks to by deflate without a header, at most MIB bytes at a time.

    Raises:
        zlib.error, EOFError: it is damaged, or cut off.
    """
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    while not unpacker.eof:
        packed = unpacker.unconsumed_tail or stream.read(MIB)
        part = unpacker.decompress(packed, MIB)
        if not packed and not part:
            raise EOFError("its deflated part is cut off")
        yield part


def require_rle(file: Path, frame: bytes, size: int) -> None:
    """Raises BadFile if a frame of DICOM's RLE (PS3.5, G.3) unpacks to more than `size` bytes."""
    if sum(map(_run_lengths, _segments(frame))) > 2 * size + _SEGMENTS:  # scanners pad segments, by one byte or by more
        raise BadFile(Problem(file, f"unpacks to far more than its {size} bytes", "Save it again"))


def _segments(frame: bytes) -> Iterator[bytes]:
    """Yields the segments of a frame by its header: their number, and fifteen offsets."""
    number, *starts = struct.unpack("<16L", frame[:64])
    ends = [*starts[1 : min(number, _SEGMENTS)], len(frame)]
    for start, end in zip(starts, ends, strict=False):
        yield frame[start:end]


def _run_lengths(segment: bytes) -> int:
    """Returns the bytes to which a segment unpacks: n < 128 begins n + 1 bytes, n > 128 one byte 257 - n times."""
    place = length = 0
    while place < len(segment):
        head = segment[place]
        if head < 128:
            length, place = length + head + 1, place + head + 2
        else:
            length, place = length + (257 - head) % 129, place + (2 if head > 128 else 1)
    return length
