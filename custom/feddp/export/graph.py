"""A network with everything around it that `feddp predict` does, as one module that can be traced."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddp.adaptation.models import described, prepared
from feddp.data.images import label_mask
from feddp.errors import FedDPError
from feddp.networks.metadata import ZSCORE, Metadata
from feddp.networks.weights import load_personal
from feddp.training.metrics import THRESHOLD

# resizing leaves about 1e-5 in a channel of one value; one differing pixel of 1024 x 1024 has a deviation of 1e-3
NO_CONTRAST = 1e-4
TOLERANCE = 1e-4  # of a probability


class Graph(nn.Module):
    """Images as PNGs hold them -> probabilities and masks, both in the size of the images.

    Scales as the training images were prepared, resizes to the network's size, normalises
    (`feddp.data.loading.network_input`), applies the network, resizes its logits back, and decodes them to values 0 to C
    (`feddp.data.images.label_mask`).

    Args:
        prepared: the height and width to which the training images were resized before the run, if they were.
    """

    def __init__(self, network: nn.Module, metadata: Metadata, prepared: int | None = None):
        super().__init__()
        self.network, self.metadata, self.prepared = network, metadata, prepared

    @classmethod
    def of(cls, file: Path) -> "tuple[Graph, Metadata]":
        """Returns the graph of a network's file, in eval mode on the CPU, and its metadata; InputError as `load_personal`."""
        metadata, preparation = described(file), prepared(file)
        return cls(load_personal(file), metadata, preparation.size if preparation else None).eval(), metadata

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (B, H, W, channels) -> float32 (B, classes, H, W), uint8 (B, H, W)."""
        probabilities = self.probabilities(image.permute(0, 3, 1, 2).float())
        return probabilities, label_mask(probabilities, self.metadata.labels, THRESHOLD)

    def probabilities(self, pixels: Tensor) -> Tensor:
        """float32 (B, channels, H, W) of 0 to 255 -> float32 (B, classes, H, W)."""
        scaled = pixels if self.prepared is None else _scaled(pixels, self.prepared)
        inputs = self._normalised(self._resized(scaled, (self.metadata.size, self.metadata.size)))
        return self._resized(self.network(inputs), (pixels.shape[2], pixels.shape[3])).sigmoid()

    def _resized(self, maps: Tensor, size: tuple[int, int]) -> Tensor:
        return F.interpolate(maps, size, mode="bilinear")

    def _normalised(self, pixels: Tensor) -> Tensor:
        if self.metadata.normalise != ZSCORE:
            return pixels / 255
        centred = pixels - pixels.mean(dim=(2, 3), keepdim=True)
        deviation = centred.square().mean(dim=(2, 3), keepdim=True).sqrt()
        return centred / torch.where(deviation > NO_CONTRAST, deviation, torch.ones_like(deviation))

    def verify(self, exported: Callable[[np.ndarray], tuple[np.ndarray, ...]], file: Path) -> None:
        """Raises FedDPError if `exported` differs from this graph on noise of two sizes and batches; names `file`.

        `exported` takes what `forward` takes and returns what it returns, or the probabilities alone. They may differ by
        TOLERANCE, and the masks where rounding decides.
        """
        rng, size = np.random.default_rng(0), self.metadata.size
        for batch, height, width in ((1, size, size), (3, size + 9, size - 7)):
            images = rng.integers(0, 256, (batch, height, width, self.metadata.channels), np.uint8)
            theirs, *masks = exported(images)
            with torch.no_grad():
                ours, labels = (tensor.numpy() for tensor in self(torch.from_numpy(images)))
            clear = (np.abs(ours - THRESHOLD) > TOLERANCE).all(axis=1)
            if self.metadata.labels == "exclusive":
                clear &= (np.diff(np.sort(ours, axis=1)[:, -2:], axis=1) > 2 * TOLERANCE).all(axis=1)  # the two most probable
            apart, wrong = np.abs(theirs - ours).max(), sum((mask != labels)[clear].sum() for mask in masks)
            if not apart <= TOLERANCE or wrong:
                raise FedDPError(f"{file} and the network differ by {apart:g} ({wrong} pixels): a bug; report it")


def _scaled(pixels: Tensor, size: int) -> Tensor:
    """Does what `feddp.data.pixels.scaled` does, without rounding to whole values: (B, C, H, W) -> (B, C, size, size)."""
    down, across = (_weights(line, size) for line in (pixels[0, 0, :, 0], pixels[0, 0, 0]))
    return down @ pixels @ across.T


def _weights(line: Tensor, size: int) -> Tensor:
    """Returns the weights (size, N) with which N pixels in a line become `size`: a triangle around each new pixel's centre,
    as wide as two new pixels, or as two old ones if those are wider.

    N is computed from the line's content, so that a trace does not take it for a constant.
    """
    at = torch.ones_like(line).cumsum(0) - 0.5
    step = (at[-1] + 0.5) / size
    centres = (torch.arange(size, device=line.device) + 0.5) * step
    weights = (1 - (at - centres[:, None]).abs() / step.clamp(min=1)).clamp(min=0)
    return weights / weights.sum(dim=1, keepdim=True)


@contextmanager
def tracing() -> Iterator[None]:
    """For a block that traces: no gradients, and none of PyTorch's warnings.

    They say that it will drop torch.jit, and name each number that the trace takes for a constant. Those are constants: the
    network's input has one size, and the tensors that steer FedLC's layers are the file's.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
