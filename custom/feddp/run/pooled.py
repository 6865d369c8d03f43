"""A run without a federation, for the method `centralized`: all sites' images in one place, one process, no FLARE."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from feddp.data.folder import SiteFolder
from feddp.data.loading import Sample, load
from feddp.files import WEIGHTS, site_folder
from feddp.flare.context import SiteContext
from feddp.flare.kept import files_of, kept_below
from feddp.flare.policy import SitePolicy
from feddp.jobs.folder import LOCAL
from feddp.methods.base import TRAIN
from feddp.networks.weights import save_network
from feddp.plan.resolve import require_initial
from feddp.run.local import LocalServer, followed, tracked
from feddp.run.session import Request, awaited, begin, copy_results, finish
from feddp.stages import served, train
from feddp.stages.evaluate import evaluate
from feddp.stages.memory import ServerMemory
from feddp.stages.results import gathered
from feddp.stages.site import Site
from feddp.stages.tensors import Expected
from feddp.terminal import note
from feddp.training.device import memory_of
from feddp.training.store import Store

POOL = "pool"


class PooledSite(Site):
    """A site with all sites' images, in the order of the sites."""

    folders: list[SiteFolder]

    def _split(self, *splits: str) -> list[Sample]:
        size, normalise = self.plan.size, self.plan.training.normalise
        parts = [(folder, split) for folder in self.folders for split in splits]
        return [sample for folder, split in parts for sample in load(folder, split, size, normalise)]


class Pool(SiteContext):
    """The context of the pooled site. It uses only the device of a policy, because its data are those of all sites."""

    def __init__(self, request: Request, folders: list[SiteFolder], kept: Path):
        policy = SitePolicy.of(POOL, request.policies[request.sites[0]], simulated=True)
        super().__init__(POOL, LOCAL, Expected(request.plan), None, policy, kept, simulated=True)
        self._folders, self._initial = folders, request.initial

    def open(self) -> Site:
        if self._site is None:
            self._site = site = PooledSite(POOL, self._folders[0], self.plan, self.store, self.device, self._initial)
            site.folders, site.stopped = self._folders, lambda: self.stopped()
        return self._site


def run(request: Request) -> dict[str, Any]:
    """Trains one network on all images, evaluates it at every site and writes the same files as a federated run.

    Raises:
        InputError: the folder is not empty, a site's data do not fit the plan, or the initial tensors are not the plan's.
    """
    plan, out = request.plan, request.out
    require_initial(plan, str(out / WEIGHTS), request.initial, "type the same `feddp run` again")
    begin(request)
    if request.initial is not None:
        save_network(out / WEIGHTS, request.initial, {})  # for whoever continues the run
    note(f"{plan.method}: all images of {', '.join(request.sites)} in one place, outside FLARE, without a federation")
    folders = {site: SiteFolder.open(Path(request.policies[site]["data"])) for site in request.sites}
    pool = Pool(request, list(folders.values()), out / "workspace" / POOL)
    # only one site answers, and it already has the initial tensors
    alone = replace(plan, weights="", settings=plan.settings | {"min_sites": 1})

    def serve(server: Path, log: Path, stopped: threading.Event) -> None:
        memory = ServerMemory(alone, LOCAL, server, files_of(kept_below(server), LOCAL), server)
        asked = LocalServer(memory, {POOL: pool}, stopped, log)
        with tracked(asked, plan.method):
            served(TRAIN, asked)
        network, _ = pool.store.read(train.START)
        sites = {}
        for name, folder in folders.items():
            with memory_of(name):
                site = Site(name, folder, plan, Store(out / "workspace" / name), pool.device, stopped=stopped.is_set)
                site.store.write(train.START, network, **plan.metadata, **folder.metadata, site=name)
                sites[name] = {when: summary for when, summary in evaluate(site).items() if when != "peers"}
            copy_results(site.store.folder, site_folder(out, name))
        memory.write_results(gathered(plan, sites, memory.start_round, memory.best_round))

    with followed(out, serve) as running:
        results, _ = awaited(request, [POOL], running)
    results.pop("job")  # no later job can find this run at a site
    return finish(out, results)
