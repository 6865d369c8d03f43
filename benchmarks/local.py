"""A whole run of four sites: `--env local` against the simulator and against POC.

From the command to its end, with the start of all processes. All environments give the same bits.
"""

import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import count as numbers
from pathlib import Path
from statistics import median

from benchmarks.common import count, interleaved, parser, ratio, report, run, shown
from feddp.data.synthesize import synthesize
from feddp.networks import DEFAULT
from feddp.run.session import ENVIRONMENTS

AGAINST, TWO = "local", "local --threads 2"  # all sites in one process, and in two


def main(arguments: Sequence[str]) -> None:
    options = parser("local", __doc__)
    options.add_argument("--envs", nargs="+", choices=(*ENVIRONMENTS, TWO), default=list(ENVIRONMENTS))
    options.add_argument("--sites", type=count, default=4)
    options.add_argument("--rounds", type=count, default=20)
    options.add_argument("--images", type=count, default=20, help="per site")
    options.add_argument("--size", type=count, default=32)
    options.add_argument("--method", default="fedavg")
    options.add_argument("--pairs", type=count, default=1)
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    words = ("--method", given.method, "--rounds", given.rounds, "--size", given.size, "--network", given.network)
    words += ("--set", "start=last")  # in POC, a site with few images withholds the scores that choose a round
    with tempfile.TemporaryDirectory() as folder:
        data, number = Path(folder) / "data", numbers()
        synthesize(data, given.sites, given.images, given.size)

        def whole(where: str) -> None:
            env, *more = where.split()
            run(data, Path(folder) / f"run-{next(number)}", env, *more, *words)

        calls = {env: partial(whole, env) for env in dict.fromkeys((AGAINST, *given.envs))}
        seconds = interleaved("Runs", given.pairs, calls, warm=False)
    against = {env: ratio(values, seconds[AGAINST]) for env, values in seconds.items()}
    rows = [(env, f"{median(values):.1f}", shown(against[env])) for env, values in seconds.items()]
    report(
        "local",
        ("environment", "seconds", f"/ {AGAINST}, per pair"),
        rows,
        vars(given) | {"seconds": seconds, "ratio": against},
    )
