"""A run that is broken off anywhere and continued ends with the bits of an unbroken one."""

import itertools
import threading

import pytest
import torch
from safetensors.torch import load_file

from feddp.errors import FedDPError
from feddp.flare.context import SiteContext, files_of, kept_below
from feddp.flare.policy import SitePolicy
from feddp.protocol import CONSENTS
from feddp.run.local import LocalServer
from feddp.stages import served, stages_of
from feddp.stages.memory import BEST, LATEST, ServerMemory, start_file
from feddp.stages.site import last_network
from feddp.stages.tensors import Expected

RUN = "run"
SITES = ("site-1", "site-2")
# a private rule, a personal model, two phases a round, an exchange at every epoch, one before the rounds, a tuning
SHAPES = {
    "feddp": {"calibration_epochs": 2},
    "ditto": {"stages": ("train", "calibrate"), "calibration_epochs": 1, "start": "best"},
    "feddg": {},
    "fedbabu": {"tune_epochs": 1},
}


class Killed(Exception):
    """The process ended here."""


class Mortal(LocalServer):
    """Its process ends after so many answers, before the next one is used or after."""

    left = float("inf")

    def _reply(self, task, site, message):
        if self.left < 0.5:
            raise Killed
        answer = super()._reply(task, site, message)
        self.left -= 1
        return answer


@pytest.fixture
def federation(tiny_root, tmp_path, monkeypatch):
    """Starts a job of a run in new objects, as a new process would; it ends after `answers` answers."""

    def start(plan, name, job, answers=float("inf")):
        root = tmp_path / name
        properties = {"consent": list(CONSENTS), "seed": "plan", "min_images": 1, "std_images": 1, "spectra": 100}
        contexts = {}
        for site in SITES:
            policy = SitePolicy.of(
                site, SitePolicy.admitting(plan) | properties | {"data": str(tiny_root / site)}, simulated=True
            )
            contexts[site] = SiteContext(site, RUN, Expected(plan), None, policy, kept_below(root / site), simulated=True)
        folder = root / "server" / job
        folder.mkdir(parents=True)
        memory = ServerMemory(plan, RUN, folder, files_of(kept_below(root / "server"), RUN), folder)
        server = Mortal(memory, contexts, threading.Event(), root / "log")
        server.left = answers
        for stage in stages_of(plan, adapts=False):
            served(stage, server)
        return root, folder

    return start


def outcome(root, folder, plan) -> dict:
    results = (folder / "results.json").read_bytes()
    networks = {site: load_file(last_network(files_of(kept_below(root / site), RUN))) for site in SITES}
    tables = {site: (files_of(kept_below(root / site), RUN) / "images.csv").read_bytes() for site in SITES}
    return {"results": results, "tables": tables, "networks": networks}


def same(one, other) -> None:
    assert one["results"] == other["results"]
    assert one["tables"] == other["tables"]
    for site, tensors in one["networks"].items():
        assert tensors.keys() == other["networks"][site].keys()
        assert all(torch.equal(tensors[name], other["networks"][site][name]) for name in tensors), site


@pytest.mark.parametrize("method", SHAPES)
def test_broken_off_after_every_answer(method, plan_for, federation, toy):
    """The process ends after the first answer, the second, and so on, until one job reaches the end."""
    plan = plan_for(network=toy, method=method, rounds=3, **SHAPES[method])
    whole = outcome(*federation(plan, "whole", "job"), plan)
    for number in itertools.count(1):
        name = f"broken-{number}"
        try:
            federation(plan, name, "first", answers=number)
        except Killed:
            same(whole, outcome(*federation(plan, name, "second"), plan))
        else:
            assert number > 10, "the control: there were answers to break off after"
            return


def test_broken_off_again_and_again(plan_for, federation, toy):
    """Each job makes one round's answers and no more: the run ends all the same."""
    plan = plan_for(network=toy, rounds=3, calibration_epochs=1)
    whole = outcome(*federation(plan, "whole", "job"), plan)
    for number in itertools.count():
        try:
            done = federation(plan, "broken", f"job-{number}", answers=5)
        except Killed:
            continue
        break
    assert number >= 3
    same(whole, outcome(*done, plan))


def test_more_rounds_are_an_extension(plan_for, federation, toy):
    """A finished run of 2 rounds, continued with a plan of 4, ends as a run of 4."""
    short, long = (plan_for(network=toy, rounds=rounds, calibration_epochs=1) for rounds in (2, 4))
    federation(short, "grown", "first")
    same(outcome(*federation(long, "whole", "job"), long), outcome(*federation(long, "grown", "second"), long))


def test_a_finished_run_gives_its_results_again(plan_for, federation, toy):
    """Also the matrix, whose peers' networks the sites have removed."""
    plan = plan_for(network=toy, rounds=2, calibration_epochs=1)
    root, first = federation(plan, "run", "first")
    _, second = federation(plan, "run", "second")
    assert (second / "results.json").read_bytes() == (first / "results.json").read_bytes()
    assert b'"matrix"' in (second / "results.json").read_bytes()


def damage(path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_server_file_costs_one_round(plan_for, federation, toy, tmp_path):
    """The latest γ is damaged: the job continues from the round before, says so, and ends with the same bits."""
    plan = plan_for(network=toy, rounds=3, calibration_epochs=1)
    whole = outcome(*federation(plan, "whole", "job"), plan)
    # 2 answers a round: broken off in the third, γ^2 is the latest
    with pytest.raises(Killed):
        federation(plan, "broken", "first", answers=5)
    kept = files_of(kept_below(tmp_path / "broken" / "server"), RUN)
    damage(kept / f"{LATEST}.safetensors")
    root, folder = federation(plan, "broken", "second")
    same(whole, outcome(root, folder, plan))
    assert '"event": "damaged"' in (folder / "progress.jsonl").read_text()


def test_another_plan_is_refused_by_what_differs(plan_for, federation, toy):
    federation(plan_for(network=toy, rounds=2, calibration_epochs=1), "run", "first")
    with pytest.raises(FedDPError, match="belongs to a run with seed=0, but this job has seed=1"):
        federation(plan_for(network=toy, rounds=2, calibration_epochs=1, seed=1), "run", "second")


def test_the_jobs_folder_has_what_a_download_needs(plan_for, federation, toy):
    """γ of the start round, whichever job made it, and the progress of both."""
    plan = plan_for(network=toy, rounds=3, start="best", method="fedavg")
    with pytest.raises(Killed):
        federation(plan, "run", "first", answers=5)
    _, folder = federation(plan, "run", "second")
    assert {path.stem for path in folder.glob("*.safetensors")} == {LATEST, BEST}
    assert start_file(folder, 3).exists()
    lines = (folder / "progress.jsonl").read_text().splitlines()
    assert sum('"event": "round"' in line for line in lines) == 3
    assert sum('"event": "resumed"' in line for line in lines) == 1
