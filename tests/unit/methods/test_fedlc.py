"""FedLC's layers and losses, against numbers worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn, tensor

from feddp.methods.fedlc import FedLC, FedLCSettings
from feddp.networks.local_calibration import HeadCalibration, LocalCalibration

LN3 = math.log(3)


class Encoder(nn.Identity):
    out_channels = [2]

    def forward(self, x):
        return [x]


class Decoder(nn.Module):
    """Hands on the deepest features, through a layer with weights of its own: once the identity."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 1, bias=False)
        self.layer.weight.data = torch.eye(2)[:, :, None, None]

    def forward(self, features):
        return self.layer(features[-1])


def head(weight, bias):
    """A segmentation head of two features."""
    layer = nn.Conv2d(2, 1, 1)
    layer.weight.data, layer.bias.data = tensor(weight).view(1, 2, 1, 1), tensor([bias])
    return layer


def calibrated(sites, own=0) -> LocalCalibration:
    """Two channels a and b, the site `own` of `sites`. The gates are σ(ln 3 · s) and σ(−ln 3 · s) with

    s = relu(mean(a) − k) + relu(max(a) − k), k the site's place. The head's logit is a. The calibrator's own
    head adds a as gated by the deviation, 10 times a as gated by the mean, and 1/2, of the same pixel.
    """
    network = nn.Module()
    network.encoder, network.decoder = Encoder(), Decoder()
    network.segmentation_head = nn.Sequential(head([1.0, 0.0], 0.0), nn.Identity())
    network = LocalCalibration(network, classes=1, sites=sites)
    network.embedding.set(own)
    select = network.selection
    select.embed[0].weight.data = torch.stack([torch.zeros(sites), torch.arange(sites).float()])
    select.embed[2].weight.data = torch.eye(2)
    select.fuse[0].weight.data = tensor([[1.0, 0.0, 0.0, -1.0]])
    select.fuse[2].weight.data = tensor([[LN3], [-LN3]])
    out = network.calibrator.out
    out.weight.data = torch.zeros(1, 4, 3, 3)
    out.weight.data[0, :, 1, 1] = tensor([1.0, 0.0, 10.0, 0.0])
    out.bias.data = tensor([0.5])
    return network


def features(a, b):
    return tensor([[[a], [b]]])


# --- channel selection -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "s", "gated"),
    [
        (0, 3, ([0, 2 * (1 + 27 / 28)], [1 + 1 / 28, 5 * (1 + 1 / 28)])),
        (1, 1, ([0, 3.5], [1.25, 6.25])),
        (2, 0, ([0, 3.0], [1.5, 7.5])),
    ],
)
def test_channels_are_gated_by_the_features_and_the_site(own, s, gated):
    """a = (0, 2): mean 1, maximum 2. s = 1 + 2 at site 0, 0 + 1 at site 1, 0 at site 2; σ(ln 3 · s) = 3^s/(3^s + 1):

    gates (27/28, 1/28), (3/4, 1/4) and (1/2, 1/2); x h + x is x (1 + h). b = (1, 5).
    """
    network, x = calibrated(sites=3, own=own), features([0.0, 2.0], [1.0, 5.0])
    gate = network.selection.gate((x.mean(dim=(2, 3)), x.amax(dim=(2, 3))), network.embedding.one_hot)
    h = 3**s / (3**s + 1)
    assert gate.flatten().tolist() == pytest.approx([h, 1 - h], abs=1e-6)
    found = network.selection(x, network.embedding.one_hot)[0, :, 0].tolist()
    assert found == [pytest.approx(row, abs=1e-5) for row in gated]


@pytest.mark.parametrize(("sites", "own", "wanted"), [(2, 0, -9 / 196), (2, 1, -9 / 196), (3, 1, -(9 / 196 + 1 / 16) / 2)])
def test_contrast_is_minus_the_mean_distance_of_the_gates(sites, own, wanted):
    """As above: sites 0 and 1 differ by 27/28 − 3/4 = 6/28 in both channels, the mean of the squares is 9/196; sites 1 and
    2 differ by 1/4, squared 1/16. FedLC adds 0.1 of it to L_seg; before any head is received, no more than that."""
    network = calibrated(sites, own)
    logits = network(features([0.0, 2.0], [1.0, 5.0]))
    assert network.contrast().item() == pytest.approx(wanted, abs=1e-6)
    site = SimpleNamespace(network=network, segmentation_loss=lambda logits, mask: tensor(7.0))
    for weight in (0.1, 2.0):
        found = FedLC(FedLCSettings(contrast=weight)).loss(site, logits, {"mask": None})
        assert found.item() == pytest.approx(7 + weight * wanted, abs=1e-6)


def test_contrast_trains_the_own_gate_alone():
    """K = 2 at site 0. By the own gate h = (27/28, 1/28): −2 (h − h_1)/2 = ∓6/28; by the last layer's weights, × h (1 − h) s
    = (27/784) · 3: ∓(6/28)(81/784) = ∓0.0221392. Through the other's gate there would be ±(6/28)(3/16) = 0.0401786 more.

    The features themselves are not moved."""
    network, x = calibrated(sites=2), features([0.0, 2.0], [1.0, 5.0]).requires_grad_()
    network(x)
    network.contrast().backward()
    assert network.selection.fuse[2].weight.grad.flatten().tolist() == pytest.approx([-0.0221392, 0.0221392], abs=1e-6)
    assert x.grad is None


# --- head calibration --------------------------------------------------------------------------------------------------


def heads(*biases):
    """Heads of the sites 1, 2, …, whose logit is the bias everywhere."""
    return {j: {"weight": torch.zeros(1, 2, 1, 1), "bias": tensor([bias])} for j, bias in enumerate(biases, 1)}


@pytest.mark.parametrize(
    ("others", "deviation", "mean"),
    [
        ({}, 0.0, 3 / 4),
        (heads(-LN3), 1 / 4, 1 / 2),
        (heads(-LN3, 0.0), math.sqrt(1 / 24), 1 / 2),
        (heads(-LN3) | {0: {"weight": torch.ones(1, 2, 1, 1), "bias": tensor([9.0])}}, 1 / 4, 1 / 2),
    ],
    ids=["none", "two sites", "three sites", "one's own is not taken from others"],
)
def test_disagreement_by_hand(others, deviation, mean):
    """The own head sees a = ln 3: p = 3/4; the others say 1/4 and 1/2 everywhere. Two sites: |3/4 − 1/4|/2 and their mean.

    Three: mean 1/2, squares 1/16, 1/16, 0, so sqrt(1/24). What was received earlier is forgotten.
    """
    network = calibrated(sites=3)
    network.calibrator.receive(heads(5.0, -5.0))
    network.calibrator.receive(others)
    found = network.calibrator.disagreement(features([LN3], [0.0]), network.segmentation_head[0], 0)
    assert [value.item() for value in found] == pytest.approx([deviation, mean], abs=1e-6)


@pytest.mark.parametrize(
    ("gate", "wanted"),
    [
        ([0.0, 0.0, 0.5, 0.0, 0.0], [0.0, 0.738160, 1.0, 0.738160, 0.0]),
        ([0.0, 0.0, 0.5, 0.0, 0.1], [0.0, 0.674005, 1.0, 0.922297, 0.455679]),
        ([0.5], [0.5]),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        ([0.2, 0.2, 0.2], [0.2, 1.0, 0.2]),
    ],
)
def test_a_gate_is_softened(gate, wanted):
    """σ = 4, the weights e^(−d²/32) at the distances 0 to 4: 1, 0.969233, 0.882497, 0.754840, 0.606531. Their common factor
    goes with the scaling to [0, 1]; the larger of the gate and the scaled smoothing stays.

    0.5 in the middle: 0.882497, 0.969233, 1 scaled: 0, 0.086736/0.117503 = 0.738160, 1.
    With 0.1 at the end, ×2: 0.882497 + 0.2 · 0.606531 = 1.003803, 0.969233 + 0.150968 = 1.120201, 1 + 0.176499 = 1.176499,
    0.969233 + 0.193847 = 1.163080, 0.882497 + 0.2 = 1.082497; least 1.003803, largest 1.176499, a span of 0.172696:
    0, 0.674005, 1, 0.922297, 0.455679.
    A single pixel, or nothing at all: no span, the gate itself. Beyond the border is 0, so that a constant sags there.
    """
    network = calibrated(sites=2)
    found = network.calibrator.soften(tensor(gate).view(1, 1, 1, -1)).flatten().tolist()
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("shape", [(1, 41), (41, 1)])
def test_a_gate_is_softened_as_far_as_a_kernel_of_31_reaches(shape):
    """(31 − 1)/2 = 15 pixels on each side of the one that is set: e^(−d²/32) at the distance d, as above, e^(−225/32) =
    0.000884 at 15, and nothing from 16 on, where a wider kernel has e^(−8) = 0.000335. Nothing is the least, 1 the largest."""
    gate = torch.zeros(41)
    gate[20] = 1.0
    found = calibrated(sites=2).calibrator.soften(gate.view(1, 1, *shape)).flatten().tolist()
    distances = [abs(i - 20) for i in range(41)]
    assert found == pytest.approx([math.exp(-(d**2) / 32) if d <= 15 else 0.0 for d in distances], abs=1e-5)


def test_each_image_of_a_batch_is_softened_alone():
    """The first image of above, and one of a fifth of it: scaled to [0, 1] both are 0, 0.738160, 1, 0.738160, 0."""
    gates = tensor([[0.0, 0.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.1, 0.0, 0.0]]).view(2, 1, 1, -1)
    found = calibrated(sites=2).calibrator.soften(gates)[:, 0, 0].tolist()
    assert found == [pytest.approx([0, 0.738160, 1, 0.738160, 0], abs=1e-3)] * 2


def test_several_classes_gate_the_features_each_by_its_own_maps():
    """Two classes, whose own logits are a and b; one pixel (ln 3, 0): p = 3/4 and 1/2. A peer says 1/4 and 3/4. Deviations 1/4
    and 1/8, means 1/2 and 5/8, so a is 5/4, 9/8, 3/2 and 13/8 of ln 3, b is 0. The first class's logit weighs the four by 1,
    10, 100 and 1000, the second's by 1 alone."""
    own = nn.Conv2d(2, 2, 1)
    own.weight.data, own.bias.data = torch.eye(2)[:, :, None, None], torch.zeros(2)
    layer = HeadCalibration(own, classes=2, sites=2)
    layer.out.weight.data.zero_()
    layer.out.weight.data[:, ::2, 1, 1] = tensor([[1.0, 10.0, 100.0, 1000.0], [1.0, 0.0, 0.0, 0.0]])
    layer.out.bias.data.zero_()
    layer.receive({1: {"weight": torch.zeros(2, 2, 1, 1), "bias": tensor([-LN3, LN3])}})
    found = layer(features([LN3], [0.0]), nn.Sequential(own), 0).flatten().tolist()
    assert found == pytest.approx([(1.25 + 11.25 + 150 + 1625) * LN3, 1.25 * LN3], rel=1e-5)


def test_a_peers_head_without_a_number_is_undecided():
    """4 · 3e38 is infinite, and infinity less infinity no number: 1/2. Beside the own 3/4, deviation 1/8 and mean 5/8."""
    network = calibrated(sites=2)
    network.segmentation_head[0].weight.data = tensor([LN3 / 4, 0.0]).view(1, 2, 1, 1)
    network.calibrator.receive({1: {"weight": tensor([3e38, -3e38]).view(1, 2, 1, 1), "bias": tensor([0.0])}})
    found = network.calibrator.disagreement(features([4.0], [4.0]), network.segmentation_head[0], 0)
    assert [value.item() for value in found] == pytest.approx([1 / 8, 5 / 8], abs=1e-6)


def ungated(sites=2):
    """Gates of 1/2 everywhere, so that the features ×1.5 are decoded, and the contrast is 0."""
    network = calibrated(sites)
    nn.init.zeros_(network.selection.fuse[2].weight)
    return network


ONE_PIXEL = features([LN3 / 1.5], [0.0])  # decoded: (ln 3, 0), for which the own head says 3/4


def test_the_output_is_the_head_s_until_heads_are_received():
    """The head's logit is ln 3. Calibrated: ln 3 (1 + deviation) + 10 ln 3 (1 + mean) + 1/2 of the probabilities

    3/4 alone: 18.5 ln 3 + 1/2. 3/4 and 1/4: deviation 1/4, mean 1/2, 16.25 ln 3 + 1/2. 3/4 and 1/2: 17.375 ln 3 + 1/2.
    """
    network = ungated()
    before = network(ONE_PIXEL)
    assert before.equal(network.segmentation_head(network.decoder(network.encoder(ONE_PIXEL * 1.5))))
    assert before.item() == pytest.approx(LN3, abs=1e-6)
    for received, wanted in (({}, 18.5), (heads(-LN3), 16.25), (heads(0.0), 17.375)):
        network.calibrator.receive(received)
        assert network(ONE_PIXEL).item() == pytest.approx(wanted * LN3 + 0.5, abs=1e-5)
        assert network.plain.item() == pytest.approx(LN3, abs=1e-6)


def test_calibrated_logits_train_the_calibrator_alone():
    """By the centre of its own head: the gated features, ln 3 × 5/4 and × 3/2. By decoder and segmentation head: nothing."""
    network = ungated()
    network.calibrator.receive(heads(-LN3))
    network(ONE_PIXEL).sum().backward()
    grads = {name for name, parameter in network.named_parameters() if parameter.grad is not None}
    assert grads == {"calibrator.out.weight", "calibrator.out.bias"}
    found = network.calibrator.out.weight.grad[0, :, 1, 1].tolist()
    assert found == pytest.approx([1.25 * LN3, 0, 1.5 * LN3, 0], abs=1e-6)


def test_the_loss_of_the_second_stage_has_the_head_s_own_beside_it():
    """L_seg(z) = z: 16.25 ln 3 + 1/2 calibrated, ln 3 by the head, and no contrast. Its gradient by the head's bias is 1, by
    the decoder's row of a what that decodes, (ln 3, 0): once, as the calibrated logits have none."""
    network = ungated()
    network.calibrator.receive(heads(-LN3))
    site = SimpleNamespace(network=network, segmentation_loss=lambda logits, mask: logits.sum())
    loss = FedLC(FedLCSettings()).loss(site, network(ONE_PIXEL), {"mask": None})
    loss.backward()
    assert loss.item() == pytest.approx(17.25 * LN3 + 0.5, abs=1e-5)
    assert network.segmentation_head[0].bias.grad.item() == pytest.approx(1)
    assert network.decoder.layer.weight.grad.flatten().tolist() == pytest.approx([LN3, 0, 0, 0], abs=1e-6)


@pytest.mark.parametrize("received", [None, {}, heads(0.0)], ids=["none yet", "of nobody", "of a site"])
def test_a_loaded_state_says_whose_heads_it_has(received):
    """What a network knows about its peers without reading its tensors is what the tensors of the loaded state say. Of heads
    that it received before the last ones, these say nothing."""
    network, fresh = ungated(sites=3), calibrated(sites=3, own=2)
    network.embedding.set(1)
    fresh.calibrator.receive(heads(1.0, 2.0))
    if received is not None:
        network.calibrator.receive(heads(5.0, -5.0))
        network.calibrator.receive(received)
    fresh.load_state_dict(network.state_dict())
    assert fresh.embedding.index == 1
    assert fresh.calibrator.peers == (None if received is None else tuple(received))
    assert fresh(ONE_PIXEL).equal(network(ONE_PIXEL))
