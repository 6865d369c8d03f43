"""Losses over logits: what the segmentation is trained on, and FedDP's inconsistency-guided term.

Everywhere, logits, probabilities and masks are (B, C, H, W), one channel a foreground class; masks are 0 or 1. Classes
nest (the optic disc contains the cup), so each channel is a binary problem of its own: sigmoid, never softmax.
Source of equations: FedDP (Wang et al.), Eq. 7 and 8; methods.md has the readings of what it leaves open.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddp.errors import InputError

Loss = Callable[[Tensor, Tensor], Tensor]


def dice(logits: Tensor, mask: Tensor) -> Tensor:
    """Soft Dice loss, scalar in [0, 1]: sums over the whole batch and image, a mean over classes, smooth 1e-5.

    FedDP's released choice. From random weights it can collapse to empty predictions on small sites.
    """
    from monai.losses import DiceLoss  # where it is needed: a plan is read, and a job admitted, without MONAI

    # float32: under mixed precision a sum over 384 x 384 pixels overflows float16
    loss: Tensor = DiceLoss(sigmoid=True, batch=True, smooth_nr=1e-5, smooth_dr=1e-5)(logits.float(), mask.float())
    return loss


def dice_ce(logits: Tensor, mask: Tensor) -> Tensor:
    """Soft Dice plus mean binary cross-entropy in nats, scalar.

    Not MONAI's DiceCELoss, whose cross-entropy is a softmax as soon as there are two channels.
    """
    return dice(logits, mask) + F.binary_cross_entropy_with_logits(logits.float(), mask.float())


DEFAULT = "dice_ce"
LOSSES: dict[str, Loss] = {DEFAULT: dice_ce, "dice": dice}


def segmentation_loss(kind: str = DEFAULT) -> Loss:
    """The loss `kind`, a function (logits, mask) -> scalar. InputError for an unknown kind."""
    if kind not in LOSSES:
        raise InputError(f"unknown loss '{kind}'; the losses are {', '.join(LOSSES)}")
    return LOSSES[kind]


def inconsistency(own: Tensor, others: Tensor) -> Tensor:
    """Eq. 7: δ = 1/(K−1) Σ_{j≠k} (ŷ^k − ŷ^j)², per pixel and class.

    own (B, C, H, W) and others (K−1, B, C, H, W), probabilities -> (B, C, H, W), in [0, 1]. InputError where there is
    no other site, or the shapes differ (which would broadcast unnoticed).
    """
    if others.shape[1:] != own.shape or len(others) == 0:
        raise InputError(
            f"inconsistency needs at least one other site's maps, each shaped {tuple(own.shape)}, "
            f"not {tuple(others.shape)}; a site without peers is calibrated with weight 0"
        )
    return (own - others).square().mean(dim=0)


def inconsistency_std(maps: Tensor) -> Tensor:
    """The released code's δ: standard deviation over all K maps, own included; (K, B, C, H, W) -> (B, C, H, W).

    Population (ddof 0). It is not normalised here: the loss divides it by its maximum in the batch, where a factor such
    as sqrt(K/(K−1)) cancels, so ddof 0 or 1 makes no difference. One map alone gives zeros.
    """
    return maps.std(dim=0, unbiased=False)


def auxiliary_loss(logits: Tensor, mask: Tensor, delta: Tensor) -> Tensor:
    """Eq. 8: L_aux = −mean(stopgrad(δ) · [y log ŷ + (1−y) log(1−ŷ)]), ŷ = sigmoid(logits), scalar, in nats.

    The paper prints y and ŷ exchanged inside the logarithms, which is infinite for y in {0, 1}; this is what the
    released code computes. Taken from logits, it is finite however sure the network is. The mean is over (B, C, H, W).
    """
    if delta.shape != logits.shape:
        raise InputError(f"δ is {tuple(delta.shape)}, the logits are {tuple(logits.shape)}; both must be (B, C, H, W)")
    entropy = F.binary_cross_entropy_with_logits(logits.float(), mask.float(), reduction="none")
    return (delta.detach() * entropy).mean()


def bernoulli_kl(teacher: Tensor, logits: Tensor) -> Tensor:
    """KL(p ‖ q) = p log(p/q) + (1−p) log((1−p)/(1−q)), mean over (B, C, H, W), in nats; zero where the two agree.

    teacher: probabilities p, without gradients. logits: q = sigmoid(logits). A sigmoid map is a Bernoulli variable a pixel
    and class; torch's kl_div wants log-probabilities that sum to one, which these do not.
    """
    p = teacher.detach()
    cross = F.binary_cross_entropy_with_logits(logits, p, reduction="none")
    entropy = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))
    return (cross - entropy).mean()


def squared_distance(network: nn.Module, anchor: Mapping[str, Tensor]) -> Tensor:
    """‖v − w‖² over all parameters of `network`, w by name in `anchor`; a scalar."""
    return torch.stack([(value - anchor[name]).square().sum() for name, value in network.named_parameters()]).sum()
