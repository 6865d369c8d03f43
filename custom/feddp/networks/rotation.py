"""TTT's second head: it predicts by which of four quarter turns an image was rotated, from the encoder's deepest features."""

from torch import Tensor, nn

from feddp.networks.parts import deepest, part, pooled, width_of

TURNS = 4


def with_rotation_head(network: nn.Module, classes: int) -> nn.Module:
    """`network`, in place, with a `rotation_head` beside its decoder; its predictions do not change.

    Global average pooling, then one linear layer. InputError where the network has no encoder.
    """
    network.rotation_head = pooled(nn.Linear(width_of(network, "TTT"), TURNS))
    return network


def rotation_logits(network: nn.Module, images: Tensor) -> Tensor:
    """images (B, channels, H, W) -> (B, TURNS)."""
    logits: Tensor = part(network, "rotation_head", "TTT")(deepest(network, images, "TTT"))
    return logits
