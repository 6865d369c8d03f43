"""`feddp join`: a hospital that was not in the federation, but has labels (002, Table 7), starts from what it shared.

The start is the shared tensors that stage 1 handed on; what the method keeps private, which no server ever had, starts as every
site's did, from the run's seed (or the job's own initial tensors). Decoder and head are tuned at home, the encoder stays.

Deviations: the paper does not say for how long, nor at which rate: 20 epochs at 1e-4, as our other tunings, the best validation
IoU kept. A frozen batch normalisation normalises by the batch's statistics while tuning, records nothing, and predicts by
the federation's.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from feddp.adaptation.models import plan_of, read_shared
from feddp.data.folder import SiteFolder
from feddp.errors import FedDPError, InputError
from feddp.files import RESULTS, SHARED, read_results
from feddp.methods import METHODS
from feddp.methods.aggregation import Spec
from feddp.methods.base import TRAIN, TUNE
from feddp.partition import Rule, chosen
from feddp.plan.resolve import build_network, initial_tensors, partition_of
from feddp.plan.schema import Plan
from feddp.run.session import bring_home, finish, fresh
from feddp.stages.evaluate import evaluate
from feddp.stages.results import gathered
from feddp.stages.site import Site
from feddp.stages.train import adopt
from feddp.stages.tune import tune
from feddp.training.calibration import Report
from feddp.training.device import asked_for, settle
from feddp.training.store import Store, Tensors


def join(
    run: Path,
    folder: Path,
    out: Path,
    train: Rule = ("decoder", "head"),
    epochs: int = 20,
    lr: float = 1e-4,
    seed: int = 0,
    device: str = "cpu",
    report: Report = lambda epoch, loss, score: None,
) -> dict[str, Any]:
    """Tunes the roles `train` of the finished run's network on the site's folder; returns what results.json holds.

    In `out`: network.safetensors, as a site of a run has it, images.csv, cases.csv of volumes, record.jsonl, results.json and
    results.md, whose `before_calibration` is the start and `final` the network that was kept.

    Raises:
        InputError: no finished run, a method that shares nothing or gives every site layers of its own, a role that the
            network does not have, data that do not fit the run or lack a split, or `out` is not empty. Nothing is left then.
    """
    results, shared = read_results(run), read_shared(run)
    plan = plan_of(run, results)
    if results.get("start_round") not in range(plan.rounds + 1) or "best_round" not in results:
        raise InputError(f"{run / RESULTS} does not say which of its rounds were handed on and best; join another run")
    if METHODS[plan.method].own:
        raise InputError(f"{run}: {plan.method} gives every site of the federation layers of its own; join another run")
    first = first_of(run, plan)
    tuning = {"tune_epochs": epochs, "tune_lr": lr}
    home = replace(plan, stages=(TRAIN, TUNE), seed=seed, weights="", settings=plan.settings | tuning)
    opened = SiteFolder.open(folder)
    asked_for(device)
    network = build_network(plan)
    chosen(network, train)  # an unknown role is refused before anything is written
    Spec.of(network.state_dict(), partition_of(plan, network).shared).check(str(run / SHARED), shared)
    fresh(out)
    settle(device, threads=1)  # as a site: the same bits on every machine
    site = _opened(opened, home, out, device, first)
    adopt(site, shared, results["start_round"])
    tune(site, train, report)
    summary = {when: value for when, value in evaluate(site).items() if when != "peers"}
    bring_home(site.store.folder, out)
    done = gathered(home, {site.name: summary}, results["start_round"], results["best_round"])
    return finish(out, done | {"joined": {"run": str(run), "train": list(train)}})


def _opened(folder: SiteFolder, plan: Plan, out: Path, device: str, first: Tensors) -> Site:
    """The site with all its splits read: what is wrong with them is said before hours of tuning, and `out` is gone again."""
    try:
        site = Site(folder.site, folder, plan, Store(out / "workspace"), device, first)
        _ = site.samples, site.validation, site.test
    except FedDPError:
        shutil.rmtree(out)  # it was made, or empty, a moment ago: the command can be given again
        raise
    return site


def first_of(run: Path, plan: Plan) -> Tensors:
    """The whole network that every site of the run started from. InputError where the job that brought it along is gone."""
    if not plan.weights:
        return build_network(plan).state_dict()
    configs = sorted(run.glob("job/*/app_server/config"))
    tensors = initial_tensors(plan, configs[0]) if configs else None
    if tensors is None:
        raise InputError(f"{run} began with initial tensors, and its job/ that holds them is gone; join another run")
    return tensors
