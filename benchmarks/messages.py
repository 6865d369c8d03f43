"""Bytes of a round and of every stage in float32 and in half precision, and the Dice of both over seeds.

Runs in one process, whose messages are counted as FLARE's are: tensors without the transport's own bytes.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev

from benchmarks.common import count, parser, pixels, report
from feddp import protocol
from feddp.data.synthesize import synthesize
from feddp.files import PROGRESS, Event, read_events
from feddp.networks import DEFAULT
from feddp.run.options import Options, run_here

PRECISIONS = FULL, HALF = "float32", "float16"


def main(arguments: Sequence[str]) -> None:
    options = parser("messages", __doc__)
    options.add_argument("--method", default="feddp")
    options.add_argument("--sites", type=count, default=4)
    options.add_argument("--rounds", type=count, default=8)
    options.add_argument("--calibration-epochs", type=count, help="default: the method's")
    options.add_argument("--images", type=count, default=20, help="per site")
    options.add_argument("--size", type=pixels, default=64)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    nbytes: dict[str, dict[str, int]] = {}
    dice: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        synthesize(data, given.sites, given.images, given.size)
        for seed in given.seeds:
            for precision in PRECISIONS:
                out = Path(folder) / f"{precision}-{seed}"
                epochs, settings = given.calibration_epochs, (f"precision={precision}",)
                run = Options(given.method, given.rounds, epochs, given.network, given.size, seed, settings)
                results = run_here(data, out, run, "local")
                dice[precision].append(100 * mean(site["final"]["dice"]["mean"] for site in results["sites"].values()))
                nbytes[precision] = by_stage(read_events(out / PROGRESS))
    rows: list[tuple[object, ...]] = []
    for stage, full in nbytes[FULL].items():
        half = nbytes[HALF][stage]
        rows.append((stage, full, half, f"{half / full:.3f}" if full else ""))
    full, half = (nbytes[precision][protocol.spec_of(protocol.TRAIN).stage] // given.rounds for precision in PRECISIONS)
    rows.append(("a round, with its share of the scoring", full, half, f"{half / full:.3f}"))
    of_full, of_half = (f"{mean(values):.1f} ± {pstdev(values):.1f}" for values in dice.values())
    rows.append(("Dice (%), mean ± population std over seeds", of_full, of_half, ""))
    report("messages", ("bytes of", *PRECISIONS, "ratio"), rows, vars(given) | {"bytes": nbytes, "dice": dice})


def by_stage(events: Sequence[Event]) -> dict[str, int]:
    """Returns the bytes that the server sent and received, by stage."""
    found: dict[str, int] = {}
    for event in events:
        if event["event"] in ("ask", "answer"):
            sent = sum(event["bytes"].values()) if event["event"] == "ask" else event["bytes"]
            stage = protocol.spec_of(event["task"]).stage
            found[stage] = found.get(stage, 0) + sent
    return found
