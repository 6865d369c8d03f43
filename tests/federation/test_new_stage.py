"""A stage of one's own touches three files: the table of tasks, the order of the stages, and its module with both halves."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import feddp

ROW = '    TaskSpec("count", "count", Kind.LOCAL, scalars=("images",)),\n'
STAGE = '''"""Each site says how many images it trains on."""

from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.server import Server


def serve(server: Server) -> None:
    answers = server.ask("count", Message(), ("images",))
    server.progress("counted", images=sum(answer.scalars["images"] for answer in answers.values()))


def answer(task: str, message: Message, host: Host) -> Message:
    return Message(scalars={"images": len(host.open().samples)})
'''
RUN = """
import json, sys
from pathlib import Path
from feddp.plan.schema import Plan
from feddp.run.options import environment
from feddp.run import session
from feddp.run.session import Request

given = json.load(sys.stdin)
plan = Plan.from_json(given["plan"])
session.run(Request(plan, given["policies"], Path(given["out"])), environment(given["env"]), "counting")
"""


def inserted(path: Path, before: str, text: str) -> None:
    content = path.read_text()
    assert content.count(before) == 1
    path.write_text(content.replace(before, text + before))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package with the new stage, and nothing else changed."""
    root = tmp_path_factory.mktemp("package")
    copy = root / "feddp"
    shutil.copytree(Path(feddp.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "stages/count.py").write_text(STAGE)
    inserted(copy / "protocol.py", "    TaskSpec(EVALUATE, ", ROW)
    inserted(copy / "methods/base.py", ', CALIBRATE: "calibrated"', ', "count": ""')
    return root


@pytest.mark.parametrize("env", ["local", pytest.param("sim", marks=pytest.mark.simulator)])
def test_a_stage_of_three_files_runs(env, package, plan_for, tiny_root, tmp_path):
    """Eight training images at each of two sites: 16 in all. In the simulator the job's filter lets the new number pass."""
    plan = plan_for(method="fedavg", rounds=1).to_json() | {"stages": ["train", "count"]}
    policies = {site: {"data": str(tiny_root / site), "seed": "plan"} for site in plan["sites"]}
    given = {"plan": plan, "policies": policies, "out": str(tmp_path / "out"), "env": env}
    environment = os.environ | {"PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(given), env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    events = [json.loads(line) for line in (tmp_path / "out/progress.jsonl").read_text().splitlines()]
    answers = {event["site"]: event["scalars"] for event in events if event["event"] == "answer" and event["task"] == "count"}
    assert answers == {site: {"images": 8} for site in plan["sites"]}
    assert [event["images"] for event in events if event["event"] == "counted"] == [16]
