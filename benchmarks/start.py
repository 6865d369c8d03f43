"""CPU-seconds and memory of each process in POC, until its site's first step.

A site's processes are measured until its first step, the server's until the first site's: by a site's own log, the end of its
first round less its seconds, and then the loading of its images. Processes are looked at several times a second; CPU-seconds
are interpolated between the looks before and after. Memory is the most that was seen before: resident (RSS), and with pages of
libraries divided among the processes that share them (PSS).
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.common import STDERR, count, kind_of, own_trainings, parser, pixels, report
from feddp.data.synthesize import synthesize
from feddp.errors import FedDPError
from feddp.networks import DEFAULT
from feddp.protocol import LOADING
from feddp.run.keeper import processes_below
from feddp.run.poc import SERVER
from feddp.run.session import POC

MIB = 2**20


@dataclass(frozen=True)
class Seen:
    """A process at one moment."""

    time: float
    participant: str
    kind: str
    cpu: float  # seconds
    rss: float  # MiB
    pss: float


def main(arguments: Sequence[str]) -> None:
    options = parser("start", __doc__)
    options.add_argument("--sites", type=count, default=4)
    options.add_argument("--images", type=count, default=20, help="per site")
    options.add_argument("--size", type=pixels, default=32)
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        synthesize(root / "data", given.sites, given.images, given.size)
        command = [sys.executable, "-m", "feddp", "run", "--env", "poc", "--data", root / "data", "--out", root / "run"]
        command += ["--method", "fedavg", "--rounds", 1, "--size", given.size, "--network", given.network]
        command += ["--set", "start=last"]  # a site with few images withholds the scores that choose a round
        process = subprocess.Popen(list(map(str, command)), stdout=STDERR)
        seen: list[Seen] = []
        while process.poll() is None:
            seen += looked(root / "run")
            time.sleep(0.2)
        if process.returncode:
            raise FedDPError(f"the run ended with exit code {process.returncode}; its message is above")
        begins = {
            site: event["time"] - event["seconds"] + event[LOADING] for (site, *_), event in own_trainings(root / "run").items()
        }
    rows = until(seen, begins)
    heads = ("participant", "process", "CPU-seconds", "RSS, MiB", "PSS, MiB")
    report("start", heads, rows, vars(given) | {"processes": [dict(zip(heads, row, strict=True)) for row in rows]})


def looked(out: Path) -> list[Seen]:
    """Returns all FLARE processes of a run, as they are."""
    kits, found = (out / POC).resolve(), []
    for process in processes_below(out):
        try:
            words, times, memory = process.cmdline(), process.cpu_times(), process.memory_full_info()
            kind = kind_of(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended meanwhile
            continue
        inside = [Path(word).relative_to(kits).parts for word in words if Path(word).is_relative_to(kits)]
        participant = next((parts[0] for parts in inside if parts), "")
        cpu = times.user + times.system
        found.append(Seen(time.time(), participant, kind, cpu, memory.rss / MIB, memory.pss / MIB))
    return found


def until(seen: Sequence[Seen], begins: Mapping[str, float]) -> list[tuple[str, str, float, int, int]]:
    """Returns a row per process: CPU-seconds until its site's first step, the most memory until then.

    A participant has one process of each kind.
    """
    processes: dict[tuple[str, str], list[Seen]] = {}
    for look in seen:
        processes.setdefault((look.participant, look.kind), []).append(look)
    rows = []
    for (participant, kind), looks in sorted(processes.items()):
        end = min(begins.values()) if participant == SERVER else begins.get(participant, 0.0)
        if before := [look for look in looks if look.time <= end]:
            most = (round(max(look.rss for look in before)), round(max(look.pss for look in before)))
            cpu = np.interp(end, [look.time for look in looks], [look.cpu for look in looks])
            rows.append((participant, kind, round(float(cpu), 1), *most))
    return rows
