"""A run's folder: when what is in it counts, and what a person is given of a site's own files after a run."""

import os

import pytest

from feddp.files import write_text
from feddp.run import session
from feddp.run.options import Options, run_here
from feddp.run.session import copy_results, fresh
from feddp.training.claim import release
from feddp.training.store import Store


@pytest.mark.parametrize(
    "make", [fresh, Store, lambda folder: copy_results(folder.parent, folder)], ids=["run", "store", "home"]
)
def test_a_folder_with_a_sites_own_files_is_its_owners_alone(tmp_path, make):
    """Whatever the process's umask; a plain folder is the control."""
    before = os.umask(0o022)
    try:
        make(tmp_path / "own")
        (tmp_path / "control").mkdir()
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("own", "control")] == [0o700, 0o755]


def test_what_comes_home(tmp_path):
    """The last network there is, tables of images and, where there are some, of cases, and the log; no private state."""
    store = tmp_path / "store"
    store.mkdir()
    for name in (
        "start.safetensors",
        "tuned.safetensors",
        "state_00002.safetensors",
        "images.csv",
        "cases.csv",
        "record.jsonl",
    ):
        (store / name).write_text(name)
    copy_results(store, tmp_path / "home")
    found = {file.name: file.read_text() for file in (tmp_path / "home").iterdir()}
    kept = {name: name for name in ("images.csv", "cases.csv", "record.jsonl")}
    assert found == kept | {"network.safetensors": "tuned.safetensors"}
    (store / "cases.csv").unlink()
    copy_results(store, tmp_path / "again")
    assert {file.name for file in (tmp_path / "again").iterdir()} == found.keys() - {"cases.csv"}


def test_a_copy_that_is_interrupted_leaves_the_earlier_one(tmp_path, monkeypatch):
    store, home = tmp_path / "store", tmp_path / "home"
    for folder, text in ((store, "later"), (home, "earlier")):
        folder.mkdir()
        (folder / "images.csv").write_text(text)

    def crash(_):
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="power cut"):
        copy_results(store, home)
    assert [(path.name, path.read_text()) for path in home.iterdir()] == [("images.csv", "earlier")]


def test_a_run_is_complete_when_all_its_files_are_on_the_disk(toy, tiny_root, tmp_path, monkeypatch):
    """After results.json nobody makes them again."""
    replace, replaced, out = os.replace, [], tmp_path / "run"

    def replacing(part, path):
        replaced.append(path)
        replace(part, path)

    monkeypatch.setattr(os, "replace", replacing)
    run_here(tiny_root, out, Options("fedavg", 1, None, toy, 32, 0, ("batch=4",)), "local")
    homes = [out / "sites" / site / name for site in ("site-1", "site-2") for name in ("network.safetensors", "images.csv")]
    first = {*homes, *(out / name for name in ("run.yaml", "shared.safetensors", "progress.jsonl", "time.json"))}
    assert first <= {*replaced[: replaced.index(out / "results.json")]}


def test_no_run_lacks_its_run_yaml(toy, tiny_root, tmp_path, monkeypatch):
    """A process is killed before it writes run.yaml; the same command writes it, and continues."""

    def killed(*_):
        raise KeyboardInterrupt

    options = Options("fedavg", 1, None, toy, 32, 0, ("batch=4",))
    monkeypatch.setattr(session, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        run_here(tiny_root, tmp_path / "run", options, "local")
    monkeypatch.setattr(session, "write_text", write_text)
    release(tmp_path)  # as the end of a process does
    run_here(tiny_root, tmp_path / "run", options, "local")
    run_here(tiny_root, tmp_path / "whole", options, "local")
    broken, whole = ((tmp_path / name / "run.yaml").read_text() for name in ("run", "whole"))
    assert broken == whole.replace(str(tmp_path / "whole"), str(tmp_path / "run"))
    assert (tmp_path / "run/results.json").exists()
