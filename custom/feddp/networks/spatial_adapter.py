"""FedOAP's spatial adapter (Tashdeed et al., 2025; their released code): a residual block before the segmentation head."""

import torch
from torch import Tensor, nn

from feddp.networks.parts import PART_ROLES, parts_of
from feddp.partition import SPATIAL_ADAPTER


class SpatialAdapter(nn.Module):
    """`network` with a residual block between its decoder and its segmentation head; its tensors keep their names.

    Takes over the layers of `network`, which must not be used afterwards. The block keeps the number of channels and the size:
    (B, F, h, w) -> (B, F, h, w), all values at least 0. It starts at random, so the predictions change.

    Raises:
        InputError: the network lacks an encoder, a decoder or a segmentation head.
    """

    roles = {**PART_ROLES, SPATIAL_ADAPTER: ("adapter",)}

    def __init__(self, network: nn.Module, classes: int):
        super().__init__()
        self.encoder, self.decoder, self.segmentation_head, first = parts_of(network, "FedOAP")
        self.adapter = Residual(first.in_channels)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.segmentation_head(self.adapter(self.decoder(list(self.encoder(x)))))
        return logits


class Residual(nn.Module):
    """ReLU(conv 3×3, norm, ReLU, conv 3×3, norm + conv 1×1, norm) over `width` channels; a norm is of one image and channel.

    The 3×3 convolutions have biases, as in the released code, which the norms cancel.
    """

    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(*_normed(width, 3), nn.ReLU(), *_normed(width, 3))
        self.skip = nn.Sequential(*_normed(width, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def _normed(width: int, kernel: int, bias: bool = True) -> tuple[nn.Module, nn.Module]:
    """Returns a convolution that keeps channels and size, and an instance normalisation with trained scale and shift."""
    return nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=bias), nn.InstanceNorm2d(width, affine=True)
