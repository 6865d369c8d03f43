"""Decodes the packed frames of a DICOM file in a process of their own (`feddp.data.formats.codec`)."""

import atexit
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from pydicom import Dataset
from pydicom.pixels.processing import convert_color_space

from feddp.data.formats.codec import JPEG, JPEG_2000, JPEG_LS, REPLY, REQUEST, TYPES, WRONG
from feddp.data.formats.codestream import Codestream, of_jpeg, of_jpeg_2000
from feddp.data.formats.dicom import whole
from feddp.data.formats.guarded import AGAIN
from feddp.data.pixels import require_scans
from feddp.errors import BadFile, Problem
from feddp.limits import DECODER_BYTES, DECODER_SECONDS, JPEG_TILES
from feddp.reading import amount, one_line

_END = b"\xff\xd9"  # the last mark; a byte of zero may follow
COMMAND = [sys.executable, "-m", "feddp.data.formats.codec"]
# of transfer syntaxes (PS3.5, 10): the codec, and what reads its header
CODECS: Mapping[str, tuple[int, Callable[[bytes], Codestream]]] = {
    **{f"1.2.840.10008.1.2.4.{number}": (JPEG, of_jpeg) for number in (50, 51, 53, 55, 57, 70)},
    **{f"1.2.840.10008.1.2.4.{number}": (JPEG_LS, of_jpeg) for number in (80, 81)},
    **{f"1.2.840.10008.1.2.4.{number}": (JPEG_2000, of_jpeg_2000) for number in (90, 91, 201, 202, 203)},
}


def decode(file: Path, syntax: str, frame: bytes, shape: tuple[int, int, int]) -> tuple[np.ndarray, Codestream]:
    """Returns a frame's values as they are stored, (H, W) or (H, W, 3) of 8 or 16 bits, and its header.

    Args:
        syntax: the transfer syntax, one of CODECS.
        shape: height, width and samples of a pixel, as the file says.

    Raises:
        BadFile: the frame is of another size than the file says, cannot be decoded, or only with too much time or memory.
        ValueError: the frame's header is broken.
    """
    codec, read_header = CODECS[syntax]
    if codec == JPEG:
        require_scans(file, frame)
    # JPEG's decoder makes grey pixels of what is missing, and that of JPEG-LS looks for it for seconds
    if codec != JPEG_2000 and not frame.rstrip(b"\0").endswith(_END):
        raise BadFile(Problem(file, "has packed pixels that are cut off", AGAIN))
    header = read_header(frame)
    stated = header.height, header.width, header.components
    if stated != shape:
        packed, said = (f"{width} x {height} pixels of {samples} value(s)" for height, width, samples in (stated, shape))
        raise BadFile(Problem(file, f"holds a packed picture of {packed}, but its header says {said}", AGAIN))
    if header.tiles > JPEG_TILES:
        raise BadFile(Problem(file, f"has {header.tiles} tiles; the limit is {JPEG_TILES}", AGAIN))
    return _DECODER.ask(file, codec, header, shape), header


def unpacked_frame(file: Path, dataset: Dataset, packed: bytes) -> np.ndarray:
    """Returns a frame as numbers of the type that its file says, (H, W), or in red, green and blue (H, W, 3).

    Raises as `decode`, and BadFile if the values do not fit into that type.
    """
    keys = ("Rows", "Columns", "SamplesPerPixel", "BitsAllocated", "BitsStored", "PixelRepresentation")
    rows, columns, samples, allocated, bits, signed = (whole(dataset, key) for key in keys)
    syntax, photometry = str(dataset.file_meta.TransferSyntaxUID), str(dataset.get("PhotometricInterpretation"))
    values, header = decode(file, syntax, packed, (rows, columns, samples or 1))
    if allocated not in (8, 16) or values.dtype.itemsize * 8 > allocated:
        what = f"holds packed values of {header.bits} bits, but its header says {allocated}"
        raise BadFile(Problem(file, what, AGAIN))
    codec = CODECS[syntax][0]
    bits = max(bits, header.bits) if codec == JPEG else header.bits
    if codec != JPEG_2000 or header.signed != bool(signed):
        values = _of_sign(values, bits, bool(signed))
    values = values.astype(f"{'i' if signed else 'u'}{allocated // 8}")
    is_ybr = photometry.startswith("YBR_FULL")
    if codec != JPEG_2000 and header.ybr is not None:
        is_ybr = header.ybr
    return convert_color_space(values, "YBR_FULL", "RGB") if values.ndim == 3 and is_ybr else values


def _of_sign(values: np.ndarray, bits: int, signed: bool) -> np.ndarray:
    """Returns the numbers that the lowest `bits` bits of values are, with a sign (two's complement) or without."""
    lowest = values.astype(np.int64) & ((1 << bits) - 1)
    return np.where(lowest >> (bits - 1), lowest - (1 << bits), lowest) if signed else lowest


class _Decoder:
    """A process that decodes; it is started when it is needed, and again if a frame has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, file: Path, codec: int, header: Codestream, shape: tuple[int, int, int]) -> np.ndarray:
        if self._process is None:
            # in a folder where nobody has put modules: Python looks there for them first
            self._process = subprocess.Popen(
                COMMAND, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        process = self._process
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(REQUEST.pack(codec, header.components, len(header.content)) + header.content)
            process.stdin.flush()
            head = process.stdout.read(REPLY.size)
        except BrokenPipeError:
            head = b""
        if len(head) < REPLY.size:
            raise BadFile(Problem(file, self._end(), AGAIN))
        kind, *found, count = REPLY.unpack(head)
        if kind == WRONG:
            why = one_line(process.stdout.read(count).decode(errors="replace"), 100)
            raise BadFile(Problem(file, "has packed pixels that are damaged" + (f" ({why})" if why else ""), AGAIN))
        dtype = np.dtype(kind.decode()) if kind.decode() in TYPES else None
        if tuple(found) != shape or dtype is None or count != dtype.itemsize * shape[0] * shape[1] * shape[2]:
            self._end()
            raise BadFile(Problem(file, "is decoded to another size than its header says, or to huge values", AGAIN))
        values = np.frombuffer(process.stdout.read(count), dtype)
        return values.reshape(shape if shape[2] > 1 else shape[:2])

    def _end(self) -> str:
        """Ends the process, if it has not ended; returns what of it."""
        process, self._process = self._process, None
        assert process
        with process:  # closes its pipes and waits
            process.kill()
        if process.returncode == -signal.SIGALRM:
            return f"takes more than {DECODER_SECONDS} seconds to decode"
        return f"has packed pixels that break the decoder off, or take it more than {amount(DECODER_BYTES)}"

    def close(self) -> None:
        if self._process:
            self._end()


_DECODER = _Decoder()
atexit.register(_DECODER.close)
