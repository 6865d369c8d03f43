"""Encodes JPEG Lossless (process 14) by the letter of ITU-T T.81, so that a decoder is not tested by its own library."""

import struct
from collections.abc import Iterator

import numpy as np

# what predicts a sample, from its left, upper and upper left neighbours (Table H.1)
PREDICTORS = {
    1: lambda a, b, c: a,
    2: lambda a, b, c: b,
    3: lambda a, b, c: c,
    4: lambda a, b, c: a + b - c,
    5: lambda a, b, c: a + ((b - c) >> 1),
    6: lambda a, b, c: b + ((a - c) >> 1),
    7: lambda a, b, c: (a + b) >> 1,
}
_LENGTH = 5  # bits of the code of each of the 17 categories, which are the numbers from 0: a table that anybody may choose


def encode(values: np.ndarray, bits: int, predictor: int = 1, shift: int = 0, restart: int = 0) -> bytes:
    """Returns samples (H, W) or (H, W, components), whole numbers of 0 to 2^bits - 1, as a JPEG of one scan.

    Args:
        shift: the point transform: the lowest bits are left out (H.1.2.1).
        restart: lines after which the prediction starts anew (H.1.1), if any.
    """
    planes = values if values.ndim == 3 else values[..., None]
    height, width, components = planes.shape
    numbers = range(1, components + 1)
    frame = struct.pack(">BHHB", bits, height, width, components) + b"".join(bytes([n, 0x11, 0]) for n in numbers)
    table = bytes([0]) + bytes(17 if n == _LENGTH else 0 for n in range(1, 17)) + bytes(range(17))
    scan = bytes([components]) + b"".join(bytes([n, 0]) for n in numbers) + bytes([predictor, 0, shift])
    parts = [b"\xff\xd8", _segment(0xC3, frame), _segment(0xC4, table)]
    parts += [_segment(0xDD, struct.pack(">H", restart * width))] if restart else []
    parts.append(_segment(0xDA, scan))
    lines = restart or height
    for number, top in enumerate(range(0, height, lines)):
        coded = "".join(_codes(planes[top : top + lines].astype(np.int64) >> shift, bits - shift, predictor))
        coded += "1" * (-len(coded) % 8)
        packed = int(coded, 2).to_bytes(len(coded) // 8, "big").replace(b"\xff", b"\xff\0")
        parts += [packed, bytes([0xFF, 0xD0 + number % 8])]
    return b"".join(parts[:-1]) + b"\xff\xd9"


def _segment(mark: int, content: bytes) -> bytes:
    return bytes([0xFF, mark]) + struct.pack(">H", len(content) + 2) + content


def _codes(planes: np.ndarray, bits: int, predictor: int) -> Iterator[str]:
    """Yields the bits of each sample: the category of its difference, modulo 2^16, and the bits that tell which (H.1.2.2)."""
    for y, x, plane in np.ndindex(planes.shape):
        sample = planes[..., plane]
        if y == x == 0:
            expected = 1 << (bits - 1)
        elif y == 0 or x == 0:
            expected = int(sample[0, x - 1] if y == 0 else sample[y - 1, 0])
        else:
            near = sample[y, x - 1], sample[y - 1, x], sample[y - 1, x - 1]
            expected = PREDICTORS[predictor](*(int(each) for each in near))
        difference = (int(sample[y, x]) - expected + 32767) % 65536 - 32767  # -32767 to 32768
        category = abs(difference).bit_length()
        yield f"{category:0{_LENGTH}b}"
        if 0 < category < 16:
            yield f"{difference if difference > 0 else difference + (1 << category) - 1:0{category}b}"
