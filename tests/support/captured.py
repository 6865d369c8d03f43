"""What capture/sitecustomize.py notes: every frame that the server's process of a job gets and sends, and how a tensor is found
there; and which of some modules a process has loaded."""

from collections.abc import Set
from pathlib import Path

import numpy as np
from torch import Tensor

NOTHING = b"nothing to tell it by"


class Capture:
    """Frames: of the jobs that start and end within `with capture:`. Half a gigabyte a run, so not of every job."""

    def __init__(self, root: Path):
        self.folder, self._done, self.modules = root / "server", root / "done", root / "modules"
        self.modules.mkdir(parents=True)

    def __enter__(self) -> None:
        self.folder.mkdir()

    def __exit__(self, *_) -> None:
        self.folder.rename(self._done)

    def frames(self) -> bytes:
        return (self._done / "server.bin").read_bytes()

    def loaded(self, *words: str) -> list[set[str]]:
        """Of each process whose command has these words the modules that it has loaded of some (`capture/sitecustomize.py`)."""
        notes = [path.read_text().splitlines() for path in self.modules.iterdir()]
        return [set(names) for command, *names in notes if set(words) <= set(command.split())]


def value_of(tensor: Tensor) -> bytes:
    """A piece of a tensor's bytes that no other tensor has by chance."""
    return tensor.numpy().tobytes()[:64] if tensor.numel() >= 16 and tensor.unique().numel() > 8 else NOTHING


def those_in(content: bytes, values: Set[bytes]) -> set[bytes]:
    """Those of some values that are in `content`, wherever: what `in` says of each, in one pass for those of 8 bytes or more.

    Two bytes tell most places from every value's begin, eight bytes the rest, and all of a value's bytes the last.
    """
    found = {value for value in values if len(value) < 8 and value in content}
    values = {value for value in values if len(value) >= 8}
    begins = np.zeros(2**16, bool)
    begins[[int.from_bytes(value[:2], "little") for value in values]] = True
    firsts = np.array([int.from_bytes(value[:8], "little") for value in values], "<u8")
    lengths = {len(value) for value in values}
    piece = 2**20
    for start in range(0, len(content), piece):
        part = np.frombuffer(content[start : start + piece + 7], np.uint8)  # a value may begin at any of the piece's bytes
        for offset in range(2):
            pairs = part[offset : offset + (len(part) - offset) // 2 * 2].view("<u2")
            places = 2 * np.flatnonzero(begins[pairs]) + offset
            eights = part[places[places + 8 <= len(part), None] + np.arange(8)].view("<u8")[:, 0]
            for place in start + places[: len(eights)][np.isin(eights, firsts)]:
                found |= {content[place : place + length] for length in lengths} & values
    return found
