"""A network sees images after its training, at its site and elsewhere, as it saw them in training: z-scores, or values / 255.

The network here calls a pixel lesion if its first channel's value is above one half. The images are flat, 255 everywhere: their
z-scores are 0, so no pixel is lesion; divided by 255 they are 1, so every pixel is."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from feddp.adaptation.models import read_models
from feddp.compare.scores import Result
from feddp.compare.unseen import unseen_tables
from feddp.data.folder import SiteFolder
from feddp.errors import FedDPError, InputError
from feddp.features import report
from feddp.networks import NETWORKS, build
from feddp.networks.metadata import NORMALISATIONS
from feddp.networks.weights import load_personal, save_network
from feddp.partition import HEAD
from feddp.run.predict import predict
from feddp.stages import adapt as adapt_stage
from feddp.stages.train import adopt

METADATA = {"network": "bright", "channels": "3", "classes": '["lesion"]', "labels": "nested", "size": "32"}
SAVED = [({}, 0), ({"normalise": "zscore"}, 0), ({"normalise": "scale"}, 1)]


class Bright(nn.Module):
    """logit = first channel − 1/2."""

    roles = {HEAD: ("head",)}

    def __init__(self, channels: int, classes: int, pretrained: bool = False):
        super().__init__()
        self.head = nn.Conv2d(channels, classes, 1)
        self.head.weight.data.zero_()[:, 0] = 1.0
        self.head.bias.data.fill_(-0.5)

    def forward(self, x):
        return self.head(x)


@pytest.fixture(autouse=True)
def _bright(monkeypatch):
    monkeypatch.setitem(NETWORKS, "bright", Bright)


@pytest.fixture
def pngs(tmp_path):
    folder = tmp_path / "pngs"
    folder.mkdir()
    Image.new("RGB", (40, 30), (255, 255, 255)).save(folder / "a.png")
    return folder


def run_of(folder, metadata, settings=None):
    """A finished FedAvg run of two sites."""
    state = build("bright", 3, 1, seed=0).state_dict()
    for site in ("A", "B"):
        save_network(folder / "sites" / site / "network.safetensors", state, METADATA | metadata | {"site": site})
    save_network(folder / "shared.safetensors", state, {"round": "2"})
    results = {"sites": {"A": {}, "B": {}}, "selection": "val", "federated": True, "settings": settings or {}}
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def value_of(mask):
    (value,) = np.unique(np.asarray(Image.open(mask)))
    return value


@pytest.mark.parametrize(("metadata", "value"), SAVED)
def test_predict_normalises_as_the_file_says(tmp_path, pngs, metadata, value):
    run = run_of(tmp_path / "run", metadata)
    predict(run / "sites/A/network.safetensors", pngs, tmp_path / "masks")
    assert value_of(tmp_path / "masks/a.png") == value


@pytest.mark.parametrize(("metadata", "value"), SAVED)
def test_adapt_normalises_as_the_file_says(tmp_path, pngs, feddp, metadata, value):
    run = run_of(tmp_path / "run", metadata)
    code, _, err = feddp("adapt", "--models", run, "--images", pngs, "--out", tmp_path / "masks", "--how", "global")
    assert code == 0, err
    assert value_of(tmp_path / "masks/a.png") == value


def test_another_word_is_refused(tmp_path, pngs, plan_for):
    run = run_of(tmp_path / "run", {"normalise": "log"})
    with pytest.raises(InputError, match="network.safetensors: unknown normalise 'log'; it is one of zscore, scale"):
        load_personal(run / "sites/A/network.safetensors")
    with pytest.raises(FedDPError, match="normalise='log' is not one of zscore, scale"):
        plan_for(network="bright", method="fedavg", normalise="log")


@pytest.mark.parametrize("normalise", NORMALISATIONS)
@pytest.mark.parametrize("split", ["samples", "validation", "test"])
def test_a_site_normalises_as_the_plan_says(open_site, tiny_root, normalise, split):
    """At the images' own size, the first of the split: x / 255, or (x − mean) / deviation by channel."""
    site = open_site(network="bright", method="fedavg", normalise=normalise)
    sample = getattr(site, split)[0]
    x = np.asarray(Image.open(tiny_root / "site-1/images" / f"{sample['stem']}.png"), dtype=float).transpose(2, 0, 1)
    scores = (x - x.mean((1, 2), keepdims=True)) / x.std((1, 2), keepdims=True)
    wanted = torch.as_tensor(scores if normalise == "zscore" else x / 255, dtype=torch.float32)
    torch.testing.assert_close(sample["image"], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("normalise", NORMALISATIONS)
def test_a_saved_network_says_how(open_site, normalise):
    site = open_site(network="bright", method="fedavg", normalise=normalise)
    adopt(site, site.copy(), 0)
    assert site.store.read("start")[1]["normalise"] == normalise


def test_table_iv_shows_each_run_the_images_as_it_knows_them(tmp_path, tiny_root, monkeypatch):
    """Two variants on one unseen site: the images of one are z-scores, those of the other lie between 0 and 1."""
    from feddp.compare import unseen

    seen, real = [], unseen.measure_networks
    monkeypatch.setattr(unseen, "measure_networks", lambda nets, images, classes: seen.append(images) or real(nets, images))
    settings = ({}, {"normalise": "scale"})
    runs = {str(n): Result({0: run_of(tmp_path / f"run-{n}", given, given)}, {}) for n, given in enumerate(settings)}
    (table,) = unseen_tables(runs, SiteFolder.open(tiny_root / "site-1"), ["A", "B"], 32, "cpu")
    assert len(table.rows) == 2
    scored, scaled = (torch.stack([sample["image"] for sample in samples]) for samples in seen)
    assert scored.mean().item() == pytest.approx(0, abs=1e-4)
    assert scored.min() < 0
    assert 0 <= scaled.min() < scaled.max() <= 1


def test_features_are_of_the_images_as_the_network_knows_them(tmp_path, tiny_root, monkeypatch):
    seen = []
    monkeypatch.setattr(report, "load", lambda *given: seen.append(given) or [])
    for normalise in NORMALISATIONS:
        file = run_of(tmp_path / normalise, {"normalise": normalise}) / "sites/A/network.safetensors"
        with pytest.raises(FedDPError, match="no image in split test"):
            report._pixels(None, file, SiteFolder.open(tiny_root / "site-1"))
    assert [given[3] for given in seen] == list(NORMALISATIONS)


def test_a_donor_of_another_normalisation_is_refused(tmp_path, plan_for, monkeypatch):
    """An adaptation job's plan names the run's normalisation; a file without it was trained on z-scores."""
    for metadata, _ in SAVED:
        run = run_of(tmp_path / str(metadata), metadata)
        file = run / "sites/A/network.safetensors"
        monkeypatch.setattr(adapt_stage, "last_network", lambda folder, file=file: file)
        for normalise in NORMALISATIONS:
            host = type("Host", (), {"name": "A", "files": lambda self, job: None})()
            host.plan = plan_for(network="bright", method="fedavg", normalise=normalise)
            if metadata.get("normalise", "zscore") == normalise:
                assert adapt_stage._own_network(host, "job")
            else:
                with pytest.raises(InputError, match=r"another network than this job's: normalise="):
                    adapt_stage._own_network(host, "job")


def test_the_models_of_a_run_say_how(tmp_path):
    assert [read_models(run_of(tmp_path / str(m), m)).normalise for m, _ in SAVED] == ["zscore", "zscore", "scale"]
