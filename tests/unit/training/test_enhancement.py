"""pFLFE's enhancement of features: the loss, the target that follows, what a phase trains, and how often E is averaged."""

import json
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from torch import nn, tensor

from feddp.files import read_events
from feddp.methods.pflfe import PFLFE, PFLFESettings
from feddp.networks.projector import project
from feddp.stages.train import train
from feddp.training.enhancement import Draws, Enhancement, blurring, distance, draw, seen, views, zooming


def test_the_distance_is_two_minus_twice_the_cosine():
    """(3, 4) and (4, 3): cos = 24/25, 2 − 48/25 = 0.08. Opposite: 4. Of any length: (1, 0) and (0, 7): 2. Equal: 0."""
    online = tensor([[3.0, 4.0], [1.0, 2.0], [1.0, 0.0], [2.0, 2.0]])
    target = tensor([[4.0, 3.0], [-2.0, -4.0], [0.0, 7.0], [5.0, 5.0]])
    assert distance(online, target).tolist() == pytest.approx([0.08, 4.0, 2.0, 0.0], abs=1e-6)


def test_the_loss_crosses_the_views_and_only_the_online_branch_has_gradients():
    """o(v) = (1, 0), o(v') = (0, 1); t(v) = (0, 1), t(v') = (1, 0): each online output meets the other view's target, and both
    pairs agree: L = 0. (Of the same view they would be 2 + 2.) Turned round, t(v) = (1, 0), t(v') = (0, 1): L = 4."""
    outputs = tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 1.0]], [[1.0, 0.0]]], requires_grad=True)
    phase = Enhancement(nn.Linear(1, 1), lambda network, images: images, 0.9)
    assert phase.loss(outputs, {}).item() == pytest.approx(0, abs=1e-6)
    turned = tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]], [[0.0, 1.0]]], requires_grad=True)
    loss = phase.loss(turned, {})
    assert loss.item() == pytest.approx(4)
    loss.backward()
    assert turned.grad[:2].abs().sum() > 0
    assert (turned.grad[2:] == 0).all()


def test_the_target_follows_the_online_network(monkeypatch):
    """m = 0.9, the online weight goes from 1 to 2, then to 3: the target 1, 0.9 + 0.2 = 1.1, 0.99 + 0.3 = 1.29.

    Its own start is the online network's, no gradient reaches it, and the online network is not moved by it.
    """
    network = nn.Linear(1, 1, bias=False)
    nn.init.constant_(network.weight, 1.0)
    monkeypatch.setattr("feddp.training.enhancement.views", lambda images: images)
    phase = Enhancement(network, lambda net, images: net(images), 0.9)
    assert phase.target.weight.item() == 1
    phase.loss(phase.forward(torch.ones(2, 1)), {}).backward()
    assert phase.target.weight.grad is None
    for weight, wanted in ((2.0, 1.1), (3.0, 1.29)):
        nn.init.constant_(network.weight, weight)
        phase.after()
        assert phase.target.weight.item() == pytest.approx(wanted)
        assert network.weight.item() == weight


def test_the_target_normalises_by_the_batch_as_the_online_network_does():
    """Images 1 and 3, mean 2, deviation 1: −1 and 1 from both. From running statistics of 0 and 1 they would be 1 and 3.

    Before the phase the network was in eval mode, as it is after a validation. Each of the target's own passes moves its
    running mean a tenth of the way to 2: 0.2, then 0.38."""
    network = nn.BatchNorm2d(1).eval()
    images = tensor([1.0, 3.0]).view(2, 1, 1, 1)
    phase = Enhancement(network, lambda net, given: net(given).flatten(1), 0.9)
    network.train()
    for net in (network, phase.target):
        assert phase.project(net, images).flatten().tolist() == pytest.approx([-1, 1], abs=1e-4)
        assert net.running_mean.item() == pytest.approx(0.2)
    phase.project(phase.target, images)
    assert phase.target.running_mean.item() == pytest.approx(0.38)


@pytest.mark.parametrize(("settings", "target"), [({}, 1.01), ({"ema": 0.75}, 1.25)])
def test_a_phase_has_two_views_and_a_target_that_follows(monkeypatch, tmp_path, settings, target):
    """A network that multiplies by w = 1; the first view is the image x = 1, the second 10 x. Outputs o(v), o(v'), t(v), t(v')
    of the first batch: 1, 10, 1, 10. The step makes w = 2, and the target, at the momentum 0.99 of BYOL,
    0.99 · 1 + 0.01 · 2 = 1.01; at 0.75, 1.25. The second batch: 2, 20, 1.01, 10.1. In the third, after w = 2 again, the target
    is 0.99 · 1.01 + 0.02 = 1.0199 or 0.75 · 1.25 + 0.5 = 1.4375."""
    network, factors = nn.Linear(1, 1, bias=False), cycle((1.0, 10.0))
    nn.init.constant_(network.weight, 1.0)
    monkeypatch.setattr("feddp.training.enhancement.views", lambda images: images * next(factors))
    monkeypatch.setattr("feddp.networks.projector.project", lambda net, images: net(images))
    seen = []

    def fit(epochs, loss, forward, after=lambda: None):
        for _ in range(3):
            outputs = forward(torch.ones(1, 1))
            seen.append(outputs.flatten().tolist())
            loss(outputs, {})
            nn.init.constant_(network.weight, 2.0)
            after()
        return 0.0

    plan = SimpleNamespace(training=SimpleNamespace(local_epochs=1))
    store = SimpleNamespace(record=lambda *_, **__: None, folder=tmp_path)
    PFLFE(PFLFESettings(**settings)).round(SimpleNamespace(name="A", phase=0, network=network, plan=plan, store=store, fit=fit))
    momentum = settings.get("ema", 0.99)
    third = momentum * target + (1 - momentum) * 2
    assert seen == [
        pytest.approx([1, 10, 1, 10]),
        pytest.approx([2, 20, target, 10 * target]),
        pytest.approx([2, 20, third, 10 * third]),
    ]


def test_the_spread_tells_a_collapse():
    """Four outputs, at the ends of both axes of the plane: each dimension's values are 1, −1, 0, 0, its deviation √(1/2), times
    √2 is 1. All alike: 0. Two batches: their mean."""
    phase = Enhancement(nn.Linear(1, 1), lambda network, images: images, 0.9)
    cross = tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    phase.loss(torch.stack([cross] * 4), {})
    assert phase.spread == pytest.approx(1)
    phase.loss(torch.ones(4, 4, 2), {})
    assert phase.spread == pytest.approx(0.5)
    phase.loss(torch.ones(4, 1, 2), {})
    assert phase.spread == pytest.approx(0.5), "a batch of one image tells nothing"


def test_batches_of_one_image_are_not_warned_of(open_site, pvt, caplog):
    """The deviation over one output is 0, whatever the network does."""
    site = open_site(method="fc_pflfe", batch=1, network=pvt)
    train(site, site.partition.split(site.copy())[0], 0)
    (event,) = [event for event in read_events(site.store.folder / "record.jsonl") if event["event"] == "enhancement"]
    assert event["spread"] is None
    assert "collapsed" not in caplog.text


def test_views_differ_and_come_again_with_the_seed():
    images = torch.rand(3, 3, 32, 32)
    before = images.clone()
    torch.manual_seed(1)
    one, two = views(images), views(images)
    torch.manual_seed(1)
    assert views(images).equal(one)
    assert one.shape == images.shape
    assert not one.equal(two)
    assert images.equal(before)


NEUTRAL = Draws(*(tensor(v) for v in ([False], [False], [0], [1.0], [[0.0, 0.0]], [[1.0]], [[0.0]])))


def test_a_view_by_hand():
    """Rows flipped: 3 4 / 1 2. Columns too: 4 3 / 2 1. A quarter turn anticlockwise has the last column on top: 3 1 / 4 2.
    Times 2 less 1: 5 1 / 7 3. Without draws, the image itself."""
    image = tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    assert seen(image, NEUTRAL).equal(image)
    turned = NEUTRAL._replace(down=tensor([True]), across=tensor([True]), turns=tensor([1]))
    assert seen(image, turned).tolist() == [[[[3, 1], [4, 2]]]]
    lit = turned._replace(contrast=tensor([[2.0]]), brightness=tensor([[-1.0]]))
    assert seen(image, lit).tolist() == [[[[5, 1], [7, 3]]]]


def test_a_zoom_by_hand():
    """Four pixels become six, of which the middle four stay: pixel i is the mean of ⌊2i/3⌋ to ⌈2(i+1)/3⌉ − 1: of 0 and 1, 1
    alone, 2 alone, 2 and 3. Factor 1.2 makes no fifth pixel, ⌊4.8⌋ = 4."""
    half = 0.5
    wanted = [[half, half, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, half, half]]
    assert zooming(4, tensor([1.5, 1.2])).tolist() == [wanted, torch.eye(4).tolist()]


def test_a_blur_by_hand():
    """σ = 1/2: a pixel is from −σ to σ, with 0.682689 of the Gaussian; its neighbours have the rest to 3σ, (0.997300 −
    0.682689)/2 = 0.157305; the next to 5σ, 0.00135. At the border what falls outside is lost. σ = 1/4 ends after 1 pixel."""
    found = blurring(7, tensor([0.5, 0.0, 0.25]))
    assert found[0, 3].tolist() == pytest.approx([0, 0.00135, 0.157305, 0.682689, 0.157305, 0.00135, 0], abs=1e-5)
    assert found[0, 0].tolist() == pytest.approx([0.682689, 0.157305, 0.00135, 0, 0, 0, 0], abs=1e-5)
    assert found[1].equal(torch.eye(7))
    assert found[2, 3].count_nonzero() == 3


def test_whole_batches_are_seen_as_monai_sees_each_image():
    """20 images of an odd and an even side: flips, turns, zoom, blur and both intensities by MONAI's transforms, one by one."""
    from monai import transforms

    torch.manual_seed(0)
    for side in (31, 32):
        images, drawn = torch.rand(20, 2, side, side), draw(20, 2)
        found = seen(images, drawn)
        assert all((values != neutral).any() for values, neutral in zip(drawn, NEUTRAL, strict=True))
        for i, image in enumerate(images):
            down, across, turns, zoom, blur, contrast, brightness = (values[i].tolist() for values in drawn)
            steps = [transforms.Flip(axis) for axis, applied in ((0, down), (1, across)) if applied]
            steps += [transforms.Rotate90(turns), transforms.Zoom(zoom)]
            steps += [transforms.GaussianSmooth(blur)] if any(blur) else []
            wanted = torch.as_tensor(transforms.Compose(steps)(image))
            wanted = torch.stack([wanted[c] * contrast[c] + brightness[c] for c in range(2)])
            torch.testing.assert_close(found[i], wanted, rtol=0, atol=1e-5)


def test_what_is_drawn():
    """40,000 images: each share of those that are changed has a deviation of 0.0025, and 0.0165 is more than six of them.

    A uniform draw from low to high has the mean of both, with deviations below 0.002; no value lies beyond."""
    torch.manual_seed(0)
    drawn = draw(40_000, 2)
    shares = dict(down=0.5, across=0.5, turns=0.5, zoom=0.8, blur=0.5, contrast=0.8, brightness=0.8)
    ranges = dict(turns=(1, 3), zoom=(1, 1.5), blur=(0.25, 1), contrast=(0.6, 1.4), brightness=(-0.4, 0.4))
    for name, share in shares.items():
        values = getattr(drawn, name).float().view(40_000, -1)
        changed = (values != getattr(NEUTRAL, name).flatten()[0]).all(dim=1)
        assert changed.double().mean().item() == pytest.approx(share, abs=0.0165)
        if name in ranges:
            low, high = ranges[name]
            chosen = values[changed]
            assert chosen.min() >= low - 1e-6
            assert chosen.max() <= high + 1e-6
            assert chosen.mean().item() == pytest.approx((low + high) / 2, abs=0.03 if name == "turns" else 0.012)
    assert sorted(drawn.turns.unique().tolist()) == [0, 1, 2, 3]
    assert drawn.blur[:, 0].ne(drawn.blur[:, 1]).any()
    assert drawn.contrast[:, 0].ne(drawn.contrast[:, 1]).any()


def changed(before, after, prefix):
    names = [name for name in before if name.startswith(prefix)]
    return {before[name].equal(after[name]) for name in names} != {True}


def test_each_phase_trains_its_own_part_and_no_label_reaches_the_first(open_site, pvt):
    """Phase 1: encoder and projector, with every mask set to nan; phase 2: encoder, decoder and head, the projector rests.

    The same bits from a new process for each phase; the phase is one state on disk.
    """
    one = open_site(method="pflfe", network=pvt)
    labels = [sample["mask"] for sample in one.samples]
    start = one.copy()
    gamma = one.partition.split(start)[0]
    for sample in one.samples:
        sample["mask"] = torch.full_like(sample["mask"], float("nan"))
    sent, metrics = train(one, gamma, 0, phase=0)
    first = one.copy()
    assert 0 < metrics["loss"] <= 8
    assert [changed(start, first, part) for part in ("encoder", "projector", "decoder", "segmentation_head")] == [
        *(True, True, False, False)
    ]
    for sample, mask in zip(one.samples, labels, strict=True):
        sample["mask"] = mask
    again, _ = train(one, sent, 0, phase=1)
    second = one.copy()
    assert [changed(first, second, part) for part in ("encoder", "projector", "decoder", "segmentation_head")] == [
        *(True, False, True, True)
    ]
    fresh, _ = train(open_site(method="pflfe", network=pvt, at="fresh"), gamma, 0, phase=0)
    assert all(fresh[name].equal(sent[name]) for name in sent)
    fresh, _ = train(open_site(method="pflfe", network=pvt, at="fresh"), fresh, 0, phase=1)
    assert all(fresh[name].equal(again[name]) for name in again)
    events = [json.loads(line) for line in (one.store.folder / "record.jsonl").read_text().splitlines()]
    assert [(e["event"], e.get("phase")) for e in events] == [("enhancement", None), ("train", 0), ("train", 1)]
    assert 0 < events[0]["spread"] < 2


def test_without_enhancement_it_is_supervised_training_alone(open_site, pvt):
    """Table 4: FC-pFLFE without it is, to the bit, one epoch of the whole."""
    site = open_site(method="fc_pflfe", network=pvt, enhance="false")
    gamma = site.partition.split(site.copy())[0]
    sent, _ = train(site, gamma, 0)
    plain = open_site(method="fedavg", network=pvt, at="plain", private="decoder,head")
    wanted, _ = train(plain, plain.partition.split(plain.copy())[0], 0)
    assert all(sent[name].equal(wanted[name]) for name in wanted)


def test_a_collapse_is_warned_of_once(open_site, pvt, monkeypatch, caplog):
    """In its first round: of the spreads 0.005 and 0.001, the first. A run with 0.02 is not warned of."""
    for at, spreads, warnings in (("well", (0.02,), 0), ("collapsed", (0.005, 0.001), 1)):
        site = open_site(method="fc_pflfe", network=pvt, at=at)
        sent = site.partition.split(site.copy())[0]
        for number, spread in enumerate(spreads):
            monkeypatch.setattr(Enhancement, "spread", spread)
            sent, _ = train(site, sent, number)
        assert caplog.text.count("site-1: pFLFE's outputs have collapsed") == warnings


def test_the_projector_looks_at_the_deepest_features(open_site):
    """128 numbers an image: of the average over the last feature map, by the two layers, here once more by hand."""
    site = open_site(method="pflfe")
    network, images = site.network.eval(), torch.rand(2, 3, 32, 32)
    pooled = network.encoder(images)[-1].mean(dim=(2, 3))
    hidden = torch.relu(network.projector[2](pooled))
    torch.testing.assert_close(project(network, images), network.projector[4](hidden))
    assert project(network, images).shape == (2, 128)
