"""Measures memory: of a round at the server with many sites, or of every process of a run in POC with many rounds.

python tests/memory.py aggregate --sites 64 --rule uniform
python tests/memory.py watch runs/long --rounds 10 50 100 200
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from chaos import ROLES, events
from feddp.methods.aggregation import combine
from feddp.methods.base import AGGREGATIONS
from feddp.networks import DEFAULT
from feddp.plan.schema import Plan
from feddp.protocol import PARTS
from feddp.stages import train
from feddp.stages.memory import ServerMemory
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.stages.spool import Spool

MIB = 2**20


class Arriving(Server):
    """A server to which every site sends γ with noise of its own, the last site of the alphabet first."""

    seconds = 0.0  # of making the noise

    def __init__(self, memory: ServerMemory):
        super().__init__(memory, sealed=False)

    def joined(self):
        return self.plan.sites

    def warn(self, message):
        print(message, file=sys.stderr)

    def send(self, task, sites, data, received):
        def reply():
            started = time.monotonic()
            tensors = {name: value + torch.randn(value.shape).to(value.dtype) for name, value in data.tensors.items()}
            self.seconds += time.monotonic() - started
            return Message(
                tensors, {"round": 0, "phase": 0, "loss": 1.0, "samples": 10.0, "seconds": 0.0, **dict.fromkeys(PARTS, 0.0)}
            )

        for site in reversed(sites):
            received(site, reply)
        return set()


def status(name: str) -> int:
    """Returns a line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(name))


def aggregate(sites: int, rule: str, factor: float, network: str) -> None:
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
            answers = train._ask_to_train(server, shared, 0, 0, spool)
            arrived = time.monotonic() - started - server.seconds
            started = time.monotonic()
            combine(rule, {site: answer.tensors for site, answer in answers.items()}, dict.fromkeys(answers, 1.0))
        combined, size = time.monotonic() - started, sum(value.nbytes for value in shared.values()) / MIB
        print(
            f"{sites} contributions of {size:.0f} MiB, {rule}: received, checked and stored in {arrived:.2f} s, combined in"
            f" {combined:.2f} s, peak {status('VmHWM') - before} MiB above {before} MiB"
        )


def watch(out: Path, rounds: list[int]) -> None:
    """Prints a line for every one of `rounds`, when it is complete."""
    peaks: dict[str, int] = {}
    waiting = sorted(rounds)
    while waiting:
        time.sleep(1)
        now: dict[str, list[tuple[int, int]]] = {}
        for process in psutil.process_iter(["cmdline", "memory_info"]):
            line, memory = " ".join(process.info["cmdline"] or ()), process.info["memory_info"]
            role = next((role for role, part in ROLES.items() if part in line and str(out) in line), None)
            if role and memory:
                now.setdefault(role, []).append((memory.rss // MIB, (memory.rss - memory.shared) // MIB))
        for role, found in now.items():
            peaks[role] = max(peaks.get(role, 0), *(rss for rss, _ in found))
        done = max((event["round"] for event in events(out) if event["event"] == "round"), default=0)
        while waiting and done >= waiting[0]:
            print(json.dumps({"round": waiting.pop(0), "rss and anonymous, MiB": now, "peak rss, MiB": peaks}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("aggregate")
    one.add_argument("--sites", type=int, default=4)
    one.add_argument("--rule", choices=AGGREGATIONS, default=AGGREGATIONS[0])
    one.add_argument("--factor", type=float, default=0.0, help="norm_factor")
    one.add_argument("--network", default=DEFAULT)
    one.set_defaults(run=aggregate)
    other = commands.add_parser("watch")
    other.add_argument("out", type=Path, help="the --out folder of a run in POC, which is under way")
    other.add_argument("--rounds", type=int, nargs="+", default=[10, 50, 100, 200])
    other.set_defaults(run=watch)
    arguments = vars(parser.parse_args())
    arguments.pop("run")(**arguments)


if __name__ == "__main__":
    main()
