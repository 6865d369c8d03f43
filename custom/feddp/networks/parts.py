"""What the networks, and the layers that methods add to them, have in common."""

from collections.abc import Mapping

from torch import Tensor, nn

from feddp.errors import InputError
from feddp.partition import DECODER, ENCODER, HEAD

# the roles of every network's three parts, by the names of its children
PART_ROLES: dict[str, tuple[str, ...]] = {HEAD: ("segmentation_head",), ENCODER: ("encoder",), DECODER: ("decoder",)}


def declare(module: nn.Module, roles: Mapping[str, tuple[str, ...]]) -> None:
    """Says, beside what it says already, which of `module`'s children play which role (`feddp.partition`)."""
    # past torch's own setattr, whose declared types are tensors and modules
    vars(module)["roles"] = {**getattr(module, "roles", {}), **roles}


def part(network: nn.Module, name: str, user: str) -> nn.Module:
    """The child `name` of `network`, which `user` needs.

    Raises:
        InputError: the network has no such child.
    """
    found = getattr(network, name, None)
    if not isinstance(found, nn.Module):
        raise InputError(f"{type(network).__name__} has no {name.replace('_', ' ')}; {user} needs one")
    return found


def head_of(network: nn.Module, user: str) -> tuple[nn.Sequential, nn.Conv2d]:
    """The segmentation head, and its first layer: the convolution that gives the classes.

    Raises:
        InputError: the network has no such head.
    """
    head = part(network, "segmentation_head", user)
    if not isinstance(head, nn.Sequential) or not isinstance(head[0], nn.Conv2d):
        raise InputError(
            f"the segmentation head of {type(network).__name__} does not begin with a convolution; {user} needs one"
        )
    return head, head[0]


def deepest(network: nn.Module, images: Tensor, user: str) -> Tensor:
    """Images (B, channels, H, W) -> the encoder's deepest features (B, `width_of`, h, w)."""
    features: Tensor = part(network, "encoder", user)(images)[-1]
    return features


def width_of(network: nn.Module, user: str) -> int:
    """The number of channels of the encoder's deepest features. InputError where the network has no encoder."""
    widths = part(network, "encoder", user).out_channels
    if not isinstance(widths, list | tuple):
        raise InputError(f"the encoder of {type(network).__name__} does not say its out_channels; {user} needs them")
    return int(widths[-1])


def pooled(*layers: nn.Module) -> nn.Sequential:
    """Global average pooling, then `layers`: feature maps (B, C, h, w) -> what the layers make of (B, C)."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *layers)
