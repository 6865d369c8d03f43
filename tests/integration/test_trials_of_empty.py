"""`feddp bench empty`: what FedDP has no setting for is tried with a method of the benchmark's own."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import empty
from benchmarks.empty import NAME, TRIALS, Tried, TriedSettings, with_bias
from feddp.data.folder import SiteFolder, write_site
from feddp.data.synthesize import synthesize
from feddp.errors import InputError
from feddp.files import NETWORK, PROGRESS, read_events, site_folder
from feddp.jobs.folder import federation_of
from feddp.methods import OWN
from feddp.networks.weights import read_network
from feddp.plan.resolve import build_network
from feddp.run.options import Options, run_here
from feddp.stages.round import LocalRound
from feddp.stages.scored import DICE, curves
from feddp.training.losses import dice_ce


@pytest.fixture
def data(tmp_path):
    """Two sites of eight images."""
    synthesize(tmp_path / "data", sites=2, images=8, size=32)
    return tmp_path / "data"


def test_the_rate_rises_in_equal_steps(toy, data, tmp_path, monkeypatch):
    """Over four rounds to 0.001, at both sites: a quarter, a half, three quarters and all of it, and then all of it."""
    rates, fit = {}, LocalRound.fit

    def recorded(self, *arguments, **named):
        rates.setdefault(self.name, []).append(self._optimizer.param_groups[0]["lr"])
        return fit(self, *arguments, **named)

    monkeypatch.setattr(LocalRound, "fit", recorded)
    with patch.dict(OWN, {NAME: Tried}):
        run_here(data, tmp_path / "out", Options(NAME, 6, None, toy, 32, settings=("warm_up=4",)), "local")
    wanted = pytest.approx([0.00025, 0.0005, 0.00075, 0.001, 0.001, 0.001])
    assert rates == {"site-1": wanted, "site-2": wanted}


def test_the_losses():
    """Logits 0 are probabilities of 1/2, whose cross-entropy is log 2 at every pixel.

    Two images of four pixels, of which one and three are foreground. Soft Dice loss is 1 - 2 Σ py / (Σ p + Σ y): over the batch
    1 - 4 / (4 + 4) = 1/2; image by image 1 - 1 / (2 + 1) = 2/3 and 1 - 3 / (2 + 3) = 2/5, whose mean is 8/15. A weight of 10 on
    four of eight pixels makes the cross-entropy (4 · 10 + 4) / 8 = 5.5 times log 2.
    """
    mask = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]], [[[1.0, 1.0], [1.0, 0.0]]]])
    logits, site, expected = torch.zeros_like(mask), SimpleNamespace(segmentation_loss=dice_ce), {}
    expected[TriedSettings()] = 1 / 2 + math.log(2)
    expected[TriedSettings(per_image=True)] = 8 / 15 + math.log(2)
    expected[TriedSettings(foreground=10)] = 1 / 2 + 5.5 * math.log(2)
    for settings, value in expected.items():
        assert Tried(settings).loss(site, logits, {"mask": mask}).item() == pytest.approx(value, abs=1e-4), settings


def test_the_first_bias(toy, data, tmp_path):
    """At 0.1 the logit is log(0.1 / 0.9); every other tensor is that of a run without a bias."""
    run = Options("fedavg", 1, network=toy, size=32)
    biased = with_bias(run, data, tmp_path / "first.safetensors", 0.1)
    changed, _ = read_network(biased.weights)
    first = build_network(run.plan(federation_of(data)[1], ["site-1", "site-2"])).state_dict()
    (bias,) = (name for name in first if not torch.equal(changed[name], first[name]))
    assert bias.endswith("bias")
    assert changed[bias].tolist() == pytest.approx([math.log(1 / 9)])
    assert changed.keys() == first.keys()


def test_without_a_change_the_method_is_fedavg(toy, data, tmp_path):
    """To the last bit."""
    with patch.dict(OWN, {NAME: Tried}):
        for name in ("fedavg", NAME):
            run_here(data, tmp_path / name, Options(name, 3, None, toy, 32), "local")
    one, other = (read_network(site_folder(tmp_path / name, "site-1") / NETWORK)[0] for name in ("fedavg", NAME))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def two_classes(root, site, **splits):
    """Writes a site with a disc and a cup: {split: the highest label of each image's mask}."""
    described = {"name": "toy", "channels": 3, "classes": ["disc", "cup"], "labels": "nested"}
    image, mask = np.zeros((32, 32, 3), np.uint8), np.zeros((32, 32), np.uint8)
    labels = [(split, label) for split, found in splits.items() for label in found]
    samples = [
        (f"i{n}", f"p{n}", split, image, mask + np.eye(32, dtype=np.uint8) * label) for n, (split, label) in enumerate(labels)
    ]
    write_site(root / site, described, samples)


def test_what_nothing_found_scores(tmp_path):
    """At A one of four class masks is empty, the cup of the first image; at B all are: (1/4 + 1) / 2."""
    two_classes(tmp_path, "A", train=[1], val=[1, 2])
    two_classes(tmp_path, "B", train=[1], val=[0])
    assert empty.of_nothing(tmp_path, 32) == (1 / 4 + 1) / 2
    two_classes(tmp_path, "C", train=[1])
    with pytest.raises(InputError, match="site C: .*val"):
        empty.of_nothing(tmp_path, 32)


def test_every_trial_changes_the_training(feddp, toy, data, tmp_path, monkeypatch):
    """The networks of no two trials are equal; `loss=dice` is the setting of FedAvg. Two of 4 validation masks are empty."""
    networks = []

    def recorded(data, out, run, env):
        run_here(data, out, replace(run, settings=("start=last", *run.settings)), env)
        networks.append(read_network(site_folder(out, "site-1") / NETWORK)[0])

    for site in ("site-1", "site-2"):
        stem = SiteFolder.open(data / site).rows_of("val")[0].image
        blank = SiteFolder.open(data / site).mask_path(stem)
        Image.fromarray(np.zeros((32, 32), np.uint8)).save(blank)
    monkeypatch.setattr(empty, "run_here", recorded)
    options = ("--rounds", "2", "--size", "32", "--network", toy, "--seeds", "0", "0", "--data", data)
    code, out, err = feddp("bench", "empty", *options)
    assert code == 0, err
    (found,) = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    assert found["nothing"] == 1 / 2
    assert {trial: {seed: len(dice) for seed, dice in seeds.items()} for trial, seeds in found["dice"].items()} == {
        trial: {"0": 2} for trial in TRIALS
    }
    assert [line.split(" | ")[0] for line in out.splitlines()[3:-1]] == [f"| {trial}" for trial in TRIALS]
    for one, other in itertools.combinations(networks, 2):
        assert any(not torch.equal(one[name], other[name]) for name in one)
    run_here(data, tmp_path / "out", Options("fedavg", 2, None, toy, 32, settings=("loss=dice",)), "local")
    by_site = curves(read_events(tmp_path / "out" / PROGRESS), DICE)
    assert found["dice"]["dice"]["0"] == [sum(curve[round] for curve in by_site.values()) / 2 for round in (1, 2)]
    assert NAME not in feddp("methods")[1]
