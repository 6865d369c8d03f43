"""Local feature enhancement of pFLFE (Xie et al., 2024, Sec. 2.2): two views per image, an online and a target network.

L = ‖o(v) − t(v')‖² + ‖o(v') − t(v)‖² over l2-normalised outputs, each term 2 − 2 cos (Eq. 2, 3). Gradients flow through the
online branch only; the target is the exponential moving average of the online network's parameters.
"""

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddp.data.loading import Batch

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
        self._spreads.append(unit.std(dim=0, unbiased=False).mean() * math.sqrt(unit.shape[1]))
        one, two, target_one, target_two = outputs
        return (distance(one, target_two) + distance(two, target_one)).mean()

    @torch.no_grad()
    def after(self) -> None:
        """Sets θ_target ← m θ_target + (1−m) θ_online after every step; the target's own passes update its buffers."""
        for target, online in zip(self.target.parameters(), self.network.parameters(), strict=True):
            target.lerp_(online, 1 - self.momentum)

    @property
    def spread(self) -> float:
        """Distance of the normalised outputs from collapse: their standard deviation over a batch, averaged over dimensions
        and batches, times √D. 1: they fill the sphere evenly; 0: all images have the same output."""
        return float(torch.stack(self._spreads).mean())


def distance(online: Tensor, target: Tensor) -> Tensor:
    """Returns ‖õ − t̃‖² = 2 − 2 cos(o, t) per pair of rows: (B, D) -> (B,). No gradient flows to the target."""
    return 2 - 2 * F.cosine_similarity(online, target.detach(), dim=1)


def views(images: Tensor) -> Tensor:
    """Returns a random view of each image (B, channels, H, W).

    Flips, quarter turns, zooms into the centre, blur, brightness and contrast. The transforms are ours; the paper does not
    state them. Randomness comes from torch's CPU generator.
    """
    from monai import transforms

    seed = int(torch.randint(2**31, ()).item())
    warp = transforms.Compose(
        [
            *(transforms.RandFlip(prob=0.5, spatial_axis=axis) for axis in (0, 1)),
            transforms.RandRotate90(prob=0.5),
            transforms.RandZoom(prob=0.8, min_zoom=1.0, max_zoom=1.5),
            transforms.RandGaussianSmooth(prob=0.5, sigma_x=(0.25, 1.0), sigma_y=(0.25, 1.0)),
            transforms.RandScaleIntensity(prob=0.8, factors=0.4, channel_wise=True),
            transforms.RandShiftIntensity(prob=0.8, offsets=0.4, channel_wise=True),
        ]
    ).set_random_state(seed=seed)
    return torch.stack([torch.as_tensor(warp(image)) for image in images.cpu()]).to(images.device)
