"""`feddp run` goes on where it was broken off: the same command, --resume, --retries. How-to: continue.md."""

import json
import re
import shlex
from types import SimpleNamespace

import pytest

from feddp.errors import ContributionError, FedDPError, InputError
from feddp.protocol import READY
from feddp.run import local, retry
from feddp.run.follow import Follower
from feddp.run.options import Options, resume_here, run_here
from feddp.run.retry import retried
from feddp.training import claim


@pytest.fixture
def run(toy, tiny_root, tmp_path):
    """`feddp run --env local` of FedAvg on a toy network."""

    def run(out="run", rounds=3, seed=0):
        options = Options("fedavg", rounds, None, toy, 32, seed, ("batch=4",))
        return run_here(tiny_root, tmp_path / out, options, "local")

    return run


@pytest.fixture
def fails(monkeypatch):
    """The server's connection fails once, after so many tasks; the first question of a job is none of them."""
    send = local.LocalServer.send

    def make(tasks: int, times: int = 1):
        left = {"tasks": tasks, "times": times}

        def failing(self, task, *arguments):
            left["tasks"] -= task != READY
            if left["tasks"] < 0 and left["times"] > 0:
                left["times"] -= 1
                left["tasks"] = tasks
                raise ContributionError("the connection broke")
            return send(self, task, *arguments)

        monkeypatch.setattr(local.LocalServer, "send", failing)

    return make


def rounds_asked(out) -> list[int]:
    events = map(json.loads, (out / "progress.jsonl").read_text().splitlines())
    return [event["round"] for event in events if event["event"] == "ask" and event["task"] == "train"]


def test_the_same_command_goes_on(run, fails, tmp_path, capfd):
    """Two rounds are complete, the third is asked for again, and no other."""
    whole = run("whole")
    fails(2)
    with pytest.raises(FedDPError, match=rf"the connection broke; .*to go on: feddp run --resume {tmp_path / 'run'}"):
        run()
    assert run() == whole
    assert "holds this run, unfinished: it is continued" in capfd.readouterr().err
    assert rounds_asked(tmp_path / "run") == [1, 2, 3, 3]


def test_an_ended_run_holds_no_folder(run, tmp_path):
    """A comparison runs hundreds in one process; a run's own folder alone stays locked."""
    run()
    held = [path.relative_to(tmp_path) for path in claim._held if path.is_relative_to(tmp_path.resolve())]
    assert [path for path in held if "workspace" in path.parts] == []


def test_resume_needs_the_folder_alone(run, fails, tmp_path):
    whole = run("whole")
    fails(2)
    with pytest.raises(FedDPError):
        run()
    assert resume_here(tmp_path / "run") == whole


def test_resume_refuses_other_options_by_name(run, fails, feddp, tmp_path):
    """Also an option with its default value (`--env sim`); nothing is changed."""
    fails(2)
    with pytest.raises(FedDPError):
        run()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    code, _, said = feddp(
        "run", "--rounds", 50, "--env", "sim", "--retries", 2, "--set", "batch=4", "--resume", tmp_path / "run"
    )
    assert code == 2
    assert "leave out --rounds, --set, --env. A run with other options, or with more rounds, is a new one" in said
    assert {path: path.read_bytes() for path in before} == before
    code, _, said = feddp("run", "--resume", tmp_path / "run", "--retries", 1)
    assert (code, rounds_asked(tmp_path / "run")) == (0, [1, 2, 3, 3]), said


def test_another_command_does_not_overwrite_it(run, fails, tmp_path):
    fails(2)
    with pytest.raises(FedDPError):
        run()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"with another plan \(.*seed=0.*\); continue that one with `feddp run --resume"):
        run(seed=1)
    assert {path: path.read_bytes() for path in before} == before


def test_a_finished_run_is_not_continued(run, tmp_path):
    run()
    for again in (run, lambda: resume_here(tmp_path / "run")):
        with pytest.raises(InputError, match="holds a finished run"):
            again()
    with pytest.raises(InputError, match="holds no run"):
        resume_here(tmp_path)


def test_retries_continue_by_themselves(run, fails, tmp_path, monkeypatch, capfd):
    """Two failures, three attempts; the pause doubles."""
    pauses = []
    whole = run("whole")
    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=pauses.append))
    fails(1, times=2)
    assert retried(run, tmp_path / "run", 2) == whole
    assert pauses == [5, 10]
    said = capfd.readouterr().err
    assert "attempt 2 of 3 in 5 s" in said
    assert "attempt 3 of 3 in 10 s" in said


def test_the_command_is_one_that_a_shell_reads(run, fails, tmp_path):
    fails(2)
    with pytest.raises(FedDPError) as raised:
        run("my run")
    command = str(raised.value).split("to go on: ")[1]
    assert shlex.split(command) == ["feddp", "run", "--resume", str(tmp_path / "my run")]
    with pytest.raises(InputError, match=re.escape(f"`{command}`")):
        run("my run", seed=1)


@pytest.mark.parametrize(
    ("method", "env"),
    [("fedavg", "local"), ("centralized", "local"), pytest.param("fedavg", "sim", marks=pytest.mark.simulator)],
)
def test_ctrl_c_names_the_command_that_goes_on(method, env, toy, tiny_root, tmp_path, feddp, monkeypatch):
    """The signal comes while the command waits for the rounds, in every environment in the same place."""

    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Follower, "until", pressed)
    options = ["--method", method, "--network", toy, "--size", 32, "--rounds", 3, "--set", "batch=4", "--env", env]
    code, _, said = feddp("run", "--data", tiny_root, "--out", tmp_path / "run", *options)
    assert code == 130
    assert said.splitlines()[-1] == f"to go on: feddp run --resume {tmp_path / 'run'}"


def test_ctrl_c_names_no_command_where_nothing_can_go_on(tmp_path, capsys):
    """Before the run has begun, and after its last file was written."""

    def pressed():
        raise KeyboardInterrupt

    for name in ("", "results.json"):
        if name:
            (tmp_path / "run.json").write_text("{}")
            (tmp_path / name).write_text("{}")
        with pytest.raises(KeyboardInterrupt):
            retried(pressed, tmp_path, 2)
    assert capsys.readouterr().err == ""


def test_the_last_failure_is_told(run, fails, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=lambda seconds: None))
    fails(1, times=9)
    with pytest.raises(FedDPError, match="the connection broke"):
        retried(run, tmp_path / "run", 1)


def test_what_is_wrong_with_the_command_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=lambda seconds: pytest.fail("it waited")))

    def wrong():
        raise InputError("no such method")

    with pytest.raises(InputError):
        retried(wrong, tmp_path, 5)
