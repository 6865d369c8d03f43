"""The commands as people type them: what they leave, and that a mistake ends in one line and exit code 2."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

from feddp.cli import app
from feddp.data.images import label_mask
from feddp.data.synthesize import synthesize
from feddp.errors import InputError
from feddp.networks import build
from feddp.networks.weights import save_network
from feddp.run.session import fresh
from support import ROOT


def typed(*arguments):
    """A command in a process of its own."""
    command = [sys.executable, "-m", "feddp", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def commands(group, *names):
    """The words of every command, from the one table that there is."""
    for name, command in group.commands.items():
        yield from commands(command, *names, name) if hasattr(command, "commands") else [" ".join((*names, name))]


COMMANDS = [*commands(get_command(app))]


def test_the_commands_of_groups_are_among_them():
    assert {"run", "report", "kit approve", "runs slim", "models deploy", "data prepare"} <= set(COMMANDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "bench"])  # its --help is the benchmark's
def test_every_command_has_a_help(command):
    done = CliRunner().invoke(app, [*command.split(), "--help"])
    assert done.exit_code == 0
    assert f"Usage: feddp {command}" in done.output.replace("root", "feddp")


def test_a_mistake_is_one_line_and_exit_code_two(tmp_path):
    done = typed("run", "--data", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("feddp: ")
    assert str(tmp_path / "nowhere") in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("option", "message"), [("--device", "--device cuda:99 cannot be used"), ("--out", "not empty")])
def test_a_run_that_cannot_be_is_refused_before_it_starts(feddp, tmp_path, option, message):
    """A device that is not there would else fail at every site, once FLARE is up; a file is no folder for results."""
    synthesize(tmp_path / "data", sites=2, images=10, size=32)
    (tmp_path / "file").write_text("mine")
    arguments = {"--data": tmp_path / "data", "--out": tmp_path / "out", "--size": 32}
    arguments[option] = {"--device": "cuda:99", "--out": tmp_path / "file"}[option]
    code, _, said = feddp("run", *(word for pair in arguments.items() for word in pair))
    assert code == 2
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "out").exists()


@pytest.fixture
def taken_home(tmp_path):
    """A network whose last layer says class 1 everywhere (bias 10, weight 0), and two images."""
    network = build("pvt_v2_b0-fpn", 3, 1, seed=0)
    torch.nn.init.zeros_(network.segmentation_head[0].weight)
    torch.nn.init.constant_(network.segmentation_head[0].bias, 10)
    metadata = {"network": "pvt_v2_b0-fpn", "channels": "3", "classes": '["lesion"]', "labels": "nested", "size": "32"}
    save_network(tmp_path / "network.safetensors", network.state_dict(), metadata)
    (tmp_path / "images").mkdir()
    sizes = {"a": (40, 30), "b": (64, 64)}
    for name, size in sizes.items():
        Image.new("RGB", size, (10, 200, 30)).save(tmp_path / f"images/{name}.png")
    return ("predict", "--network", tmp_path / "network.safetensors"), sizes


def test_a_personal_network_runs_at_home(feddp, taken_home, tmp_path):
    """Masks of ones, at each image's own size."""
    arguments, sizes = taken_home
    code, _, err = feddp(*arguments, "--images", tmp_path / "images", "--out", tmp_path / "masks")
    assert code == 0, err
    for name, size in sizes.items():
        with Image.open(tmp_path / f"masks/{name}.png") as mask:
            assert mask.size == size
            assert (np.asarray(mask) == 1).all()


def test_what_cannot_be_predicted_is_one_line(feddp, taken_home, tmp_path):
    arguments, _ = taken_home
    arguments = (*arguments, "--images", tmp_path / "images")
    for wrong, message in (
        (["--device", "cuda:99"], "--device cuda:99 cannot be used"),
        ([], "network.safetensors: not empty"),
    ):
        code, _, said = feddp(*arguments, "--out", tmp_path / ("gpu" if wrong else "network.safetensors"), *wrong)
        assert (code, len(said.strip().splitlines())) == (2, 1)
        assert message in said
    assert not (tmp_path / "gpu").exists()
    (tmp_path / "empty").mkdir()
    (tmp_path / "grey").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "grey/c.png")
    for images, message in (
        ("empty", "holds no image"),
        ("nowhere", "does not exist"),
        ("images/a.png", "is a file; name its folder"),
        ("grey", "has 1 channel(s), but the network expects 3. Save it as 8-bit RGB"),
    ):
        code, _, said = feddp(*arguments[:3], "--images", tmp_path / images, "--out", tmp_path / "x")
        assert (code, "dataset.json" in said) == (2, False)
        assert message in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("predict", "--images", "i", "--out", "o", "--network", "n", "--registry", "r"), "--registry r is for --deployed"),
        (("kit", "check", "k", "--within", 60), "--within is for --canary"),
        (("kit", "check", "k", "--offline", "--canary", "j"), "--canary submits a job to the server"),
    ],
)
def test_an_option_without_effect_is_named(feddp, words, said):
    code, _, err = feddp(*words)
    assert (code, len(err.splitlines())) == (2, 1)
    assert said in err


def test_the_variable_for_the_registry_is_no_option(feddp, monkeypatch):
    """Whoever has set it may name a network all the same; that one is looked for."""
    monkeypatch.setenv("FEDDP_MODELS", "r")
    code, _, err = feddp("predict", "--images", "i", "--out", "o", "--network", "nowhere")
    assert (code, "nowhere" in err, "--registry" in err) == (2, True, False)


def test_poc_takes_sites_or_a_folder_of_sites(tmp_path):
    """Without an environment: the script says so before it makes one."""
    (tmp_path / "poc").mkdir()
    shutil.copy(ROOT / "poc/run.sh", tmp_path / "poc")
    (tmp_path / "poc/environment.sh").write_text("echo made >&2; exit 9\n")
    for words, code, said in (
        (("--sites", "3"), 9, "made\n"),
        (("--data", "x"), 9, "made\n"),
        (("--data", "x", "--sites", "3"), 2, "--sites N is the number of synthetic sites; with --data ROOT, leave it out\n"),
    ):
        done = subprocess.run(["bash", tmp_path / "poc/run.sh", *words], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, said)


def test_a_job_of_some_sites_leaves_the_others_out(feddp, tmp_path):
    synthesize(tmp_path / "data", sites=3, images=10, size=32)
    job = ("job", "--data", tmp_path / "data", "--method", "fedavg", "--network", "unet", "--size", 32, "--out", tmp_path / "j")
    for wrong, said in (
        (("--sites", "site-1,site-9"), "site-9: not a site below"),
        (("--sites", "site-1,site-2", "--channels", 1), "--channels: the folders below"),
        (("--sites", ""), "the job has no sites"),
    ):
        code, _, err = feddp(*job, *wrong)
        assert (code, len(err.splitlines())) == (2, 1)
        assert said in err
        assert not (tmp_path / "j").exists()
    assert feddp(*job, "--sites", "site-1,site-3")[0] == 0
    plan = json.loads((tmp_path / "j/app_server/config/config_fed_server.json").read_text())
    assert '"sites": ["site-1", "site-3"]' in json.dumps(plan)


def test_a_run_does_not_lie_in_another_one(tmp_path):
    """`feddp runs delete` would remove it too, and `runs list` does not show it. A folder beside it, and one below another
    program's run.json, are no matter."""
    run = {"env": "local", "plan": {"method": "fedavg", "rounds": 1, "sites": ["A"]}, "policies": {"A": {}}, "threads": None}
    (tmp_path / "first").mkdir()
    (tmp_path / "first/run.json").write_text(json.dumps(run))
    with pytest.raises(InputError, match=f"second lies in the folder of another run, {tmp_path / 'first'}; name another"):
        fresh(tmp_path / "first/deeper/second")
    assert not (tmp_path / "first/deeper").exists()
    fresh(tmp_path / "first/../beside")
    (tmp_path / "first/run.json").write_text('{"x": 1}')
    fresh(tmp_path / "first/other")


def test_a_seed_is_not_negative(feddp, tmp_path):
    code, _, said = feddp("run", "--data", tmp_path, "--out", tmp_path / "out", "--seed", -1)
    assert code == 2
    assert "equal to 0" in said


def test_label_masks_by_hand():
    """Of two classes, 0.5 is not above 0.5. Nested, 2 needs 1, and counts if it is less probable too.

    Exclusive, the most probable of those above the threshold counts, and of equal ones the first.
    """
    pixels = torch.tensor([(0.5, 0.4), (0.9, 0.2), (0.99, 0.51), (0.51, 0.99), (0.6, 0.6), (0.4, 0.7)])
    maps = pixels.T.reshape(2, 1, 6)
    assert label_mask(maps, "nested", 0.5).tolist() == [[0, 1, 2, 2, 2, 0]]
    assert label_mask(maps, "exclusive", 0.5).tolist() == [[0, 1, 1, 2, 1, 2]]
    assert label_mask(maps, "exclusive", 0.3).tolist() == [[1, 1, 1, 2, 1, 2]]
    assert label_mask(torch.stack([maps, maps.flip(0)]), "exclusive", 0.5)[1].tolist() == [[0, 2, 2, 1, 1, 1]]
