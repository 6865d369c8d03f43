"""What a person is given of a site's own files after a run."""

from feddp.run.session import bring_home


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
    bring_home(store, tmp_path / "home")
    found = {file.name: file.read_text() for file in (tmp_path / "home").iterdir()}
    kept = {name: name for name in ("images.csv", "cases.csv", "record.jsonl")}
    assert found == kept | {"network.safetensors": "tuned.safetensors"}
    (store / "cases.csv").unlink()
    bring_home(store, tmp_path / "again")
    assert {file.name for file in (tmp_path / "again").iterdir()} == found.keys() - {"cases.csv"}
