"""What test-time routing is trained on (004, section III-C): no label is in any of it. Maps are (B, C, H, W).

    L_t = L_cons + β L_shape
    L_cons = mean (ŷ(x) − ŷ(x + ε))², ε ~ N(0, 0.5²)
    L_shape = mean entropy of ŷ + mean over pixels of (max ŷ − min ŷ) within (2k+1)² pixels

Deviations: ŷ is a sigmoid a class (the paper: a softmax over classes and background), so the entropy is a Bernoulli's,
in nats. The distance's equation is lost in our copy of the paper; max-pool of ŷ plus max-pool of −ŷ is the released code's,
which weighs its terms otherwise (10, 0.1, 1e-6 on a norm) and turns and flips the noisy image; ours is the paper's text.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def consistency(logits: Tensor, noisy: Tensor) -> Tensor:
    """L_cons of the logits for an image and for the image with noise; a scalar in [0, 1]. Both get gradients."""
    return (torch.sigmoid(logits) - torch.sigmoid(noisy)).square().mean()


def entropy(logits: Tensor) -> Tensor:
    """−ŷ log ŷ − (1−ŷ) log(1−ŷ), mean over (B, C, H, W), in nats, in [0, log 2]; finite however sure the network is."""
    return F.binary_cross_entropy_with_logits(logits, torch.sigmoid(logits))


def spread(probabilities: Tensor, neighbourhood: int) -> Tensor:
    """max − min within `neighbourhood` pixels on either side and both axes, clipped at the border; mean, in [0, 1]."""
    return (_pool(probabilities, neighbourhood) + _pool(-probabilities, neighbourhood)).mean()


def shape(logits: Tensor, neighbourhood: int) -> Tensor:
    """L_shape; a scalar."""
    return entropy(logits) + spread(torch.sigmoid(logits), neighbourhood)


def _pool(maps: Tensor, k: int) -> Tensor:
    """The maximum within (2k+1)², as two passes of 2k+1: the same maxima in a tenth of the time at k = 10."""
    columns = F.max_pool2d(maps, (2 * k + 1, 1), stride=1, padding=(k, 0))
    return F.max_pool2d(columns, (1, 2 * k + 1), stride=1, padding=(0, k))
