"""Test-time routing's losses on maps of a few pixels, by hand."""

import math

import pytest
import torch
from torch import nn, tensor

from feddp.adaptation.choices import Settings
from feddp.adaptation.fitting import entropy_loss, routing_loss
from feddp.adaptation.losses import consistency, entropy, shape, spread

LN2, LN3, LN4 = math.log(2), math.log(3), math.log(4)
H34 = 0.25 * LN4 + 0.75 * math.log(4 / 3)  # the entropy of ¾ and ¼, 0.562335 nats


def test_consistency_by_hand():
    """1 x 2 pixels, logits (0, ln 3) and with noise (ln 3, ln 3): ŷ (½, ¾) and (¾, ¾). Mean of (¼², 0) = 1/32."""
    logits, noisy = tensor([[[[0.0, LN3]]]]), tensor([[[[LN3, LN3]]]])
    assert consistency(logits, noisy).item() == pytest.approx(1 / 32, abs=1e-7)


def test_both_predictions_of_the_consistency_get_gradients():
    """One pixel, z = 0, z' = ln 3: ∂/∂z (ŷ − ŷ')² = 2 (½ − ¾) ¼ = −⅛; ∂/∂z' = −2 (½ − ¾) 3/16 = 3/32."""
    logits, noisy = torch.zeros(1, 1, 1, 1, requires_grad=True), torch.full((1, 1, 1, 1), LN3, requires_grad=True)
    consistency(logits, noisy).backward()
    assert logits.grad.item() == pytest.approx(-1 / 8, abs=1e-6)
    assert noisy.grad.item() == pytest.approx(3 / 32, abs=1e-6)


def test_entropy_by_hand():
    """2 x 2 pixels, logits (0, ln 3; −ln 3, 1000): entropies ln 2, H(¾), H(¼) = H(¾), 0."""
    logits = tensor([[[[0.0, LN3], [-LN3, 1000.0]]]])
    assert entropy(logits).item() == pytest.approx((LN2 + 2 * H34) / 4, abs=1e-6)


def test_the_gradient_of_the_entropy():
    """dH/dz = −z ŷ (1−ŷ): at ln 3, −1.098612 · ¾ · ¼ = −0.205990; at 1000, 0 and no nan."""
    logits = tensor([[[[LN3]], [[1000.0]]]], requires_grad=True)
    (entropy(logits) * 2).backward()
    assert logits.grad.flatten().tolist() == pytest.approx([-LN3 * 3 / 16, 0], abs=1e-6)


def test_spread_in_a_row():
    """(0.1, 0.2, 0.9), k = 1: {0.1, 0.2} 0.1; {0.1, 0.2, 0.9} 0.8; {0.2, 0.9} 0.7. Mean 1.6/3."""
    assert spread(tensor([[[[0.1, 0.2, 0.9]]]]), 1).item() == pytest.approx(1.6 / 3, abs=1e-6)


def test_spread_in_a_square():
    """3 x 3 zeros with a 1 in a corner: with k = 1 the corner is within reach of 2 x 2 pixels, 4/9; of all with k = 10."""
    maps = torch.zeros(1, 1, 3, 3)
    maps[..., 0, 0] = 1
    assert spread(maps, 1).item() == pytest.approx(4 / 9, abs=1e-6)
    assert spread(maps, 10).item() == 1
    assert spread(maps, 0).item() == 0


def test_spread_is_of_each_image_and_class():
    """Two images of two classes, each constant, all different: nothing spreads."""
    assert spread(torch.arange(4.0).view(2, 2, 1, 1).expand(2, 2, 3, 3) / 4, 10).item() == 0


def test_spread_is_the_whole_neighbourhood_s():
    """Against every neighbourhood written out, 7 x 9 pixels, k = 2."""
    maps = torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(0))
    found = []
    for image in maps[:, 0]:
        for i in range(7):
            for j in range(9):
                near = image[max(0, i - 2) : i + 3, max(0, j - 2) : j + 3]
                found.append((near.max() - near.min()).item())
    assert spread(maps, 2).item() == pytest.approx(sum(found) / len(found), abs=1e-6)


def test_shape_by_hand():
    """2 x 2 pixels, logits (0, ln 3; 0, 0), k = 10: entropy (3 ln 2 + H(¾))/4; ŷ from ½ to ¾, spread ¼ everywhere."""
    logits = tensor([[[[0.0, LN3], [0.0, 0.0]]]])
    assert shape(logits, 10).item() == pytest.approx((3 * LN2 + H34) / 4 + 0.25, abs=1e-6)


class Identity(nn.Module):
    """logit = image; counts its passes."""

    passes = 0

    def forward(self, x):
        self.passes += 1
        return x


def test_the_whole_loss():
    """L_t = L_cons + β L_shape. Logits 0, noise ε of deviation 0.5: L_cons = mean (½ − σ(ε))², L_shape = ln 2."""
    images = torch.zeros(1, 1, 2, 2)
    noise = 0.5 * torch.randn(1, 1, 2, 2, generator=torch.Generator().manual_seed(7))
    wanted = (0.5 - torch.sigmoid(noise)).square().mean().item() + 0.01 * LN2
    found = routing_loss(Settings())(Identity(), images, torch.Generator().manual_seed(7))
    assert found.item() == pytest.approx(wanted, abs=1e-7)


def test_each_term_can_be_left_out():
    """Noise 0: β L_shape alone, from one pass. β = 0: L_cons alone. Both: 0."""
    images = torch.full((1, 1, 2, 2), LN3)
    network = Identity()
    only_shape = routing_loss(Settings(noise=0, beta=0.5))(network, images, torch.Generator())
    assert only_shape.item() == pytest.approx(0.5 * H34, abs=1e-6)
    assert network.passes == 1
    noise = 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(7))
    wanted = (torch.sigmoid(images) - torch.sigmoid(images + noise)).square().mean().item()
    found = routing_loss(Settings(beta=0))(network, images, torch.Generator().manual_seed(7))
    assert found.item() == pytest.approx(wanted, abs=1e-7)
    assert routing_loss(Settings(beta=0, noise=0))(network, images, torch.Generator()).item() == 0


@pytest.mark.parametrize(("neighbourhood", "spread"), [(1, 2 / 5 * 0.5), (3, 4 / 5 * 0.5), (10, 0.5)])
def test_the_loss_looks_as_far_as_the_settings_say(neighbourhood, spread):
    """One row of ŷ = (¼, ¼, ¼, ¼, ¾): max − min is ½ for the pixels that see the last one, 2, 4 or all of 5; the entropy is
    H(¾) = H(¼) everywhere. β = ½, without noise."""
    row = tensor([[[[-LN3, -LN3, -LN3, -LN3, LN3]]]])
    found = routing_loss(Settings(neighbourhood=neighbourhood, beta=0.5, noise=0))(Identity(), row, torch.Generator())
    assert found.item() == pytest.approx(0.5 * (H34 + spread), abs=1e-6)


def test_tent_s_loss_is_the_entropy():
    assert entropy_loss(Identity(), torch.full((1, 1, 1, 1), LN3), torch.Generator()).item() == pytest.approx(H34, abs=1e-6)
