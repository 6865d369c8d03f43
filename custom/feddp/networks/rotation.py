"""TTT's second head: which of four quarter turns an image was given, from the encoder's deepest features."""

from torch import Tensor, nn

from feddp.errors import InputError

TURNS = 4


def with_rotation_head(network: nn.Module, classes: int) -> nn.Module:
    """`network`, in place, with a `rotation_head` beside its decoder; what it predicts is as it was.

    Global average pooling, then one linear layer. InputError where the network has no encoder.
    """
    if not isinstance(getattr(network, "encoder", None), nn.Module):
        raise InputError(f"{type(network).__name__} has no encoder; TTT needs one")
    linear = nn.Linear(network.encoder.out_channels[-1], TURNS)
    network.rotation_head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)
    return network


def rotation_logits(network: nn.Module, images: Tensor) -> Tensor:
    """images (B, channels, H, W) -> (B, TURNS)."""
    return network.rotation_head(network.encoder(images)[-1])
