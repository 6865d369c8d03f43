"""A run in one process, stage by stage, and its sites as they are before their evaluation."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from feddp.files import WEIGHTS
from feddp.flare.context import SiteContext
from feddp.flare.kept import files_of, kept_below
from feddp.flare.policy import SitePolicy
from feddp.networks.weights import save_network
from feddp.plan.schema import Plan
from feddp.protocol import CONSENTS
from feddp.run.local import LocalServer
from feddp.stages import served
from feddp.stages.memory import ServerMemory
from feddp.stages.site import Site
from feddp.stages.tensors import Expected


class _Fresh(Mapping):
    """Sites, each opened anew whenever it is asked for."""

    def __init__(self, contexts: Mapping[str, SiteContext], opened):
        self._contexts, self._opened = contexts, opened

    def __getitem__(self, name: str) -> SiteContext:
        torch.rand(7)  # no draw of a site's may depend on what the process has drawn before
        return self._opened(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._contexts)

    def __len__(self) -> int:
        return len(self._contexts)


def drive(
    plan: Plan,
    root: Path,
    folder: Path,
    names: tuple[str, ...] = ("site-1", "site-2"),
    silent: tuple[str, ...] = (),
    initial: dict[str, Tensor] | None = None,
    secrets: Mapping[str, str] | None = None,
    job: str = "job",
    fresh: bool = False,
    device: str = "cpu",
) -> dict[str, Site]:
    """All stages of `plan` but the evaluation; the sites as they are then.

    Sites in `silent` take no part in any exchange. All start from `initial`, where it is given; `secrets` are the sites'
    own parts of their seeds, with which the job's id goes. `fresh`: each task finds a site that has just been opened, which
    knows what is on its disk, as where FLARE starts a process for every task.
    """
    expected = Expected(plan)  # one for all sites of a process, as in `feddp run`

    def opened(name: str) -> SiteContext:
        consent = [] if name in silent else list(CONSENTS)
        own = SitePolicy.admitting(plan) | {"data": str(root / name), "consent": consent, "device": device}
        own |= {"spectra": 10_000, "min_images": 2}  # few patients are enough for FedDG's means
        policy = SitePolicy.of(name, own, simulated=True)
        known = Expected(plan) if fresh else expected
        context = SiteContext(name, job, known, None, policy, kept_below(folder / name), simulated=True)
        context.secret = (secrets or {}).get(name, "")
        return context

    server = folder / "server"
    server.mkdir(parents=True)
    if initial is not None:
        save_network(server / WEIGHTS, initial, {})
    contexts = {name: opened(name) for name in names}
    asked = _Fresh(contexts, opened) if fresh else contexts
    few = replace(plan, settings=plan.settings | {"min_sites": min(plan.federation.min_sites, len(names))})
    memory = ServerMemory(few, job, server, files_of(kept_below(server), job), server)
    run = LocalServer(memory, asked, threading.Event(), folder / "log")
    for stage in plan.stages:
        served(stage, run)
    return {name: context.open() for name, context in contexts.items()}
