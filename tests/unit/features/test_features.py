"""`feddp features`: the divergence by hand, pixels of the class that they claim, and the command on runs of tiny networks."""

import csv
import json
import math
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from feddp.data.synthesize import synthesize
from feddp.errors import FedDPError
from feddp.features.divergence import FLOOR, divergence, gaussian_kl
from feddp.features.extract import Pixels, at_size, sample_pixels, tapped
from feddp.features.report import kl_table
from feddp.features.tsne import embed
from feddp.networks import build
from feddp.networks.weights import read_network, save_network
from feddp.plan.schema import Plan

# --- the divergence --------------------------------------------------------------------------------------------------------


def test_the_closed_form_by_hand():
    """N(0, 1) from N(2, 4): ½ (ln 4 + (1 + 4)/4 − 1) = ½ ln 4 + 1/8; the other way ½ (−ln 4 + (4 + 4)/1 − 1) = 7/2 − ½ ln 4.
    A second feature N(1, 1) from N(1, e): ½ (1 + 1/e − 1) = 1/(2e), added."""
    zero, one, two, four = (np.array([x], dtype=float) for x in (0, 1, 2, 4))
    assert gaussian_kl(zero, one, two, four) == pytest.approx(math.log(4) / 2 + 1 / 8)
    assert gaussian_kl(two, four, zero, one) == pytest.approx(7 / 2 - math.log(4) / 2)
    both = gaussian_kl(np.array([0, 1.0]), np.ones(2), np.array([2, 1.0]), np.array([4, math.e]))
    assert both == pytest.approx(math.log(4) / 2 + 1 / 8 + 1 / (2 * math.e))


def test_the_divergence_is_of_the_fitted_gaussians_in_both_directions():
    """F = {−1, 1} is N(0, 1), B = {0, 4} is N(2, 4): the logarithms cancel, ½ (1/8 + 7/2) = 29/16. A feature that is 7
    everywhere adds nothing, F and B may be exchanged, and a unit of 1000 changes nothing."""
    f, b = np.array([[-1, 7], [1, 7]], dtype=np.float32), np.array([[0, 7], [4, 7]], dtype=np.float32)
    assert divergence(f, b) == pytest.approx(29 / 16)
    assert divergence(b, f) == pytest.approx(29 / 16)
    assert divergence(1000 * f, 1000 * b) == pytest.approx(29 / 16)
    assert divergence(f, f) == 0
    assert divergence(f[:1], b) is None


def test_a_feature_that_is_constant_in_one_set_is_finite():
    """F = {1, 1}, B = {0, 2}: both means 1, variances 0 and 1, over both sets 1/2. With v = FLOOR/2 in place of the 0:
    ½ · ½ (v + 1/v − 2)."""
    v = FLOOR / 2
    assert divergence(np.ones((2, 1)), np.array([[0.0], [2.0]])) == pytest.approx((v + 1 / v - 2) / 4)


def test_a_row_a_run_and_no_average_without_every_site():
    """Run one at A: 29/16, at B the same sets further apart by their scale's square; run two was not at B."""
    features = np.array([[-1.0], [1.0], [0.0], [4.0]])
    pixels = Pixels(features, np.array([1, 2, 0, 0]))  # both classes are foreground
    apart = Pixels(features + np.array([[0], [0], [8], [8]]), np.array([1, 1, 0, 0]))
    # N(0, 1) and N(10, 4): ½ · ½ [(1 + 100)/4 + (4 + 100) − 2] = (25.25 + 102)/4
    table = kl_table({"one": {"A": pixels, "B": apart}, "two": {"A": pixels}}, ["A", "B"], "")
    assert table.heads == ("Run", "A", "B", "Average")
    assert [cell.mean for cell in table.rows[0][1:]] == pytest.approx([29 / 16, 127.25 / 4, (29 / 16 + 127.25 / 4) / 2])
    assert table.rows[1] == ("two", table.rows[0][1], "—", "—")
    assert not table.best()


# --- the pixels ------------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """Features are the image itself, at half its size; the encoder's deepest map is at a quarter."""

    def __init__(self, channels: int = 3, classes: int = 1, pretrained: bool = False):
        super().__init__()
        self.encoder = nn.ModuleList([nn.AvgPool2d(2), nn.AvgPool2d(2)])
        self.decoder = First()
        self.segmentation_head = nn.Sequential(nn.Conv2d(channels, classes, 1), nn.Upsample(scale_factor=2))

    def forward(self, x):
        high = self.encoder[0](x)
        return self.segmentation_head(self.decoder([x, high, self.encoder[1](high)]))


class First(nn.Module):
    def forward(self, maps):
        return maps[1]


def coloured(classes: int = 2, count: int = 11, size: int = 16) -> list[dict]:
    """Images whose every channel is the mask's class plus the image's number / 100: a feature says where it is from."""
    chance = np.random.default_rng(5)
    samples = []
    for i in range(count):
        blocks = chance.integers(0, classes + 1, (size // 4, size // 4)).repeat(4, 0).repeat(4, 1)
        mask = torch.from_numpy(np.stack([blocks >= c for c in range(1, classes + 1)])).float()
        image = torch.from_numpy(blocks).float().expand(3, -1, -1) + i / 100
        samples.append({"image": image, "mask": mask, "stem": str(i)})
    return samples


@pytest.mark.parametrize("layer", ["decoder", "encoder"])
def test_pixels_are_of_the_class_they_claim(layer):
    """Blocks of 4 x 4, so that no pixel of a map mixes classes: a feature's whole part is its class."""
    pixels = sample_pixels(Tiny(), coloured(), "nested", layer, per_class=20, seed=0, what="")
    assert np.floor(pixels.features[:, 0] + 1e-6).tolist() == pixels.classes.tolist()
    assert np.bincount(pixels.classes).tolist() == [20, 20, 20]
    images = {round(100 * x) % 100 for x in pixels.features[:, 0].tolist()}
    assert len(images) > 8, "from all images, those after the first batch of 8 too"
    assert {8, 9, 10} & images


def test_exclusive_classes_are_told_apart_too():
    samples = coloured()
    for sample in samples:
        sample["mask"][0] -= sample["mask"][1]
    pixels = sample_pixels(Tiny(), samples, "exclusive", "decoder", per_class=20, seed=0, what="")
    assert np.floor(pixels.features[:, 0] + 1e-6).tolist() == pixels.classes.tolist()
    assert set(pixels.classes) == {0, 1, 2}


def test_no_pixel_twice_and_all_where_there_are_fewer():
    """11 images of 8 x 8 pixels; every pixel has a value of its own."""
    samples = coloured(count=11)
    for i, sample in enumerate(samples):
        sample["image"] = (
            (torch.arange(64.0) + 64 * i).view(8, 8).repeat_interleave(2, 0).repeat_interleave(2, 1).expand(3, -1, -1)
        )
    pixels = sample_pixels(Tiny(), samples, "nested", "decoder", per_class=10_000, seed=0, what="")
    assert sorted(pixels.features[:, 0].tolist()) == list(range(64 * 11))
    some = sample_pixels(Tiny(), samples, "nested", "decoder", per_class=100, seed=0, what="")
    assert len(set(some.features[:, 0].tolist())) == 300


def test_the_seed_chooses_the_pixels():
    one, two, other = (sample_pixels(Tiny(), coloured(), "nested", "decoder", 30, seed, "") for seed in (1, 1, 2))
    assert np.array_equal(one.features, two.features)
    assert not np.array_equal(one.features, other.features)


def test_a_pixel_s_class_is_the_one_at_its_centre():
    """4 x 4 to 2 x 2: of each 2 x 2 the one below and to the right of the centre, as torch rounds."""
    classes = torch.arange(16).view(1, 4, 4)
    assert at_size(classes, (2, 2)).tolist() == [[[5, 7], [13, 15]]]
    assert at_size(classes, (4, 4)).equal(classes)


@pytest.mark.parametrize("layers", [{}, {"projector": {}}, {"local_calibration": {"sites": 2}}])
def test_what_is_tapped_is_what_the_head_is_given(layers):
    """On a real network, and with each method's layers: the head makes of the tapped map what the network puts out."""
    network = build("resnet18-fpn", 3, 1, seed=0, layers=layers).eval()
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad(), tapped(network, "decoder") as head, tapped(network, "encoder") as deep:
        logits = network(image)
        assert torch.equal(network.segmentation_head(head[0]), logits)
        assert deep[0].shape == (1, 512, 2, 2)
    assert len(head) == 2
    assert len(deep) == 1
    network(image)
    assert len(head) == 2, "the hook is gone"


def test_a_network_without_a_head_is_refused(toy):
    with pytest.raises(FedDPError, match="Toy has no segmentation_head"), tapped(build(toy, 3, 1, seed=0), "decoder"):
        pass


def test_the_embedding_is_the_seed_s():
    features = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    features[:20] += 20
    one, two = embed(features, 2**40 + 1), embed(features, 2**40 + 1)
    assert np.array_equal(one, two)
    assert one.shape == (40, 2)
    gap = np.linalg.norm(one[:20].mean(axis=0) - one[20:].mean(axis=0))
    assert gap > np.linalg.norm(one[:20] - one[:20].mean(axis=0), axis=1).max(), "two clouds stay two"
    with pytest.raises(FedDPError, match="2 pixels are too few"):
        embed(features[:2], 0)


# --- the command -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sites of 64 x 64 pixels, 2 test images each."""
    root = tmp_path_factory.mktemp("features")
    synthesize(root, sites=2, images=12, size=64)
    return root


@pytest.fixture
def run(tmp_path, resnet):
    """Makes a run's folder as `feddp run` leaves it, of a method's own network, untrained, another seed at each site."""

    def make(method: str, name: str | None = None, sites=("site-1", "site-2")):
        folder = tmp_path / (name or method)
        plan = Plan(method, resnet, 3, ("lesion",), "nested", 64, 1, sites=("site-1", "site-2"))
        metadata = {"network": resnet, "channels": "3", "classes": '["lesion"]', "labels": "nested", "size": "64"}
        metadata |= {"layers": json.dumps(plan.layers)} if plan.layers else {}
        for seed, site in enumerate(sites):
            state = build(resnet, 3, 1, seed=seed, layers=plan.layers).state_dict()
            save_network(folder / "sites" / site / "network.safetensors", state, metadata)
        (folder / "results.json").write_text(json.dumps({"sites": dict.fromkeys(sites, {})}))
        return folder

    return make


def read(folder):
    with open(folder / "table_kl.csv", newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def test_runs_side_by_side(feddp, run, data, tmp_path):
    """A sigmoid's, pFLFE's and a softmax's: a row and a panel each. The same seed leaves the same bytes, another does not."""
    models = [part for method in ("fedavg", "pflfe", "virtual_class") for part in ("--models", run(method))]
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            code, out, err = feddp(
                "features", *models, "--data", data, "--out", tmp_path / name, "--pixels", 20, "--seed", seed
            )
        assert code == 0, err
    assert "Table 5" in out
    rows = read(tmp_path / "one")
    assert [row["Run"] for row in rows] == ["fedavg", "pflfe", "virtual_class"]
    for row in rows:
        a, b = float(row["site-1"]), float(row["site-2"])
        assert a > 0
        assert float(row["Average"]) == pytest.approx((a + b) / 2)
    # pFLFE's projector is no part of what it predicts: its features are FedAvg's
    assert rows[0]["site-1"] == rows[1]["site-1"] != rows[2]["site-1"]
    bytes_of = {name: (tmp_path / name / "tsne.png").read_bytes() for name in ("one", "two", "three")}
    assert bytes_of["one"] == bytes_of["two"] != bytes_of["three"]
    assert read(tmp_path / "two") == rows != read(tmp_path / "three")
    with Image.open(tmp_path / "one/tsne.png") as picture:
        assert picture.size[0] > 2.5 * picture.size[1], "three panels"
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 10, "an empty canvas"


def test_one_site_and_the_encoder_s_features(feddp, run, data, tmp_path):
    """Two runs of one name are told apart by their paths; a site that one run lacks is left blank there."""
    here, there = run("fedavg", "a/fedavg"), run("fedavg", "b/fedavg", sites=("site-2",))
    code, _, err = feddp(
        "features", "--models", here, "--models", there, "--data", data, "--out", tmp_path / "o", "--pixels", 9
    )
    assert code == 0, err
    assert [(row["Run"], row["site-1"] == "—", row["Average"] == "—") for row in read(tmp_path / "o")] == [
        (str(here), False, False),
        (str(there), True, True),
    ]
    rest = ("--data", data, "--out", tmp_path / "e", "--site", "site-2", "--layer", "encoder")
    code, out, err = feddp("features", "--models", here, *rest)
    assert code == 0, err
    assert list(read(tmp_path / "e")[0]) == ["Run", "site-2", "Average"]
    assert "encoder features" in (tmp_path / "e/table_kl.tex").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--models": "{nothing}"}, "is not a finished run"),
        ({"--site": "site-9"}, "--site site-9: "),
        ({"--layer": "middle"}, "--layer middle: there are decoder, encoder"),
        ({"--device": "cuda:99"}, "--device cuda:99 cannot be used"),
        ({"--out": "{occupied}"}, "not empty"),
        ({"--data": "{nothing}"}, "has no site-1, site-2; name the data that --models was run on"),
        ({"--data": "{other}"}, "is not of (channels, classes, labels) = (3, ('lesion',), 'nested')"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(feddp, run, data, tmp_path, changes, message):
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied/file").touch()
    synthesize(tmp_path / "other", sites=2, images=6, size=32)
    for metadata in tmp_path.glob("other/*/dataset.json"):
        metadata.write_text(metadata.read_text().replace('"nested"', '"exclusive"'))
    given = {"--models": run("fedavg"), "--data": data, "--out": tmp_path / "out"}
    given |= {k: v.format(**{n: tmp_path / n for n in ("nothing", "occupied", "other")}) for k, v in changes.items()}
    code, _, err = feddp("features", *(part for pair in given.items() for part in pair))
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_network_without_its_facts_is_named(feddp, run, data, tmp_path):
    folder = run("fedavg")
    file = folder / "sites/site-2/network.safetensors"
    state, metadata = read_network(file)
    save_network(file, state, {name: value for name, value in metadata.items() if name != "size"})
    code, _, err = feddp("features", "--models", folder, "--data", data, "--out", tmp_path / "out")
    assert code == 2
    assert f"{file}: its metadata lacks size" in " ".join(err.split())
