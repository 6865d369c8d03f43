"""Local feature enhancement of pFLFE (Xie et al., 2024, Sec. 2.2): two views per image, an online and a target network.

L = ‖o(v) − t(v')‖² + ‖o(v') − t(v)‖² over l2-normalised outputs, each term 2 − 2 cos (Eq. 2, 3). Gradients flow through the
online branch only; the target is the exponential moving average of the online network's parameters.
"""

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddp.data.loading import Batch, moved
from feddp.networks.rotation import TURNS
from feddp.training.rotation import turned

Project = Callable[[nn.Module, Tensor], Tensor]  # (network, images (B, channels, H, W)) -> (B, D)


class Enhancement:
    """One phase of enhancement: a site's `fit` takes `forward`, `loss` and `after`; the target is discarded with the object.

    Args:
        network: the online network; the target starts as its copy.
        project: maps images to vectors through a network.
        momentum: momentum of the target's moving average.
    """

    def __init__(self, network: nn.Module, project: Project, momentum: float):
        self.network, self.project, self.momentum = network, project, momentum
        self.target = copy.deepcopy(network).requires_grad_(False).train()
        self._spreads: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) -> o(v), o(v'), t(v), t(v'), stacked: (4, B, D)."""
        one, two = views(images), views(images)
        online = [self.project(self.network, view) for view in (one, two)]
        with torch.no_grad():
            target = [self.project(self.target, view) for view in (one, two)]
        return torch.stack([*online, *target])

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns Eq. 3 of `forward`'s outputs, a scalar in [0, 8]. It uses no labels."""
        unit = F.normalize(outputs[0].detach(), dim=1)
        if len(unit) > 1:
            self._spreads.append(unit.std(dim=0, unbiased=False).mean() * math.sqrt(unit.shape[1]))
        one, two, target_one, target_two = outputs
        return (distance(one, target_two) + distance(two, target_one)).mean()

    @torch.no_grad()
    def after(self) -> None:
        """Sets θ_target ← m θ_target + (1−m) θ_online after every step; the target's own passes update its buffers."""
        for target, online in zip(self.target.parameters(), self.network.parameters(), strict=True):
            target.lerp_(online, 1 - self.momentum)

    @property
    def spread(self) -> float | None:
        """Distance of the normalised outputs from collapse: their standard deviation over a batch, averaged over dimensions
        and batches, times √D. 1: they fill the sphere evenly; 0: all images have the same output. None: there was no batch of
        several images, and a single output has no deviation."""
        return float(torch.stack(self._spreads).mean()) if self._spreads else None


def distance(online: Tensor, target: Tensor) -> Tensor:
    """Returns ‖õ − t̃‖² = 2 − 2 cos(o, t) per pair of rows: (B, D) -> (B,). No gradient flows to the target."""
    return 2 - 2 * F.cosine_similarity(online, target.detach(), dim=1)


def views(images: Tensor) -> Tensor:
    """Returns a random view of each square image (B, channels, S, S). The transforms are ours; the paper does not state them.

    Randomness comes from torch's CPU generator, so it is equal on every device.
    """
    drawn = draw(len(images), images.shape[1])
    return seen(images, Draws(*(moved(values, images.device) for values in drawn)))


class Draws(NamedTuple):
    """What makes the views of B images. A value of 0, or a factor of 1, changes nothing."""

    down: Tensor  # bool (B,): rows are flipped
    across: Tensor  # bool (B,): columns are flipped
    turns: Tensor  # (B,): quarter turns, 0 to 3
    zoom: Tensor  # (B,): factor of a zoom into the centre
    blur: Tensor  # (B, 2): standard deviations in pixels, of rows and of columns
    contrast: Tensor  # (B, channels): a factor
    brightness: Tensor  # (B, channels): added


def draw(count: int, channels: int) -> Draws:
    """Draws the views of `count` images, on the CPU.

    With probability 1/2 each: a flip of rows, one of columns, one to three quarter turns, a blur of 0.25 to 1 pixels; with 0.8
    each: a zoom of 1 to 1.5, a contrast of 0.6 to 1.4 and a brightness of −0.4 to 0.4 per channel.
    """

    def coin(probability: float) -> Tensor:
        return torch.rand(count) < probability

    def some(probability: float, low: float, high: float, neutral: float, *each: int) -> Tensor:
        applied = coin(probability).view(count, *(1 for _ in each))
        return torch.where(applied, low + (high - low) * torch.rand(count, *each), torch.tensor(neutral))

    return Draws(
        down=coin(0.5),
        across=coin(0.5),
        turns=torch.where(coin(0.5), torch.randint(1, TURNS, (count,)), torch.tensor(0)),
        zoom=some(0.8, 1.0, 1.5, 1.0),
        blur=some(0.5, 0.25, 1.0, 0.0, 2),
        contrast=some(0.8, 0.6, 1.4, 1.0, channels),
        brightness=some(0.8, -0.4, 0.4, 0.0, channels),
    )


def seen(images: Tensor, drawn: Draws) -> Tensor:
    """Returns the views `drawn` of square images (B, channels, S, S): flips, turn, zoom, blur, contrast, brightness.

    Zoom and blur are linear and separate into rows and columns: a matrix (S, S) for each, of each image.
    """
    flipped = torch.where(drawn.down[:, None, None, None], images.flip(-2), images)
    flipped = torch.where(drawn.across[:, None, None, None], flipped.flip(-1), flipped)
    zoom = zooming(images.shape[-1], drawn.zoom)
    with torch.autocast(images.device.type, enabled=False):  # bfloat16 would round the images
        rows, columns = ((blurring(images.shape[-1], sigma) @ zoom)[:, None] for sigma in drawn.blur.unbind(dim=1))
        warped = rows @ turned(flipped, drawn.turns) @ columns.mT
    return warped * drawn.contrast[:, :, None, None] + drawn.brightness[:, :, None, None]


def zooming(side: int, factors: Tensor) -> Tensor:
    """Returns matrices (B, side, side) that enlarge a line of pixels by its factor, from 1 on, and cut its centre out.

    Pixel i of n = ⌊side · factor⌋ is the mean of the pixels ⌊i · side/n⌋ to ⌈(i+1) · side/n⌉ − 1, as torch's "area" has it.
    """
    size = (side * factors).long()[:, None, None]
    pixels = torch.arange(side, device=factors.device)
    at = pixels[:, None] + size // 2 - side // 2
    inside = (pixels >= at * side // size) & (pixels < -(-(at + 1) * side // size))
    return inside / inside.sum(dim=2, keepdim=True)


def blurring(side: int, sigmas: Tensor) -> Tensor:
    """Returns matrices (B, side, side) that blur a line of pixels by a Gaussian of σ pixels; σ = 0 changes nothing.

    A weight is the Gaussian's integral over a pixel. It ends at 4σ, and beyond the border is 0.
    """
    pixels, sigma = torch.arange(side, device=sigmas.device), sigmas[:, None, None]
    apart = (pixels[:, None] - pixels).abs()
    weights = (torch.special.ndtr((apart + 0.5) / sigma) - torch.special.ndtr((apart - 0.5) / sigma)).clamp_min(0)
    return torch.where(apart <= (4 * sigma + 0.5).floor(), weights, 0)
