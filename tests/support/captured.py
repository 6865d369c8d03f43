"""Every frame that the server's process of a job gets and sends (capture/sitecustomize.py), and how a tensor is found there."""

from pathlib import Path

from torch import Tensor

NOTHING = b"nothing to tell it by"


class Capture:
    """Of the jobs that start and end within `with capture:`. Half a gigabyte a run, so not of every job."""

    def __init__(self, root: Path):
        self.folder, self._done = root / "server", root / "done"

    def __enter__(self) -> None:
        self.folder.mkdir()

    def __exit__(self, *_) -> None:
        self.folder.rename(self._done)

    def frames(self) -> bytes:
        return (self._done / "server.bin").read_bytes()


def value_of(tensor: Tensor) -> bytes:
    """A piece of a tensor's bytes that no other tensor has by chance."""
    return tensor.numpy().tobytes()[:64] if tensor.numel() >= 16 and tensor.unique().numel() > 8 else NOTHING
