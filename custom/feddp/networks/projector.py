"""The projector P of pFLFE (Xie et al., 2024, Fig. 2): from the encoder's deepest features to a vector."""

from torch import Tensor, nn

from feddp.networks.parts import declare, deepest, part, pooled, width_of
from feddp.partition import PROJECTOR

HIDDEN, WIDTH = 256, 128


def with_projector(network: nn.Module, classes: int) -> nn.Module:
    """Adds a `projector` to `network`, in place, and returns the network; its predictions do not change.

    The projector is global average pooling and a two-layer perceptron 256-128; the paper does not state its size. Raises
    InputError if the network has no encoder.
    """
    width = width_of(network, "pFLFE")
    network.projector = pooled(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    declare(network, {PROJECTOR: ("projector",)})
    return network


def project(network: nn.Module, images: Tensor) -> Tensor:
    """Returns P(E(images)): (B, channels, H, W) -> (B, WIDTH)."""
    projected: Tensor = part(network, "projector", "pFLFE")(deepest(network, images, "pFLFE"))
    return projected
