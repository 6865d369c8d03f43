"""The process in which frames of JPEG, JPEG-LS and JPEG 2000 are decoded: `python -m feddp.data.formats.codec`.

Their decoders are written in C and C++, and read bytes of unknown origin. What they do wrong
ends this process and not the one that reads a file; its memory and time have limits
(`feddp.data.formats.decoding` starts it and speaks with it).
"""

import resource
import signal
import struct
import sys
from typing import BinaryIO

import imagecodecs
import numpy as np

from feddp.limits import DECODER_BYTES, DECODER_SECONDS

JPEG, JPEG_LS, JPEG_2000 = 1, 2, 3
REQUEST = struct.Struct("<BBQ")  # one of these, the components of a pixel, the bytes that follow
REPLY = struct.Struct("<c3IQ")  # a type of values, or WRONG; height, width, components; the bytes that follow
WRONG = b"?"  # then a text follows
TYPES = "BbHh"  # of values: 8 and 16 bits, unsigned and signed


def decoded(codec: int, components: int, frame: bytes) -> np.ndarray:
    """Returns a frame's values, (H, W) or (H, W, components), in the colour space in which they are stored."""
    if codec == JPEG:
        stored = "YCBCR" if components == 3 else None
        return np.asarray(imagecodecs.jpeg8_decode(frame, colorspace=stored, outcolorspace=stored))
    decode = imagecodecs.jpegls_decode if codec == JPEG_LS else imagecodecs.jpeg2k_decode
    return np.asarray(decode(frame))


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers requests until there are no more."""
    while head := requests.read(REQUEST.size):
        codec, components, count = REQUEST.unpack(head)
        frame = requests.read(count)
        signal.alarm(DECODER_SECONDS)  # this ends the process
        try:
            values = decoded(codec, components, frame)
            height, width, *more = values.shape
            kind, content = values.dtype.char.encode(), values.tobytes()
            start = REPLY.pack(kind, height, width, more[0] if more else 1, len(content))
        except Exception as error:  # whatever a decoder raises is an answer
            content = str(error).encode()[:200] if codec == JPEG else b""  # other libraries say which function failed
            start = REPLY.pack(WRONG, 0, 0, 0, len(content))
        signal.alarm(0)
        replies.write(start + content)
        replies.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (DECODER_BYTES, DECODER_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a picture of its memory would hold the patient's image
    serve(sys.stdin.buffer, sys.stdout.buffer)
