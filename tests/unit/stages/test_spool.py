"""Contributions on disk: the bits of those in memory, a memory that does not grow with the sites, and no file that stays."""

import os
import weakref
from pathlib import Path

import pytest
import torch

from feddp.errors import StorageError
from feddp.methods.aggregation import combine, outliers
from feddp.methods.base import AGGREGATIONS
from feddp.protocol import PARTS
from feddp.stages import spool as module
from feddp.stages import train
from feddp.stages.memory import ServerMemory
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.stages.spool import Spool

SITES = tuple(f"site-{i:02}" for i in range(32))
TRAINED = {"round": 0, "phase": 0, "loss": 0.5, "samples": 1.0, "seconds": 0.1, **dict.fromkeys(PARTS, 0.0)}


@pytest.fixture
def spool(tmp_path):
    with Spool(tmp_path) as spool:
        yield spool


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).T,
        torch.randn(5).half(),
        torch.randn(5).bfloat16(),
        torch.randn(2, 3).double(),
        torch.tensor(2**53 + 1),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.tensor([-0.0, 1e-45, 3e38]),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_a_tensor_comes_back_with_its_bits(spool, value):
    spool.put({"before": torch.ones(7)})
    stored = spool.put({"a": value, "b": torch.zeros(3)})
    assert list(stored) == ["a", "b"]
    found = stored["a"]
    assert (found.shape, found.dtype) == (value.shape, value.dtype)
    bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (found, value)]
    assert torch.equal(*bits)
    assert stored["b"].tolist() == [0, 0, 0]


def contributions(count):
    """Values whose float64 sum depends on the order: from 1e-8 to 1e8."""
    rng = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return torch.randn(shape, generator=rng) * 10 ** torch.randint(-8, 9, shape, generator=rng)

    return {site: {"w": tensor(40, 9), "b": tensor(), "n": torch.tensor(int(site[-1]))} for site in SITES[:count]}


@pytest.mark.parametrize("rule", AGGREGATIONS)
@pytest.mark.parametrize("count", [3, 32])
def test_every_rule_gives_the_bits_of_contributions_in_memory(spool, rule, count):
    """Stored in the reverse of the order in which they are summed."""
    given = contributions(count)
    weights = {site: 1.0 + at for at, site in enumerate(given)}
    stored = {site: spool.put(given[site]) for site in reversed(given)}
    expected, found = combine(rule, given, weights), combine(rule, stored, weights)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    shared = given[SITES[0]]
    assert outliers(stored, shared, 1.0) == outliers(given, shared, 1.0)


class Asked(Server):
    """A server whose sites each answer with tensors of their own; `alive` counts those in memory before each answer.

    Args:
        fails_at: the number of the site at which the round is broken off.
    """

    def __init__(self, memory, fails_at=len(SITES)):
        super().__init__(memory, sealed=False)
        self.alive, self.fails_at = [], fails_at

    def joined(self):
        return SITES

    def warn(self, message):
        raise AssertionError(message)

    def send(self, task, sites, data, received):
        sent = []

        def reply():
            tensors = {name: value.clone() for name, value in data.tensors.items()}
            sent.extend(map(weakref.ref, tensors.values()))
            return Message(tensors, TRAINED)

        for at, site in enumerate(sites):
            if at == self.fails_at:
                raise KeyboardInterrupt
            self.alive.append(sum(ref() is not None for ref in sent))
            received(site, reply)
        return {}


@pytest.fixture
def memory(toy, plan_for, tmp_path):
    plan = plan_for(method="fedavg", network=toy, sites=SITES, rounds=1)
    return ServerMemory(plan, "job", tmp_path, tmp_path / "kept", tmp_path)


def test_no_contribution_is_in_memory_when_the_next_one_comes(memory, spool):
    """So their number does not grow with the sites."""
    server, first = Asked(memory), memory.first()
    answers, _ = train._ask_to_train(server, first, 0, 0, spool, None)
    assert list(answers) == list(SITES)
    assert server.alive == [0] * len(SITES)


def nameless(folder: Path) -> list[str]:
    """This process's open files in a folder that have no name any more."""
    handles = [f"/proc/self/fd/{handle}" for handle in os.listdir("/proc/self/fd")]
    paths = [os.readlink(handle) for handle in handles if os.path.exists(handle) or os.path.islink(handle)]
    return [path for path in paths if path.startswith(str(folder)) and path.endswith("(deleted)")]


def test_no_file_is_to_be_seen_and_none_stays(memory, tmp_path):
    with Spool(memory.kept) as spool:
        answers, _ = train._ask_to_train(Asked(memory), memory.first(), 0, 0, spool, None)
        names = set(os.listdir(memory.kept))
        assert len(nameless(tmp_path)) == 1, "the control: the tensors are in a file of that folder"
    assert names == {"plan.json", ".lock", "progress.jsonl"}
    assert len(answers) == len(SITES)
    assert nameless(tmp_path) == [], "although the answers still know their place in it"


def test_no_file_stays_of_a_round_that_is_broken_off(memory, tmp_path):
    server = Asked(memory, fails_at=2)
    with pytest.raises(KeyboardInterrupt):
        train.serve(server)
    assert server.alive == [0, 0], "the control: contributions came"
    assert nameless(tmp_path) == []


@pytest.mark.parametrize("buffering", [0, -1])
def test_a_full_disk_is_named(memory, monkeypatch, buffering):
    """/dev/full takes nothing. No site is to blame: the run stops. Small tensors are in a buffer when the file is closed."""
    monkeypatch.setattr(module, "TemporaryFile", lambda dir: open("/dev/full", "w+b", buffering))  # noqa: SIM115
    server = Asked(memory)
    monkeypatch.setattr(server, "warn", lambda message: None)
    reason = r"kept: the contributions' file was not written \(No space left on device\); free space"
    with pytest.raises(StorageError, match=reason), Spool(memory.kept) as spool:
        train._ask_to_train(server, memory.first(), 0, 0, spool, None)
