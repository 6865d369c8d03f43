"""`--env local` when something goes wrong at a site: it is refused as FLARE refuses it, and the others go on."""

import json
import shutil
from collections import Counter

import pytest
import torch

from feddp.data import loading
from feddp.data.synthesize import synthesize
from feddp.errors import InputError, Stopped
from feddp.files import PROGRESS, TIME
from feddp.networks.weights import fingerprint, read_network
from feddp.run import session
from feddp.run.config import read_config
from feddp.run.local import local
from feddp.run.options import Options, policies_of, run_here
from feddp.run.session import Request
from feddp.stages import train as stage

SITES = ("site-1", "site-2")


@pytest.fixture
def run(toy, plan_for, tiny_root, tmp_path):
    def run(rounds=1, **policies):
        plan = plan_for(method="fedavg", network=toy, rounds=rounds, min_sites=1, start="last")
        given = {site: {"data": str(tiny_root / site), "seed": "plan"} | policies.get(site[-1:], {}) for site in SITES}
        out = tmp_path / "run"
        return session.run(Request(plan, given, out), local, "fedavg"), out

    return run


def refused(out):
    events = map(json.loads, (out / PROGRESS).read_text().splitlines())
    return {(event["site"], event["task"]): event["reason"] for event in events if event["event"] == "refused"}


def test_a_finished_run_says_where_its_time_went(run):
    """The round has the seconds of the mean and of the server's files, each above 0 and together within the round."""
    _, out = run()
    events = map(json.loads, (out / PROGRESS).read_text().splitlines())
    (event,) = (event for event in events if event["event"] == "round")
    assert event["combining"] > 0
    assert event["saving"] > 0
    assert event["combining"] + event["saving"] <= event["seconds"]
    time = json.loads((out / TIME).read_text())
    parts = {"wall": event["seconds"], "combining": event["combining"], "saving": event["saving"]}
    assert time["rounds"] == {name: [round(seconds, 3)] for name, seconds in parts.items()}
    assert list(time["stages"]) == ["ready", "train", "evaluate"]
    assert set(time["sites"]) == set(time["stages"]["train"]["sites"]) == set(SITES)


def test_an_image_is_decoded_once_whatever_the_rounds(run, tiny_root, monkeypatch):
    """Each of a site's 12: those to train on and to choose with are used in both rounds, test images at the end."""
    read, image = Counter(), loading.read_image
    monkeypatch.setattr(loading, "read_image", lambda file, *given: read.update([file]) or image(file, *given))
    run(rounds=2)
    assert read == dict.fromkeys((file for site in SITES for file in (tiny_root / site / "images").iterdir()), 1)
    assert len(read) == 24


def test_a_failure_of_any_kind_at_one_site_is_that_sites(run, monkeypatch):
    """A GPU that is out of memory, for example. The traceback is in the log."""
    trained = stage.train

    def train(site, *arguments, **options):
        if site.name == "site-1":
            raise RuntimeError("out of memory")
        return trained(site, *arguments, **options)

    monkeypatch.setattr(stage, "train", train)
    results, out = run()
    assert "site site-1: train ended with RuntimeError" in refused(out)["site-1", "train"]
    log = (out / "local.log").read_text()
    assert "Traceback" in log
    assert "RuntimeError: out of memory" in log
    assert "site-2" in results["sites"]


def test_a_stop_is_the_runs_and_no_sites_failure(run, monkeypatch, tmp_path):
    """Training raises Stopped where the run is stopped within a step: no site is refused, and none has an error on file."""

    def train(site, *arguments, **options):
        raise Stopped("the job was aborted")

    monkeypatch.setattr(stage, "train", train)
    with pytest.raises(Stopped):
        run()
    out = tmp_path / "run"
    records = list(out.rglob("record.jsonl"))
    assert not any('"error"' in record.read_text() for record in records)
    assert "refused" not in (out / "workspace/server" / PROGRESS).read_text()
    assert (out / "local.log").read_text() == ""


def test_a_policy_that_takes_no_such_job_is_that_sites_refusal(run):
    results, out = run(**{"2": {"methods": ["feddp"]}})
    assert "site-2" in refused(out)["site-2", "ready"]
    assert list(results["sites"]) == ["site-1"]
    assert "site-2" in results["missing"]


def test_several_devices_are_dealt_to_the_sites(toy, plan_for, tiny_root, tmp_path, monkeypatch):
    """In the policies that every environment gives its sites, workers too, as they stand in run.json. No GPU is asked here."""
    monkeypatch.setattr("feddp.training.device.usable", lambda name, *_: torch.device(name))
    found = policies_of(plan_for(network=toy, method="fedavg"), tiny_root, "cuda:1,cuda:0")
    assert {site: policy["device"] for site, policy in found.items()} == {"site-1": "cuda:1", "site-2": "cuda:0"}
    monkeypatch.undo()


def test_a_run_on_several_devices_has_the_bits_of_one(toy, tiny_root, tmp_path):
    """Two names of the CPU; run.yaml repeats them."""
    runs = {}
    for device in ("cpu", "cpu,cpu"):
        out = tmp_path / device
        run_here(tiny_root, out, Options("fedavg", 1, None, toy, 32, 0, ("batch=4",)), "local", device)
        runs[device] = [fingerprint(read_network(path)[0]) for path in sorted(out.glob("sites/*/*.safetensors"))]
        assert read_config(out / "run.yaml")["device"] == device
    assert runs["cpu"] == runs["cpu,cpu"]
    assert len(runs["cpu"]) >= 2


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_site_without_images_of_a_split_is_found_before_the_run(toy, plan_for, tiny_root, tmp_path, split):
    """Its folder is named; the last stage would need the test images."""
    data = shutil.copytree(tiny_root, tmp_path / "data")
    table = data / "site-2/split.csv"
    table.write_text(table.read_text().replace(f",{split}", ",val" if split == "train" else ",train"))
    with pytest.raises(InputError, match=rf"site-2/split.csv has no image in split {split}; add some"):
        policies_of(plan_for(network=toy), data, "cpu")


def test_a_site_with_fewer_training_images_than_a_step_takes_is_found_before_the_run(toy, tiny_root, tmp_path):
    """site-2 keeps 3 of 8. A run's own bounds ask for 4 per step, or for as many as `batch`, if that is smaller: the remedy.

    Centralized trains on all sites' images together.
    """
    data, out = shutil.copytree(tiny_root, tmp_path / "data"), tmp_path / "run"
    table = data / "site-2/split.csv"
    rows = table.read_text().splitlines()
    train = [row for row in rows if row.endswith(",train")]
    table.write_text("\n".join(row for row in rows if row not in train[3:]) + "\n")
    with pytest.raises(InputError, match=r"data/site-2 has 3 training images, but a step takes at least 4; .* --set batch=3$"):
        run_here(data, out, Options("fedavg", 1, None, toy, 32), "local")
    assert not out.exists()
    remedy = Options("fedavg", 1, None, toy, 32, 0, ("batch=3",))
    for options in (remedy, Options("centralized", 1, None, toy, 32)):
        assert list(run_here(data, tmp_path / options.method, options, "local")["sites"]) == ["site-1", "site-2"]


@pytest.mark.parametrize(
    ("folder", "job"),
    [
        ("Bilder für Test", "fedavg_Bilder f-r Test"),
        ("data (1)", "fedavg_data -1-"),
        ("x" * 60, "fedavg_" + "x" * 57),  # 64 characters
    ],
)
def test_data_of_any_folder_s_name_are_trained_on(toy, tiny_root, tmp_path, folder, job):
    data, out = shutil.copytree(tiny_root, tmp_path / folder), tmp_path / "run"
    assert run_here(data, out, Options("fedavg", 1, None, toy, 32, 0, ("batch=4",)), "local")["job"]
    assert [path.name for path in (out / "job").iterdir()] == [job]


@pytest.mark.parametrize("method", ["feddp", "centralized"])
@pytest.mark.parametrize("setting", ["min_sites=4", "private=decoder.1"])
def test_a_command_that_is_refused_for_its_plan_claims_no_folder(toy, tiny_root, tmp_path, method, setting):
    """The toy has no decoder. Centralized needs no sites. The corrected command runs there."""
    out, wrong, right = tmp_path / "run", ("batch=4", setting), ("batch=4",)
    if (method, setting) != ("centralized", "min_sites=4"):
        with pytest.raises(InputError, match=r"fewer than min_sites=4|selects no tensor"):
            run_here(tiny_root, out, Options(method, 1, 0 if method == "feddp" else None, toy, 32, 0, wrong), "local")
        assert not out.exists()
    assert run_here(tiny_root, out, Options("fedavg", 1, None, toy, 32, 0, right), "local")["sites"]


def test_64_sites_in_one_process(toy, plan_for, tmp_path):
    """Each has the six images of one of two sites, two in each split, and draws of its own."""
    synthesize(tmp_path / "data", sites=2, images=6, size=32)
    sites = [f"site-{i:02}" for i in range(64)]
    plan = plan_for(method="fedavg", network=toy, rounds=1, sites=sites, min_sites=64, start="last", batch=2)
    policies = {site: {"data": str(tmp_path / "data" / SITES[i % 2]), "seed": "plan"} for i, site in enumerate(sites)}
    results = session.run(Request(plan, policies, tmp_path / "run"), local, "fedavg")
    assert list(results["sites"]) == sites
    assert refused(tmp_path / "run") == {}
