"""The stages after the rounds, and the workers of `--threads 2`, run on the GPU: tiny runs of `feddp run --env local`.

Every method with such a stage (a calibration, calibrated heads, tuning) runs one round, and an epoch of each of its stages;
FedDP once more with a process for each of its two sites. A line says "runs", or what went wrong. Nothing is compared: that is
`gpu_agree`'s, which leaves these stages out.
"""

import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.common import FP32, apart, computing, count, line, parser, pixels
from feddp.data.synthesize import synthesize
from feddp.errors import FedDPError
from feddp.methods import METHODS, OWN
from feddp.methods.base import LOCAL_STAGES, TUNE
from feddp.networks import DEFAULT
from feddp.run.options import Options, run_here
from feddp.training.device import asked_for

STAGED = [name for name, method in OWN.items() if LOCAL_STAGES & set(method.stages)]
WORKERS = "feddp"  # the method that also runs with workers
IMAGES = 12
PATIENCE = 80  # seconds until a run has failed


def main(arguments: Sequence[str]) -> None:
    options = parser("gpu_stages", __doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--methods", nargs="+", default=STAGED, choices=STAGED)
    options.add_argument("--size", type=pixels, default=64)
    options.add_argument("--processes", type=count, default=1, help="runs at once")
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    asked_for(given.device)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        synthesize(data, sites=2, images=IMAGES, size=given.size)
        runs = {name: (name, 1) for name in given.methods}
        runs |= {f"{name} with 2 workers": (name, 2) for name in given.methods if name == WORKERS}
        calls = {run: (data, Path(folder) / run, given, *about) for run, about in runs.items()}
        with closing(apart(ran, calls, given.processes, PATIENCE)) as answers:
            for run, answer in answers:
                stages = METHODS[runs[run][0]].stages
                about = {"run": run, "stages": stages, "size": given.size, "network": given.network, "device": given.device}
                line("gpu_stages", about | {"outcome": "failed" if "error" in answer else "runs"} | answer, given.device)
                failed += [run] if "error" in answer else []
    if failed:
        raise FedDPError(f"{', '.join(failed)} failed on {given.device}; the lines above say why")


def ran(data: Path, out: Path, given: Any, method: str, threads: int) -> dict[str, float]:
    """Returns the seconds of the run."""
    words = tuple(f"{name}={value}" for name, value in computing(FP32).items())
    tuned = TUNE in METHODS[method].stages
    words += ("tune_epochs=1",) if tuned else ()
    asked = Options(method, 1, None if tuned else 1, given.network, given.size, settings=words)
    started = time.monotonic()
    run_here(data, out, asked, "local", given.device, threads)
    return {"seconds": time.monotonic() - started}
