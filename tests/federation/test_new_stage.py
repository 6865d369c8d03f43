"""A stage of one's own touches three files: the table of tasks, the order of the stages, and its module with both halves."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import feddp
from support import ROOT

ROW = '    TaskSpec("count", "count", Kind.LOCAL, scalars=("images", "share")),\n'
SCALAR = '    "share": Number(decimals=2, over=Over.TRAIN),\n'  # of the training images that show the class
STAGE = '''"""Each site says how many images it trains on."""

from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.server import Server


def serve(server: Server) -> None:
    answers = server.ask("count", Message(), ("images", "share"))
    server.progress("counted", images=sum(answer.scalars["images"] for answer in answers.values()))


def answer(task: str, message: Message, host: Host) -> Message:
    samples = host.open().samples
    return Message(scalars={"images": len(samples), "share": sum(bool(s["mask"].any()) for s in samples) / len(samples)})
'''
RUN = """
import json, sys
from pathlib import Path
from feddp.lean import end_at_once, postpone_compiler
postpone_compiler()  # as the command does
end_at_once()
from feddp.plan.schema import Plan
from feddp.run.options import environment
from feddp.run import session
from feddp.run.session import Request

given = json.load(sys.stdin)
plan = Plan.from_json(given["plan"])
session.run(Request(plan, given["policies"], Path(given["out"])), environment(given["env"]), "counting")
"""
GUARD = """
import json, sys
from pathlib import Path
from feddp.lean import end_at_once, postpone_compiler
postpone_compiler()
end_at_once()
from feddp.flare import messages
from feddp.plan.schema import Plan
from support.site import FlareSite

given = json.load(sys.stdin)
for least in (8, 9):
    site = FlareSite(Plan.from_json(given["plan"]), Path(given["out"]), simulated=True, data=given["data"], min_images=least)
    print(json.dumps(site.sends("count", messages.pack(images=8, share=0.8765))[1]))
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
    inserted(copy / "protocol.py", '    "empty_masks": Number(', SCALAR)
    inserted(copy / "methods/base.py", ', CALIBRATE: "calibrated"', ', "count": ""')
    return root


def ran(program: str, given: dict, package: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(package), str(ROOT / "tests")))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=json.dumps(given), env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("env", ["local", pytest.param("sim", marks=pytest.mark.simulator)])
def test_a_stage_of_three_files_runs(env, package, plan_for, tiny_root, tmp_path):
    """Eight training images at each of two sites: 16 in all. In the simulator the job's filter lets the new number pass."""
    plan = plan_for(method="fedavg", rounds=1).to_json() | {"stages": ["train", "count"]}
    policies = {site: {"data": str(tiny_root / site), "seed": "plan"} for site in plan["sites"]}
    given = {"plan": plan, "policies": policies, "out": str(tmp_path / "out"), "env": env}
    ran(RUN, given, package)
    events = [json.loads(line) for line in (tmp_path / "out/progress.jsonl").read_text().splitlines()]
    answers = {event["site"]: event["scalars"] for event in events if event["event"] == "answer" and event["task"] == "count"}
    assert {site: scalars["images"] for site, scalars in answers.items()} == dict.fromkeys(plan["sites"], 8)
    assert all(0 < scalars["share"] <= 1 for scalars in answers.values())
    assert [event["images"] for event in events if event["event"] == "counted"] == [16]


def test_the_guard_of_a_real_site_knows_the_new_number(package, plan_for, tiny_root, tmp_path):
    """Rounded to its two decimals, 0.8765 is 0.88; measured over 8 training images, it is withheld where 9 are the least."""
    plan = plan_for(method="fedavg", rounds=1).to_json() | {"stages": ["train", "count"]}
    given = {"plan": plan, "out": str(tmp_path), "data": str(tiny_root / "site-1")}
    enough, few = map(json.loads, ran(GUARD, given, package).splitlines())
    assert enough == {"images": 8, "share": 0.88}
    assert few == {"images": 8, "withheld": 9}
