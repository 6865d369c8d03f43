"""A run.json that was broken by hand: one message, exit code 2 and nothing changed, whoever reads it."""

import json

import pytest

from feddp.cli.options import Env
from feddp.files import write_json
from feddp.run.session import ENVIRONMENTS, Request, record, recorded


@pytest.fixture
def runs(toy, tiny_root, tmp_path, plan_for):
    """Two broken-off runs, `good` and `strange`."""
    policies = {site: {"data": str(tiny_root / site)} for site in ("site-1", "site-2")}
    request = Request(plan_for(network=toy, method="fedavg", rounds=3), policies, tmp_path, env="local")
    for name in ("good", "strange"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_json(tmp_path / "runs" / name / "run.json", record(request) | {"job": "local"})
    return tmp_path / "runs"


def plan(**changes):
    return lambda content: content | {"plan": content["plan"] | changes}


# what becomes of run.json, and what is said about it
DAMAGED = {
    "no JSON": (lambda content: '{"env": ', " is not readable JSON (Expecting value: line 1 column 9 (char 8))"),
    "a list": (lambda content: [content], " holds no JSON object"),
    "foreign": (lambda content: {"env": "sim"}, " is damaged, or not of FedDP: it lacks plan, policies, threads"),
    "env": (lambda content: content | {"env": ["local"]}, ": env cannot be ['local']"),
    "plan": (lambda content: content | {"plan": None}, ": plan cannot be None"),
    "rounds": (plan(rounds="3"), ": plan cannot be {'"),
    "policies": (lambda content: content | {"policies": {"site-1": 1}}, ": policies cannot be {'site-1': 1}"),
    "threads": (lambda content: content | {"threads": 0}, ": threads cannot be 0"),
    "job": (lambda content: content | {"job": 7}, ": job cannot be 7"),
    "sites": (lambda content: content | {"policies": {"../x": {}}}, ": policies and plan name different sites"),
}


@pytest.fixture
def strange(runs):
    """Damages the run `strange`."""

    def damage(change):
        path = runs / "strange/run.json"
        content = change(json.loads(path.read_text()))
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return damage


def test_the_control(runs, feddp):
    assert recorded(runs / "strange")["threads"] is None
    code, said, _ = feddp("runs", "list", runs)
    assert (code, said.count("  broken off  ")) == (0, 2)


@pytest.mark.parametrize("damage", DAMAGED)
def test_whoever_reads_it_ends_with_one_message(damage, runs, strange, feddp, tiny_root, toy):
    change, what = DAMAGED[damage]
    path = strange(change)
    before, folder = path.read_bytes(), path.parent
    same = ["--data", tiny_root, "--out", folder, "--method", "fedavg", "--network", toy, "--size", 32, "--env", "local"]
    for command in (["run", "--resume", folder], ["run", *same], ["runs", "delete", folder, runs / "good", "--yes"]):
        code, _, said = feddp(*command)
        assert code == 2
        assert said.startswith(f"feddp: {path}{what}")
        assert said.endswith("; the run cannot be continued: remove its folder, or name another one\n")
        assert said.count("\n") == 1
    assert path.read_bytes() == before
    assert (runs / "good/run.json").exists()


@pytest.mark.parametrize("damage", DAMAGED)
def test_the_list_has_the_other_runs_still(damage, runs, strange, feddp):
    change, what = DAMAGED[damage]
    path = strange(change)
    code, said, _ = feddp("runs", "list", runs)
    good, _, last = said.splitlines()
    assert code == 2
    assert good.startswith(f"{runs / 'good'}  fedavg  ")
    assert last.startswith(f"{path.parent}  damaged: {path}{what}")


def test_a_plan_that_is_none_of_ours_is_named_with_its_file(runs, strange, feddp):
    """The method's package may be missing here, so it is no reason to remove the run: the list has it."""
    path = strange(plan(method="theirs"))
    code, _, said = feddp("run", "--resume", path.parent)
    assert code == 2
    assert said.startswith(f"feddp: {path} holds a plan that cannot be continued here: unknown method 'theirs'; known: ")
    code, said, _ = feddp("runs", "list", runs)
    assert (code, "strange  theirs  " in said) == (0, True)


def test_the_environments_are_those_of_the_command():
    assert tuple(env.value for env in Env) == ENVIRONMENTS
