"""pFLFE's projector P: from the encoder's deepest features to a vector, for the enhancement of features (002, Fig. 2)."""

from torch import Tensor, nn

from feddp.errors import InputError
from feddp.partition import PROJECTOR

HIDDEN, WIDTH = 256, 128


def with_projector(network: nn.Module, classes: int) -> nn.Module:
    """`network`, in place, with a `projector` beside its encoder; what it predicts is as it was.

    The size is ours (the paper does not state it): global average pooling, then a two-layer perceptron 256-128.
    InputError where the network has no encoder.
    """
    if not isinstance(getattr(network, "encoder", None), nn.Module):
        raise InputError(f"{type(network).__name__} has no encoder; pFLFE needs one")
    width = network.encoder.out_channels[-1]
    layers = nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)
    network.projector = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *layers)
    network.roles = {**network.roles, PROJECTOR: ("projector",)}
    return network


def project(network: nn.Module, images: Tensor) -> Tensor:
    """images (B, channels, H, W) -> P(E(images)), (B, WIDTH)."""
    return network.projector(network.encoder(images)[-1])
