"""What a person is given of a site's own files after a run."""

import os

import pytest

from feddp.run.session import copy_results, fresh
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
