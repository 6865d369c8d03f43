"""Which runs a comparison starts: every one planned first, each once, finished ones not again."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from subprocess import PIPE

import numpy as np
import pytest
from PIL import Image

from feddp.cli.compare import ManyRuns
from feddp.compare.request import ENVIRONMENTS
from feddp.compare.runs import Campaign, Place
from feddp.compare.studies import STUDIES
from feddp.compare.variants import Common, Variant
from feddp.errors import ContributionError, FedDPError, InputError
from feddp.files import write_json
from feddp.run import local
from feddp.run import options as run_options
from feddp.run.options import resume_here
from feddp.training.claim import hold, is_held, release
from support.compare_runs import SITES, FakeRuns


def test_the_command_offers_the_environments_that_a_comparison_takes():
    assert tuple(each.value for each in ManyRuns) == ENVIRONMENTS


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
    """Interrupted in the middle: half a folder is left, even with results.json in it. It does not count, because no run.json
    says of which run it is."""
    made = campaign("fedavg")

    def interrupted(data, out, *args, **kwargs):
        (out / "results.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(run_options, "run_here", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.execute()
    monkeypatch.setattr(run_options, "run_here", fake)
    assert campaign("fedavg").execute()[Variant.parse("fedavg")].folders
    assert len(fake.calls) == 1


def test_a_finished_run_whose_folder_was_removed_is_run_again(campaign, fake):
    """Its record alone, which says that it finished, is no result."""
    made = campaign("fedavg")
    made.execute()
    (run,) = made.runs
    shutil.rmtree(run.folder)
    assert not campaign("fedavg").runs[0].is_finished()
    assert campaign("fedavg").execute()[Variant.parse("fedavg")].folders == {0: run.folder}
    assert len(fake.calls) == 2


def test_a_run_is_locked_and_noted_as_unfinished_until_its_end(campaign, fake, monkeypatch):
    """So that no other comparison takes it; also while what no later step needs is removed: who is killed in that moment leaves
    a run that the next comparison closes."""
    seen, remove = [], shutil.rmtree

    def look(folder, done):
        record = json.loads((folder.parent / f"{folder.name}.json").read_text())
        seen.append((done, is_held(folder), record["finished"]))

    def watched(data, out, *args, **kwargs):
        look(out, "runs")
        return fake(data, out, *args, **kwargs)

    def removing(path, *args, **kwargs):
        if path.name == "workspace":
            look(path.parent, "removes")
        return remove(path, *args, **kwargs)

    monkeypatch.setattr(run_options, "run_here", watched)
    monkeypatch.setattr("feddp.compare.planned_run.shutil.rmtree", removing)
    (run,) = (made := campaign("fedavg")).runs
    made.execute()
    assert seen[0] == ("runs", True, False)
    assert ("removes", False) in [(done, finished) for done, _, finished in seen]
    assert json.loads(run.record.read_text())["finished"] is True


@pytest.fixture
def broken_off(campaign, monkeypatch):
    """Breaks off fedavg, seed 0, of 2 rounds, with these files in its folder; returns that run."""

    def make(*files: str):
        made = campaign("fedavg")
        (run,) = made.runs
        plan = run.wanted["plan"]
        began = {"env": "sim", "plan": plan, "policies": {site: {} for site in SITES}, "threads": None}
        contents = {"run.json": began, "results.json": plan | {"sites": {}}, "half.txt": {}}

        def broken(data, out, *args, **kwargs):
            for name in files:
                write_json(out / name, contents[name])
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(run_options, "run_here", broken)
            with pytest.raises(KeyboardInterrupt):
                made.execute()
        release(made.out)  # as if that process had ended
        return run

    return make


def contents_of(run) -> dict[str, bytes]:
    """What a run's folder holds, and its record."""
    files = [path for path in run.folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(run.folder.parent)): path.read_bytes() for path in (run.record, *files)}


@contextmanager
def held(folder):
    """Another process has the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, 2); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", lock, folder / ".lock"], stdin=PIPE, stdout=PIPE) as other:
        other.stdout.readline()
        yield
        other.communicate()


@pytest.mark.parametrize("files", [["run.json"], []])
def test_a_run_that_was_broken_off_is_continued(campaign, broken_off, monkeypatch, files):
    """Its folder reaches `feddp run` as it was left, also in a comparison with more methods and seeds; one in which no run
    began is emptied first."""
    broken_off("half.txt", *files)
    found = {}

    def again(data, out, *args, **kwargs):
        found[f"{out.parent.name}/{out.name}"] = sorted(path.name for path in out.iterdir())
        raise FedDPError("enough")

    monkeypatch.setattr(run_options, "run_here", again)
    campaign("fedavg", "local", seeds=(0, 1)).execute()
    left = [".lock", "half.txt", *files] if files else [".lock"]
    assert found == {"fedavg/seed-0": left} | dict.fromkeys(["fedavg/seed-1", "local/seed-0", "local/seed-1"], [".lock"])


def test_an_unfinished_run_of_another_plan_or_other_data_is_refused_before_anything_runs(
    campaign, broken_off, fake, tiny_root, tmp_path
):
    """As where --rounds was mistyped. Nothing of it changes, and the comparison that began it goes on."""
    run = broken_off("run.json", "half.txt")
    before = contents_of(run)
    message = (
        f"{run.folder} holds an unfinished run of another plan or other data; give the options that it began with, choose"
        f" another --out, or `feddp runs delete {run.folder}`"
    )
    shutil.copytree(tiny_root, tmp_path / "copy")
    split = tmp_path / "copy/site-1/split.csv"
    split.write_bytes(re.sub(rb"(,P000,)\w+", rb"\1test", split.read_bytes()))
    for methods, changes in (("local", "fedavg"), {"rounds": 3}), (("fedavg",), {"data": tmp_path / "copy"}):
        with pytest.raises(InputError, match=re.escape(message)):
            campaign(*methods, **changes)
    campaign("local", rounds=3)  # its own run's folder is free
    assert campaign("fedavg").runs[0].require_own() is None, "the control"
    content = json.loads((run.folder / "run.json").read_text())
    write_json(run.folder / "run.json", content | {"plan": content["plan"] | {"rounds": 3}})  # begun by another command
    with pytest.raises(InputError, match=re.escape(message)):
        campaign("fedavg")
    write_json(run.folder / "run.json", content)
    assert contents_of(run) == before
    assert not fake.calls


def test_no_run_that_another_process_has_is_touched(campaign, broken_off, fake):
    """Whether the plan is another one or the same. Two comparisons of other methods or seeds may run at the same time."""
    run = broken_off("run.json", "half.txt")
    before = contents_of(run)
    with held(run.folder):
        for methods, rounds in (("fedavg",), 2), (("local", "fedavg"), 3):
            with pytest.raises(InputError, match=re.escape(f"{run.folder} is in use by another process; wait for it")):
                campaign(*methods, rounds=rounds)
        campaign("local").execute()
        campaign("fedavg", seeds=(1,)).execute()
    assert [folder for folder, _ in fake.calls] == ["local/seed-0", "fedavg/seed-1"]
    assert contents_of(run) == before
    assert campaign("fedavg").runs[0].require_own() is None, "the control: that process has ended"


def test_a_folder_that_another_comparison_takes_meanwhile_costs_one_run(campaign, fake):
    """Both comparisons were started at the same time, and the other one has not written anything there yet."""
    made = campaign("fedavg", "local")
    (run, _) = made.runs
    with held(run.folder):
        with pytest.raises(InputError, match="is in use by another process"):
            campaign("fedavg")
        made.execute()
    assert made.failed == {"fedavg, seed 0": f"{run.folder} is in use by another process; wait for it"}
    assert [folder for folder, _ in fake.calls] == ["local/seed-0"]
    assert not run.record.exists()
    assert not campaign("fedavg").execute()[Variant.parse("fedavg")].failed, "a lock that was left behind is nobody's run"


def test_a_run_that_another_comparison_began_meanwhile_costs_one_run(campaign, broken_off, fake):
    """That one had another plan, and was broken off before this one came to the run."""
    made = campaign("local", "fedavg", rounds=3)
    run = broken_off("run.json", "half.txt")
    before = contents_of(run)
    made.execute()
    assert made.failed["fedavg, seed 0"].startswith(f"{run.folder} holds an unfinished run of another plan or other data")
    assert [folder for folder, _ in fake.calls] == ["local/seed-0"]
    assert contents_of(run) == before


def test_a_run_that_another_comparison_began_before_the_lock_costs_one_run(campaign, broken_off, fake, monkeypatch):
    """As before, but it began and ended between this one's look at the folder and its lock."""
    run = broken_off("run.json", "half.txt")
    aside, record, before = run.folder.with_name("aside"), run.record.read_bytes(), contents_of(run)
    run.folder.rename(aside)
    run.record.unlink()
    made = campaign("fedavg", rounds=3)

    def late(folder, patience):
        folder.rmdir()
        aside.rename(folder)
        run.record.write_bytes(record)
        hold(folder, patience)

    monkeypatch.setattr("feddp.compare.planned_run.hold", late)
    made.execute()
    assert made.failed["fedavg, seed 0"].startswith(f"{run.folder} holds an unfinished run of another plan or other data")
    assert not fake.calls
    assert contents_of(run) == before


def test_a_complete_run_whose_end_was_not_noted_is_finished(campaign, broken_off, fake):
    """The comparison was killed, or its disk was full, between results.json and the record."""
    run = broken_off("run.json", "results.json")
    (run.folder / "workspace").mkdir()
    made = campaign("fedavg")
    assert made.execute()[Variant.parse("fedavg")].folders == {0: run.folder}
    assert not fake.calls
    assert json.loads(run.record.read_text())["finished"] is True
    assert not (run.folder / "workspace").exists()
    with pytest.raises(InputError, match="finished with another plan or other data"):
        campaign("fedavg", rounds=3)


def test_results_of_this_plan_without_a_run_json_are_finished(campaign, broken_off, fake):
    """results.json holds the plan, and the record says of which data; such a run is not emptied and trained again."""
    run = broken_off("results.json")
    kept = (run.folder / "results.json").read_bytes()
    assert campaign("fedavg").execute()[Variant.parse("fedavg")].folders == {0: run.folder}
    assert not fake.calls
    assert (run.folder / "results.json").read_bytes() == kept


@pytest.mark.parametrize("files", [["results.json"], ["run.json", "results.json"]])
def test_results_of_another_plan_are_never_removed(campaign, broken_off, fake, files):
    """Whether anybody noted their end or not, and while another process has the folder: it would not help to wait for that."""
    run = broken_off(*files)
    before = contents_of(run)
    with held(run.folder), pytest.raises(InputError, match="finished with another plan or other data"):
        campaign("fedavg", rounds=3)
    assert contents_of(run) == before


@pytest.mark.parametrize("name", ["run.json", "results.json"])
def test_a_complete_run_of_another_plan_is_refused(campaign, broken_off, fake, name):
    """Its record is of this plan, one of its files of another one, or damaged; nothing is removed."""
    run = broken_off("run.json", "results.json")
    path = run.folder / name
    content = json.loads(path.read_text())
    other = content | {"plan": content["plan"] | {"rounds": 3}} if name == "run.json" else content | {"rounds": 3}
    for text, message in (json.dumps(other), "finished with another plan or other data"), ("{", "is not readable JSON"):
        path.write_text(text)
        before = contents_of(run)
        with pytest.raises(InputError, match=message):
            campaign("fedavg")
        assert contents_of(run) == before
    write_json(path, content)
    assert campaign("fedavg").runs[0].is_finished(), "the control"


@pytest.mark.parametrize("method", ["fedavg", "feddp", "centralized"])
def test_a_run_that_feddp_run_finished_is_finished(campaign, monkeypatch, capsys, method):
    """A real one, broken off in its second round; its comparison does not train it again. The record keeps the machine."""
    send, left = local.LocalServer.send, [1]

    def failing(self, *arguments):
        left[0] -= 1
        if left[0] < 0:
            raise ContributionError("the connection broke")
        return send(self, *arguments)

    made = campaign(method, settings=("batch=4",))
    with monkeypatch.context() as patch:
        patch.setattr(local.LocalServer, "send", failing)
        assert made.execute(Place("local"))[Variant.parse(method)].failed
    (run,) = made.runs
    resume_here(run.folder)
    before, stored = contents_of(run), json.loads(run.record.read_text())
    assert stored["finished"] is False
    results = campaign(method, settings=("batch=4",)).execute(Place("local", "cpu,cpu"))
    assert results[Variant.parse(method)].folders == {0: run.folder}
    assert f"{method}, seed 0 (finished before)" in capsys.readouterr().err
    assert json.loads(run.record.read_text()) == stored | {"finished": True}
    kept = contents_of(run)
    assert {name: before[name] for name in kept if name != "seed-0.json"} == {
        name: content for name, content in kept.items() if name != "seed-0.json"
    }
    assert {name.split("/")[1] for name in before.keys() - kept.keys()} == {"workspace"}


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda stored: "", " is not readable JSON"),
        (lambda stored: [stored], " holds no JSON object; "),
        (lambda stored: {name: stored[name] for name in stored if name != "finished"}, " is damaged: finished is missing "),
        (lambda stored: stored | {"finished": "yes"}, " is damaged: finished is missing or of another kind; "),
        (lambda stored: stored | {"plan": None, "machine": 3}, " is damaged: plan, machine is missing or of another kind; "),
        (lambda stored: stored | {"data": [], "pixels": 1}, " is damaged: data, pixels is missing or of another kind; "),
    ],
)
def test_a_damaged_record_ends_with_one_message(campaign, fake, feddp, tiny_root, toy, capsys, damage, what):
    """Nothing has run then, and the run's folder is as it was."""
    made = campaign("fedavg")
    made.execute()
    (run,) = made.runs
    content = damage(json.loads(run.record.read_text()))
    run.record.write_text(content and json.dumps(content))
    before = contents_of(run)
    capsys.readouterr()
    options = ["--data", tiny_root, "--out", made.out, "--network", toy, "--size", 32, "--rounds", 2]
    code, _, said = feddp("compare", "--methods", "local,fedavg", *options)
    assert code == 2
    assert said.startswith(f"feddp: {run.record}{what}")
    assert said.endswith(f"; remove it and {run.folder}; the same `feddp compare` runs it again\n")
    assert said.count("\n") == 1
    assert contents_of(run) == before
    assert len(fake.calls) == 1


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


@pytest.mark.parametrize("name", ["mine.txt", "run.json", "results.json"])
def test_a_folder_that_is_not_ours_is_left_alone(campaign, tmp_path, name):
    """Also a run whose record is gone: nobody knows which data it read."""
    (tmp_path / "out/runs/fedavg/seed-0").mkdir(parents=True)
    campaign("fedavg")  # the control: nothing is in it
    (tmp_path / "out/runs/fedavg/seed-0" / name).write_text("{}")
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


def open_files(folder):
    """This process's; others than the campaign's are opened and closed by threads of earlier tests."""
    handles = [f"/proc/self/fd/{handle}" for handle in os.listdir("/proc/self/fd")]
    paths = [os.readlink(handle) for handle in handles if os.path.lexists(handle)]
    return [path for path in paths if path.startswith(str(folder))]


def test_no_run_that_has_ended_keeps_its_folder_or_a_file_open(campaign, fake, tmp_path):
    """Well or badly: a comparison of a thousand runs would run out of open files."""
    fake.broken = {"local"}
    made = campaign("fedavg", "local")
    made.execute()
    assert [run.folder for run in made.runs if is_held(run.folder)] == []
    fake.broken = set()
    campaign("fedavg", "local").execute()
    assert open_files(tmp_path) == []
