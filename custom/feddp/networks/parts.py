"""Common parts of the networks and of the layers that methods add to them."""

from collections.abc import Mapping

from torch import Tensor, nn

from feddp.errors import InputError
from feddp.partition import DECODER, ENCODER, HEAD

# the roles of every network's three parts: {role: names of children}
PART_ROLES: dict[str, tuple[str, ...]] = {HEAD: ("segmentation_head",), ENCODER: ("encoder",), DECODER: ("decoder",)}


def declare(module: nn.Module, roles: Mapping[str, tuple[str, ...]]) -> None:
    """Adds roles of `module`'s children (`feddp.partition`) to those declared before."""
    # not by torch's setattr, which is typed for tensors and modules only
    vars(module)["roles"] = {**getattr(module, "roles", {}), **roles}


def part(network: nn.Module, name: str, user: str) -> nn.Module:
    """Returns the child `name` of `network`; `user` is named in the error.

    Raises:
        InputError: the network has no such child.
    """
    found = getattr(network, name, None)
    if not isinstance(found, nn.Module):
        raise InputError(f"{type(network).__name__} has no {name.replace('_', ' ')}; {user} needs one")
    return found


def head_of(network: nn.Module, user: str) -> tuple[nn.Sequential, nn.Conv2d]:
    """Returns the segmentation head and its first layer, the convolution to the classes.

    Raises:
        InputError: the network has no such head.
    """
    head = part(network, "segmentation_head", user)
    if not isinstance(head, nn.Sequential) or not isinstance(head[0], nn.Conv2d):
        raise InputError(
            f"the segmentation head of {type(network).__name__} does not start with a convolution; {user} needs one"
        )
    return head, head[0]


def parts_of(network: nn.Module, user: str) -> tuple[nn.Module, nn.Module, nn.Sequential, nn.Conv2d]:
    """Returns encoder, decoder, segmentation head and the head's first layer, for a module that takes them over.

    Raises:
        InputError: the network lacks one of them.
    """
    return part(network, "encoder", user), part(network, "decoder", user), *head_of(network, user)


def deepest(network: nn.Module, images: Tensor, user: str) -> Tensor:
    """Returns the encoder's deepest features: (B, channels, H, W) -> (B, `width_of`, h, w)."""
    features: Tensor = part(network, "encoder", user)(images)[-1]
    return features


def width_of(network: nn.Module, user: str) -> int:
    """Returns the number of channels of the encoder's deepest features; raises InputError if there is no encoder."""
    widths = part(network, "encoder", user).out_channels
    if not isinstance(widths, list | tuple):
        raise InputError(f"the encoder of {type(network).__name__} has no out_channels; {user} needs them")
    return int(widths[-1])


def pooled(*layers: nn.Module) -> nn.Sequential:
    """Returns global average pooling followed by `layers`: feature maps (B, C, h, w) -> layers((B, C))."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *layers)
