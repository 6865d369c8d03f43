"""`feddp join`: local post-training at an unseen site with labels, from a finished run's shared tensors (Xie et al., 2024,
Table 7).

The start is the shared tensors that stage 1 selected. The method's private tensors, which no server ever had, start as at every
site: from the run's seed or the job's initial tensors. The decoder and the head are tuned locally, the encoder is frozen.
Private tensors that are not tuned keep their start; a warning names them.

Deviations: the paper gives neither epochs nor learning rate; as in our other tuning stages, 20 epochs at 1e-4, and the epoch
with the best validation IoU is kept. During tuning, a frozen batch normalisation normalises with the batch's statistics and
does not update its own. It predicts with those of its start: the federation's where they are shared, else the private start's.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from feddp.adaptation.models import plan_of, read_shared
from feddp.data.folder import SiteFolder
from feddp.data.loading import batches
from feddp.errors import FedDPError, InputError
from feddp.files import RESULTS, SHARED, read_results
from feddp.methods import METHODS
from feddp.methods.base import TRAIN, TUNE
from feddp.partition import ROLES, Rule, Tensors, chosen, select, some
from feddp.plan.resolve import build_network, initial_tensors
from feddp.plan.schema import Plan
from feddp.protocol import Sent
from feddp.run.session import copy_results, finish, fresh
from feddp.stages.evaluate import evaluate
from feddp.stages.results import gathered
from feddp.stages.site import Site
from feddp.stages.tensors import Expected
from feddp.stages.train import adopt
from feddp.stages.tune import tune
from feddp.terminal import note
from feddp.training.calibration import Report
from feddp.training.device import asked_for, settle
from feddp.training.seeds import seeded
from feddp.training.store import Store


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
    """Tunes the roles `train` of the finished run's network on the site's folder; returns the content of results.json.

    Writes to `out` the files of a run's site (network.safetensors, images.csv, cases.csv for volumes, record.jsonl) and
    results.json and results.md, where `before_calibration` is the start and `final` the selected network.

    Raises:
        InputError: the run is not finished, its method shares nothing or has layers per site, the network lacks a role, no
            role can be tuned, the data do not fit the run or lack a split, or `out` is not empty. Then no files are written.
    """
    results, shared = read_results(run), read_shared(run)
    plan = plan_of(run, results)
    if results.get("start_round") not in range(plan.rounds + 1) or "best_round" not in results:
        raise InputError(f"{run / RESULTS} does not say which rounds were selected and best; join another run")
    if METHODS[plan.method].own:
        raise InputError(f"{run}: {plan.method} has its own layers for every site of the federation; join another run")
    first = first_of(run, plan)
    tuning = {"tune_epochs": epochs, "tune_lr": lr}
    local_plan = replace(plan, stages=(TRAIN, TUNE), seed=seed, weights="", settings=plan.settings | tuning)
    opened = SiteFolder.open(folder)
    for split in dict.fromkeys(("train", plan.training.selection, "test")):
        if not opened.rows_of(split):
            raise InputError(f"{folder / 'split.csv'} has no image in split {split}, which local post-training needs; add some")
    asked_for(device)
    network = build_network(plan)
    chosen(network, train)  # refuses an unknown role before files are written
    Expected(plan, network).check(Sent.SHARED, str(run / SHARED), shared)
    fresh(out)
    settle(device, threads=1)  # as at a site: bit-equal on machines of one kind
    site = _opened(opened, local_plan, out, device, first, train)
    if untouched := _untouched(site, train):
        note(f"warning: {untouched}")
    adopt(site, shared, results["start_round"])
    tune(site, train, report)
    summary = {when: value for when, value in evaluate(site).items() if when != "peers"}
    copy_results(site.store.folder, out)
    done = gathered(local_plan, {site.name: summary}, results["start_round"], results["best_round"])
    return finish(out, done | {"joined": {"run": str(run), "train": list(train)}})


def _opened(folder: SiteFolder, plan: Plan, out: Path, device: str, first: Tensors, train: Rule) -> Site:
    """Returns the site with all splits read, so that bad data are refused before hours of tuning; then `out` is removed.

    So are roles `train` of which the loss depends on no parameter, such as buffers, or layers of another phase of the method.
    """
    try:
        site = Site(folder.site, folder, plan, Store(out / "workspace"), device, first)
        _ = site.samples, site.validation, site.test
        if not _tunable(site, train):
            usable = ", ".join(role for role in ROLES if _has(site, role) and _tunable(site, (role,)))
            raise InputError(f"--train {','.join(train)}: the loss depends on no parameter of that; name one of {usable}")
    except (FedDPError, RuntimeError):  # torch's, of too little memory
        shutil.rmtree(out)  # it was new or empty, and the user may repeat the command
        raise
    return site


def _has(site: Site, role: str) -> bool:
    """Whether the network has tensors of the role, which can be divided from others."""
    try:
        return bool(select(site.network, role))
    except InputError:
        return False


def _tunable(site: Site, roles: Rule) -> bool:
    """Whether the loss of a batch of the site's images depends on a parameter of these roles. The network does not change."""
    site.network.eval()
    batch = next(batches(site.samples[:2], 2, seed=None, augment=False, device=site.device))
    with seeded(site.device, "tunable"), site.only(roles):
        return site.batch_loss(site.network(batch["image"]), batch).requires_grad


def _untouched(site: Site, train: Rule) -> str:
    """Returns what to tell the user of private tensors that are not tuned although the network predicts with them, else ""."""
    kept, found, roles = set(site.partition.private) - chosen(site.network, train), [], list(train)
    parameters = {name for name, _ in site.network.named_parameters()}
    for role in site.plan.rule:
        names = sorted(kept & select(site.network, role))
        # a role of parameters on which the loss does not depend is not for prediction, such as pFLFE's projector
        if names and (parameters.isdisjoint(names) or _tunable(site, (role,))):
            found.append(f"{role} ({some(names, 1)})")
            roles.append(role)
    if not found:
        return ""
    return (
        f"private tensors, which no site shared, stay as every site of the run began with them: {', '.join(found)};"
        f" to tune them too, --train {','.join(roles)}"
    )


def first_of(run: Path, plan: Plan) -> Tensors:
    """Returns the whole network from which every site of the run started; raises InputError if its job folder is missing."""
    if not plan.weights:
        return build_network(plan).state_dict()
    configs = sorted(run.glob("job/*/app_server/config"))
    tensors = initial_tensors(plan, configs[0]) if configs else None
    if tensors is None:
        raise InputError(f"{run} started from initial tensors, but its job/ with these tensors is missing; name another run")
    return tensors
