"""A network with everything around it that `feddp predict` does, as one module that can be traced."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddp.adaptation.models import described
from feddp.networks.metadata import ZSCORE, Metadata
from feddp.networks.weights import load_personal
from feddp.training.metrics import THRESHOLD

# resizing leaves about 1e-5 in a channel of one value; one differing pixel of 1024 x 1024 has a deviation of 1e-3
NO_CONTRAST = 1e-4


class Graph(nn.Module):
    """Images as PNGs hold them -> probabilities and masks, both in the size of the images.

    Resizes to the network's size, normalises (`feddp.data.loading.network_input`), applies the network, resizes its logits
    back, and decodes them to values 0 to C (`feddp.data.images.label_mask`).
    """

    def __init__(self, network: nn.Module, metadata: Metadata):
        super().__init__()
        self.network, self.metadata = network, metadata

    @classmethod
    def of(cls, file: Path) -> "tuple[Graph, Metadata]":
        """Returns the graph of a network's file, in eval mode on the CPU, and its metadata; InputError as `load_personal`."""
        metadata = described(file)
        return cls(load_personal(file), metadata).eval(), metadata

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (B, H, W, channels) -> float32 (B, classes, H, W), uint8 (B, H, W)."""
        pixels = self._normalised(self._resized(image.permute(0, 3, 1, 2).float(), (self.metadata.size, self.metadata.size)))
        logits = self._resized(self.network(pixels), (image.shape[1], image.shape[2]))
        probabilities = logits.sigmoid()
        return probabilities, self._labels(probabilities > THRESHOLD)

    def _resized(self, maps: Tensor, size: tuple[int, int]) -> Tensor:
        return F.interpolate(maps, size, mode="bilinear")

    def _normalised(self, pixels: Tensor) -> Tensor:
        if self.metadata.normalise != ZSCORE:
            return pixels / 255
        centred = pixels - pixels.mean(dim=(2, 3), keepdim=True)
        deviation = centred.square().mean(dim=(2, 3), keepdim=True).sqrt()
        return centred / torch.where(deviation > NO_CONTRAST, deviation, torch.ones_like(deviation))

    def _labels(self, maps: Tensor) -> Tensor:
        """bool (B, C, H, W) -> uint8 (B, H, W), as `label_mask`; without cumulative minima, which ONNX does not have."""
        if self.metadata.labels == "nested":
            inside = maps[:, 0]
            labels = inside.int()
            for c in range(1, len(self.metadata.classes)):
                inside = inside & maps[:, c]
                labels = labels + inside.int()
            return labels.to(torch.uint8)
        values = torch.arange(1, len(self.metadata.classes) + 1, dtype=torch.int32).view(-1, 1, 1)
        return (maps.int() * values).amax(dim=1).to(torch.uint8)
