"""Files made to exhaust whoever reads them, and what reading them costs, measured in a process of its own."""

import io
import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

MIB = 1024**2
_CHILD = """
import json, re
from pathlib import Path
from feddp.errors import FedDPError
{setup}
def peak():  # not getrusage's: that begins with what the process had which started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
"""
_READ = """
before, error = peak(), ""
try:
    {read}
except FedDPError as refused:
    error = str(refused)
print(json.dumps([error, peak() - before]))
Path("/proc/self/clear_refs").write_text("5")  # from here a peak counts anew
"""


def cost(setup: str, read: str) -> tuple[str, float]:
    """(the FedDPError that the statement `read` ends in, or "", and by how many MiB the process grew for it)."""
    return costs(setup, read)[0]


def costs(setup: str, *reads: str) -> list[tuple[str, float]]:
    """The same of several, one after the other in one process: the cheapest first, since memory that is freed may stay."""
    code = _CHILD.format(setup=setup) + "".join(_READ.format(read=read) for read in reads)
    code += "import os, sys; sys.stdout.flush(); os._exit(0)"  # at once: to take torch apart takes a second more
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()[-len(reads) :]]


def png(width: int, height: int, pixels: bytes | None = None, frames: int = 1) -> bytes:
    """A grey PNG, black unless its rows are given; `frames` above 1 say that it is animated."""
    rows = zlib.compress(bytes((1 + width) * height) if pixels is None else pixels, 1)
    animation = [(b"acTL", struct.pack(">II", frames, 0))] if frames > 1 else []
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), *animation, (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def zeros_gz(mebibytes: int, start: bytes = b"") -> bytes:
    """A gzip of `start` and then so many MiB of zeros: one small member over and over."""

    def member(content: bytes) -> bytes:
        packer = zlib.compressobj(9, wbits=31)
        return packer.compress(content) + packer.flush()

    return (member(start) if start else b"") + member(bytes(16 * MIB)) * (mebibytes // 16)


def sparse(file: Path, size: int, start: bytes = b"", end: bytes = b"") -> Path:
    """A file of `size` bytes that hardly takes room on the disk."""
    with open(file, "wb") as stream:
        stream.write(start)
        stream.truncate(size)
        stream.seek(size - len(end))
        stream.write(end)
    return file


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one_line(code: int, err: str) -> str:
    """What a command said that ended as a user's mistake does."""
    assert code == 2, err
    assert err.startswith("feddp: ")
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err
    return err


def bmp(width: int, height: int) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, "BMP")
    return stream.getvalue()
