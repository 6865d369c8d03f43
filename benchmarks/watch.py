"""Memory of every process of a run in POC, while it runs.

Beside `feddp run --env poc --out OUT`: a line of JSON at each of some rounds, with resident and anonymous memory. It ends after
the last of them, or when the run has ended.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.common import count, kind_of, parser
from feddp.errors import InputError
from feddp.files import PROGRESS, Event, read_events
from feddp.run.keeper import processes_below
from feddp.run.session import POC
from feddp.terminal import say

MIB = 2**20
WAIT = 60.0  # seconds: so long a run may have no process, while it starts or continues


def main(arguments: Sequence[str]) -> None:
    options = parser("watch", __doc__)
    options.add_argument("out", type=Path, help="the --out folder of a run in POC, which is under way")
    options.add_argument("--rounds", type=count, nargs="+", default=[10, 50, 100, 200])
    given = options.parse_args(arguments)
    peaks: dict[str, int] = {}
    waiting, alive = sorted(given.rounds), time.monotonic()
    while waiting:
        time.sleep(1)
        now: dict[str, list[tuple[int, int]]] = {}
        for process in processes_below(given.out.resolve()):
            try:
                kind, memory = kind_of(process), process.memory_info()
            except psutil.NoSuchProcess:  # it has ended meanwhile
                continue
            now.setdefault(kind, []).append((memory.rss // MIB, (memory.rss - memory.shared) // MIB))
        if now:
            alive = time.monotonic()
        elif time.monotonic() - alive > WAIT:
            if peaks:
                return
            raise InputError(
                f"{given.out} has no run: no process of one was found for {WAIT:g} s; start it with --env poc first"
            )
        for kind, found in now.items():
            peaks[kind] = max(peaks.get(kind, 0), *(rss for rss, _ in found))
        done = max((event["round"] for event in events(given.out) if event["event"] == "round"), default=0)
        while waiting and done >= waiting[0]:
            say(json.dumps({"round": waiting.pop(0), "rss and anonymous, MiB": now, "peak rss, MiB": peaks}))


def events(out: Path) -> list[Event]:
    """Returns the events of the run's latest job so far."""
    files = sorted((out / POC).glob(f"localhost/*/{PROGRESS}"), key=lambda path: path.stat().st_mtime)
    return read_events(files[-1]) if files else []
