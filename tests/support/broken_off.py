"""A run in one process whose jobs are started one after the other in new objects, as new processes would."""

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from feddp.flare.context import SiteContext
from feddp.flare.kept import files_of, kept_below
from feddp.flare.policy import SitePolicy
from feddp.plan.schema import Plan
from feddp.protocol import CONSENTS, READY
from feddp.run.local import LocalServer
from feddp.stages import served, stages_of
from feddp.stages.memory import ServerMemory
from feddp.stages.site import last_network
from feddp.stages.tensors import Expected

RUN = "run"
SITES = ("site-1", "site-2")


class Killed(Exception):
    """The process ended here."""


class Mortal(LocalServer):
    """Its process ends after so many answers, beside those to a job's first question; before the next one is used or after."""

    left = float("inf")

    def reply(self, task, site, message):
        if self.left < 0.5:
            raise Killed
        answer = super().reply(task, site, message)
        self.left -= task != READY
        return answer


def start(
    plan: Plan, data: Path, root: Path, job: str, answers: float = float("inf"), made: Callable[..., Mortal] = Mortal
) -> tuple[Path, Path]:
    """Starts a job of the run in `root`, which ends after `answers` answers.

    Returns:
        `root`, and the server's folder of the job.
    """
    properties = {"consent": list(CONSENTS), "seed": "plan", "min_images": 1, "std_images": 1, "spectra": 100}
    contexts = {}
    for site in SITES:
        policy = SitePolicy.of(site, SitePolicy.admitting(plan) | properties | {"data": str(data / site)}, simulated=True)
        contexts[site] = SiteContext(site, RUN, Expected(plan), None, policy, kept_below(root / site), simulated=True)
    folder = root / "server" / job
    folder.mkdir(parents=True)
    memory = ServerMemory(plan, RUN, folder, files_of(kept_below(root / "server"), RUN), folder)
    server = made(memory, contexts, threading.Event(), root / "log")
    server.left = answers
    for stage in stages_of(plan, adapts=False):
        served(stage, server)
    return root, folder


def outcome(root: Path, folder: Path) -> dict:
    """The results, each site's final network and its metrics per image."""
    results = (folder / "results.json").read_bytes()
    networks = {site: load_file(last_network(files_of(kept_below(root / site), RUN))) for site in SITES}
    tables = {site: (files_of(kept_below(root / site), RUN) / "images.csv").read_bytes() for site in SITES}
    return {"results": results, "tables": tables, "networks": networks}


def same(one: dict, other: dict) -> None:
    assert one["results"] == other["results"]
    assert one["tables"] == other["tables"]
    for site, tensors in one["networks"].items():
        assert tensors.keys() == other["networks"][site].keys()
        assert all(torch.equal(tensors[name], other["networks"][site][name]) for name in tensors), site
