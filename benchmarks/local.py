"""A whole run of four sites: `--env local` against the simulator and against POC.

From the command to its end, with the start of all processes. All environments give the same bits.

POC's whole run is also compared with the least that it could take: its start-up, from the command to the first request to
train, and in each round the seconds of the slowest site. The target is 1.25 at most.
"""

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import count as numbers
from pathlib import Path
from statistics import median

from benchmarks.common import count, events_of, interleaved, parser, pixels, ratio, report, run, shown
from feddp.data.synthesize import synthesize
from feddp.files import Event
from feddp.networks import DEFAULT
from feddp.protocol import TRAIN
from feddp.run.session import ENVIRONMENTS

POC = "poc"
AGAINST, TWO = "local", "local --threads 2"  # all sites in one process, and in two


def main(arguments: Sequence[str]) -> None:
    options = parser("local", __doc__)
    options.add_argument("--envs", nargs="+", choices=(*ENVIRONMENTS, TWO), default=list(ENVIRONMENTS))
    options.add_argument("--sites", type=count, default=4)
    options.add_argument("--rounds", type=count, default=20)
    options.add_argument("--images", type=count, default=20, help="per site")
    options.add_argument("--size", type=pixels, default=32)
    options.add_argument("--method", default="fedavg")
    options.add_argument("--pairs", type=count, default=3)
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    words = ["--method", given.method, "--rounds", given.rounds, "--size", given.size, "--network", given.network]
    words += ["--set", "start=last"]  # in POC, a site with few images withholds the scores that choose a round
    with tempfile.TemporaryDirectory() as folder:
        data, number, bounds = Path(folder) / "data", numbers(), list[float]()
        synthesize(data, given.sites, given.images, given.size)

        def whole(where: str) -> None:
            env, *more = where.split()
            out, began = Path(folder) / f"run-{next(number)}", time.time()
            run(data, out, env, *more, *words)
            if env == POC:
                bounds.append(least(events_of(out), began))

        calls = {env: partial(whole, env) for env in dict.fromkeys((AGAINST, *given.envs))}
        seconds = interleaved("Runs", given.pairs, calls, warm=False)
    against = {env: ratio(values, seconds[AGAINST]) for env, values in seconds.items()}
    rows = [(env, f"{median(values):.1f}", shown(against[env])) for env, values in seconds.items()]
    figures = vars(given) | {"seconds": seconds, "ratio": against}
    if bounds:
        beside = ratio(seconds[POC], bounds)
        rows.append(("poc / (start-up + compute of the slowest sites)", f"{median(bounds):.1f}", shown(beside)))
        figures |= {"poc_least": bounds, "poc_ratio": beside}
    report("local", ("environment", "seconds", f"/ {AGAINST}, per pair"), rows, figures)


def least(events: Sequence[Event], began: float) -> float:
    """Returns a run's seconds from `began` to its first request to train, and those of the slowest site in every round."""
    requests: list[tuple[float, list[float]]] = []
    for event in events:
        if event["event"] == "ask" and event["task"] == TRAIN:
            requests.append((event["time"], []))
        elif event["event"] == "answer" and event["task"] == TRAIN:
            requests[-1][1].append(event["scalars"]["seconds"])
    return requests[0][0] - began + sum(max(seconds) for _, seconds in requests)
