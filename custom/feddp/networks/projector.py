"""pFLFE's projector P: from the encoder's deepest features to a vector (pFLFE, Fig. 2)."""

from torch import Tensor, nn

from feddp.networks.parts import declare, deepest, part, pooled, width_of
from feddp.partition import PROJECTOR

HIDDEN, WIDTH = 256, 128


def with_projector(network: nn.Module, classes: int) -> nn.Module:
    """`network`, in place, with a `projector` beside its encoder; its predictions do not change.

    The size is ours (the paper does not state it): global average pooling, then a two-layer perceptron 256-128.
    InputError where the network has no encoder.
    """
    width = width_of(network, "pFLFE")
    network.projector = pooled(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    declare(network, {PROJECTOR: ("projector",)})
    return network


def project(network: nn.Module, images: Tensor) -> Tensor:
    """images (B, channels, H, W) -> P(E(images)), (B, WIDTH)."""
    projected: Tensor = part(network, "projector", "pFLFE")(deepest(network, images, "pFLFE"))
    return projected
