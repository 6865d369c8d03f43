"""A link in a folder that others can write leads no command out of the folder; links within it, and to it, are honest."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn import Linear

from feddp.compare.scores import IMAGE, read_table
from feddp.compare.variants import FINAL
from feddp.errors import BadFile, InputError
from feddp.files import append_event, folder_of, read_events, read_results
from feddp.networks.weights import load_checkpoint, read_network
from feddp.pages.provenance import _sha256
from feddp.reading import read_own
from support.report_runs import save_toy, toy_run

WAY_OUT = "is a link that leads out of"


@pytest.fixture
def run(toy, tmp_path):
    return toy_run(tmp_path / "run", toy)


def turned(path, elsewhere):
    """Moves a file or folder out of its folder, and leaves a link in its place."""
    target = elsewhere / path.name
    elsewhere.mkdir(exist_ok=True)
    shutil.move(path, target)
    path.symlink_to(target)
    return target


# what reads a finished run
COMMANDS = {
    "report": ("report", "run", "--out", "page.html"),
    "compare's page": ("report", "run", "--site", "sites/site-1", "--out", "page.html"),
    "adapt": ("adapt", "--models", "run", "--images", "sites/site-1", "--out", "masks"),
    "job-outside": ("job-outside", "--run", "run", "--newcomer", "site-9", "--out", "job"),
    "join": ("join", "--models", "run", "--data", "sites/site-1", "--out", "joined"),
    "features": ("features", "--models", "run", "--data", "sites", "--out", "features"),
    "predict": ("predict", "--network", "run/sites/site-1/network.safetensors", "--images", "images", "--out", "masks"),
    "export": ("export", "--network", "run/sites/site-1/network.safetensors", "--to", "card", "--out", "card"),
    "deploy": ("models", "deploy", "run/sites/site-1/network.safetensors"),
    "threshold": (
        *("calibrate-threshold", "--network", "run/sites/site-1/network.safetensors"),
        *("--data", "sites/site-1", "--out", "t.json"),
    ),
}


@pytest.fixture
def typed(run, feddp, tiny_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").symlink_to(tiny_root)
    (tmp_path / "images").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "images/a.png")
    return feddp


def test_no_command_follows_a_run_s_link_to_a_network_elsewhere(typed, run, tmp_path, plan_for, toy):
    """A run that somebody gave away: its networks would be read, hashed, copied and sent from wherever they lie."""
    results = json.loads((run / "results.json").read_text())
    results = plan_for(network=toy).to_json() | results | {"network": toy, "start_round": 3, "best_round": 3}
    (run / "results.json").write_text(json.dumps(results))
    for file in (save_toy(run / "shared.safetensors", toy, 0), run / "sites/site-1/network.safetensors"):
        turned(file, tmp_path / "elsewhere")
    said = {name: typed(*words) for name, words in COMMANDS.items()}
    assert {name: (code, err) for name, (code, _, err) in said.items() if code != 2 or WAY_OUT not in err} == {}
    assert not [
        name for name in ("page.html", "masks", "job", "joined", "features", "card", "models") if (tmp_path / name).exists()
    ]


@pytest.mark.parametrize("name", ["results.json", "sites/site-1", "run.json"])
def test_no_file_of_a_run_leads_out(typed, run, tmp_path, name):
    if name == "run.json":
        (run / name).write_text(json.dumps({"plan": {"method": "secret"}}))
    turned(run / name, tmp_path / "elsewhere")
    code, _, said = typed("report", "run", "--out", "page.html")
    assert (code, WAY_OUT in said) == (2, True)
    assert typed("runs", "list", ".")[0] == (2 if name == "run.json" else 0)


# the files of a run, and what reads them
READERS = {
    "results.json": lambda file: read_results(file.parent),
    "time.json": lambda file: read_own(file, InputError, "remove it"),
    "progress.jsonl": read_events,
    "sites/site-1/record.jsonl": read_events,
    "sites/site-1/images.csv": lambda file: read_table(file, IMAGE, FINAL, "none"),
    "sites/site-1/network.safetensors": read_network,
    "job/feddp/app_server/config/weights.safetensors": read_network,
    "weights.pt": lambda file: load_checkpoint(Linear(1, 1), file),
}


@pytest.mark.parametrize("name", READERS)
def test_whatever_reads_a_run_s_file_stays_in_the_run(run, tmp_path, name):
    """Each file, and each folder above it, is a link in turn."""
    file, read = run / name, READERS[name]
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".safetensors":
        shutil.copy(run / "sites/site-2/network.safetensors", file)
    elif file.suffix == ".pt":
        torch.save(Linear(1, 1).state_dict(), file)
    elif not file.exists():
        append_event(file, "round", round=1)
    read(file)
    for path in (file, *file.parents[: len(Path(name).parts) - 1]):
        target = turned(path, tmp_path / "elsewhere")
        if target.is_dir():  # and looks like a run's folder
            (target / "run.json").write_text("{}")
        with pytest.raises(InputError, match=WAY_OUT) as refused:
            read(file)
        assert str(file) in str(refused.value) or name == "results.json"
        if target.is_dir():
            (target / "run.json").unlink()
        path.unlink()
        target.rename(path)
    read(file)


def test_a_link_that_no_command_reads_does_no_harm(typed, run, tmp_path):
    """A hospital's own link to its notes, say. What it leads to would end whoever opened it."""
    (tmp_path / "elsewhere").mkdir()
    os.mkfifo(tmp_path / "elsewhere/notes")
    for place in ("notes", "sites/notes", "sites/site-1/notes"):
        (run / place).symlink_to(tmp_path / "elsewhere/notes")
    (run / "scans").symlink_to(tmp_path / "elsewhere")
    assert read_results(run)["sites"]
    for name in ("report", "compare's page", "predict"):
        code, _, said = typed(*COMMANDS[name])
        assert code == 0, said


def test_the_page_hashes_nothing_elsewhere(run, tmp_path):
    secret = turned(run / "sites/site-1/network.safetensors", tmp_path / "elsewhere")
    with pytest.raises(BadFile, match=WAY_OUT):
        _sha256(run / "sites/site-1/network.safetensors", run)
    assert len(_sha256(secret, secret.parent)) == 64, "the control"


def test_links_within_a_run_and_to_a_run_are_honest(typed, run, tmp_path):
    inner = run / "sites/site-1/network.safetensors"
    inner.rename(run / "kept.safetensors")
    inner.symlink_to("../../kept.safetensors")
    (run / "nothing").symlink_to(tmp_path / "nowhere")
    run.rename(tmp_path / "disk")
    run.symlink_to(tmp_path / "disk")
    for name in ("report", "predict", "deploy"):
        code, _, said = typed(*COMMANDS[name])
        assert code == 0, said


def test_a_network_that_is_named_may_be_a_link(toy, tmp_path):
    """Whoever types a link to a network means that network; in a site's own folder of a job, a link is not typed."""
    file = save_toy(tmp_path / "elsewhere/network.safetensors", toy, 0)
    (tmp_path / "own").mkdir()
    link = tmp_path / "own/latest.safetensors"
    link.symlink_to(file)
    assert folder_of(link) is None
    assert read_network(link)[0]
    append_event(tmp_path / "own/record.jsonl", "score", round=1)
    with pytest.raises(BadFile, match=WAY_OUT):
        read_network(link)


def test_the_package_s_own_files_lead_nowhere(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "own").mkdir()
    for name, read in {"a.json": lambda file: read_own(file, InputError, "remove it"), "a.jsonl": read_events}.items():
        (tmp_path / "elsewhere" / name).write_text('{"event": "a"}\n')
        assert read(tmp_path / "elsewhere" / name), "the control"
        (tmp_path / "own" / name).symlink_to(tmp_path / "elsewhere" / name)
        with pytest.raises(InputError, match=WAY_OUT):
            read(tmp_path / "own" / name)


def test_a_watched_run_s_progress_is_its_own(typed, run, tmp_path, plan_for):
    """The server's folder below the run may be a link too."""
    from feddp.run.folders import RunFolder

    (tmp_path / "elsewhere/local").mkdir(parents=True)
    append_event(tmp_path / "elsewhere/local/progress.jsonl", "round", round=1, of=1, seconds=1.0)
    (run / "workspace/server").mkdir(parents=True)
    (run / "workspace/server/feddp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadFile, match=WAY_OUT):
        RunFolder(run, {}).progress()


def test_a_job_folder_s_apps_are_its_own(tmp_path, plan_for, toy):
    from feddp.jobs.folder import export
    from feddp.kit.approve import read_job

    job = export(plan_for(network=toy), tmp_path / "job", "feddp")
    assert read_job(job)[1].plan.network == toy
    for name in ("app_site", "meta.json"):
        whole = shutil.copytree(job, tmp_path / f"with-{name}")
        path = next(whole.glob(f"{name}*"), None) or next(path for path in whole.iterdir() if path.is_dir())
        turned(path, tmp_path / f"elsewhere-{name}")
        with pytest.raises(BadFile, match=WAY_OUT):
            read_job(whole)
