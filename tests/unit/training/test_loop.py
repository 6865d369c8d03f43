"""The training loop and prediction, on networks of a few numbers."""

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn

from feddp.errors import FedDPError, InputError, Stopped
from feddp.training.device import require_bfloat16
from feddp.training.loop import adamw, fit_epoch, predict
from feddp.training.settings import Training

PLAIN = Training(batch=2, augment=False)


class Bias(nn.Module):
    """Two classes whose logits are two parameters, whatever the image. Notes every image it sees."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return self.w.view(1, 2, 1, 1).expand(len(x), 2, *x.shape[2:])


def slope(logits, batch):
    return 5 * logits[:, 0].mean() - 0.3 * logits[:, 1].mean()


def images(count, size=2):
    """Images of their own: all pixels of a sample and of all samples differ."""
    pixels = torch.arange(count * size * size, dtype=torch.float32).view(count, 1, size, size) / 10
    return [{"image": image, "mask": (image > 1).float(), "stem": str(i)} for i, image in enumerate(pixels)]


def sgd(network, lr=1.0):
    return torch.optim.SGD(network.parameters(), lr=lr)


@pytest.mark.parametrize(("clip", "moved"), [(1.0, [-1, 0.3]), (2.0, [-2, 0.3]), (9.0, [-5, 0.3])])
def test_gradients_are_clipped_element_by_element(clip, moved):
    """L = 5 w_0 − 0.3 w_1, so the gradient is (5, −0.3); SGD at lr 1 moves by its negative.

    Clipped to [−1, 1]: (−1, +0.3). Clipped by its norm 5.009 instead, the second would move by 0.06.
    """
    network = Bias()
    fit_epoch(network, sgd(network), images(1), slope, Training(augment=False, clip=clip), seed=0)
    assert network.w.tolist() == pytest.approx(moved, abs=1e-6)


def test_the_optimiser_updates_all_parameters_in_one_pass():
    """Without `fused` an epoch takes longer, and its numbers differ in the last digits alone."""
    optimizer = adamw(Bias(), 0.1, 0.01)
    assert [group["fused"] for group in optimizer.param_groups] == [True]


def test_the_loss_is_the_mean_over_batches():
    """w starts at 0 and moves by (−1, 0.3) a step; L before the two steps: 0 and −5 − 0.09 = −5.09; mean −2.545."""
    network = Bias()
    assert fit_epoch(network, sgd(network), images(4), slope, PLAIN, seed=0) == pytest.approx(-2.545, abs=1e-6)
    assert len(network.seen) == 2


def trained(seed, count=6, augment=False, dropout=0.0):
    torch.manual_seed(11)
    network = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Dropout(dropout), nn.Conv2d(3, 1, 1))
    torch.manual_seed(random.getrandbits(32))  # what the generator holds must not matter
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    loss = nn.functional.binary_cross_entropy_with_logits
    samples = images(count, size=4)
    fit_epoch(network, optimizer, samples, lambda z, b: loss(z, b["mask"]), Training(batch=2, augment=augment), seed)
    return torch.cat([p.detach().flatten() for p in network.parameters()])


@pytest.mark.parametrize("chance", [{}, {"count": 1, "dropout": 0.5}, {"count": 1, "augment": True}])
def test_the_seed_decides_every_bit(chance):
    """The order of six samples; the dropout of a single one; its turns, of which two seeds may draw the same."""
    runs = [trained(seed, **chance) for seed in range(4)]
    assert all(trained(seed, **chance).equal(run) for seed, run in enumerate(runs))
    assert any(not run.equal(runs[0]) for run in runs)


def test_global_generators_are_left_alone():
    random.seed(1)
    network = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout(0.5))
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    fit_epoch(network, sgd(network, 0.1), images(4), lambda z, b: z.mean(), Training(batch=2), seed=3)
    list(predict(network, images(3)))
    assert torch.get_rng_state().equal(before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_loss_that_is_not_finite_ends_it_and_names_the_rate(value):
    network = Bias()
    with pytest.raises(FedDPError, match=f"the training loss is {value}; lower lr \\(now 0.25\\)"):
        fit_epoch(network, sgd(network, 0.25), images(2), lambda z, b: slope(z, b) + float(value), PLAIN, seed=0)


def test_stopping_ends_it_before_the_next_step():
    """Three batches; it is stopped when asked for the third time, so two were trained on."""
    network, asked = Bias(), iter([False, False, True])
    with pytest.raises(Stopped, match="stopped"):
        fit_epoch(network, sgd(network), images(6), slope, PLAIN, seed=0, stopped=lambda: next(asked))
    assert len(network.seen) == 2


def test_without_augmentation_images_are_seen_as_they_are():
    network, samples = Bias(), images(6)
    fit_epoch(network, sgd(network), samples, slope, PLAIN, seed=0)
    seen = sorted(torch.cat(network.seen).flatten(1).tolist())
    assert seen == [sample["image"].flatten().tolist() for sample in samples]


def test_with_augmentation_they_are_turned():
    """All pixels differ, so a turned or flipped image differs from its original; its pixels are the same ones."""
    network, samples = Bias(), images(6)
    fit_epoch(network, sgd(network), samples, slope, Training(batch=2), seed=0)
    seen = torch.cat(network.seen).flatten(1)
    originals = [sample["image"].flatten().tolist() for sample in samples]
    assert sorted(seen.tolist()) != originals
    assert sorted(row.sort().values.tolist() for row in seen) == originals


def test_it_trains_in_training_mode():
    network = Bias().eval()
    fit_epoch(network, sgd(network), images(2), slope, PLAIN, seed=0)
    assert network.training


def test_predictions_are_probabilities_in_the_samples_order():
    """A network that hands the image through: the logit ln 3 is the probability 3/4, 0 is 1/2, −ln 3 is 1/4."""
    logit = np.log(3.0)
    values = [logit, 0.0, -logit, 0.0, logit]
    samples = [{"image": torch.full((1, 2, 2), v), "mask": torch.zeros(1, 2, 2), "stem": str(i)} for i, v in enumerate(values)]
    network = nn.Sequential(nn.Identity(), nn.Dropout(0.9), nn.Conv2d(1, 1, 1, bias=False))
    nn.init.ones_(network[2].weight)
    parts = list(predict(network, samples, batch=2))
    assert [len(maps) for maps, _ in parts] == [2, 2, 1]
    maps = torch.cat([maps for maps, _ in parts])
    assert maps.shape == (5, 1, 2, 2)
    assert maps[:, 0, 1, 1].tolist() == pytest.approx([0.75, 0.5, 0.25, 0.5, 0.75], abs=1e-6)
    assert [stem for _, part in parts for stem in part["stem"]] == list("01234")
    assert not maps.requires_grad


class Noting(nn.Module):
    """Notes the type of what its convolution gives."""

    def __init__(self):
        super().__init__()
        self.layer, self.types = nn.Conv2d(1, 1, 1), []

    def forward(self, x):
        found = self.layer(x)
        self.types.append(found.dtype)
        return found


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_forward_pass_computes_in_the_plan_s_precision(precision):
    """The loss gets float32 in both, and the weights stay float32."""
    network, seen = Noting(), []
    training = Training(batch=2, precision_compute=precision)
    fit_epoch(network, sgd(network, 0.1), images(2), lambda z, b: seen.append(z.dtype) or z.mean(), training, seed=0)
    assert network.types == [getattr(torch, precision)]
    assert seen == [torch.float32]
    assert {p.dtype for p in network.parameters()} == {torch.float32}


def test_a_gpu_without_bfloat16_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(InputError, match="site A: its Tesla T4 has no bfloat16; .*precision_compute=float32"):
        require_bfloat16(torch.device("cuda:0"), "site A")


@pytest.mark.parametrize(
    ("can", "warned"), [({"avx512_bf16": True}, 0), ({"bf16": True}, 0), ({"avx512_f": True, "avx512_bf16": False}, 1)]
)
def test_a_cpu_without_bfloat16_is_warned_of(monkeypatch, caplog, can, warned):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
    require_bfloat16(torch.device("cpu"), "site A")
    assert caplog.messages == ["site A: its CPU has no instructions for bfloat16; float32 may be faster"] * warned


class Pixel(nn.Module):
    """Normalises what it makes of each 2 x 2 image: one value per channel and image."""

    def __init__(self, failing=""):
        super().__init__()
        self.layers, self.failing = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2)), failing

    def forward(self, x):
        if self.failing:
            raise ValueError(self.failing)
        return self.layers(x)


def test_one_value_per_channel_is_refused_with_the_remedy():
    """torch: "Expected more than 1 value per channel when training". Two images, or one of 3 x 3 pixels, have more, of mean 0
    after normalisation. Another ValueError is a bug and stays one."""

    def fit(network, samples, batch):
        return fit_epoch(network, sgd(network), samples, slope, Training(batch=batch, augment=False), seed=0)

    with pytest.raises(InputError, match=r"1 image\(s\) of 2 pixels have one value per channel, .* raise --size or batch"):
        fit(Pixel(), images(2), 1)
    assert fit(Pixel(), images(2), 2) == pytest.approx(0, abs=1e-5)
    assert fit(Pixel(), images(1, size=3), 1) == pytest.approx(0, abs=1e-5)
    with pytest.raises(ValueError, match="another") as raised:
        fit(Pixel("another"), images(2), 1)
    assert not isinstance(raised.value, FedDPError)
