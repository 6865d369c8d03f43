"""A short run of tests/chaos.py: processes are killed at drawn moments, and the outcome has the bits of an unbroken run."""

import io
import json
import sys
from contextlib import redirect_stdout

import pytest

import chaos as script
from support.command import ended

pytestmark = pytest.mark.poc

ROUNDS, EPOCHS = 2, 1  # 8 of the 19 moments are in the rounds; the seeds below kill there


def unbroken(words: list[str]) -> None:
    """The run that is not killed needs no process of its own, nor does the script."""
    assert ended(words[2:]) == 0


@pytest.fixture(scope="module")
def chaos(tmp_path_factory, tiny_root):
    """What happened to a run of FedDP at two sites, after the unbroken one."""
    # the script takes a process for its own whose command has its name before the run's folder
    out = tmp_path_factory.mktemp("killed")

    def run(env: str, roles: str, kills: int, seed: int) -> dict:
        words = ["chaos.py", "--data", tiny_root, "--out", out, "--env", env, "--rounds", ROUNDS, "--epochs", EPOCHS]
        words += ["--roles", roles, "--kills", kills, "--seed", seed]
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as said:
            patch.setattr(sys, "argv", [*map(str, words)])
            patch.setattr(script, "unbroken", unbroken)
            code = script.main()
        assert code == 0, said.getvalue()
        return json.loads(said.getvalue().splitlines()[-1])

    return run


def test_a_killed_command_goes_on(chaos):
    outcome = chaos("local", "command", kills=1, seed=18)
    assert outcome["kills"], "the control: something was killed"
    assert outcome["starts"] == 1 + len(outcome["kills"])
    assert outcome["differing"] == outcome["left"] == []
    assert outcome["repeated"] <= len(outcome["kills"]), "at most the round that was under way"


def test_killed_sites_take_part_again_in_the_same_run(chaos):
    """A FLARE client with its job's process, and a job's process alone: nobody has to start the run again."""
    outcome = chaos("poc", "site parent,site job", kills=2, seed=143)
    assert sorted(kill.split(" after")[0] for kill in outcome["kills"]) == ["site job", "site parent"]
    assert outcome["starts"] == 1
    assert outcome["repeated"] == 0
    assert outcome["differing"] == outcome["left"] == []
