"""A run without a federation: all sites' images in one place, one process, no FLARE. For the method `centralized`."""

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from feddp.data.folder import SiteFolder
from feddp.data.loading import load
from feddp.files import PROGRESS, append_event, site_folder
from feddp.flare.numbers import rounded
from feddp.methods.results import gathered
from feddp.methods.site import Site
from feddp.methods.trainer import START
from feddp.run.session import Request, bring_home, finish, fresh
from feddp.training.loop import Batch
from feddp.training.store import Store


class Pool(Site):
    """All sites' images as one site's, in the sites' order."""

    def __init__(self, folders: list[SiteFolder], request: Request, store: Store, device: str):
        super().__init__("pool", folders[0], request.plan, store, device, request.initial)
        self.folders = folders

    def _split(self, split: str) -> list[Batch]:
        return [sample for folder in self.folders for sample in load(folder, split, self.plan.size)]


def run(request: Request) -> dict[str, Any]:
    """Trains one network on all images; measures it at every site; leaves in `request.out` what a federation's run leaves.

    Raises:
        InputError: the folder is taken, or a site's data do not fit the plan.
    """
    plan, out = request.plan, request.out
    fresh(out)
    console = Console(stderr=True)
    console.print(f"{plan.method}: all images of {', '.join(request.sites)} in one place, outside FLARE; nothing is federated")
    folders = {site: SiteFolder.open(Path(request.policies[site]["data"])) for site in request.sites}
    device = str(request.policies[request.sites[0]]["device"])
    torch.set_num_threads(1)  # as a site: the same bits on every machine
    pool = Pool(list(folders.values()), request, Store(out / "workspace" / "pool"), device)
    best, best_iou = None, float("-inf")

    def note(round: int, scores: dict[str, float]) -> None:
        nonlocal best, best_iou
        append_event(out / PROGRESS, "answer", site="pool", task="score", round=round, scalars=scores)
        iou = rounded("iou", scores["iou"])  # as a federation's server compares its rounds
        if iou > best_iou:
            best, best_iou = round, iou

    for t in range(plan.rounds):
        started = time.monotonic()
        _, metrics = pool.train({}, t, keep=best)
        if t:
            note(t, {name: metrics[name] for name in ("dice", "iou")})
        seconds = time.monotonic() - started
        append_event(out / PROGRESS, "round", round=t + 1, of=plan.rounds, seconds=seconds)
        console.print(f"round {t + 1}/{plan.rounds} ({seconds:.1f} s)  loss: {metrics['loss']:.3f}")
    note(plan.rounds, pool.adopt({}, plan.rounds))
    start = plan.rounds if plan.start == "last" else best
    if start != plan.rounds:
        pool.adopt({}, start)
    network, facts = pool.store.read(START)
    sites = {}
    for name, folder in folders.items():
        site = Site(name, folder, plan, Store(out / "workspace" / name), device)
        site.store.write(START, network, **facts | {"site": name})
        sites[name] = {when: summary for when, summary in site.evaluate().items() if when != "peers"}
        bring_home(site.store.folder, site_folder(out, name))
    return finish(out, gathered(plan, sites, start, best))
