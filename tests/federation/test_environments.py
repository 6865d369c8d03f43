"""One process, FLARE's simulator and a POC with certificates: the same recipe (recipes.md), the same bits; in the POC also over
a connection that breaks."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from nvflare.recipe import PocEnv, ProdEnv, SimEnv
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
from support.line import DOWN, UP, line_of

pytestmark = [pytest.mark.simulator, pytest.mark.poc]

SITES = ("site-1", "site-2")
# the environment in which the POC gets a method's job. FedDP has two stages and private tensors; the other shapes:
# test_flares_controllers_and_executors_come_to_the_bits_of_one_process (test_methods)
METHODS = {"feddp": ProdEnv, "fedavg": PocEnv}
LONG = {"rounds": 3, "settings": {"batch": 4, "start": "last", "local_epochs": 2}}  # a round long enough to be caught computing


def policies_of(root: Path, plans) -> dict[str, dict]:
    """Of sites that take all these plans: consenting, with the plan's seed, for data of few images."""
    properties: dict = {"consent": list(CONSENTS), "seed": "plan", "min_images": 1, "std_images": 1}
    for plan in plans:
        own = SitePolicy.admitting(plan)
        properties["approve"] = [*properties.get("approve", []), *own.pop("approve")]
        properties |= own
    return {site: {"data": str(root / site), **properties} for site in SITES}


@pytest.fixture(scope="module")
def recipes(tiny_root):
    short = {"rounds": 2, "settings": {"batch": 4, "start": "last"}, "calibration_epochs": 1}
    own = {"feddp": short, "fedavg": LONG}
    return {name: PersonalizedRecipe(method=name, name=name, data=tiny_root, size=32, **own[name]) for name in METHODS}


@pytest.fixture(scope="module")
def poc(tmp_path_factory, tiny_root, recipes):
    """The one POC of these tests: its kits, the lead's session, and the line through which site-2 reaches the server."""
    plans = [recipe.plan for recipe in recipes.values()]
    request = Request(plans[0], policies_of(tiny_root, plans), tmp_path_factory.mktemp("poc"))
    with line_of(provisioned(request)[0] / "site-2") as line, federation(request) as (kits, lead):
        yield kits, lead, line


class Executed:
    """The lead's session, in which FLARE's environment `env` submits a recipe's job."""

    def __init__(self, session, recipe, env):
        self._session, self._recipe, self._env = session, recipe, env

    def __getattr__(self, name):
        return getattr(self._session, name)

    def submit_job(self, _):
        return self._recipe.execute(self._env).get_job_id()


def env_of(kind, kits: Path, patch: pytest.MonkeyPatch):
    """A PocEnv takes the federation that stands for the one that it would have started."""
    if kind is ProdEnv:
        return ProdEnv(str(kits / LEAD), username=LEAD)
    patch.setattr(flare_poc, "prepare_poc_provision", lambda **given: _same_project(kits, Path(given["project_conf_path"])))
    patch.setattr(flare_poc, "_start_poc", lambda **_: None)
    patch.setattr(PocEnv, "_check_poc_running", lambda _: False)
    patch.setenv(WORKSPACE, str(kits.parents[1]))
    return PocEnv(username=LEAD)


def _same_project(kits: Path, path: Path) -> None:
    """What PocEnv would start is what stands, but for ports and policies (the one that stands takes all plans)."""
    found, here = (yaml.safe_load(file.read_text()) for file in (path, kits.parents[1] / "project.yml"))
    assert found["builders"] == here["builders"]
    described = [[(each["name"], each["type"], each.get("role")) for each in p["participants"]] for p in (found, here)]
    assert described[0] == described[1]


@pytest.fixture(scope="module")
def submitted(poc, tmp_path_factory, recipes):
    """Runs a method's job on the POC, and calls `meanwhile` again and again; gives the server's files and the sites'."""
    kits, lead, _ = poc

    def run(method, meanwhile=lambda job: None):
        recipe = recipes[method]
        folder = export(recipe.plan, tmp_path_factory.mktemp("jobs") / method)
        with pytest.MonkeyPatch.context() as patch:
            job = PocJob(kits, Executed(lead, recipe, env_of(METHODS[method], kits, patch)), folder)
        deadline = time.monotonic() + 240
        while not job.finished():
            assert time.monotonic() < deadline, job.log.read_text()[-2000:]
            meanwhile(job)
            time.sleep(0.1)
        succeeded, server = job.outcome()
        assert succeeded, job.log.read_text()[-3000:]
        return server, {site: job.store(site) for site in SITES}

    return run


def here(root, plan, out):
    return session.run(Request(plan, policies_of(root, [plan]), out), local, plan.method)


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


def test_the_same_bits_in_every_environment(recipes, submitted, tiny_root, tmp_path):
    recipe = recipes["feddp"]
    plan = recipe.plan
    locally = here(tiny_root, plan, tmp_path / "local")
    wanted = tensors_here(tmp_path / "local")
    server, stores = submitted("feddp")
    same(wanted, tensors_of(server, stores, plan))
    env = SimEnv(clients=list(SITES), workspace_root=str(tmp_path / "recipe"))
    (tmp_path / "sim").symlink_to(recipe.execute(env).get_result())
    results = json.loads((tmp_path / "sim" / RESULTS).read_text())
    assert {**results, "job": ""} == {**locally, "job": ""}
    same(wanted, tensors_here(tmp_path / "sim"))
    assert not (tmp_path / "sim" / "local").exists(), "FLARE's own allow-list, which SimEnv writes"
    folders = [server, tmp_path / "sim"]
    curves = [curves_of(folder / TENSORBOARD) for folder in (tmp_path / "local", *folders)]
    scores = [{tag: points for tag, points in found.items() if tag.startswith(("train/loss/", "val/"))} for found in curves]
    assert all(found == scores[0] for found in scores)
    assert [step for step, _ in scores[0]["train/loss/mean"]] == list(range(1, plan.rounds + 1))
    for folder in folders:
        summary = json.loads((folder / ARTIFACTS / "metrics_summary.json").read_text())
        assert summary["final_round"] == plan.rounds


def test_a_broken_connection_costs_no_round(poc, submitted, recipes, tiny_root, tmp_path):
    """It breaks for 3 s while site-2 computes its first round and in the middle of its second contribution, and for 8 s in the
    middle of the third task: too long for FLARE's own repetitions. Both processes of site-2 use it: its FLARE client and the
    job's.

    γ has n bytes and travels once a round each way. From the first computation on, the middle of the second contribution and
    that of the third task are 1.5 n bytes away. Each site trains each of the three rounds once, and none is missed.
    """
    kits, _, line = poc
    plan = recipes["fedavg"].plan
    nbytes, before = Expected(plan).spec(Sent.SHARED).nbytes, line.cuts
    log: list[str] = []
    begun = threading.Event()

    def cut(job):
        path = kits / "site-2" / job.id / "log.txt"
        log[:] = path.read_text().splitlines() if path.exists() else []
        if computing(log) == 1 and not begun.is_set():
            begun.set()
            line.cut(3)
            line.cut_after(3 * nbytes // 2, UP, 3)
            line.cut_after(3 * nbytes // 2, DOWN, 8)

    server, stores = submitted("fedavg", cut)
    assert line.cuts - before == 3
    closed = [computing(log[:number]) for number, entry in enumerate(log) if "Connection" in entry and "is closed" in entry]
    assert closed[0] == 1, "the control"
    here(tiny_root, plan, tmp_path / "local")
    same(tensors_here(tmp_path / "local"), tensors_of(server, stores, plan))
    for store in stores.values():
        assert [event["round"] for event in read_events(store / RECORD) if event["event"] == "train"] == [0, 1, 2]
    events = read_events(server / PROGRESS)
    assert [event["round"] for event in events if event["event"] == "ask" and event["task"] == "train"] == [1, 2, 3]
    assert not [event for event in events if event["event"] == "refused"]
    assert "missed" not in json.loads((server / RESULTS).read_text())


def computing(log: list[str]) -> int:
    """The number of the task that a site computes, from 1; 0 while it computes none."""
    begun, done = (sum(words in line for line in log) for words in ("invoking task executor", "finished processing task"))
    return begun if begun > done else 0
