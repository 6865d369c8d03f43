"""Stage 2 against numbers worked out by hand, on networks whose prediction is a constant of our choice."""

import math

import pytest
import torch
from torch import nn, tensor

from feddp.errors import FedDPError, Stopped
from feddp.training.calibration import calibration_loss, tune, with_inconsistency
from feddp.training.settings import Training

LN2, LN3 = math.log(2), math.log(3)
PLAIN = Training(batch=1, augment=False, weight_decay=0.0)


class Constant(nn.Conv2d):
    """Predicts one probability a class, whatever the image; counts its forward passes."""

    def __init__(self, *probabilities):
        super().__init__(1, len(probabilities), 1)
        self.load_state_dict(constant(*probabilities))
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return super().forward(x)


def constant(*probabilities):
    """The state of a `Constant`."""
    return {"weight": torch.zeros(len(probabilities), 1, 1, 1), "bias": torch.logit(tensor(probabilities))}


def samples(count, classes=1, side=2):
    return [
        {"image": torch.full((1, side, side), float(i)), "mask": torch.ones(classes, side, side), "stem": str(i)}
        for i in range(count)
    ]


PEERS = {"b": constant(0.3), "a": constant(0.8)}


def test_frozen_delta_is_equation_7():
    """K = 3, own 0.5, peers 0.8 and 0.3: δ = ½ (0.3² + 0.2²) = ½ (0.09 + 0.04) = 0.065 at every pixel."""
    given = samples(3)
    found = with_inconsistency(Constant(0.5), PEERS, given, "frozen")
    assert [s["stem"] for s in found] == ["0", "1", "2"]
    for sample, original in zip(found, given, strict=True):
        assert sample["delta"].shape == (1, 2, 2)
        assert sample["delta"].flatten().tolist() == pytest.approx([0.065] * 4, abs=1e-6)
        assert sample["image"].equal(original["image"])
    assert all("delta" not in sample for sample in given)


def test_std_delta_is_over_all_maps():
    """Maps 0.5, 0.8, 0.3, mean 8/15: deviations −1/30, 8/30, −7/30; variance (1 + 64 + 49)/(3·900) = 114/2700 = 0.042222."""
    found = with_inconsistency(Constant(0.5), PEERS, samples(1), "std")
    assert found[0]["delta"].flatten().tolist() == pytest.approx([math.sqrt(114 / 2700)] * 4, abs=1e-6)


def test_delta_belongs_to_its_sample():
    """Peers that hand the image on: sample i has the logit i. δ of sample i is (½ − σ(i))²; σ(0) = ½ gives 0.

    σ(1) = 0.731059, squared distance 0.053388; σ(2) = 0.880797, 0.145006. Ten samples: two batches of prediction.
    """
    peer = {"weight": torch.ones(1, 1, 1, 1), "bias": torch.zeros(1)}
    found = with_inconsistency(Constant(0.5), {"a": peer}, samples(10), "frozen")
    deltas = [sample["delta"].mean().item() for sample in found]
    assert deltas[:3] == pytest.approx([0, 0.053388, 0.145006], abs=1e-6)
    assert deltas == sorted(deltas)


def test_live_stacks_the_peers_maps_by_site_and_class():
    """Two peers of two classes: (a's class 0, a's class 1, b's class 0, b's class 1), whatever the order they came in."""
    peers = {"b": constant(0.3, 0.1), "a": constant(0.8, 0.6)}
    found = with_inconsistency(Constant(0.5, 0.5), peers, samples(2, classes=2), "live")
    for sample in found:
        assert sample["peers"].shape == (4, 2, 2)
        assert sample["peers"][:, 0, 1].tolist() == pytest.approx([0.8, 0.6, 0.3, 0.1], abs=1e-6)
        assert "delta" not in sample


@pytest.mark.parametrize("delta", ["frozen", "live", "std"])
def test_the_network_is_itself_again(delta):
    network = Constant(0.5)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    peers = {site: {name: value.clone() for name, value in state.items()} for site, state in PEERS.items()}
    with_inconsistency(network, peers, samples(1), delta)
    assert all(network.state_dict()[name].equal(value) for name, value in before.items())
    assert all(peers[site][name].equal(value) for site, state in PEERS.items() for name, value in state.items())


def test_a_site_alone_has_no_delta():
    with pytest.raises((FedDPError, RuntimeError)):
        with_inconsistency(Constant(0.5), {}, samples(1), "frozen")


@pytest.mark.parametrize("delta", ["frozen", "live", "std"])
def test_a_peer_whose_maps_are_not_finite_is_left_out_by_name(delta):
    """Peer a's network gives NaN for sample 9 alone, in the second batch: δ is that of b alone. If no peer is good, the site
    does not go on as if it had none, and its network is itself again."""

    class Rare(Constant):
        def forward(self, x):
            return torch.where((x == 9) & (self.bias == 7), math.nan, super().forward(x))

    network, given, told = Rare(0.5), samples(10), {}
    nine = {"weight": torch.zeros(1, 1, 1, 1), "bias": tensor([7.0])}
    found = with_inconsistency(network, {"a": nine, "b": PEERS["b"]}, given, delta, told.__setitem__)
    alone = with_inconsistency(network, {"b": PEERS["b"]}, given, delta)
    key = "peers" if delta == "live" else "delta"
    assert all(one[key].equal(other[key]) for one, other in zip(found, alone, strict=True))
    assert [*told] == ["a"]
    assert "site a: its network's maps of this site's images are not finite" in str(told["a"])
    with pytest.raises(FedDPError, match="site a: its network's maps"):
        with_inconsistency(network, {"a": nine}, given, delta)
    assert all(network.state_dict()[name].equal(value) for name, value in constant(0.5).items())


def seven(logits, batch):
    """A segmentation loss that is easy to add to."""
    return logits.sum() * 0 + 7


def test_the_loss_on_one_pixel():
    """ŷ = ½, y = 1, δ = 0.065: L_aux = 0.065 ln 2; with λ = 10, L = 7 + 0.65 ln 2 = 7.45055."""
    batch = {"mask": torch.ones(1, 1, 1, 1), "delta": torch.full((1, 1, 1, 1), 0.065)}
    assert calibration_loss(seven, 10.0, "frozen")(torch.zeros(1, 1, 1, 1), batch).item() == pytest.approx(7 + 0.65 * LN2)


def test_the_loss_on_four_pixels():
    """Logits (0, ln 3; −ln 3, 0), ŷ = (½, ¾; ¼, ½), y = (1, 1; 1, 0), δ = (0, 0.4; 0.8, 0.2).

    −[y log ŷ + (1−y) log(1−ŷ)] = (ln 2, ln 4/3; ln 4, ln 2). L_aux = (0.4 ln 4/3 + 0.8 ln 4 + 0.2 ln 2)/4.
    """
    logits, mask = tensor([[[[0.0, LN3], [-LN3, 0.0]]]]), tensor([[[[1.0, 1.0], [1.0, 0.0]]]])
    batch = {"mask": mask, "delta": tensor([[[[0.0, 0.4], [0.8, 0.2]]]])}
    auxiliary = (0.4 * math.log(4 / 3) + 0.8 * math.log(4) + 0.2 * LN2) / 4
    assert calibration_loss(seven, 2.0, "frozen")(logits, batch).item() == pytest.approx(7 + 2 * auxiliary, abs=1e-6)


def test_std_is_divided_by_its_maximum_in_the_batch():
    """Two images of one pixel, deviations 0.1 and 0.4: δ = ¼ and 1. All ŷ = ½: L_aux = (¼ + 1)/2 · ln 2 = 0.625 ln 2."""
    batch = {"mask": torch.ones(2, 1, 1, 1), "delta": tensor([0.1, 0.4]).view(2, 1, 1, 1)}
    loss = calibration_loss(seven, 1.0, "std")
    assert loss(torch.zeros(2, 1, 1, 1), batch).item() == pytest.approx(7 + 0.625 * LN2, abs=1e-6)
    # where all agree, there is nothing to divide by, and nothing to add
    assert loss(torch.zeros(2, 1, 1, 1), batch | {"delta": torch.zeros(2, 1, 1, 1)}).item() == 7


def test_live_compares_with_the_current_prediction_class_by_class():
    """One image of one pixel, two classes, logits (0, ln 3): ŷ = (½, ¾), y = (1, 1). Peers a: (0.8, 0.6), b: (0.3, 0.1).

    δ = (½ (0.09 + 0.04), ½ (0.0225 + 0.4225)) = (0.065, 0.2225). −log ŷ = (ln 2, ln 4/3).
    L_aux = (0.065 ln 2 + 0.2225 ln 4/3)/2. Were peers and classes exchanged, δ would be (0.05, 0.11125).
    """
    peers = tensor([0.8, 0.6, 0.3, 0.1]).view(1, 4, 1, 1)
    logits, batch = tensor([0.0, LN3]).view(1, 2, 1, 1), {"mask": torch.ones(1, 2, 1, 1), "peers": peers}
    auxiliary = (0.065 * LN2 + 0.2225 * math.log(4 / 3)) / 2
    assert calibration_loss(seven, 1.0, "live")(logits, batch).item() == pytest.approx(7 + auxiliary, abs=1e-6)


def test_no_gradient_flows_through_live_delta():
    """One pixel, z = 0, y = 1, peers 0.8 and 0.3: ∂L/∂z = δ (ŷ − y) = 0.065 · (−½) = −0.0325.

    Through δ there would be another (−0.1 · ¼) ln 2 = −0.0173.
    """
    logits = torch.zeros(1, 1, 1, 1, requires_grad=True)
    batch = {"mask": torch.ones(1, 1, 1, 1), "peers": tensor([0.8, 0.3]).view(1, 2, 1, 1)}
    calibration_loss(seven, 1.0, "live")(logits, batch).backward()
    assert logits.grad.item() == pytest.approx(-0.0325, abs=1e-6)


@pytest.mark.parametrize("delta", ["frozen", "live", "std"])
def test_lambda_zero_is_the_plain_loss(delta):
    logits = torch.randn(2, 1, 2, 2)
    batch = {"mask": torch.ones(2, 1, 2, 2), "delta": torch.rand(2, 1, 2, 2), "peers": torch.rand(2, 3, 2, 2)}

    def plain(z, b):
        return (z - b["mask"]).square().mean()

    assert calibration_loss(plain, 0.0, delta)(logits, batch).equal(plain(logits, batch))
    assert not calibration_loss(plain, 1.0, delta)(logits, batch).equal(plain(logits, batch))


class Slope(nn.Module):
    """logit = w · image. The validation image is +1 on the mask and −1 beside it: IoU is 1 for w > 0, 0 for w < 0."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(tensor([float(w)]))

    def forward(self, x):
        return self.w * x


IMAGE = tensor([[[1.0, -1.0]]])
VALIDATION = [{"image": IMAGE, "mask": (IMAGE > 0).float(), "stem": "v"}]


def tuned(network, directions, lr):
    """Tunes for an epoch of one step a direction. +1 lets w grow by `lr`: AdamW's step where the gradient is constant."""
    steps, reports = iter(directions), []

    def loss(logits, batch):
        return -next(steps) * network.w.sum()

    def report(*metadata):
        reports.append(metadata)

    result = tune(network, VALIDATION, VALIDATION, loss, PLAIN, len(directions), lr, ("s", 0), lambda: False, report)
    return result, reports


def test_the_start_is_kept_where_every_epoch_is_worse():
    """w = 1, IoU 1. At a rate of 10 two steps down lead to −9 and −19, IoU 0: w is 1 again, to the bit."""
    network = Slope(1)
    result, _ = tuned(network, [-1, -1], lr=10.0)
    assert result.scores == [1, 0, 0]
    assert result.best == 0
    assert network.w.item() == 1


def test_the_best_epoch_is_kept_and_of_equals_the_first():
    """w = −1, IoU 0. A rate of 1.5 up: w = 0.5 and 2, IoU 1 both. Then down, by a gradient of another size, below 0.

    The kept w is that of epoch 1: AdamW's first step is the rate, whatever the gradient. L = −w before each step.
    """
    network = Slope(-1)
    result, reports = tuned(network, [1, 1, -50], lr=1.5)
    assert result.scores[:3] == [0, 1, 1]
    assert result.best == 1
    assert network.w.item() == pytest.approx(0.5, abs=1e-5)
    assert result.losses[:2] == pytest.approx([1, -0.5], abs=1e-5)
    assert reports == [(e, result.losses[e - 1], result.scores[e]) for e in (1, 2, 3)]


def test_a_later_better_epoch_replaces_the_start():
    """w = −2 and a rate of 1.5: −0.5 after one epoch, IoU 0; 1 after two, IoU 1."""
    network = Slope(-2)
    result, _ = tuned(network, [1, 1], lr=1.5)
    assert result.scores == [0, 0, 1]
    assert result.best == 2
    assert network.w.item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("decay", "wanted"), [(0.0, 0.5), (0.2, 0.8)])
def test_weights_decay_while_tuning(decay, wanted):
    """AdamW, rate 1.5: w ← (1 − 1.5 · decay) w + 1.5 from w = −1, IoU 0. Decay 0.2: −0.7 + 1.5 = 0.8; none: 0.5. IoU 1 both."""
    network = Slope(-1)

    def loss(logits, batch):
        return -network.w.sum()

    training = Training(batch=1, augment=False, weight_decay=decay)
    tune(network, VALIDATION, VALIDATION, loss, training, 1, 1.5, ("s", 0), lambda: False, lambda *_: None)
    assert network.w.item() == pytest.approx(wanted, abs=1e-5)


def test_tuning_can_be_stopped():
    network = Slope(1)
    with pytest.raises(Stopped, match="stopped"):
        tune(network, VALIDATION, VALIDATION, seven, PLAIN, 1, 0.1, (0,), lambda: True, print)


def test_delta_is_computed_once_and_stays_the_same():
    """Three sites, 2 samples in one batch of prediction: 3 passes. Then 3 epochs of 2 steps, scored 1 + 3 times: 10 more."""
    network, seen = Constant(0.5), {}
    ready = with_inconsistency(network, PEERS, samples(2), "frozen")
    assert network.passes == 3

    def watched(logits, batch):
        seen.setdefault(batch["stem"][0], []).append(batch["delta"].clone())
        return calibration_loss(lambda z, b: -z.mean(), 1.0, "frozen")(logits, batch)

    tune(network, ready, samples(1), watched, PLAIN, 3, 0.5, (0,), lambda: False, lambda *_: None)
    assert network.passes == 3 + 10
    assert {stem: len(deltas) for stem, deltas in seen.items()} == {"0": 3, "1": 3}
    assert all(d.flatten().tolist() == pytest.approx([0.065] * 4, abs=1e-6) for deltas in seen.values() for d in deltas)


def test_every_epoch_has_an_order_of_its_own_that_follows_from_the_seed():
    """8 samples, one a batch, two epochs: of 8! orders, two are equal by chance in 1 of 40,320."""

    def orders(seed):
        stems = []

        def noted(logits, batch):
            stems.append(batch["stem"][0])
            return -logits.mean()

        tune(Slope(1), samples(8), samples(1), noted, PLAIN, 2, 0.1, seed, lambda: False, lambda *_: None)
        return stems[:8], stems[8:]

    one, two = orders(("s", 0))
    assert sorted(one) == sorted(two) == [str(i) for i in range(8)]
    assert one != two
    assert orders(("s", 0)) == (one, two)
    assert orders(("s", 1))[0] != one
