"""The second head of TTT: predicts from the encoder's deepest features by which of four quarter turns an image was rotated."""

from torch import Tensor, nn

from feddp.networks.parts import deepest, part, pooled, width_of

TURNS = 4


def with_rotation_head(network: nn.Module, classes: int) -> nn.Module:
    """Adds a `rotation_head` to `network`, in place, and returns the network; its predictions do not change.

    The head is global average pooling and one linear layer. Raises InputError if the network has no encoder.
    """
    network.rotation_head = pooled(nn.Linear(width_of(network, "TTT"), TURNS))
    return network


def rotation_logits(network: nn.Module, images: Tensor) -> Tensor:
    """Returns the rotation head's logits: (B, channels, H, W) -> (B, TURNS)."""
    logits: Tensor = part(network, "rotation_head", "TTT")(deepest(network, images, "TTT"))
    return logits
