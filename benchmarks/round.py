"""A round in POC beyond the slowest site's compute: ours, and FLARE's stock FedAvg recipe with its defaults.

Same network, images, epoch and validation at the sites; whole federations take turns, `--pairs` times. A stock
round lasts from the first site's start to the first site's next start.

The two do not mean the same by a site's compute. Ours is the site's "seconds", which include that it reads and writes its own
state; FLARE's stock site keeps no state, and its seconds are loading the received weights, validation and training. What ours
takes for its state is therefore not counted as overhead, and the comparison favours ours by that much. Our overhead includes
the checks and filters of messages, and the server's saving of a checkpoint.

Where ours goes, by the server's events, as medians over the rounds (`where`), and then over the runs:

to the fastest site     from the request until the site begins to work: serialising γ, its polling for a task, the transfer of
                        γ, the filters and checks before
before its offer        from the end of its work until it offers its answer to the server: the filters and checks after
from the fastest site   from that offer until the server has accepted the answer: the transfer, the server's checks, its disk
until the last site     what the last answer takes longer than these three, beyond the slowest site's seconds
polling                 from the last answer to the round's end without the next two: the server's look whether the task is over
aggregating             the mean of the contributions
saving                  the server's checkpoint
before the next request to the next round's request, which no round counts

A site's begin and end are those of its own log (`benchmarks.common.events_of`), by the clock of the one machine. FLARE tells
of nothing within these parts. What depends on the number of bytes shows with `--set precision=float16`, which halves it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.common import STDERR, count, events_of, interleaved, parser, pixels, ratio, report, run, shown
from feddp.data.synthesize import synthesize
from feddp.errors import FedDPError
from feddp.files import Event, read_events
from feddp.networks import DEFAULT
from feddp.protocol import TRAIN
from feddp.run.keeper import watched

PARTS = (
    *("to the fastest site", "before its offer", "from the fastest site", "until the last site"),
    *("polling", "aggregating", "saving", "before the next request"),
)


def main(arguments: Sequence[str]) -> None:
    options = parser("round", __doc__)
    options.add_argument("--sites", type=count, default=4)
    options.add_argument("--rounds", type=count, default=10)
    options.add_argument("--images", type=count, default=20, help="per site")
    options.add_argument("--size", type=pixels, default=32)
    options.add_argument("--pairs", type=count, default=3)
    options.add_argument("--network", default=DEFAULT)
    options.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="of ours")
    given = options.parse_args(arguments)
    ours: list[float] = []
    theirs: list[float] = []
    parts: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        synthesize(root / "data", given.sites, given.images, given.size)

        def one_of_ours() -> None:
            out = root / f"ours-{len(ours)}"
            words = ("--method", "fedavg", "--rounds", given.rounds, "--size", given.size, "--network", given.network)
            settings = [word for each in ("start=last", *given.settings) for word in ("--set", each)]
            run(root / "data", out, "poc", *words, *settings)
            events = events_of(out)
            ours.append(median(event["beyond_compute"] for event in events if event["event"] == "round"))
            parts.append(where(events))

        def one_of_theirs() -> None:
            theirs.append(median(beyond(stock(root / "data", root / f"stock-{len(theirs)}", given))))

        interleaved("Runs", given.pairs, {"ours": one_of_ours, "stock": one_of_theirs}, warm=False)
    against = ratio(ours, theirs)
    of_them = {name: median(one[name] for one in parts) for name in PARTS}
    rows = [("ours", f"{median(ours):.2f}"), *((f"of that: {name}", f"{value:.2f}") for name, value in of_them.items())]
    rows += [("stock", f"{median(theirs):.2f}"), ("ours / stock", shown(against))]
    figures = vars(given) | {"ours": ours, "parts": parts, "stock": theirs, "ratio": against}
    report("round", ("beyond the slowest site's compute", "seconds a round"), rows, figures)


def where(events: Sequence[Event]) -> dict[str, float]:
    """Returns where the medians of our rounds' seconds beyond compute go, as far as the server and the sites note it.

    The parts are explained above. The fastest site is that whose answer comes soonest beyond its own seconds. All parts of a
    round but the last sum to its seconds beyond compute.
    """
    rows: list[tuple[float, ...]] = []
    between: list[float] = []
    asked, ended, offered, answers = 0.0, None, dict[str, float](), list[Event]()
    for event in events:
        if event["event"] == "ask" and event["task"] == TRAIN:
            asked, offered, answers = event["time"], {}, []
            between += [] if ended is None else [asked - ended]
        elif event["event"] == "computed":
            offered.setdefault(event["site"], event["time"])
        elif event["event"] == "answer" and event["task"] == TRAIN:
            answers.append(event)
        elif event["event"] == "round":
            ended, last = event["time"], answers[-1]["time"]
            fastest = min(answers, key=lambda answer: answer["time"] - answer["scalars"]["seconds"])
            offer, done, own = offered[fastest["site"]], fastest["done"], fastest["scalars"]["seconds"]
            spread = last - max(answer["scalars"]["seconds"] for answer in answers) - (fastest["time"] - own)
            combining, saving = event["combining"], event["saving"]
            polling = ended - last - combining - saving
            ways = (done - own - asked, offer - done, fastest["time"] - offer)
            rows.append((*ways, spread, polling, combining, saving))
    medians = [median(column) for column in zip(*rows, strict=True)]
    return dict(zip(PARTS, [*medians, median(between) if between else 0.0], strict=True))


def beyond(sites: Mapping[str, Sequence[Event]]) -> list[float]:
    """Returns the seconds of each stock round beyond the slowest site's compute; the last round has no next one."""
    rounds = list(zip(*sites.values(), strict=True))
    starts = [min(event["started"] for event in events) for events in rounds]
    slowest = [max(event["time"] - event["started"] for event in events) for events in rounds]
    return [after - start - most for start, after, most in zip(starts[:-1], starts[1:], slowest[:-1], strict=True)]


def stock(data: Path, out: Path, given: argparse.Namespace) -> dict[str, list[Event]]:
    """Runs FLARE's recipe in its own POC; returns each site's events.

    Raises:
        FedDPError: it failed.
    """
    (out / "times").mkdir(parents=True)
    env = {**os.environ, "HOME": str(out), "NVFLARE_POC_WORKSPACE": str(out / "poc")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    words = [data, out, given.sites, given.rounds, given.size, given.network]
    with watched(out):
        command = [sys.executable, "-m", "benchmarks.stock.job", *map(str, words)]
        env["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")))
        code = subprocess.run(command, env=env, stdout=STDERR, check=False).returncode
    found = {path.stem: read_events(path) for path in sorted((out / "times").glob("*.jsonl"))}
    if code or [len(events) for events in found.values()] != [given.rounds] * given.sites:
        raise FedDPError(f"FLARE's recipe ended with exit code {code} before its last round; its messages are above")
    return found
