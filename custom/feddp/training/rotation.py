"""Rotation prediction (Sun et al., ICML 2020), a task whose labels come from the image itself."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddp.data.loading import moved
from feddp.networks.rotation import TURNS, rotation_logits


def turned(images: Tensor, turns: Tensor) -> Tensor:
    """Rotates each square image (B, C, S, S) anticlockwise by its number of quarter turns, (B,) of 0 to 3."""
    found, each = images, moved(turns, images.device)[:, None, None, None]
    for k in range(1, TURNS):  # no turn is read here: that would wait for the GPU
        found = torch.where(each == k, images.rot90(k, dims=(-2, -1)), found)
    return found.contiguous()


def rotation_loss(network: nn.Module, upright: Tensor, turns: Tensor) -> Tensor:
    """Rotates the images and returns the cross-entropy of the rotation head's predictions, a scalar in nats.

    upright (B, C, S, S), images as they are in the data; turns int64 (B,), 0 to 3.
    """
    return F.cross_entropy(rotation_logits(network, turned(upright, turns)).float(), moved(turns, upright.device))


def every_turn(network: nn.Module, images: Tensor) -> Tensor:
    """Returns `rotation_loss` over all four turns of every image, without a random draw."""
    return rotation_loss(network, images.repeat_interleave(TURNS, dim=0), torch.arange(TURNS).repeat(len(images)))
