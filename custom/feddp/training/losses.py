"""Losses over logits: the segmentation losses and FedDP's inconsistency-guided term (Wang et al., TMI 2024, Eq. 7 and 8).

Logits, probabilities and masks are (B, C, H, W), one channel per foreground class; masks are 0 or 1. Classes may be nested
(the optic disc contains the cup), so each channel is a separate binary problem: sigmoid, never softmax.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddp.errors import InputError
from feddp.training.settings import DICE, DICE_CE

Loss = Callable[[Tensor, Tensor], Tensor]


def dice(logits: Tensor, mask: Tensor) -> Tensor:
    """Returns the soft Dice loss, a scalar in [0, 1]: sums over the whole batch and image, mean over classes, smooth 1e-5.

    FedDP's released code uses it. Sites that train alone from random weights may then find nothing for many rounds
    (docs/results/mri-short.md).
    """
    from monai.losses import DiceLoss  # imported here: reading a plan and admitting a job do not need MONAI

    # float32: under mixed precision a sum over 384 x 384 pixels overflows float16
    loss: Tensor = DiceLoss(sigmoid=True, batch=True, smooth_nr=1e-5, smooth_dr=1e-5)(logits.float(), mask.float())
    return loss


def dice_ce(logits: Tensor, mask: Tensor) -> Tensor:
    """Returns soft Dice plus mean binary cross-entropy in nats, a scalar.

    MONAI's DiceCELoss is not used: with two or more channels, its cross-entropy is a softmax.
    """
    return dice(logits, mask) + F.binary_cross_entropy_with_logits(logits.float(), mask.float())


DEFAULT = DICE_CE
LOSSES: dict[str, Loss] = {DICE_CE: dice_ce, DICE: dice}


def segmentation_loss(kind: str = DEFAULT) -> Loss:
    """Returns the loss `kind`, a function (logits, mask) -> scalar; raises InputError for an unknown kind."""
    if kind not in LOSSES:
        raise InputError(f"unknown loss '{kind}'; the losses are {', '.join(LOSSES)}")
    return LOSSES[kind]


def inconsistency(own: Tensor, others: Tensor) -> Tensor:
    """Returns δ = 1/(K−1) Σ_{j≠k} (ŷ^k − ŷ^j)², per pixel and class (Eq. 7).

    own (B, C, H, W) and others (K−1, B, C, H, W) are probabilities -> (B, C, H, W), in [0, 1]. Raises InputError if there is
    no other site, or if the shapes differ (torch would broadcast them without a warning).
    """
    if others.shape[1:] != own.shape or len(others) == 0:
        raise InputError(
            f"inconsistency needs at least one other site's maps, each shaped {tuple(own.shape)}, "
            f"not {tuple(others.shape)}; a site without peers is calibrated with weight 0"
        )
    return (own - others).square().mean(dim=0)


def inconsistency_std(maps: Tensor) -> Tensor:
    """Returns δ of the released code: the standard deviation over all K maps, own included: (K, B, C, H, W) -> (B, C, H, W).

    It is the population's (ddof 0) and not normalised: the loss divides it by its maximum in the batch, so a factor such as
    sqrt(K/(K−1)) cancels, and ddof 0 or 1 makes no difference. A single map gives zeros.
    """
    return maps.std(dim=0, unbiased=False)


def auxiliary_loss(logits: Tensor, mask: Tensor, delta: Tensor) -> Tensor:
    """Returns L_aux = −mean(stopgrad(δ) · [y log ŷ + (1−y) log(1−ŷ)]), ŷ = sigmoid(logits), a scalar in nats (Eq. 8).

    The paper prints y and ŷ exchanged inside the logarithms, which is infinite for y in {0, 1}; this is the loss of the
    released code. Computed from logits, it is finite for any finite logits. The mean is over (B, C, H, W).
    """
    if delta.shape != logits.shape:
        raise InputError(f"δ is {tuple(delta.shape)}, the logits are {tuple(logits.shape)}; both must be (B, C, H, W)")
    entropy = F.binary_cross_entropy_with_logits(logits.float(), mask.float(), reduction="none")
    return (delta.detach() * entropy).mean()


def window_max(maps: Tensor, k: int) -> Tensor:
    """Returns the maximum within (2k+1)² pixels, cut at the border: (B, C, H, W) -> (B, C, H, W).

    In two passes of 2k+1: the same maxima in a tenth of the time at k = 10.
    """
    columns = F.max_pool2d(maps, (2 * k + 1, 1), stride=1, padding=(k, 0))
    return F.max_pool2d(columns, (1, 2 * k + 1), stride=1, padding=(0, k))


def perturbed(logits: Tensor, mask: Tensor, noise: Tensor, above: float) -> Tensor:
    """Returns logits + noise where a probability is further than `above` from the mask, logits elsewhere: (B, C, H, W).

    The choice of the places has no gradient. Source: FedOAP's released code (Tashdeed et al., 2025).
    """
    far = (torch.sigmoid(logits.detach()) - mask.float()).abs() > above
    return logits + noise * far


def balanced_cross_entropy(logits: Tensor, mask: Tensor, foreground: Tensor) -> Tensor:
    """Returns the mean cross-entropy with weight 1/(2f) for foreground and 1/(2(1−f)) for background, a scalar in nats.

    foreground: f, each class's share of the pixels, (C,). Over the masks from which f comes, the two weigh 1/2 each in total.
    Where f is 0 or 1, the weight that would be infinite belongs to no pixel; f is kept away from both.
    """
    target, share = mask.float(), foreground.float().clamp(1e-7, 1 - 1e-7)[:, None, None]
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return (entropy * torch.where(target > 0, 0.5 / share, 0.5 / (1 - share))).mean()


def model_contrast(own: Tensor, positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
    """Returns mean −log [e^{s⁺/τ} / (e^{s⁺/τ} + e^{s⁻/τ})], a scalar in nats (Li et al., CVPR 2021).

    s⁺ and s⁻ are the cosines of `own` with `positive` and `negative`, (B, D) each. log 2 if they are equal.
    """
    near, far = (F.cosine_similarity(own, other, dim=1) for other in (positive, negative))
    return F.softplus((far - near) / temperature).mean()


def bernoulli_kl(teacher: Tensor, logits: Tensor) -> Tensor:
    """Returns KL(p ‖ q) = p log(p/q) + (1−p) log((1−p)/(1−q)), mean over (B, C, H, W), in nats; zero if p = q.

    teacher: probabilities p, without gradients. logits: q = sigmoid(logits). A sigmoid map is one Bernoulli variable per pixel
    and class; torch's kl_div expects log-probabilities that sum to one, and these do not.
    """
    p = teacher.detach()
    cross = F.binary_cross_entropy_with_logits(logits, p, reduction="none")
    entropy = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))
    return (cross - entropy).mean()


def squared_distance(network: nn.Module, anchor: Mapping[str, Tensor]) -> Tensor:
    """Returns ‖v − w‖² over all parameters v of `network`, with w by name in `anchor`: a scalar."""
    return torch.stack([(value - anchor[name]).square().sum() for name, value in network.named_parameters()]).sum()
