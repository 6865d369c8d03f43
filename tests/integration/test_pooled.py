"""Centralized training: all images in one place, outside FLARE, with the results of a federation's run."""

import csv
import json
import shutil
import threading
import time
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file

from feddp.adaptation.models import prepared
from feddp.data.folder import SiteFolder
from feddp.data.loading import load
from feddp.data.preparation import KEY, Preparation
from feddp.errors import FedDPError, Stopped
from feddp.files import WEIGHTS
from feddp.jobs.folder import export
from feddp.networks.weights import save_network
from feddp.plan.resolve import build_network
from feddp.run import pooled
from feddp.run.follow import Follower
from feddp.run.options import Options, resume_here, run_here
from feddp.stages import train as stage
from feddp.training.loop import adamw, fit_epoch
from feddp.training.losses import segmentation_loss
from feddp.training.seeds import seed_of

OPTIONS = Options("centralized", rounds=2, size=32, settings=("batch=4", "start=last"))
SITES = ("site-1", "site-2")
MADE = Preparation("axial", (-160.0, 240.0), True)


@pytest.fixture(scope="module")
def run(tiny_root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pooled")
    shutil.copytree(tiny_root, folder / "data")
    described = folder / "data/site-1/dataset.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {KEY: asdict(MADE)}))
    return folder / "run", run_here(folder / "data", folder / "run", OPTIONS)


def test_one_network_is_trained_on_all_images(run, tiny_root, plan_for):
    """Two epochs over the 16 images of both sites, as a plain loop: the same bits, at both sites."""
    out, _ = run
    plan = plan_for(method="centralized")
    samples = [sample for site in SITES for sample in load(SiteFolder.open(tiny_root / site), "train", 32)]
    assert len(samples) == 16
    network = build_network(plan)
    optimizer = adamw(network, plan.training.lr, plan.training.weight_decay)
    loss = segmentation_loss(plan.training.loss)
    for t in range(2):
        seed = seed_of(plan.seed, "pool", t, 0)
        fit_epoch(network, optimizer, samples, lambda logits, batch: loss(logits, batch["mask"]), plan.training, seed)
    for site in SITES:
        own = load_file(out / "sites" / site / "network.safetensors")
        assert own.keys() == network.state_dict().keys()
        assert all(torch.equal(own[name], value) for name, value in network.state_dict().items())


def test_a_site_s_network_says_how_that_site_s_images_were_made(run):
    """Of site-1; site-2 does not know, though its network was trained on the same images."""
    assert [prepared(run[0] / "sites" / site / "network.safetensors") for site in SITES] == [MADE, None]


def test_it_leaves_what_a_federation_leaves_and_says_what_it_is(run):
    out, results = run
    assert results == json.loads((out / "results.json").read_text())
    assert results["federated"] is False
    assert set(results["sites"]) == set(SITES)
    assert "outside FLARE" in (out / "results.md").read_text()
    for site in SITES:
        with open(out / "sites" / site / "images.csv", newline="") as handle:
            rows = list(csv.DictReader(handle))
        assert len(rows) == results["sites"][site]["final"]["dice"]["n"] == 2
    events = [json.loads(line) for line in (out / "progress.jsonl").read_text().splitlines()]
    steps = [("train", 1), ("train", 2), ("adopt", 2)]  # as those of a federation of one site
    assert [(e["task"], e["round"]) for e in events if e["event"] == "ask"] == steps
    assert [(e["task"], e["round"]) for e in events if e["event"] == "answer"] == steps
    assert [e["round"] for e in events if e["event"] == "round"] == [1, 2]


def test_it_says_on_the_terminal_that_nothing_is_federated(tiny_root, tmp_path, capsys):
    run_here(tiny_root, tmp_path / "out", Options("centralized", rounds=1, size=32))
    assert "outside FLARE" in " ".join(capsys.readouterr().err.split())


def test_a_run_that_starts_from_a_checkpoint_is_continued_from_it(tiny_root, tmp_path, monkeypatch, toy):
    """The process dies in the first round. Without the checkpoint's tensors, the first round would start from the seed's."""
    checkpoint = tmp_path / "checkpoint.safetensors"
    plan = Options("centralized", network=toy).plan({"channels": 3, "classes": ("lesion",), "labels": "nested"}, SITES)
    save_network(checkpoint, {name: value + 1 for name, value in build_network(plan).state_dict().items()}, {})
    options = replace(OPTIONS, network=toy, weights=str(checkpoint))
    whole = run_here(tiny_root, tmp_path / "whole", options)
    out = tmp_path / "out"
    train = stage.train

    def killed(*_):
        raise FedDPError("killed")

    monkeypatch.setattr(stage, "train", killed)
    with pytest.raises(FedDPError, match="killed"):
        run_here(tiny_root, out, options)
    monkeypatch.setattr(stage, "train", train)
    mine = out / WEIGHTS
    checkpoint.rename(mine.with_suffix(".kept"))  # --resume needs the run's folder alone
    kept = mine.read_bytes()
    save_network(mine, build_network(plan).state_dict(), {})
    with pytest.raises(FedDPError, match=r"weights\.safetensors: tensors of SHA-256 .*; type the same `feddp run` again"):
        resume_here(out)
    mine.unlink()
    with pytest.raises(FedDPError, match=r"out lacks weights\.safetensors, .*; type the same `feddp run` again"):
        resume_here(out)
    mine.write_bytes(kept)
    assert resume_here(out) == whole
    for site in SITES:
        one, other = (load_file(each / "sites" / site / "network.safetensors") for each in (out, tmp_path / "whole"))
        assert all(torch.equal(one[name], value) for name, value in other.items())


def test_ctrl_c_does_not_wait_for_the_evaluation(tiny_root, tmp_path, monkeypatch, toy):
    """It is pressed while site-1 is evaluated, which then stops; site-2 is not begun."""
    begun, asked = threading.Event(), []

    def evaluate(site):
        begun.set()
        deadline = time.monotonic() + 10
        while not site.stopped() and time.monotonic() < deadline:
            time.sleep(0.01)
        asked.append((site.name, site.stopped()))
        raise Stopped("the job was aborted")

    def pressed(*_):
        assert begun.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(pooled, "evaluate", evaluate)
    monkeypatch.setattr(Follower, "until", pressed)
    with pytest.raises(KeyboardInterrupt):
        run_here(tiny_root, tmp_path / "out", replace(OPTIONS, network=toy))
    assert asked == [("site-1", True)]


def test_no_job_carries_it(plan_for, tmp_path):
    with pytest.raises(FedDPError, match="cannot be a FLARE job"):
        export(plan_for(method="centralized"), tmp_path / "job")
    with pytest.raises(FedDPError, match="no stage can follow"):
        plan_for(method="centralized", stages=("train", "calibrate"))


@pytest.mark.parametrize("wish", [{"env": "poc"}, {"threads": 1}, {"without_consent": ("site-1",)}])
def test_what_only_a_federation_has_is_refused(tiny_root, tmp_path, wish):
    with pytest.raises(FedDPError, match="outside FLARE"):
        run_here(tiny_root, tmp_path / "out", OPTIONS, **wish)
    assert not (tmp_path / "out").exists()
