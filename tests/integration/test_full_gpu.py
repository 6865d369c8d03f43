"""A site whose GPU is full takes its images off it and repeats the task: the run ends with the same bits, and loses nothing.

No GPU is here. A list of samples that would lie on one is marked, and a step of training on a marked list lacks memory.
"""

import logging

import pytest
import torch
from safetensors.torch import load_file

from feddp.files import PROGRESS, read_events
from feddp.run.options import Options, run_here
from feddp.training import loop

RUNS = {
    "feddp": Options("feddp", rounds=2, calibration_epochs=1, size=32, settings=("batch=4", "start=last")),
    "centralized": Options("centralized", rounds=2, size=32, settings=("batch=4", "start=last")),
}


class Placed(list):
    """Samples on a GPU."""


def networks(out) -> dict[str, dict[str, torch.Tensor]]:
    return {path.parent.name: load_file(path) for path in sorted(out.glob("sites/*/network.safetensors"))}


@pytest.mark.parametrize(("method", "while_"), [("feddp", "training"), ("feddp", "calibrating"), ("centralized", "training")])
def test_a_full_gpu_ends_no_run(tiny_root, tmp_path, monkeypatch, caplog, method, while_):
    run_here(tiny_root, tmp_path / "whole", RUNS[method], env="local")
    full: list[str] = []

    def fit_epoch(network, optimizer, samples, *rest, **more):
        if isinstance(samples, Placed) and ("delta" in samples[0]) == (while_ == "calibrating"):
            full.append(while_)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loop.fit_epoch(network, optimizer, samples, *rest, **more)

    monkeypatch.setattr("feddp.stages.site.placed", lambda samples, device: Placed(samples))
    for module in ("feddp.stages.round", "feddp.training.calibration"):
        monkeypatch.setattr(f"{module}.fit_epoch", fit_epoch)
    with caplog.at_level(logging.WARNING, "feddp"):
        run_here(tiny_root, tmp_path / "full", RUNS[method], env="local")
    sites = 1 if method == "centralized" else 2
    assert len(full) == sites, "once at each site: then its images stay in the CPU's memory"
    assert caplog.text.count("Its images and CUDA graphs left the GPU") == sites
    wanted, found = networks(tmp_path / "whole"), networks(tmp_path / "full")
    assert found.keys() == wanted.keys() == {"site-1", "site-2"}
    assert all(found[site][name].equal(value) for site, own in wanted.items() for name, value in own.items())
    assert not [event for event in read_events(tmp_path / "full" / PROGRESS) if event["event"] == "refused"]
