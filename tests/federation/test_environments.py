"""One process and a POC with certificates: the same recipe (recipes.md), the same bits, over a connection that breaks. A
ProdEnv submits the job that runs; that of a PocEnv is seen up to the sites' answer. SimEnv: test_simulator.py."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from nvflare.recipe import PocEnv, ProdEnv
from nvflare.recipe import poc_env as flare_poc
from safetensors.torch import load_file

from feddp.files import ARTIFACTS, PROGRESS, RECORD, RESULTS, TENSORBOARD, read_events
from feddp.flare.policy import SitePolicy
from feddp.jobs.folder import export
from feddp.protocol import CONSENTS, Sent
from feddp.recipe import PersonalizedRecipe
from feddp.run import session
from feddp.run.local import local
from feddp.run.poc import LEAD, WORKSPACE, PocJob, federation, provisioned
from feddp.run.session import Request
from feddp.stages.memory import start_file
from feddp.stages.site import last_network
from feddp.stages.tensors import Expected
from support.curves import curves_of
from support.deployment import until
from support.line import DOWN, UP, line_of

pytestmark = pytest.mark.poc

SITES = ("site-1", "site-2")
# FedDP has two stages and private tensors; the other shapes:
# test_flares_controllers_and_executors_come_to_the_bits_of_one_process (test_methods)
LONG = {"batch": 4, "start": "last", "local_epochs": 2}  # a round long enough to be caught computing


def policies_of(root: Path, plan) -> dict[str, dict]:
    """Of consenting sites, with the plan's seed, for data of few images."""
    properties = {"consent": list(CONSENTS), "seed": "plan", "min_images": 1, "std_images": 1, **SitePolicy.admitting(plan)}
    return {site: {"data": str(root / site), **properties} for site in SITES}


@pytest.fixture(scope="module")
def recipe(tiny_root):
    return PersonalizedRecipe(
        method="feddp", name="feddp", data=tiny_root, size=32, rounds=3, calibration_epochs=1, settings=LONG
    )


@pytest.fixture(scope="module")
def poc(tmp_path_factory, tiny_root, recipe):
    """The one POC of these tests: its kits, the lead's session, and the line through which site-2 reaches the server."""
    request = Request(recipe.plan, policies_of(tiny_root, recipe.plan), tmp_path_factory.mktemp("poc"))
    with line_of(provisioned(request)[0] / "site-2") as line, federation(request) as (kits, lead):
        yield kits, lead, line


class Executed:
    """The lead's session, in which FLARE's production environment submits a recipe's job."""

    def __init__(self, session, recipe, kits: Path):
        self._session, self._recipe, self._env = session, recipe, ProdEnv(str(kits / LEAD), username=LEAD)

    def __getattr__(self, name):
        return getattr(self._session, name)

    def submit_job(self, _):
        return self._recipe.execute(self._env).get_job_id()


def in_place(kits: Path, patch: pytest.MonkeyPatch) -> PocEnv:
    """A PocEnv that takes the federation that stands for the one that it would have started."""
    patch.setattr(flare_poc, "prepare_poc_provision", lambda **given: _same_project(kits, Path(given["project_conf_path"])))
    patch.setattr(flare_poc, "_start_poc", lambda **_: None)
    patch.setattr(PocEnv, "_check_poc_running", lambda _: False)
    patch.setenv(WORKSPACE, str(kits.parents[1]))
    return PocEnv(username=LEAD)


def _same_project(kits: Path, path: Path) -> None:
    """What PocEnv would start is what stands, but for ports and policies."""
    found, here = (yaml.safe_load(file.read_text()) for file in (path, kits.parents[1] / "project.yml"))
    assert found["builders"] == here["builders"]
    described = [[(each["name"], each["type"], each.get("role")) for each in p["participants"]] for p in (found, here)]
    assert described[0] == described[1]


@dataclass
class Ran:
    """The job in the POC.

    Attributes:
        server: the server's files.
        stores: each site's.
        cuts: of the line.
        log: of site-2's process, by line.
    """

    server: Path
    stores: dict[str, Path]
    cuts: int
    log: list[str]


@pytest.fixture(scope="module")
def ran(poc, tmp_path_factory, recipe) -> Ran:
    """The job on the POC, whose line is cut (`test_a_broken_connection_costs_no_round`)."""
    kits, lead, line = poc
    nbytes, before = Expected(recipe.plan).spec(Sent.SHARED).nbytes, line.cuts
    begun = False
    job = PocJob(kits, Executed(lead, recipe, kits), export(recipe.plan, tmp_path_factory.mktemp("jobs") / "feddp"))
    deadline = time.monotonic() + 240
    while not job.finished():
        assert time.monotonic() < deadline, job.log.read_text()[-2000:]
        if not begun and computing(lines_of(kits, job)) == 1:
            begun = True
            line.cut(3)
            line.cut_after(3 * nbytes // 2, UP, 3)
            line.cut_after(3 * nbytes // 2, DOWN, 8)
        time.sleep(0.1)
    succeeded, server = job.outcome()
    assert succeeded, job.log.read_text()[-3000:]
    return Ran(server, {site: job.store(site) for site in SITES}, line.cuts - before, lines_of(kits, job))


def lines_of(kits: Path, job: PocJob) -> list[str]:
    path = kits / "site-2" / job.id / "log.txt"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tiny_root, recipe) -> Path:
    """The folder of the run in this process."""
    out = tmp_path_factory.mktemp("local") / "run"
    session.run(Request(recipe.plan, policies_of(tiny_root, recipe.plan), out), local, recipe.plan.method)
    return out


def tensors_here(folder: Path) -> dict[str, dict]:
    networks = {site: load_file(folder / "sites" / site / "network.safetensors") for site in SITES}
    return {**networks, "shared": load_file(folder / "shared.safetensors")}


def tensors_of(server: Path, stores: dict[str, Path], plan) -> dict[str, dict]:
    networks = {site: load_file(last_network(store)) for site, store in stores.items()}
    return {**networks, "shared": load_file(start_file(server, plan.rounds))}


def same(one: dict[str, dict], other: dict[str, dict]) -> None:
    for what, wanted in one.items():
        assert other[what].keys() == wanted.keys(), what
        assert all(torch.equal(other[what][key], wanted[key]) for key in wanted), what


def test_a_recipe_in_a_poc_comes_to_the_bits_of_one_process(recipe, ran, alone):
    """FLARE's SimEnv comes to those of a plain loop in test_simulator.py."""
    same(tensors_here(alone), tensors_of(ran.server, ran.stores, recipe.plan))
    curves = [curves_of(found / TENSORBOARD) for found in (alone, ran.server)]
    scores = [{tag: points for tag, points in found.items() if tag.startswith(("train/loss/", "val/"))} for found in curves]
    assert scores[0] == scores[1]
    assert [step for step, _ in scores[0]["train/loss/mean"]] == list(range(1, recipe.plan.rounds + 1))
    summary = json.loads((ran.server / ARTIFACTS / "metrics_summary.json").read_text())
    assert summary["final_round"] == recipe.plan.rounds


def test_a_broken_connection_costs_no_round(recipe, ran, alone):
    """It breaks for 3 s while site-2 computes its first round and in the middle of its second contribution, and for 8 s in the
    middle of the third task: too long for FLARE's own repetitions. Both processes of site-2 use it: its FLARE client and the
    job's.

    γ has n bytes and travels once a round each way. From the first computation on, the middle of the second contribution and
    that of the third task are 1.5 n bytes away. Each site trains each of the three rounds once, and none is missed.
    """
    log = ran.log
    assert ran.cuts == 3
    closed = [computing(log[:number]) for number, entry in enumerate(log) if "Connection" in entry and "is closed" in entry]
    assert closed[0] == 1, "the control"
    same(tensors_here(alone), tensors_of(ran.server, ran.stores, recipe.plan))
    for store in ran.stores.values():
        assert [event["round"] for event in read_events(store / RECORD) if event["event"] == "train"] == [0, 1, 2]
    events = read_events(ran.server / PROGRESS)
    assert [event["round"] for event in events if event["event"] == "ask" and event["task"] == "train"] == [1, 2, 3]
    assert not [event for event in events if event["event"] == "refused"]
    assert "missed" not in json.loads((ran.server / RESULTS).read_text())


def test_flares_poc_environment_submits_to_the_same_server(poc, tiny_root, monkeypatch):
    """A plan that no site has approved, so no process starts for it. Each site says so; FLARE writes it down a moment later."""
    kits, lead, _ = poc
    other = PersonalizedRecipe(method="fedavg", name="other", data=tiny_root, size=32, rounds=1)
    job = other.execute(in_place(kits, monkeypatch)).get_job_id()
    said = until(lambda: lead.get_job_meta(job).get("job_deploy_detail"), "the server never said what became of the job")
    for site in SITES:
        (reason,) = [line for line in said if line.startswith(f"{site}: ")]
        assert f"has not approved plan {other.plan.digest()[:12]}" in reason
        assert not (kits / site / job).exists()


def computing(log: list[str]) -> int:
    """The number of the task that a site computes, from 1; 0 while it computes none."""
    begun, done = (sum(words in line for line in log) for words in ("invoking task executor", "finished processing task"))
    return begun if begun > done else 0
