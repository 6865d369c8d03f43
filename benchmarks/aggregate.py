"""The server's part of a round: time and peak memory with 4 to 256 contributions.

Every site sends γ with noise of its own, the last site of the alphabet first. Each measurement has a process of its own, so
that no memory is measured that an earlier one has left. The numbers of sites take turns; a row has the medians.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import cast

import torch

from benchmarks.common import count, parser, report
from feddp.data.progress import track
from feddp.methods.aggregation import combine
from feddp.methods.base import AGGREGATIONS
from feddp.networks import DEFAULT
from feddp.plan.schema import Plan
from feddp.protocol import PARTS
from feddp.stages import train
from feddp.stages.memory import ServerMemory
from feddp.stages.message import Message
from feddp.stages.server import Received, Server, Unanswered
from feddp.stages.spool import Spool

MIB = 2**20


def main(arguments: Sequence[str]) -> None:
    options = parser("aggregate", __doc__)
    options.add_argument("--sites", type=count, nargs="+", default=[4, 16, 64, 256], help="20 MiB of disk each, by default")
    options.add_argument("--rule", choices=AGGREGATIONS, default=AGGREGATIONS[0])
    options.add_argument("--factor", type=float, default=0.0, help="norm_factor")
    options.add_argument("--turns", type=count, default=3)
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    jobs = [(sites, given.rule, given.factor, given.network) for _ in range(given.turns) for sites in given.sites]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = list(track(pool.imap(measured, jobs), "Measurements", len(jobs)))
    heads = ("contributions", "MiB each", "s until all are stored", "s to combine", "peak, MiB above", "MiB before")
    about = {"rule": given.rule, "factor": given.factor, "network": given.network}
    figures = about | {"turns": [dict(zip(heads, row, strict=True)) for row in found]}
    report("aggregate", heads, medians(found, len(given.sites)), figures)


def medians(found: Sequence[tuple[float, ...]], kinds: int) -> list[tuple[float, ...]]:
    """Returns one row per kind of measurement, from the rows of all turns, one turn after the other."""
    return [tuple(map(median, zip(*found[kind::kinds], strict=True))) for kind in range(kinds)]


class Arriving(Server):
    """A server to which every site sends γ with noise."""

    seconds = 0.0  # of making the noise

    def __init__(self, memory: ServerMemory):
        super().__init__(memory, sealed=False)

    def joined(self) -> Sequence[str]:
        return self.plan.sites

    def warn(self, message: str) -> None:
        raise RuntimeError(message)  # no answer is to be refused here

    def send(
        self, task: str, sites: Sequence[str], data: Message | Mapping[str, Message], received: Received
    ) -> dict[str, Unanswered]:
        sent = cast(Message, data).tensors  # a round of training has one message for all sites

        def reply() -> Message:
            started = time.monotonic()
            tensors = {name: value + torch.randn(value.shape).to(value.dtype) for name, value in sent.items()}
            self.seconds += time.monotonic() - started
            return Message(
                tensors, {"round": 0, "phase": 0, "loss": 1.0, "samples": 10.0, "seconds": 0.0, **dict.fromkeys(PARTS, 0.0)}
            )

        for site in reversed(sites):
            received(site, reply)
        return {}


def status(name: str) -> int:
    """Returns a line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(name))


def measured(job: tuple[int, str, float, str]) -> tuple[int, float, float, float, int, int]:
    """Returns a row of the table."""
    sites, rule, factor, network = job
    names = tuple(f"site-{at:03}" for at in range(sites))
    settings = {"min_sites": 2, "aggregation": rule, "norm_factor": factor}
    plan = Plan("fedavg", network, 3, ("lesion",), "nested", 32, rounds=1, sites=names, settings=settings)
    with tempfile.TemporaryDirectory() as folder:
        memory = ServerMemory(plan, "job", Path(folder), Path(folder) / "kept", Path(folder))
        server, shared = Arriving(memory), memory.first()
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
        started = time.monotonic()
        with Spool(memory.kept) as spool:
            answers, _ = train._ask_to_train(server, shared, 0, 0, spool, None)
            arrived = time.monotonic() - started - server.seconds
            started = time.monotonic()
            combine(rule, {site: answer.tensors for site, answer in answers.items()}, dict.fromkeys(answers, 1.0))
        combined, size = time.monotonic() - started, sum(value.nbytes for value in shared.values()) / MIB
    return sites, round(size, 2), round(arrived, 2), round(combined, 2), status("VmHWM") - before, before
