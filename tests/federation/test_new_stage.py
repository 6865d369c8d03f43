"""What others add: a stage of one's own, which touches three files (the table of tasks, the order of the stages, and its module
with both halves), and a method of another package.

One plan has both. It runs in one process and in FLARE's simulator, which leave the same.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import feddp
from feddp.files import IMAGES, NETWORK, PROGRESS, RESULTS, RESULTS_TABLE, SHARED, TENSORBOARD, read_events, site_folder
from support import ROOT
from support.curves import curves_of
from support.docs_pages import blocks
from support.request import SITES

pytestmark = pytest.mark.simulator

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
BOTH = ("local", "sim")
PROGRAM = """
import json, sys
from pathlib import Path
from feddp.lean import end_at_once, postpone_compiler
postpone_compiler()  # as the command does
end_at_once()
from feddp.methods import METHODS, OWN
from feddp.plan.schema import Plan
from feddp.run.options import environment
from feddp.run import session
from feddp.run.session import Request

given = json.load(sys.stdin)
print(json.dumps(sorted(METHODS.keys() - OWN.keys())))
plan, out = Plan.from_json(given["plan"]), Path(given["out"])
for name in given["environments"]:
    session.run(Request(plan, given["policies"], out / name), environment(name), "pulled")

from feddp.flare import messages
from support.site import FlareSite

for least in (8, 9):
    site = FlareSite(plan, out / "guarded", simulated=True, data=given["policies"]["site-1"]["data"], min_images=least)
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


def docs_package() -> tuple[str, str]:
    """The code of the docs' tutorial, and its entry point's line."""
    module, project = (block.text for block in blocks("docs/tutorials/own-method.md") if block.title)
    assert len(module.splitlines()) < 30
    return module, re.search(r'^\[project.entry-points."feddp.methods"\]\n(.*)$', project, re.MULTILINE)[1].replace('"', "")


@pytest.fixture(scope="module")
def hospital_methods(tmp_path_factory):
    """The tutorial's method, as a package beside ours on every participant's path."""
    module, entry = docs_package()
    site = tmp_path_factory.mktemp("site-packages")
    info = site / "hospital_methods-1.0.dist-info"
    info.mkdir()
    (site / "hospital_methods.py").write_text(module)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hospital-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[feddp.methods]\n{entry}\n")
    return site


@pytest.fixture(scope="module")
def ran(package, hospital_methods, plan_for, tiny_root, tmp_path_factory):
    """The folder of both runs, and what the process said: the methods of others, and two answers of a guarded site."""
    out = tmp_path_factory.mktemp("ran")
    plan = plan_for(method="fedper", rounds=1).to_json()
    plan |= {"method": "pulled", "stages": ["train", "count"], "settings": plan["settings"] | {"pull": 0.5}}
    policies = {site: {"data": str(tiny_root / site), "seed": "plan"} for site in plan["sites"]}
    given = {"plan": plan, "policies": policies, "out": str(out), "environments": BOTH}
    paths = (package, hospital_methods, ROOT / "tests")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, input=json.dumps(given), env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("env", BOTH)
def test_a_stage_of_three_files_runs(env, ran):
    """Eight training images at each of two sites: 16 in all. In the simulator the job's filter lets the new number pass."""
    events = read_events(ran[0] / env / PROGRESS)
    answers = {event["site"]: event["scalars"] for event in events if event["event"] == "answer" and event["task"] == "count"}
    assert {site: scalars["images"] for site, scalars in answers.items()} == dict.fromkeys(SITES, 8)
    assert all(0 < scalars["share"] <= 1 for scalars in answers.values())
    assert [event["images"] for event in events if event["event"] == "counted"] == [16]


def test_the_guard_of_a_real_site_knows_the_new_number(ran):
    """Rounded to its two decimals, 0.8765 is 0.88; measured over 8 training images, it is withheld where 9 are the least."""
    _, (_, enough, few) = ran
    assert enough == {"images": 8, "share": 0.88}
    assert few == {"images": 8, "withheld": 9}


@pytest.mark.parametrize("env", BOTH)
def test_a_method_of_another_package_runs_by_its_name(env, ran):
    """A job with its name runs, without its code."""
    out, (others, *_) = ran
    assert others == ["pulled"]
    assert set(json.loads((out / env / RESULTS).read_text())["sites"]) == set(SITES)
    job = next((out / env / "job").iterdir())
    assert "hospital" not in "".join(path.read_text() for path in job.rglob("*.json"))
    one, two = (load_file(site_folder(out / env, name) / NETWORK) for name in SITES)
    own = {name for name in one if not torch.equal(one[name], two[name])}
    assert own == {"segmentation_head.0.weight", "segmentation_head.0.bias"}
    assert json.loads((job / "meta.json").read_text())["name"] == "pulled"


def test_one_process_and_the_simulator_leave_the_same(ran):
    """The same results, tables, networks and curves, bit by bit; only the job's id differs. So do two runs of `feddp compare`,
    whose tables are made of these files."""
    runs = [ran[0] / env for env in BOTH]
    results = [json.loads((run / RESULTS).read_text()) for run in runs]
    for result in results:
        assert result.pop("job"), "each run is a job of its own"
    assert results[0] == results[1]
    for name in (RESULTS_TABLE, *(site_folder(Path(), site) / IMAGES for site in SITES)):
        assert (runs[0] / name).read_bytes() == (runs[1] / name).read_bytes()
    for name in (SHARED, *(site_folder(Path(), site) / NETWORK for site in SITES)):
        one, other = (load_file(run / name) for run in runs)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    curves = [curves_of(run / TENSORBOARD) for run in runs]
    scores = [{tag: points for tag, points in found.items() if tag.startswith(("train/loss/", "val/"))} for found in curves]
    assert scores[0] == scores[1] != {}
    of_flare = {"simulator.log", "home", "metrics", "simulated"}
    assert {path.name for path in runs[0].iterdir()} >= {path.name for path in runs[1].iterdir()} - of_flare
