"""Losses, against numbers worked out by hand."""

import math

import pytest
import torch
from torch import tensor

from feddp.errors import FedDPError
from feddp.training.losses import (
    LOSSES,
    auxiliary_loss,
    balanced_cross_entropy,
    inconsistency,
    inconsistency_std,
    model_contrast,
    perturbed,
    segmentation_loss,
)
from feddp.training.settings import LOSS_NAMES

SURE = 30.0  # a logit whose sigmoid is 1 to within 1e-13


def image(*rows):
    """A 2 × 2 map as (B, C, H, W) = (1, 1, 2, 2)."""
    return tensor([[list(rows)]])


OWN = image([0.9, 0.1], [0.5, 0.5])
OTHERS = torch.stack([image([0.9, 0.5], [0.5, 0.1]), image([0.7, 0.3], [0.5, 0.9])])


def test_dice_sums_over_the_batch():
    """Two images of 1 × 2 pixels, all probabilities 1/2, masks [1, 0] and [0, 0].

    Over the batch: intersection 1/2, sum of probabilities 2, of masks 1, so 1 − 2·(1/2)/(2+1) = 2/3.
    A mean over images would give (1 − 1/2 + 1)/2 = 3/4.
    """
    logits, mask = torch.zeros(2, 1, 1, 2), tensor([[[[1.0, 0.0]]], [[[0.0, 0.0]]]])
    assert segmentation_loss("dice")(logits, mask).item() == pytest.approx(2 / 3, abs=1e-5)


def test_dice_ce_treats_nested_channels_each_on_its_own():
    """One image of 1 × 2 pixels, two classes. Class 0: probabilities 1/2, mask [1, 1]. Class 1: sure and right, [1, 0].

    Dice: class 0, 1 − 2·1/(1+2) = 1/3; class 1, 0; mean 1/6. Cross-entropy: ln 2 at the two pixels of class 0, 0 at the
    others, mean (ln 2)/2. Sum 1/6 + (ln 2)/2 = 0.51324. The first pixel is of both classes, which no softmax can say.
    """
    logits = tensor([[[[0.0, 0.0]], [[SURE, -SURE]]]])
    mask = tensor([[[[1.0, 1.0]], [[1.0, 0.0]]]])
    assert segmentation_loss()(logits, mask).item() == pytest.approx(1 / 6 + math.log(2) / 2, abs=1e-5)
    assert segmentation_loss("dice")(logits, mask).item() == pytest.approx(1 / 6, abs=1e-5)


def test_every_loss_that_a_plan_may_name_exists():
    """The names are kept apart, because a job is admitted without torch."""
    assert tuple(LOSSES) == LOSS_NAMES


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_take_integer_masks_and_half_precision(kind):
    """512 × 512 pixels sum to 262,144, beyond float16's 65,504. All are sure and right: the loss is 0."""
    logits, mask = (
        torch.full((1, 1, 512, 512), SURE, dtype=torch.float16),
        torch.ones(1, 1, 512, 512, dtype=torch.uint8),
    )
    assert segmentation_loss(kind)(logits, mask).item() == pytest.approx(0, abs=1e-6)


def test_an_unknown_loss_is_answered_with_the_list():
    with pytest.raises(FedDPError, match="unknown loss 'focal'; the losses are dice_ce, dice"):
        segmentation_loss("focal")


def test_inconsistency_is_eq_7():
    """K = 3. Squared differences from the first other: 0, 0.16, 0, 0.16; from the second: 0.04, 0.04, 0, 0.16.

    Their mean over K−1 = 2: 0.02, 0.10, 0, 0.16.
    """
    torch.testing.assert_close(inconsistency(OWN, OTHERS), image([0.02, 0.10], [0.0, 0.16]))


def test_inconsistency_std_is_the_population_s():
    """The three maps of each pixel and their deviations from the mean:

    (0.9, 0.9, 0.7): mean 5/6, squares 1/225, 1/225, 4/225, mean 2/225, root sqrt(2)/15 = 0.0942809
    (0.1, 0.5, 0.3): squares 0.04, 0.04, 0, mean 0.08/3, root 0.1632993
    (0.5, 0.5, 0.5): 0
    (0.5, 0.1, 0.9): squares 0, 0.16, 0.16, mean 0.32/3, root 0.3265986
    """
    maps = torch.cat([OWN[None], OTHERS])
    expected = image([math.sqrt(2) / 15, 0.1632993], [0.0, 0.3265986])
    torch.testing.assert_close(inconsistency_std(maps), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("others", [OTHERS[:0], OTHERS[0], OTHERS[..., :1]], ids=["none", "no site axis", "narrower"])
def test_inconsistency_needs_others_of_its_own_shape(others):
    with pytest.raises(FedDPError, match="at least one other site's maps"):
        inconsistency(OWN, others)


LOGITS = image([math.log(3), -math.log(3)], [0.0, math.log(3)])  # ŷ = 3/4, 1/4, 1/2, 3/4
MASK = image([1.0, 1.0], [0.0, 0.0])
DELTA = image([0.02, 0.10], [0.0, 0.16])


def test_auxiliary_loss_is_eq_8():
    """−[y log ŷ + (1−y) log(1−ŷ)] is −log(3/4) = 0.2876821, −log(1/4) = 1.3862944, ln 2, −log(1/4).

    Weighted by δ: 0.0057536 + 0.1386294 + 0 + 0.2218071 = 0.3661901; mean over four pixels 0.0915475.
    """
    assert auxiliary_loss(LOGITS, MASK, DELTA).item() == pytest.approx(0.0915475, abs=1e-7)


def test_auxiliary_loss_does_not_train_delta():
    """Its gradient by the logit is δ (ŷ − y)/4: 0.02·(−1/4)/4, 0.10·(−3/4)/4, 0, 0.16·(3/4)/4. By δ there is none."""
    logits, delta = LOGITS.clone().requires_grad_(), DELTA.clone().requires_grad_()
    auxiliary_loss(logits, MASK, delta).backward()
    torch.testing.assert_close(logits.grad, image([-0.00125, -0.01875], [0.0, 0.03]))
    assert delta.grad is None


def test_auxiliary_loss_is_finite_where_the_network_is_sure_and_wrong():
    """A logit of −1000 where y = 1: sigmoid is exactly 0 in float32, yet −log ŷ = 1000. δ = 1 at one of four: 250."""
    logits, delta = image([-1000.0, 0.0], [0.0, 0.0]), image([1.0, 0.0], [0.0, 0.0])
    assert auxiliary_loss(logits, MASK, delta).item() == pytest.approx(250)


def test_auxiliary_loss_refuses_maps_of_another_shape():
    with pytest.raises(FedDPError, match=r"δ is \(1, 2, 2\), the logits are \(1, 1, 2, 2\)"):
        auxiliary_loss(LOGITS, MASK, DELTA[0])


# --- the terms of FedOAP, FedRoD and MOON -----------------------------------------------------------------------------------

LN3 = math.log(3)  # the logit of 3/4


@pytest.mark.parametrize(
    ("above", "wanted"), [(0.8, [LN3, LN3, 3, -2.5]), (0.7, [LN3, LN3 + 0.5, 3, -2.5]), (1, [LN3, LN3, 3, -3])]
)
def test_logits_far_from_the_mask_are_perturbed(above, wanted):
    """Probabilities 3/4, 3/4, 0.953 and 0.047 with mask 1, 0, 1 and 1: errors 1/4, 3/4, 0.047 and 0.953; the noise is 1/2.

    Above 0.8 is the last alone, above 0.7 the second too, above 1 none. The gradient is 1 everywhere.
    """
    logits = tensor([[[[LN3, LN3, 3.0, -3.0]]]], requires_grad=True)
    found = perturbed(logits, tensor([[[[1, 0, 1, 1]]]], dtype=torch.uint8), torch.full((1, 1, 1, 4), 0.5), above)
    assert found.flatten().tolist() == pytest.approx(wanted, abs=1e-6)
    found.sum().backward()
    assert logits.grad.eq(1).all()


def test_balanced_cross_entropy_weighs_both_values_alike():
    """Mask [1, 0, 0, 0] of a class with f = 1/4, every probability 3/4. Weights 1/(2f) = 2 and 1/(2(1−f)) = 2/3:

    (2 ln 4/3 + 3 · (2/3) ln 4)/4 = ln(16/3)/2. The gradients are 2 (3/4 − 1)/4 = −1/8 and (2/3)(3/4)/4 = 1/8.
    """
    logits = torch.full((1, 1, 1, 4), LN3, requires_grad=True)
    found = balanced_cross_entropy(logits, tensor([[[[1, 0, 0, 0]]]], dtype=torch.uint8), tensor([0.25]))
    assert found.item() == pytest.approx(math.log(16 / 3) / 2, abs=1e-6)
    found.backward()
    assert logits.grad.flatten().tolist() == pytest.approx([-1 / 8, 1 / 8, 1 / 8, 1 / 8], abs=1e-6)


def test_balanced_cross_entropy_has_weights_of_each_class():
    """Two classes of one pixel, logits 0: f = 0 and no foreground, weight 1/2; f = 1/8 and foreground, 4.

    (1/2 + 4)/2 · ln 2.
    """
    found = balanced_cross_entropy(torch.zeros(1, 2, 1, 1), tensor([[[[0.0]], [[1.0]]]]), tensor([0.0, 1 / 8]))
    assert found.item() == pytest.approx(2.25 * math.log(2), abs=1e-5)


def test_the_contrast_is_a_softmax_over_two_cosines():
    """τ = 1/2. First row: cosines 1 and 0, −ln(e²/(e² + 1)) = ln(1 + e^−2) = 0.126928. Second: 1/√2 twice, ln 2. Their mean."""
    own, positive = tensor([[2.0, 0.0], [1.0, 1.0]]), tensor([[3.0, 0.0], [1.0, 0.0]])
    found = model_contrast(own, positive, tensor([[0.0, 1.0], [0.0, 5.0]]), 0.5)
    assert found.item() == pytest.approx((0.126928 + math.log(2)) / 2, abs=1e-6)
