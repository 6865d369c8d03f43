"""A site whose GPU is full takes its images off it and repeats the task: the run ends with the same bits, and loses nothing.
Outside a task, one message says what to lower.

No GPU is here. A list of samples that would lie on one is marked, and a step of training on a marked list lacks memory.
"""

import logging

import pytest
import torch
from safetensors.torch import load_file

from feddp.errors import FedDPError
from feddp.files import PROGRESS, read_events
from feddp.run import pooled
from feddp.run.options import Options, run_here
from feddp.training import loop

RUNS = {
    "feddp": Options("feddp", network="toy", rounds=2, calibration_epochs=1, size=32, settings=("batch=4", "start=last")),
    "centralized": Options("centralized", network="toy", rounds=2, size=32, settings=("batch=4", "start=last")),
}


class Placed(list):
    """Samples on a GPU."""


def networks(out) -> dict[str, dict[str, torch.Tensor]]:
    return {path.parent.name: load_file(path) for path in sorted(out.glob("sites/*/network.safetensors"))}


@pytest.mark.usefixtures("toy")
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


@pytest.fixture
def finished(tiny_root, tmp_path, toy):
    """The folder of a finished run of FedAvg, and site-1's network in it."""
    run = tmp_path / "finished"
    run_here(tiny_root, run, Options("fedavg", 1, network=toy, size=32, settings=("batch=4",)), env="local")
    return run, run / "sites/site-1/network.safetensors"


@pytest.mark.parametrize(
    ("words", "leaves"),
    [
        ("predict --network {net} --images {site}/images --out {out}", False),
        ("predict --uncertainty --network {net} --images {site}/images --out {out}", True),
        ("calibrate-threshold --network {net} --data {site} --alpha 0.9 --out {out}/threshold.json", False),
        ("join --models {run} --data {site} --out {out} --train head", False),
        ("adapt --models {run} --images {site} --out {out} --how average", False),
        ("features --models {run} --data {root} --out {out}", False),
    ],
)
def test_a_command_that_lacks_memory_says_what_to_lower(finished, tiny_root, tmp_path, feddp, monkeypatch, words, leaves):
    """As on a GPU that other programs fill: no network gets there. Of `predict --uncertainty`, the masks are written first.

    What has written nothing yet leaves nothing, so that the command can be typed again.
    """
    run, network = finished
    moves = torch.nn.Module.to

    def full(module, *arguments, **named):
        if leaves and not list(tmp_path.glob("out/*.png")):
            return moves(module, *arguments, **named)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has a total capacity of ...")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    typed = words.format(net=network, run=run, root=tiny_root, site=tiny_root / "site-2", out=tmp_path / "out").split()
    code, _, said = feddp(*typed)
    assert code == 2, said
    assert said.splitlines()[-1] == (
        "feddp: the GPU has too little memory (CUDA out of memory. Tried to allocate 20.00 MiB.); end other programs there, or"
        " lower --batch, --size or --network, if the command has one of them, or use --device cpu"
    )
    assert "Traceback" not in said
    assert leaves or not [path for path in tmp_path.glob("out/**/*") if path.is_file()]


def test_another_failure_of_torch_is_still_a_bug(feddp, monkeypatch):
    """Whoever reports it needs the traceback."""

    def broken(*_):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("feddp.run.threshold.calibrate", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        feddp("calibrate-threshold", "--network", "a", "--data", "b", "--out", "c")


def test_a_full_gpu_while_centralized_is_evaluated_ends_in_one_message(tiny_root, tmp_path, monkeypatch, toy):
    """It names the site and the command that goes on, which trains nothing again."""
    options, evaluate = Options("centralized", 1, network=toy, size=32, settings=("batch=4",)), pooled.evaluate

    def full(site):
        if site.name == "site-2":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return evaluate(site)

    with monkeypatch.context() as patch:
        patch.setattr(pooled, "evaluate", full)
        with pytest.raises(FedDPError) as raised:
            run_here(tiny_root, tmp_path / "out", options, env="local")
    assert "site site-2: its GPU has too little memory (CUDA out of memory.); submit the job with" in str(raised.value)
    assert str(raised.value).endswith(f"to go on: feddp run --resume {tmp_path / 'out'}")
    monkeypatch.setattr("feddp.stages.round.fit_epoch", lambda *_, **__: pytest.fail("it trained again"))
    assert run_here(tiny_root, tmp_path / "out", options, env="local")["sites"].keys() == {"site-1", "site-2"}
