"""Which runs a comparison starts: every one planned first, each once, finished ones not again."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from feddp.compare.runs import Campaign
from feddp.compare.studies import STUDIES
from feddp.compare.variants import Common, Variant
from feddp.errors import FedDPError
from feddp.run import options as run_options
from support.compare_runs import FakeRuns


@pytest.fixture
def fake(monkeypatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(run_options, "run_here", fake)
    return fake


@pytest.fixture
def campaign(tiny_root, tmp_path, toy):
    """Makes a campaign of some variants in one folder, 2 rounds of the toy network."""

    def make(*variants: str, seeds=(0,), rounds: int = 2, data=tiny_root, settings=()) -> Campaign:
        common = Common(rounds, None, toy, 32, tuple(settings))
        return Campaign([Variant.parse(v) for v in variants], common, seeds, data, tmp_path / "out")

    return make


def test_every_variant_runs_under_every_seed_and_says_so(campaign, fake, capsys):
    made = campaign("fedavg", "feddp@private=query|head", seeds=(0, 3))
    results = made.execute()
    folders = ["fedavg/seed-0", "fedavg/seed-3", "feddp@private=query,head/seed-0", "feddp@private=query,head/seed-3"]
    assert [folder for folder, _ in fake.calls] == folders
    assert [options.seed for _, options in fake.calls] == [0, 3, 0, 3]
    assert results[Variant.parse("fedavg")].folders.keys() == {0, 3}
    said = capsys.readouterr().err
    assert "run 1 of 4: fedavg, seed 0" in said
    assert "run 4 of 4: feddp@private=query|head, seed 3" in said
    assert not list(made.out.glob("runs/*/*/workspace")), "FLARE's own files are gone once a run has finished"


def test_equal_runs_are_run_once_whatever_they_are_called(campaign, fake):
    """λ = 1 and δ frozen are the defaults, the toy network is the common one, and feddp has its calibration already."""
    equal = ["feddp", "feddp@lambda=1", "feddp+igc", "feddp@delta=frozen@network=toy", "feddp@lambda=1.0"]
    made = campaign(*equal, "feddp@lambda=0@delta=std", "feddp@delta=std@lambda=0")
    results = made.execute()
    assert [folder for folder, _ in fake.calls] == ["feddp/seed-0", "feddp@delta=std@lambda=0/seed-0"]
    assert len(results) == 7
    assert made.same(Variant.parse(equal[0]), Variant.parse(equal[3]))


def test_a_run_serves_for_the_networks_before_its_last_stage_too(campaign, fake):
    made = campaign("feddp", "feddp@when=before")
    results = made.execute()
    assert [folder for folder, _ in fake.calls] == ["feddp/seed-0"]
    assert {str(variant): result.when for variant, result in results.items()} == {
        "feddp": "final",
        "feddp@when=before": "before",
    }
    made.refuse_equal(list(results))  # two rows of one run
    with pytest.raises(FedDPError, match="it has no local stage before which its networks could be measured"):
        campaign("feddp@when=before@calibration_epochs=0")


def test_a_change_that_undoes_a_common_setting_is_a_run_of_its_own(campaign):
    made = campaign("feddp", "feddp@lambda=1", settings=["lambda=0.5"])
    assert [run.folder.parent.name for run in made.runs] == ["feddp", "feddp@lambda=1"]


def test_what_is_finished_is_not_run_again(campaign, fake, capsys):
    campaign("fedavg").execute()
    results = campaign("fedavg", "local").execute()
    assert [folder for folder, _ in fake.calls] == ["fedavg/seed-0", "local/seed-0"]
    assert all(result.folders for result in results.values())
    assert "run 1 of 2: fedavg, seed 0 (finished before)" in capsys.readouterr().err


def test_what_is_unfinished_is_run_anew(campaign, fake, monkeypatch):
    """Interrupted in the middle: half a folder is left, even with results.json in it, and it does not count."""
    made = campaign("fedavg")

    def interrupted(data, out, *args, **kwargs):
        out.mkdir()
        (out / "results.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(run_options, "run_here", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.execute()
    monkeypatch.setattr(run_options, "run_here", fake)
    assert campaign("fedavg").execute()[Variant.parse("fedavg")].folders
    assert len(fake.calls) == 1


@pytest.mark.parametrize(
    ("files", "rounds", "kept"),
    [
        (["run.json"], 2, True),
        (["run.json"], 3, False),  # another plan
        ([], 2, False),  # it never began
        (["run.json", "results.json"], 2, False),  # it ended, and the comparison before it noted that
    ],
)
def test_a_run_that_was_broken_off_is_continued(campaign, fake, monkeypatch, files, rounds, kept):
    """Its folder reaches `feddp run` as it was left; any other one is removed first."""

    def broken(data, out, *args, **kwargs):
        out.mkdir(parents=True, exist_ok=True)
        for name in files:
            (out / name).write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(run_options, "run_here", broken)
    with pytest.raises(KeyboardInterrupt):
        campaign("fedavg").execute()
    found = []

    def again(data, out, *args, **kwargs):
        found.extend(path.name for path in out.iterdir()) if out.exists() else None
        raise FedDPError("enough")

    monkeypatch.setattr(run_options, "run_here", again)
    campaign("fedavg", rounds=rounds).execute()
    assert found == (files if kept else [])


def test_a_failed_run_stops_no_other_and_is_tried_again(campaign, fake, capsys):
    fake.broken = {"fedavg"}
    made = campaign("fedavg", "local")
    results = made.execute()
    assert results[Variant.parse("fedavg")].failed == {0: "the job failed: fedavg | diverged at 50%"}
    assert made.failed == {"fedavg, seed 0": "the job failed: fedavg | diverged at 50%"}
    assert results[Variant.parse("local")].folders
    assert "failed: fedavg, seed 0: the job failed" in " ".join(capsys.readouterr().err.split())
    fake.broken = set()
    again = campaign("fedavg", "local")
    assert all(result.folders for result in again.execute().values())
    assert not again.failed
    assert [folder for folder, _ in fake.calls] == ["fedavg/seed-0", "local/seed-0", "fedavg/seed-0"]


def test_a_finished_run_of_another_plan_or_other_data_is_refused_before_anything_runs(campaign, fake, tiny_root, tmp_path):
    campaign("fedavg").execute()
    with pytest.raises(FedDPError, match="finished with another plan or other data; choose another --out"):
        campaign("local", "fedavg", rounds=3)
    shutil.copytree(tiny_root, tmp_path / "copy")
    assert campaign("fedavg", data=tmp_path / "copy").runs[0].is_finished(), "the same data, moved"
    split = tmp_path / "copy/site-1/split.csv"
    text = split.read_bytes()
    split.write_bytes(re.sub(rb"(,P000,)\w+", rb"\1test", text))
    with pytest.raises(FedDPError, match="finished with another plan or other data"):
        campaign("fedavg", data=tmp_path / "copy")
    split.write_bytes(text)
    assert campaign("fedavg", data=tmp_path / "copy").runs[0].is_finished(), "the control"
    assert len(fake.calls) == 1


def test_a_corrected_mask_makes_other_data(campaign, fake, tiny_root, tmp_path):
    """Its dataset.json and split.csv are the same. Another encoding of the same pixels is no other mask."""
    campaign("fedavg").execute()
    shutil.copytree(tiny_root, tmp_path / "copy")
    mask = next((tmp_path / "copy/site-2/masks").iterdir())
    pixels = np.asarray(Image.open(mask)).copy()
    size = mask.stat().st_size
    Image.fromarray(pixels).save(mask, compress_level=0)
    assert mask.stat().st_size != size
    assert campaign("fedavg", data=tmp_path / "copy").runs[0].is_finished()
    pixels[0, 0] = 1 - pixels[0, 0]
    Image.fromarray(pixels).save(mask)
    with pytest.raises(FedDPError, match="finished with another plan or other data"):
        campaign("fedavg", data=tmp_path / "copy")
    record = campaign("fedavg").runs[0].record
    stored = json.loads(record.read_text())
    del stored["pixels"]  # as earlier versions wrote it
    record.write_text(json.dumps(stored))
    assert campaign("fedavg", data=tmp_path / "copy").runs[0].is_finished()


def test_a_folder_that_is_not_ours_is_left_alone(campaign, tmp_path):
    (tmp_path / "out/runs/fedavg/seed-0").mkdir(parents=True)
    with pytest.raises(FedDPError, match="is no run of a comparison"):
        campaign("fedavg")


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("fedpony", "fedpony: unknown method 'fedpony'"),
        ("feddp@pony=1", "feddp@pony=1: unknown setting 'pony'"),
        ("feddp@lambda=-1", "lambda=-1.0 must be a number of at least 0"),
        ("feddp@network=pony", "unknown network 'pony'"),
        ("fedavg+pony", "the only stage that can follow is igc"),
        ("fedavg@calibration_epochs=3", "fedavg has no calibration"),
        ("feddp@private=pony", "pony"),
        ("feddp@private=key", "key"),  # the toy network has no key layer
    ],
)
def test_what_is_unknown_is_refused_before_anything_runs(campaign, fake, variant, message):
    with pytest.raises(FedDPError, match=message):
        campaign("local", variant)
    assert not fake.calls


def test_a_rule_is_checked_in_every_network_that_settings_make(campaign, fake):
    """Without the affinity of `paa` the network has no such layers, whatever another variant's has."""
    private = "private=affinity_query|affinity_matrix"
    with pytest.raises(FedDPError, match="paa=false.*affinity_query"):
        campaign(f"virtual_class@{private}@network=unet", f"virtual_class@{private}@paa=false@network=unet")
    assert not fake.calls


def test_a_campaign_of_some_sites_hands_them_to_its_runs(tiny_root, tmp_path, toy, monkeypatch):
    asked = []
    monkeypatch.setattr(run_options, "run_here", lambda *_, sites, **__: asked.append(sites))
    common = Common(2, None, toy, 32)
    made = Campaign([Variant.parse("fedavg")], common, (0,), tiny_root, tmp_path / "out", ("site-2",), "alone")
    made.execute()
    assert asked == [["site-2"]]
    assert made.runs[0].name == "alone: fedavg, seed 0"
    assert made.runs[0].wanted["plan"]["sites"] == ["site-2"]
    assert made.runs[0].wanted["data"].keys() == {"site-2"}


def test_the_studies_compare_what_the_paper_compares():
    """Runs: (Wang et al., TMI 2024) Table III and Figs. 6, 8, 9, 10: 3, 12, 5, 5 and 6; (Jiang et al., TMI 2023) Figs. 5 and 6:
    5 · 4 of its Table I's personalised methods, and 6; (Xie et al., 2024) Table 4: 2 · 5; (Liu et al., 2024) Tables II and III:
    4 and 4, Fig. 8: 3, 5 and 4."""
    assert {name: len({e.source.variant for e in study.entries}) for name, study in STUDIES.items()} == {
        "ablation": 3,
        "backbones": 12,
        "private": 5,
        "lambda": 5,
        "igc": 6,
        "local_epochs": 20,
        "tau": 6,
        "enhancement": 10,
        "vc_components": 4,
        "vc_paa": 4,
        "vc_private": 3,
        "vc_number": 5,
        "vc_lambda": 4,
    }
    # Fig. 10's caption: "integrating IGC to other PFL methods, i.e., IOP-FL and FedBABU"; the text adds FedDP's own
    assert list(dict.fromkeys(entry.labels[0] for entry in STUDIES["igc"].entries)) == ["iop_fl", "fedbabu", "feddp"]
    assert all(len(entry.labels) == len(study.heads) for study in STUDIES.values() for entry in study.entries)
