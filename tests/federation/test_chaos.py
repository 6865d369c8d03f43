"""A short run of tests/chaos.py: processes are killed at drawn moments, and the outcome has the bits of an unbroken run."""

import json
import subprocess
import sys

import pytest

from feddp.data.synthesize import synthesize
from support import ROOT

pytestmark = pytest.mark.poc


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
    """What happened to a run of FedDP at two sites, after the unbroken one."""
    root = tmp_path_factory.mktemp("chaos")
    synthesize(root / "data", sites=2, images=12, size=32)

    def run(env: str, roles: str, kills: int, seed: int) -> dict:
        command = [sys.executable, str(ROOT / "tests/chaos.py"), "--data", root / "data", "--out", root / "out", "--env", env]
        command += ["--roles", roles, "--kills", kills, "--seed", seed]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_killed_command_goes_on(chaos):
    outcome = chaos("local", "command", kills=1, seed=0)
    assert outcome["kills"], "the control: something was killed"
    assert outcome["starts"] == 1 + len(outcome["kills"])
    assert outcome["differing"] == outcome["left"] == []
    assert outcome["repeated"] <= len(outcome["kills"]), "at most the round that was under way"


def test_killed_sites_take_part_again_in_the_same_run(chaos):
    """A FLARE client with its job's process, and a job's process alone: nobody has to start the run again."""
    outcome = chaos("poc", "site parent,site job", kills=2, seed=4)
    assert sorted(kill.split(" after")[0] for kill in outcome["kills"]) == ["site job", "site parent"]
    assert outcome["starts"] == 1
    assert outcome["repeated"] == 0
    assert outcome["differing"] == outcome["left"] == []
