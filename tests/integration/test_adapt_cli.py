"""`feddp adapt`, from a run's folder to masks; what it reads, and what it answers to a mistake."""

import json
import math
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import tensor

from feddp.adaptation import unseen_site
from feddp.adaptation.choices import GLOBAL, AdaptationOptions, Settings
from feddp.adaptation.models import read_models
from feddp.adaptation.strategies import STRATEGIES
from feddp.data.preparation import KEY, Preparation
from feddp.errors import FedDPError
from feddp.networks import build
from feddp.networks.weights import save_network
from feddp.plan.resolve import build_network, partition_of
from feddp.run import session
from feddp.run.images import Reading
from feddp.run.predict import PredictOptions, predict
from feddp.run.session import Request
from feddp.stages.memory import start_file
from feddp.stages.results import gathered
from feddp.training.columns import METRICS, columns
from feddp.training.metrics import summarize

LN3 = math.log(3)
REQUIRED = {"network": "toy", "channels": "3", "classes": '["lesion"]', "labels": "nested", "size": "32", "method": "feddp"}
PRIVATE = ("q.weight", "q.bias")


@pytest.fixture
def run(toy, tmp_path):
    """A finished FedDP run of two sites with the toy network: its queries are private."""
    folder = tmp_path / "run"
    for seed, site in enumerate(("A", "B")):
        state = build(toy, 3, 1, seed=seed).state_dict()
        save_network(folder / "sites" / site / "network.safetensors", state, REQUIRED | {"site": site})
    shared = {key: value for key, value in build(toy, 3, 1, seed=2).state_dict().items() if key not in PRIVATE}
    save_network(folder / "shared.safetensors", shared, {"round": "2"})
    (folder / "results.json").write_text(json.dumps({"sites": {"A": {}, "B": {}}}))
    return folder


@pytest.fixture
def pngs(tmp_path):
    folder = tmp_path / "pngs"
    folder.mkdir()
    chance = np.random.default_rng(0)
    for name, (width, height) in (("a", (40, 30)), ("b", (64, 64)), ("c", (20, 50))):
        Image.fromarray(chance.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    return folder


@pytest.fixture
def site(tiny_root, tmp_path):
    """site-1 of the tiny data, to write to: its two test images are what is adapted to."""
    return shutil.copytree(tiny_root / "site-1", tmp_path / "site-1")


def masks(folder):
    return {file.name: np.asarray(Image.open(file)) for file in folder.glob("*.png")}


def bytes_of(folder):
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("how", [how for how in STRATEGIES if how != "ttt"])  # test_ttt.py
def test_it_writes_a_mask_for_every_png_and_changes_no_file_of_the_run(feddp, run, pngs, tmp_path, how):
    before = bytes_of(run)
    code, out, err = feddp("adapt", "--models", run, "--images", pngs, "--out", tmp_path / "out", "--how", how, "--epochs", 2)
    assert code == 0, err
    assert out.startswith(f"3 masks in {tmp_path / 'out'} ({how}")
    assert "s an image)" in out
    found = masks(tmp_path / "out")
    assert {name: mask.shape for name, mask in found.items()} == {"a.png": (30, 40), "b.png": (64, 64), "c.png": (50, 20)}
    assert all(set(np.unique(mask)) <= {0, 1} for mask in found.values())
    done = json.loads((tmp_path / "out/adapt.json").read_text())
    assert done["models"] == ["A", "B", GLOBAL]
    assert done["seconds_per_image"] > 0
    trains = how in ("routing", "tent")
    assert len(done["losses"]) == 3 * trains
    assert err.count("unsupervised loss: ") == 2 * trains
    assert bytes_of(run) == before


def test_the_options_reach_the_settings(feddp, run, pngs, tmp_path):
    options = {"epochs": 1, "lr": 0.5, "beta": 0.2, "noise": 0.3, "neighbourhood": 4, "mix": "softmax", "norm": "batch"}
    options |= {"batch": 2, "seed": 9}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    code, _, err = feddp("adapt", "--models", run, "--images", pngs, "--out", tmp_path / "out", *words)
    assert code == 0, err
    assert json.loads((tmp_path / "out/adapt.json").read_text())["settings"] == options


@pytest.mark.parametrize("command", ["adapt", "job-outside"])
def test_the_help_names_every_way(feddp, command):
    code, out, _ = feddp(command, "--help")
    assert code == 0
    assert all(how in out for how in STRATEGIES)


def test_the_global_model_is_the_shared_tensors_and_the_mean_of_the_private_ones(run):
    """FedDP's server never had a query; the sites' networks are theirs, every tensor."""
    models = read_models(run)
    a, b = (load_file(run / "sites" / name / "network.safetensors") for name in ("A", "B"))
    shared, found = load_file(run / "shared.safetensors"), models.state(GLOBAL)
    assert found.keys() == a.keys()
    assert all(found[name].equal(value) for name, value in shared.items())
    for name in PRIVATE:
        torch.testing.assert_close(found[name], (a[name] + b[name]) / 2)
    assert all(models.state("A")[name].equal(a[name]) and models.state("B")[name].equal(b[name]) for name in a)


@pytest.mark.parametrize("trained", [None, Preparation(size=24)])
def test_the_global_way_is_feddp_predict_of_the_global_model(feddp, run, pngs, tmp_path, trained):
    """A head without bias and with large weights: some pixels are lesion, some are not. Also where the training images had been
    resized to 24 pixels before the run: images of noise are other ones then."""
    for file in run.glob("sites/*/network.safetensors"):
        save_network(file, load_file(file), REQUIRED | ({KEY: trained.text} if trained else {}))
    shared = load_file(run / "shared.safetensors")
    head = {"head.weight": shared["head.weight"] * 20, "head.bias": torch.zeros(1)}
    save_network(run / "shared.safetensors", shared | head, {"round": "2"})
    save_network(tmp_path / "global.safetensors", read_models(run).state(GLOBAL), REQUIRED)
    predict(tmp_path / "global.safetensors", pngs, tmp_path / "wanted", options=PredictOptions(Reading(trained=trained)))
    predict(tmp_path / "global.safetensors", pngs, tmp_path / "at once")
    assert feddp("adapt", "--models", run, "--images", pngs, "--out", tmp_path / "out", "--how", "global")[0] == 0
    found, wanted, at_once = (masks(tmp_path / name) for name in ("out", "wanted", "at once"))
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)
    assert any((found[name] != at_once[name]).any() for name in found) == bool(trained), "the control"
    assert 0 < sum(mask.mean() for mask in found.values()) < 3


def test_a_network_that_says_wrongly_how_its_images_were_made_is_named(feddp, run, pngs, tmp_path):
    save_network(file := run / "sites/B/network.safetensors", load_file(file), REQUIRED | {KEY: '{"size": 0}'})
    code, _, err = feddp("adapt", "--models", run, "--images", pngs, "--out", tmp_path / "out")
    assert code == 2
    assert f"{file}: 'prepared' in its metadata is wrong" in err
    assert not (tmp_path / "out").exists()


def test_sites_that_resized_differently_have_no_size_for_a_plain_folder(feddp, run, pngs, site, tmp_path):
    """A site's folder is prepared already, and a site that does not say how it resized is in nobody's way."""
    for name, size in (("A", 24), ("B", 64)):
        file = run / f"sites/{name}/network.safetensors"
        save_network(file, load_file(file), REQUIRED | {KEY: Preparation(size=size).text})
    arguments = ("adapt", "--models", run, "--how", "global", "--images")
    code, _, err = feddp(*arguments, pngs, "--out", tmp_path / "out")
    assert code == 2
    assert f"the run's sites resized their images to 24 and 64 pixels; prepare {pngs} as a site's folder" in err
    assert not (tmp_path / "out").exists()
    assert feddp(*arguments, site, "--out", tmp_path / "prepared")[0] == 0
    save_network(file, load_file(file), REQUIRED)
    assert read_models(run).prepared == {24}


def test_a_site_without_masks_is_adapted_to_and_no_mask_is_read(feddp, run, site, tmp_path, monkeypatch):
    """The test images of the site's folder, and the same masks whether labels are there or not."""
    arguments = ("adapt", "--models", run, "--images", site, "--epochs", 1)
    assert feddp(*arguments, "--out", tmp_path / "with", "--score")[0] == 0
    shutil.rmtree(site / "masks")
    code, _, err = feddp(*arguments, "--out", tmp_path / "without")
    assert code == 0, err
    split = [line.split(",") for line in (site / "split.csv").read_text().split()]
    assert masks(tmp_path / "without").keys() == {f"{stem}.png" for stem, _, part in split if part == "test"}
    assert not (tmp_path / "without/scores.json").exists()
    first, second = masks(tmp_path / "with"), masks(tmp_path / "without")
    assert all((first[name] == second[name]).all() for name in first)


def everywhere(run, site) -> list[str]:
    """Networks that say lesion everywhere; the test images, of which one is all lesion, the other a quarter."""
    for file in (run / "shared.safetensors", *run.glob("sites/*/network.safetensors")):
        state = load_file(file)
        state["head.weight"].zero_()
        state["head.bias"].fill_(10)
        save_network(file, state, REQUIRED | {"round": "2"})
    stems = [line.split(",")[0] for line in (site / "split.csv").read_text().split() if line.endswith("test")]
    full, quarter = np.ones((32, 32), np.uint8), np.zeros((32, 32), np.uint8)
    quarter[:16, :16] = 1
    for stem, mask in zip(stems, (full, quarter), strict=True):
        Image.fromarray(mask).save(site / f"masks/{stem}.png")
    return stems


def test_scores_are_of_the_masks_at_the_network_s_size(feddp, run, site, tmp_path):
    """A head that says lesion everywhere; one mask is all lesion (Dice 1, ASSD 0), the other has 256 of 1024 pixels:
    Dice 2 · 256/(1024 + 256) = 0.4. The mean is 0.7."""
    stems = everywhere(run, site)
    code, out, err = feddp("adapt", "--models", run, "--images", site, "--out", tmp_path / "out", "--how", "average", "--score")
    assert code == 0, err
    assert "dice 0.7000 ± 0.3000" in out
    assert "every mask is empty" not in err
    scores = json.loads((tmp_path / "out/scores.json").read_text())
    assert [scores["images"][stem]["dice"] for stem in stems] == pytest.approx([1, 0.4])
    assert scores["images"][stems[0]]["assd"] == 0
    assert scores["summary"]["dice"] == {"mean": pytest.approx(0.7), "std": pytest.approx(0.3), "n": 2}


def test_scores_of_several_classes_are_shown_a_line_each(feddp, run, pngs, tmp_path, monkeypatch):
    """The metric of column k is k/100: six means from 0 on, six of the disc from 6 on, six of the cup up to 17."""
    scores = {name: {"mean": number / 100, "std": 0.0, "n": 1} for number, name in enumerate(columns(METRICS, ("disc", "cup")))}
    done = {"kept_epoch": None, "images": 1, "seconds_per_image": 0.1, "losses": [], "empty_masks": 0, "scores": scores}
    monkeypatch.setattr(unseen_site, "adapt", lambda *arguments: done)
    code, out, err = feddp("adapt", "--models", run, "--images", pngs, "--out", tmp_path / "out", "--score")
    assert code == 0, err
    mean, disc, cup = out.splitlines()[1:]
    assert (mean[:26], disc[:36]) == ("dice 0.0000; iou 0.0100; h", "dice_disc 0.0600; iou_disc 0.0700; h")
    assert cup.endswith("; assd-medpy_cup 0.1700")


@pytest.mark.parametrize("volumes", [True, False])
def test_slices_are_scored_by_case_too(feddp, run, site, tmp_path, volumes):
    """The two test images are of one patient: a head that says lesion everywhere, 2048 voxels, where they hold 1024 + 256:
    Dice 2 · 1280/(2048 + 1280) = 10/13."""
    everywhere(run, site)
    if volumes:
        metadata = json.loads((site / "dataset.json").read_text())
        (site / "dataset.json").write_text(json.dumps(metadata | {"volumes": "patient"}))
    code, _, err = feddp("adapt", "--models", run, "--images", site, "--out", tmp_path / "out", "--how", "average", "--score")
    assert code == 0, err
    scores = json.loads((tmp_path / "out/scores.json").read_text())
    assert ("cases" in scores) == ("volumes" in scores) == volumes
    if volumes:
        assert [row["dice"] for row in scores["cases"].values()] == pytest.approx([10 / 13])
        assert scores["volumes"]["dice"] == {"mean": pytest.approx(10 / 13), "std": 0, "n": 1}


@pytest.mark.parametrize("same", [True, False])
def test_models_that_do_not_differ_end_the_adaptation_early(feddp, run, pngs, tmp_path, same):
    """Whatever the routers choose, the mix is the same network: the loss stands still, and three epochs show it. The control:
    of models that differ, all five epochs are run."""
    if same:
        for site in ("A", "B"):
            state = build("toy", 3, 1, seed=2).state_dict()
            save_network(run / "sites" / site / "network.safetensors", state, REQUIRED | {"site": site})
    code, _, err = feddp("adapt", "--models", run, "--images", pngs, "--out", tmp_path / "out", "--epochs", 5)
    assert code == 0, err
    done = json.loads((tmp_path / "out/adapt.json").read_text())
    assert len(done["losses"]) == 1 + (3 if same else 5)
    said = (
        f"warning: the unsupervised loss stands still at {done['losses'][-1]:.6f}, so the adaptation ended after epoch 3 of 5"
    )
    assert (said in err) == same


def test_masks_that_are_all_empty_are_said(feddp, run, pngs, tmp_path):
    shared = load_file(run / "shared.safetensors")
    head = {"head.weight": torch.zeros_like(shared["head.weight"]), "head.bias": tensor([-10.0])}
    save_network(run / "shared.safetensors", shared | head, {"round": "2"})
    code, _, err = feddp("adapt", "--models", run, "--images", pngs, "--out", tmp_path / "out", "--how", "global")
    assert code == 0
    assert "every mask is empty; the models found nothing" in err
    assert json.loads((tmp_path / "out/adapt.json").read_text())["empty_masks"] == 3


def test_two_commands_with_one_seed_write_the_same(feddp, run, pngs, tmp_path):
    for name in ("one", "two"):
        assert feddp("adapt", "--models", run, "--images", pngs, "--out", tmp_path / name, "--epochs", 2)[0] == 0
    one, two = masks(tmp_path / "one"), masks(tmp_path / "two")
    assert all((one[name] == two[name]).all() for name in one)
    losses = [json.loads((tmp_path / name / "adapt.json").read_text())["losses"] for name in ("one", "two")]
    assert losses[0] == losses[1]


def _empty(folder):
    for file in folder.glob("*.png"):
        file.unlink()


def _gray(folder):
    Image.new("L", (32, 32)).save(folder / "b.png")


def _no_run(folder):
    (folder / "results.json").unlink()


def _no_shared(folder):
    (folder / "shared.safetensors").unlink()


def _of_local(folder):
    save_network(folder / "shared.safetensors", {}, {"round": "1"})


def _with_layers(folder):
    for file in folder.glob("sites/*/network.safetensors"):
        own = {"calibrator.out.weight": torch.zeros(1)}
        save_network(
            file, load_file(file) | own, REQUIRED | {"method": "fedlc", "layers": '{"local_calibration": {"sites": 2}}'}
        )


def _broken(folder):
    (folder / "sites/B/network.safetensors").write_bytes(b"nothing")


@pytest.mark.parametrize(
    ("spoil", "where", "message"),
    [
        (_no_run, "run", "is not a finished run"),
        (_no_shared, "run", "has no shared.safetensors"),
        (_of_local, "run", "its method shares nothing"),
        (_with_layers, "run", r"fedlc gives every site layers of its own \(calibrator.out.weight, "),
        (_broken, "run", "cannot be read as tensors"),
        (_empty, "pngs", "has no PNG"),
        (_gray, "pngs", r"b.png: has 1 channel\(s\)"),
    ],
)
def test_what_is_given_and_wrong_ends_in_one_line_and_exit_code_two(feddp, run, pngs, tmp_path, spoil, where, message):
    spoil({"run": run, "pngs": pngs}[where])
    code, _, err = feddp("adapt", "--models", run, "--images", pngs, "--out", tmp_path / "out")
    assert code == 2
    assert err.startswith("feddp: ")
    assert len(err.strip().splitlines()) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--how", "magic"], "routing, global, average, ensemble, tent"),
        (["--mix", "max"], "sigmoid, softmax"),
        (["--lr", "0"], "lr=0"),
        (["--device", "cuda:99"], "--device cuda:99 cannot be used"),
        (["--score"], "--score needs masks"),
        (["--models", "nowhere"], "nowhere is not a finished run"),
        (["--images", "nowhere"], "nowhere does not exist; name a folder of PNG images"),
    ],
)
def test_what_is_asked_and_cannot_be_done_is_said(feddp, run, pngs, tmp_path, options, message):
    code, _, err = feddp("adapt", "--models", run, "--images", pngs, "--out", tmp_path / "out", *options)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_masks_that_are_to_be_scored_are_missed_before_anything_is_adapted(feddp, run, site, tmp_path):
    shutil.rmtree(site / "masks")
    code, _, err = feddp("adapt", "--models", run, "--images", site, "--out", tmp_path / "out", "--score")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert "is missing; add it, or leave --score out" in err
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(feddp, run, pngs, tmp_path):
    before = bytes_of(pngs)
    code, _, err = feddp("adapt", "--models", run, "--images", pngs, "--out", pngs)
    assert code == 2
    assert "not empty" in err
    assert bytes_of(pngs) == before


def test_a_site_of_another_kind_is_refused(feddp, run, site, tmp_path):
    metadata = json.loads((site / "dataset.json").read_text())
    arguments = ("adapt", "--models", run, "--images", site, "--out", tmp_path / "out")
    for change, more, message in (
        ({"channels": 1}, [], "channels = (1,), but the models have (3,)"),
        ({"classes": ["polyp"]}, ["--score"], "('polyp',)"),
    ):
        (site / "dataset.json").write_text(json.dumps(metadata | change))
        code, _, err = feddp(*arguments, *more)
        assert code == 2
        assert message in err
    (site / "dataset.json").write_text(json.dumps(metadata))
    (site / "split.csv").write_text((site / "split.csv").read_text().replace(",test", ",val"))
    code, _, err = feddp(*arguments)
    assert code == 2
    assert "has no image in split test" in err
    assert not (tmp_path / "out").exists()


class Done:
    """A job in no federation that has ended: the server selected round 1 of 2, the best."""

    id = "job"

    def __init__(self, folder, plan):
        self.folder, self.progress, self.log = folder, folder / "server/progress.jsonl", folder / "log"
        networks = [build_network(plan).state_dict(), *(build(plan.network, 3, 1, seed=s).state_dict() for s in (1, 2))]
        shared, private = zip(*(partition_of(plan, build_network(plan)).split(network) for network in networks), strict=True)
        self.shared = shared[1]
        for name, round, tensors in (("latest", 2, shared[0]), ("best", 1, shared[1])):
            save_network(folder / f"server/shared_{name}.safetensors", tensors, {"round": str(round)})
        for site, own in zip(plan.sites, private, strict=False):
            metadata = REQUIRED | {"network": plan.network, "site": site}
            save_network(self.store(site) / "start.safetensors", self.shared | own, metadata)
        row = summarize([dict.fromkeys(METRICS, 0.5)])
        results = gathered(plan, {site: {"before_calibration": row, "final": row} for site in plan.sites}, 1, 1)
        (folder / "server/results.json").write_text(json.dumps(results))
        self.progress.write_text("")

    def finished(self):
        return True

    def outcome(self):
        return True, self.folder / "server"

    def store(self, site):
        return self.folder / site


def test_what_a_run_leaves_can_be_adapted(tiny_root, plan_for, tmp_path, feddp, capsys):
    """`feddp run` says that it approves its own plan, leaves the shared tensors of the round it selected and no private one;
    FedDP on PVT, routed and scored."""
    plan = plan_for(stages=("train",))
    policies = {name: {"data": str(tiny_root / name)} for name in plan.sites}
    done, out = Done(tmp_path / "done", plan), tmp_path / "run"
    session.run(Request(plan, policies, out), lambda request, job: nullcontext(done), "tiny")
    assert capsys.readouterr().err.splitlines()[0] == f"approved for this run: plan {plan.digest()[:12]} at 2 sites"
    found = load_file(out / "shared.safetensors")
    assert found.keys() == set(partition_of(plan, build_network(plan)).shared)
    assert all(value.equal(done.shared[name]) for name, value in found.items())
    options = ("--images", tiny_root / "site-2", "--out", tmp_path / "masks", "--epochs", 1, "--score")
    code, said, err = feddp("adapt", "--models", out, *options)
    assert code == 0, err
    assert "dice" in said
    assert len(masks(tmp_path / "masks")) == 2


def test_the_server_s_file_is_that_of_the_round(tmp_path):
    for name, round in (("shared_latest", 5), ("shared_best", 3)):
        save_network(tmp_path / f"{name}.safetensors", {"x": torch.zeros(1)}, {"round": str(round)})
    assert start_file(tmp_path, 5).stem == "shared_latest"
    assert start_file(tmp_path, 3).stem == "shared_best"
    with pytest.raises(FedDPError, match="lacks the shared tensors of round 4"):
        start_file(tmp_path, 4)


def test_no_label_is_touched_before_the_masks_are_written(run, site, tmp_path, monkeypatch):
    """Even with --score: when the masks are first asked for, every prediction lies on disk."""
    written = []
    monkeypatch.setattr(unseen_site, "load", lambda *_: written.extend(masks(tmp_path / "out")) or [])
    request = AdaptationOptions("average", Settings(), score=True)
    with pytest.raises((FedDPError, RuntimeError)):
        unseen_site.adapt(read_models(run), "run", site, tmp_path / "out", request, torch.device("cpu"))
    assert len(written) == 2
