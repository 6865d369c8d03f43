"""One process, FLARE's simulator and a POC with certificates: the same job, the same bits, for a method of each shape."""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from feddp.flare.policy import SitePolicy
from feddp.jobs.folder import export
from feddp.protocol import CONSENTS
from feddp.run import session
from feddp.run.local import local
from feddp.run.poc import PocJob, federation
from feddp.run.session import Request
from feddp.run.simulator import simulator
from feddp.stages.memory import start_file
from feddp.stages.site import last_network

pytestmark = [pytest.mark.simulator, pytest.mark.poc]

SITES = ("site-1", "site-2")
# two stages, nothing private, a personal model that IGC exchanges, two aggregations a round, an exchange at every epoch,
# an exchange before the rounds, a tuning
SHAPES = {
    "feddp": {"rounds": 2, "calibration_epochs": 1},
    "fedavg": {"rounds": 2},
    "ditto": {"rounds": 2, "stages": ("train", "calibrate"), "calibration_epochs": 1},
    "pflfe": {"rounds": 1},
    "fedlc": {"rounds": 1, "heads_epochs": 2},
    "feddg": {"rounds": 1},
    "fedbabu": {"rounds": 1, "tune_epochs": 1},
}


def policies_of(root: Path, plans) -> dict[str, dict]:
    """Of sites that take all these plans: consenting, with the plan's seed, for data of few images."""
    properties: dict = {"consent": list(CONSENTS), "seed": "plan", "min_images": 1, "std_images": 1}
    for plan in plans:
        own = SitePolicy.admitting(plan)
        properties["approve"] = [*properties.get("approve", []), *own.pop("approve")]
        properties |= own
    return {site: {"data": str(root / site), **properties} for site in SITES}


@pytest.fixture(scope="module")
def plans(plan_for):
    return {method: plan_for(method=method, start="last", **changes) for method, changes in SHAPES.items()}


@pytest.fixture(scope="module")
def submitted(tmp_path_factory, tiny_root, plans):
    """Runs a plan on the one POC of these tests; gives the server's files and the sites'."""
    root = tmp_path_factory.mktemp("poc")
    request = Request(plans["feddp"], policies_of(tiny_root, plans.values()), root / "run")
    with federation(request) as (kits, lead):

        def run(plan):
            job = PocJob(kits, lead, export(plan, root / plan.method))
            deadline = time.monotonic() + 240
            while not job.finished():
                assert time.monotonic() < deadline, job.log.read_text()[-2000:]
                time.sleep(0.2)
            succeeded, server = job.outcome()
            assert succeeded, job.log.read_text()[-3000:]
            return server, {site: job.store(site) for site in SITES}

        yield run


def here(environment, root, plan, out):
    request = Request(plan, policies_of(root, [plan]), out)
    return session.run(request, environment, plan.method)


@pytest.mark.parametrize("method", SHAPES)
def test_the_same_bits_in_every_environment(method, plans, submitted, tiny_root, tmp_path):
    plan, runs = plans[method], {}
    results = {name: here(run, tiny_root, plan, tmp_path / name) for name, run in (("local", local), ("sim", simulator))}
    for name in results:
        folder = tmp_path / name
        runs[name] = {site: load_file(folder / "sites" / site / "network.safetensors") for site in SITES}
        runs[name]["shared"] = load_file(folder / "shared.safetensors")
    server, stores = submitted(plan)
    runs["poc"] = {site: load_file(last_network(store)) for site, store in stores.items()}
    runs["poc"]["shared"] = load_file(start_file(server, plan.rounds))
    for name in ("sim", "poc"):
        for what, wanted in runs["local"].items():
            found = runs[name][what]
            assert found.keys() == wanted.keys(), (name, what)
            assert all(torch.equal(found[key], wanted[key]) for key in wanted), (name, what)
    same = [{key: value for key, value in result.items() if key != "job"} for result in results.values()]
    assert same[0] == same[1]
