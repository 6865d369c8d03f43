"""`feddp models`: what is deployed, verified whenever it is used; a damaged registry or network is one line and exit code 2."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from feddp.errors import InputError
from feddp.networks import build
from feddp.networks.weights import save_network
from feddp.run.registry import EVENTS, Registry
from feddp.training.claim import release
from feddp.training.store import Store


@pytest.fixture
def network(toy, tmp_path):
    """Makes the file of a toy network that finds class 1 everywhere or nowhere."""

    def make(name: str, everywhere: bool):
        module = build(toy, 3, 1, seed=0)
        torch.nn.init.zeros_(module.head.weight)
        torch.nn.init.constant_(module.head.bias, 9.0 if everywhere else -9.0)
        texts = {"network": toy, "channels": "3", "classes": '["lesion"]', "labels": "nested", "size": "32", "site": name}
        save_network(tmp_path / f"{name}.safetensors", module.state_dict(), texts)
        return tmp_path / f"{name}.safetensors"

    return make


@pytest.fixture
def masks(tmp_path, feddp):
    """Predicts one image with the deployed network; returns the mask's value, or the error."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (32, 32), (10, 200, 30)).save(tmp_path / "images/a.png")
    calls = iter(range(100))

    def predict(*more):
        out = tmp_path / f"masks-{next(calls)}"
        code, _, said = feddp("predict", "--images", tmp_path / "images", "--out", out, *more)
        if code:
            assert not out.exists()
            return code, said
        (value,) = np.unique(np.asarray(Image.open(out / "a.png")))
        return code, int(value)

    return predict


def test_deploy_predict_and_roll_back(network, masks, feddp, tmp_path, monkeypatch):
    """The second network finds nothing, the first everything. The run's file may be removed: the registry has a copy."""
    monkeypatch.setenv("FEDDP_MODELS", str(tmp_path / "models"))
    first, second = network("first", True), network("second", False)
    assert feddp("models", "list")[:2] == (0, f"no network is deployed in {tmp_path / 'models'}\n")
    assert masks("--deployed") == (2, f"feddp: {tmp_path / 'models'} has no deployed network; deploy one with"
                                      " `feddp models deploy`\n")  # fmt: skip
    code, copied, _ = feddp("models", "deploy", first)
    assert code == 0
    first.unlink()
    assert masks("--deployed") == (0, 1)
    assert feddp("models", "rollback")[0] == 2, "there is nothing before it"
    feddp("models", "deploy", second)
    assert masks("--deployed") == (0, 0)
    code, listed, _ = feddp("models", "list")
    assert code == 0
    assert [(line[0], "site first" in line, "site second" in line) for line in listed.splitlines()] == [
        (" ", True, False),
        ("*", False, True),
    ]
    assert feddp("models", "rollback")[:2] == (0, copied)
    assert masks("--deployed") == (0, 1)
    assert [line[0] for line in feddp("models", "list")[1].splitlines()] == ["*", " ", " "]
    feddp("models", "deploy", second)
    assert masks("--deployed", "--registry", tmp_path / "models") == (0, 0), "deployed again after a rollback"
    code, said = masks("--deployed", "--network", second)
    assert (code, said) == (2, "feddp: give either --network FILE or --deployed\n")


def test_a_changed_or_missing_network_is_not_used(network, masks, feddp, tmp_path):
    models = tmp_path / "models"
    registry = Registry(models)
    first = registry.deploy(network("first", True))
    second = registry.deploy(network("second", False))
    content = bytearray(second.read_bytes())
    content[-1] ^= 1  # one bit of one number: no longer what was deployed, but a sound file of tensors
    second.write_bytes(content)
    code, said = masks("--deployed", "--registry", models)
    assert (code, said.count("\n"), "has changed since it was deployed" in said) == (2, 1, True)
    assert feddp("models", "list", "--registry", models)[0] == 2
    first.unlink()
    code, _, said = feddp("models", "rollback", "--registry", models)
    assert (code, said.count("\n"), "is missing" in said) == (2, 1, True)
    assert registry.replayed()[1][-1]["site"] == "second", "nothing was rolled back"


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        '{"event": "rollback", "time": 1}',
        '{"event": "deploy", "time": 1, "sha256": "../../x", "source": "a"}',
        '{"event": "deploy", "time": "x", "sha256": "' + "0" * 64 + '"}',
        '{"event": "deploy", "time": 1e300, "sha256": "' + "0" * 64 + '"}',
        '{"event": "deploy", "time": 1, "site": ["x"], "sha256": "' + "0" * 64 + '"}',
        '{"event": "deploy", "time": 1, "sha256": "' + "0" * 64 + '"}',
        '{"event": "retrain", "time": 1}',
    ],
)
def test_a_damaged_registry_is_one_line(network, masks, feddp, tmp_path, line):
    """In every command, and no deployment is added to it."""
    models = tmp_path / "models"
    models.mkdir()
    (models / EVENTS).write_text(line + "\n")
    code, said = masks("--deployed", "--registry", models)
    assert (code, said.count("\n"), EVENTS in said) == (2, 1, True)
    for command in (["list"], ["rollback"], ["deploy", network("first", True)]):
        code, _, said = feddp("models", *command, "--registry", models)
        assert (code, said.count("\n")) == (2, 1), command
    assert (models / EVENTS).read_text() == line + "\n"


def test_a_killed_deployment_leaves_the_one_before(network, tmp_path):
    """A line that was not written to its end is no event."""
    registry = Registry(tmp_path / "models")
    first = registry.deploy(network("first", True))
    with open(registry.folder / EVENTS, "a") as file:
        file.write('{"event": "deploy", "time": 1, "sha')
    assert registry.deployed() == first
    second = registry.deploy(network("second", False))
    assert registry.deployed() == second
    assert [json.loads(line)["event"] for line in (registry.folder / EVENTS).read_text().splitlines()] == ["deploy"] * 2


def test_what_is_no_network_is_not_deployed(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"code")
    with pytest.raises(InputError):
        Registry(tmp_path / "models").deploy(tmp_path / "x.safetensors")
    assert not (tmp_path / "models").exists()


def test_the_same_network_again_is_no_deployment(network, tmp_path):
    """A rollback then leads to the network before, not to the same one; a copy that was lost is there again."""
    registry = Registry(tmp_path / "models")
    first = registry.deploy(network("first", True))
    second = registry.deploy(file := network("second", False))
    second.unlink()
    with pytest.raises(InputError, match="or go back: `feddp models rollback`"):
        registry.deployed()
    assert registry.deploy(file) == second == registry.deployed()
    assert registry.rollback() == first
    first.unlink()
    with pytest.raises(InputError, match=r"is missing.*Deploy it again from .*first\.safetensors\.$"):
        registry.deployed()


def test_two_at_once_wait_for_each_other(network, tmp_path, monkeypatch):
    """Two rollbacks of one deployment would leave a registry that nobody can read."""
    registry, check = Registry(tmp_path / "models"), Registry._checked

    def slow(self, *arguments):
        time.sleep(0.2)
        return check(self, *arguments)

    registry.deploy(network("first", True))
    registry.deploy(network("second", False))
    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(Registry, "_checked", slow)
        failed = [future.exception() for future in [pool.submit(registry.rollback) for _ in range(2)]]
    assert sorted(str(error is None) for error in failed) == ["False", "True"]
    assert "no earlier network" in str(failed[0] or failed[1])
    files = [network(f"n{i}", bool(i)) for i in range(4)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(Registry.deploy, registry), files))
    events, stack = registry.replayed()
    assert ([event["event"] for event in events].count("deploy"), len(stack)) == (6, 5)


@pytest.mark.parametrize("name", ["a\nb", "a\x7f"])
def test_a_path_that_no_line_can_hold_is_refused_and_not_written(name, network, tmp_path, feddp):
    """Written, it would make the whole registry unreadable."""
    odd = tmp_path / name
    odd.mkdir()
    file = network("first", True).rename(odd / "network.safetensors")
    code, _, said = feddp("models", "deploy", file, "--registry", tmp_path / "models")
    assert (code, said.count("\n"), "source cannot be recorded" in said) == (2, 1, True)
    assert Registry(tmp_path / "models").replayed() == ([], [])


def test_at_a_real_site_the_registry_knows_run_and_round(toy, tmp_path, plan_for, feddp):
    """A site's own folder of a run is called after the job; the last round that it scored is the one that it adopted."""
    plan, job = plan_for(network=toy, method="feddp", sites=("A", "B")), "7ddf6a5c-6f9c-4b39-9d8e-3f2f0b8f2a10"
    store = Store(tmp_path / "feddp" / job)
    store.claim(plan.to_json())
    for round in (1, 3, 2):
        store.record("score", round=round, dice=0.5)
    store.write("calibrated", build(toy, 3, 1, seed=0).state_dict(), **plan.metadata, site="A")
    release(tmp_path)
    feddp("models", "deploy", store.folder / "calibrated.safetensors", "--registry", tmp_path / "models")
    assert f"site A, method feddp, job {job}, round 2  from" in feddp("models", "list", "--registry", tmp_path / "models")[1]
    other = plan_for(network=toy, method="feddp", sites=("A", "B"), size=64)
    (store.folder / "plan.json").write_text(json.dumps(other.to_json()))
    code, _, said = feddp("models", "deploy", store.folder / "calibrated.safetensors", "--registry", tmp_path / "models")
    assert (code, said.count("\n"), "its metadata differ from the plan's" in said) == (2, 1, True)
