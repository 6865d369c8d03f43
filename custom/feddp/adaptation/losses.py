"""Losses of test-time routing (Jiang et al., TMI 2023, section III-C); none uses labels. Maps are (B, C, H, W).

    L_t = L_cons + β L_shape
    L_cons = mean (ŷ(x) − ŷ(x + ε))², ε ~ N(0, 0.5²)
    L_shape = mean entropy of ŷ + mean over pixels of (max ŷ − min ŷ) within (2k+1)² pixels

Deviations: ŷ is one sigmoid per class (the paper: a softmax over classes and background), so the entropy is the entropy of a
Bernoulli variable, in nats. The equation of the distance is illegible in our copy of the paper; max-pool of ŷ plus max-pool
of −ŷ comes from the released code. That code uses other weights (10, 0.1, 1e-6 on a norm) and rotates and flips the noisy
image; here weights and noise follow the text of the paper.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from feddp.training.losses import window_max


def consistency(logits: Tensor, noisy: Tensor) -> Tensor:
    """Returns L_cons of the logits of an image and of the image with noise: a scalar in [0, 1]. Gradients flow to both."""
    return (torch.sigmoid(logits) - torch.sigmoid(noisy)).square().mean()


def entropy(logits: Tensor) -> Tensor:
    """Returns the mean of −ŷ log ŷ − (1−ŷ) log(1−ŷ) over (B, C, H, W), in nats, in [0, log 2]; finite for any finite logits."""
    return F.binary_cross_entropy_with_logits(logits, torch.sigmoid(logits))


def spread(probabilities: Tensor, neighbourhood: int) -> Tensor:
    """Returns the mean, in [0, 1], of max − min within `neighbourhood` pixels on each side of both axes, cut at the border."""
    return (window_max(probabilities, neighbourhood) + window_max(-probabilities, neighbourhood)).mean()


def shape(logits: Tensor, neighbourhood: int) -> Tensor:
    """Returns L_shape, a scalar."""
    return entropy(logits) + spread(torch.sigmoid(logits), neighbourhood)
