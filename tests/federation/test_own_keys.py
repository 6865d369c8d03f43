"""The distributed way, to a federation that runs FedDP: every participant made its own key, which the office never saw. Its
one job brings a network of 31 MB."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import nvflare.cli
import pytest
from safetensors.torch import load_file

from feddp.data.synthesize import synthesize
from feddp.files import WEIGHTS
from feddp.jobs import folder as jobs
from feddp.networks.weights import fingerprint
from feddp.plan.resolve import build_network
from feddp.run.poc import free_ports
from support.command import ended
from support.deployment import LEAD, SERVER, SHIPPED, Deployment, approved, decided, environment, local
from support.deployment import LOOPBACK as HERE
from support.docs_pages import commands_for

pytestmark = pytest.mark.poc

PAGE = "docs/how-to/own-keys.md"
HOSPITALS = ["hospital-a", "hospital-b"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """The page's commands down to the kits, hospital-a's for a second hospital too, and all started from these kits."""
    root = tmp_path_factory.mktemp("own")
    folder = shutil.copytree(SHIPPED, root / "provisioning")
    synthesize(root / "data", sites=2, images=36, size=32)
    for site, name in zip(sorted((root / "data").iterdir()), HOSPITALS, strict=True):
        site.rename(root / "data" / name)
    request = folder / "hospital-a.request.yml"
    request.with_name("hospital-b.request.yml").write_text(_second(request.read_text()).replace("hospital_a", "hospital_b"))
    ports = free_ports()
    for path in (folder / "profile.yml", *folder.glob("*.request.yml")):
        path.write_text(local(path.read_text(), ports, root))
    made = Deployment(folder, environment(root), "own", HERE)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for name in ("HOME", "PATH"):
                patch.setenv(name, made.env[name])
            for line in commands_for("test_own_keys", PAGE):
                for command in dict.fromkeys([line, _second(line)]):
                    typed(command.replace(SERVER, HERE), patch)
        for name in HOSPITALS:
            decided(made.kits / name, bounds={"min_sites": 2})  # a job is for three otherwise
        made.up(HOSPITALS)
        yield made
    finally:
        made.down()


def _second(text: str) -> str:
    return text.replace("hospital-a", "hospital-b")


def typed(line: str, patch: pytest.MonkeyPatch) -> None:
    """A line of the page, in this process: one of its own would import FLARE first. test_provisioning.py has a shell."""
    name, _, inner = line.removesuffix(")").partition("=$(")
    if inner:
        patch.setenv(name, subprocess.check_output(["bash", "-c", inner], text=True).strip())
        return
    words = shlex.split(os.path.expandvars(line))
    if words[0] == "feddp":
        assert ended(words) == 0, line
        return
    assert words[0] == "nvflare"
    with redirect_stdout(StringIO()), pytest.MonkeyPatch.context() as command:
        command.setattr("sys.argv", words)
        command.setattr("sys.path", [*sys.path])  # FLARE adds this folder
        nvflare.cli.main()


@pytest.fixture(scope="module")
def ran(federation, plan_for):
    """A job of FedDP with the U-Net, from tensors that its seed does not give, submitted in the console. At this rate training
    moves no parameter."""
    plan = plan_for(network="unet", private="head", rounds=1, sites=tuple(HOSPITALS), lr=1e-30)
    first = build_network(plan).state_dict()
    state = {name: value + (1e-3 if value.is_floating_point() else 1) for name, value in first.items()}
    parameters = {name for name, _ in build_network(plan).named_parameters()}
    plan = replace(plan, weights=fingerprint(state))
    job_folder = jobs.export(plan, federation.folder / "jobs/pretrained", initial=state)
    for kit in (federation.kits / name for name in HOSPITALS):
        decided(kit, tensors=[plan.weights])
        approved(job_folder, kit)
    with federation.console() as console:
        said = console(f"submit_job {job_folder}")
    job = re.search(r"Submitted job: (\S+)", said)[1]
    assert federation.finished(job)["status"] == "FINISHED:COMPLETED", federation.log(HERE)[-3000:]
    results = federation.results(job)
    return SimpleNamespace(job=job, folder=job_folder, state=state, parameters=parameters, results=results)


def test_feddp_runs_on_keys_that_never_travelled(federation, ran):
    """The sealed exchange too: each took the other's certificate, made by `nvflare cert approve`, for a hospital's."""
    results = json.loads((ran.results / "results.json").read_text())
    assert results["sealed"] is True
    assert {name: site["calibration"]["peers"] for name, site in results["sites"].items()} == dict.fromkeys(HOSPITALS, 1)
    assert {file.name for file in federation.kits.iterdir()} == {HERE, LEAD, *HOSPITALS}


def test_a_job_that_brings_31_megabytes_runs_from_the_console(federation, ran):
    """Every hospital starts from the file's tensors, to the bit; the round hands on the file's, which training did not move;
    and the progress counts what was handed over."""
    file = ran.folder / "app_server/config" / WEIGHTS
    assert file.stat().st_size > 31_000_000
    initial = load_file(file)
    for hospital in HOSPITALS:
        store = federation.store(hospital, ran.job)
        kept, start = (load_file(store / f"{slot}.safetensors") for slot in ("initial", "start"))
        assert kept.keys() == start.keys() == initial.keys()
        assert all(value.equal(initial[name]) for name, value in kept.items())
        assert all(start[name].equal(initial[name]) for name in ran.parameters)
        assert not list((federation.kits / hospital / ran.job).rglob(WEIGHTS)), "no site's app brought it"
    events = [json.loads(line) for line in (ran.results / "progress.jsonl").read_text().splitlines()]
    asked = {event["task"]: event["bytes"] for event in events if event["event"] == "ask"}
    assert asked["initial"] == dict.fromkeys(HOSPITALS, sum(value.nbytes for value in ran.state.values()))
