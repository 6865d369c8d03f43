"""`feddp run --config`: run.yaml repeats a run; what is typed wins; a mistake in the file is one line that names it."""

import json

import pytest
import yaml

from feddp.limits import CONFIG_BYTES
from feddp.run.config import read_config, text_of, write_config


@pytest.fixture
def run(toy, tiny_root, tmp_path, feddp):
    """A run of one round, its folder, and what it is typed with."""
    typed = ["--data", tiny_root, "--method", "fedavg", "--network", toy, "--size", 32, "--rounds", 1, "--env", "local"]
    typed += ["--sites", "site-1,site-2", "--set", "batch=4", "--set", "lr=1e-3", "--without-consent", "site-2", "--seed", 3]
    code, _, said = feddp("run", *typed, "--out", tmp_path / "first")
    assert code == 0, said
    return tmp_path / "first"


def asked(out) -> dict:
    return json.loads((out / "run.json").read_text())


def test_a_run_is_repeated_from_its_file_alone(run, tmp_path, feddp):
    """The same run.json, the same results, and a run.yaml with the same options."""
    code, _, said = feddp("run", "--config", run / "run.yaml", "--out", tmp_path / "second")
    assert code == 0, said
    assert "replaces" not in said
    assert asked(tmp_path / "second") == asked(run)
    for name in ("results.json", "run.yaml"):
        assert (tmp_path / "second" / name).read_text() == (run / name).read_text()
    assert yaml.safe_load((run / "run.yaml").read_text()) == {
        "data": str(json.loads((run / "run.json").read_text())["policies"]["site-1"]["data"].removesuffix("/site-1")),
        "sites": ["site-1", "site-2"],
        "method": "fedavg",
        "rounds": 1,
        "network": "toy",
        "size": 32,
        "seed": 3,
        "set": {"batch": 4, "lr": "1e-3"},
        "env": "local",
        "device": "cpu",
        "without-consent": ["site-2"],
    }


def test_what_is_typed_wins_and_is_said(run, tmp_path, feddp):
    words = ["--rounds", 2, "--set", "batch=2", "--set", "local_epochs=2"]
    code, _, said = feddp("run", "--config", run / "run.yaml", *words, "--out", tmp_path / "other")
    assert code == 0, said
    assert said.splitlines()[0] == f"{run / 'run.yaml'}: the command line replaces rounds (1), set batch (4)"
    plan = asked(tmp_path / "other")["plan"]
    assert (plan["rounds"], plan["settings"]["batch"], plan["settings"]["local_epochs"]) == (2, 2, 2)
    assert plan["seed"] == asked(run)["plan"]["seed"] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("round: 3", ": unknown option 'round'; the nearest one is 'rounds'"),
        ("calibration_epochs: 3", ": unknown option 'calibration_epochs'; the nearest one is 'calibration-epochs'"),
        ("out: runs/x", ": out cannot stand in the file; remove its line"),
        ("rounds: many", ": rounds: 'many': "),
        ("rounds: 2.5", ": rounds: 2.5: "),
        ("rounds: true", ": rounds: True: "),
        ("rounds: 0x" + "f" * 5000, ": rounds: a int that is too large to print is no plain value; correct it"),
        ("rounds: {a: 1}", ": rounds: {'a': 1} is no plain value; correct it"),
        ("env: cloud", ": env: 'cloud': "),
        ("seed: -1", ": seed: -1: "),
        ("set: [lr=1]", ": set: ['lr=1'] holds no plain values"),
        ("set: {lr: {a: 1}}", ": set, lr: {'lr': {'a': 1}} holds no plain values"),
        ("rounds: &x 1\nseed: *x", ": is not readable YAML (it has an alias"),
        ("rounds: 1\nrounds: 2", ": is not readable YAML (it has a key twice"),
        ("rounds: [", ": is not readable YAML (while parsing"),
        ("rounds: !!python/object/apply:os.getcwd []", ": is not readable YAML (could not determine a constructor"),
        ("x: " + "[" * 2000, ": is not readable YAML ("),
        ("3", ": holds 3, not names and values"),
        ("#" * (CONFIG_BYTES + 1), f": has {CONFIG_BYTES + 1} bytes; the limit is"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(text, said, tmp_path, feddp):
    """Nothing is run: there is not even a folder of data."""
    (tmp_path / "my.yaml").write_text(text)
    code, _, found = feddp("run", "--config", tmp_path / "my.yaml", "--out", tmp_path / "out")
    assert code == 2
    assert found.startswith(f"feddp: {tmp_path / 'my.yaml'}{said}")
    assert found.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_empty_line_gives_nothing_and_is_not_replaced(tmp_path, feddp):
    """The sites are missed, and nothing else."""
    (tmp_path / "my.yaml").write_text(f"set:\nrounds:\ndata: {tmp_path / 'nowhere'}")
    typed = ["--rounds", 2, "--set", "batch=2", "--out", tmp_path / "out"]
    code, _, said = feddp("run", "--config", tmp_path / "my.yaml", *typed)
    assert (code, said.count("\n")) == (2, 1)
    assert f"{tmp_path / 'nowhere'} contains no site's folder" in said


def test_a_file_that_is_not_there_and_one_beside_resume(tmp_path, feddp):
    assert f"{tmp_path / 'x.yaml'}: does not exist" in feddp("run", "--config", tmp_path / "x.yaml")[2]
    (tmp_path / "x.yaml").write_text("rounds: 1")
    assert "leave out --config" in feddp("run", "--config", tmp_path / "x.yaml", "--resume", tmp_path / "x")[2]


@pytest.mark.parametrize(
    "text", ["1e-3", "0.5", "3", "true", "True", "null", "~", "007", "1_000", "off", "2020-01-01", "a,b", "1.50"]
)
def test_a_setting_comes_back_as_it_was_typed(text, tmp_path):
    """Whatever YAML would make of it: 1e-3 is a text there, off is false, 2020-01-01 a day, 1_000 and 1.50 other digits."""
    (tmp_path / "run.yaml").write_text(write_config({"set": {"x": text}}, "0" * 12))
    assert text_of(read_config(tmp_path / "run.yaml")["set"]["x"]) == text
