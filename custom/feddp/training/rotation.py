"""Rotation prediction (Sun et al., ICML 2020): a task that an image itself has the answer to."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddp.networks.rotation import TURNS, rotation_logits


def turned(images: Tensor, turns: Tensor) -> Tensor:
    """Each square image (B, C, S, S) by its number of quarter turns, int64 (B,), anticlockwise."""
    return torch.stack([image.rot90(int(k), dims=(-2, -1)) for image, k in zip(images, turns, strict=True)])


def rotation_loss(network: nn.Module, upright: Tensor, turns: Tensor) -> Tensor:
    """The cross-entropy, in nats, of the turns that the network's rotation head sees in images turned so; a scalar.

    upright (B, C, S, S), as they are in the data; turns int64 (B,), 0 to 3.
    """
    return F.cross_entropy(rotation_logits(network, turned(upright, turns)).float(), turns.to(upright.device))


def every_turn(network: nn.Module, images: Tensor) -> Tensor:
    """The same over all four turns of every image: nothing in it is drawn."""
    return rotation_loss(network, images.repeat_interleave(TURNS, dim=0), torch.arange(TURNS).repeat(len(images)))
