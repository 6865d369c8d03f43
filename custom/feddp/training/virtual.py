"""The losses of virtual classes (Liu et al., 2024, Eq. 4 to 8), over maps of similarities.

Maps are (B, classes, H, W), similarities divided by a temperature; an index is int64 (B, H, W), 0 is the background.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

EXCLUDED, LITERAL = "excluded", "literal"


def dice(real: Tensor, index: Tensor) -> Tensor:
    """Returns L_dice, the soft Dice of the softmax over the C real maps: a mean over all C, background included, in [0, 1].

    Sums over the whole batch and image, smooth 1e-5, as feddp.training.losses.dice.
    """
    from monai.losses import DiceLoss

    loss: Tensor = DiceLoss(softmax=True, to_onehot_y=True, batch=True, smooth_nr=1e-5, smooth_dr=1e-5)(real, index[:, None])
    return loss


def real_loss(real: Tensor, index: Tensor) -> Tensor:
    """Returns L_r, the cross-entropy over the C real maps: mean over pixels, in nats (Eq. 4)."""
    import torch.nn.functional as F

    return F.cross_entropy(real, index)


def virtual_loss(virtual: Tensor, classes: int, mask: str = EXCLUDED) -> Tensor:
    """Returns L_v, the cross-entropy over the V virtual maps against the largest of them: mean over pixels, in nats (Eq. 5).

    mask: EXCLUDED leaves the `classes` real maps out of the softmax; LITERAL keeps a 0 for each of them, as Eq. 7 is written.
    With both, the real kernels get no gradient.
    """
    import torch
    import torch.nn.functional as F

    assigned = virtual.argmax(dim=1)
    if mask == LITERAL:
        zeros = torch.zeros_like(virtual[:, :1]).expand(-1, classes, -1, -1)
        return F.cross_entropy(torch.cat((zeros, virtual), dim=1), classes + assigned)
    return F.cross_entropy(virtual, assigned)
