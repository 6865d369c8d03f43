"""A training step reads no tensor on the host: on a GPU each such read would wait for all that the GPU has still to do.

So would a copy to the GPU, but for those of `feddp.data.loading.moved`. On the CPU nothing waits, but the same calls are made,
so they are counted here.
"""

import traceback
from operator import methodcaller
from pathlib import Path

import pytest
import torch

from feddp.methods import OWN
from feddp.methods.base import Method
from feddp.stages.train import train
from feddp.training import loop
from support import NEEDS
from support.driven import drive

SITES = "site-1", "site-2"
READS = "item", "tolist", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"
# reads of tensors that are on the CPU wherever the site computes: MONAI's list of axes, torch.arange(...).tolist()
HOST = "tolist in monai/losses/dice.py"


@pytest.fixture
def reads(monkeypatch):
    """The reads and copies of tensors in the training loop, between a batch and the next, with their places; the batches."""
    found, batches, inside = [], [], [False]

    def place():
        return "/".join(Path(traceback.extract_stack(limit=3)[0].filename).parts[-3:])

    def recorded(name, read):
        def call(tensor, *arguments, **named):
            if inside[0]:
                found.append(f"{name} in {place()}")
            return read(tensor, *arguments, **named)

        return call

    def watched(samples, batch, seed, *arguments, **named):
        for given in plain(samples, batch, seed, *arguments, **named):
            batches.append(given)
            inside[0] = seed is not None  # prediction, which has no seed, ends in numbers on the host
            yield given
            inside[0] = False

    def moves(tensor, *arguments, **named):
        to = (named.get("device"), *arguments)
        if inside[0] and not named.get("non_blocking") and any(isinstance(value, str | torch.device) for value in to):
            found.append(f"to in {place()}")
        return move(tensor, *arguments, **named)

    plain, move = loop.batches, torch.Tensor.to
    monkeypatch.setattr(loop, "batches", watched)
    monkeypatch.setattr(torch.Tensor, "to", moves)
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, recorded(name, getattr(torch.Tensor, name)))
    return found, batches


@pytest.mark.parametrize("method", OWN)
def test_no_step_reads_a_tensor(method, plan_for, tiny_root, tmp_path, pvt, toy, reads):
    """Two rounds and every later stage of a method, each of two sites; the toy network where the default has no such layer."""
    plan = plan_for(method=method, network=toy if method in NEEDS else pvt, start="last", tune_epochs=1)
    drive(plan, tiny_root, tmp_path, SITES if OWN[method].federated else SITES[:1])
    found, batches = reads
    assert len(batches) >= 4
    assert set(found) <= {HOST}


@pytest.mark.parametrize(
    "read", [*map(methodcaller, READS[:5]), bool, int, float, methodcaller("to", "cpu"), methodcaller("to", device="cpu")]
)
def test_a_read_would_be_noticed(read, open_site, toy, reads, monkeypatch):
    """A method whose loss reads its own value, in two batches of 4."""
    site = open_site(method="fedavg", network=toy)
    plain = Method.loss

    def loss(self, site, logits, batch):
        value = plain(self, site, logits, batch)
        read(value.detach())
        return value

    monkeypatch.setattr(Method, "loss", loss)
    train(site, site.partition.split(site.copy())[0], 0)
    assert len([line for line in reads[0] if line.endswith(Path(__file__).name)]) == 2
