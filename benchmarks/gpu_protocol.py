"""The papers' protocol: 200 rounds of FedDP at 384 px with four sites of their sizes, on synthetic images.

The sizes are those of EndoPolyp's sites. Images are drawn small and resized when a site loads them, once. The run is
`feddp run --env local`, whose sites take turns on one GPU, or compute there at once with --threads. It ends by itself, or when
the time is over; then 200 rounds are extrapolated from the median round, and the line says so. A few rounds more give a new
line. Beside its wall time stands the time that the papers give for theirs: another GPU, other images and another program.
"""

import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.common import DRAWN, FP32, STDERR, computing, count, line, parser, pixels
from feddp.data.synthesize import synthesize_site
from feddp.errors import FedDPError
from feddp.files import PROGRESS, Event, read_events
from feddp.networks import DEFAULT
from feddp.run.session import WORKSPACE

PUBLISHED = "30 minutes on an NVIDIA 3090: theirs, not measured here"
COVERS = "the rounds alone: no calibration, no last scores, no start"  # what all_rounds_seconds is
EVERY = 3  # rounds after which an extrapolation is printed
LOOK = 0.5  # seconds between looks for them


def main(arguments: Sequence[str]) -> None:
    options = parser("gpu_protocol", __doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--images", type=count, nargs="+", default=[900, 328, 170, 550], help="of each site")
    options.add_argument("--rounds", type=count, default=200)
    options.add_argument("--calibration-epochs", type=count, default=20)
    options.add_argument("--size", type=pixels, default=384)
    options.add_argument("--seconds", type=float, default=300.0, help="until the run is stopped")
    options.add_argument("--compute", default=FP32)
    options.add_argument("--graphs", action="store_true", help="train with CUDA graphs")
    options.add_argument("--threads", type=count, default=1, help="sites that compute at once, each in a process")
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "data", Path(folder) / "run"
        sites = [(data / f"site-{at + 1}", at, images, DRAWN, 0) for at, images in enumerate(given.images)]
        with multiprocessing.get_context("spawn").Pool(len(sites)) as pool:
            pool.starmap(synthesize_site, sites, chunksize=1)
        drawn = time.monotonic() - started
        command = [sys.executable, "-m", "feddp", "run", "--env", "local", "--data", data, "--out", out]
        command += ["--device", given.device, "--rounds", given.rounds, "--size", given.size, "--network", given.network]
        command += ["--calibration-epochs", given.calibration_epochs]
        command += ["--threads", given.threads]
        command += [f"--set={name}={value}" for name, value in computing(given.compute, given.graphs).items()]
        begun = time.monotonic()
        process = subprocess.Popen(list(map(str, command)), stdout=STDERR)
        about = vars(given) | {"drawing_seconds": drawn, "published": PUBLISHED}
        try:
            told = 0
            while process.poll() is None and time.monotonic() - started < given.seconds:
                time.sleep(LOOK)
                if (done := len(rounds_of(out))) >= told + EVERY:
                    told = done
                    line("gpu_protocol", about | extrapolated(out, given.rounds), given.device)
        finally:
            stopped = process.poll() is None
            process.kill()  # its rounds are written down; a shell may have it ignore milder signals
            code = process.wait()
        wall, found = time.monotonic() - begun, extrapolated(out, given.rounds)
        line("gpu_protocol", about | found | {"wall_seconds": wall, "finished": code == 0}, given.device)
    measured = found["rounds_measured"]
    if code and not stopped:
        raise FedDPError(f"the run ended with exit code {code} after {measured} rounds; its messages are above")
    if not measured:
        raise FedDPError(f"the run completed no round in {given.seconds:g} s: nothing was measured; give more --seconds")


def rounds_of(out: Path) -> list[Event]:
    """Returns the completed rounds of a run that is under way or ended."""
    files = [out / PROGRESS, out / WORKSPACE / "server" / PROGRESS]
    events = next((read_events(file) for file in files if file.exists()), [])
    return [event for event in events if event["event"] == "round"]


def extrapolated(out: Path, rounds: int) -> dict[str, object]:
    """Returns the measured rounds, and the seconds of all: the first two, and the median of the others for each other one."""
    seconds = [event["seconds"] for event in rounds_of(out)]
    early = seconds[:2]  # they load the images, first the training and then the validation images, and start the GPU
    later = seconds[2:] or seconds[1:] or seconds
    guess = (sum(early) + (rounds - len(early)) * median(later)) if seconds else None
    found = {"rounds_measured": len(seconds), "seconds_per_round": median(later) if later else None}
    return found | {"all_rounds_seconds": guess, "covers": COVERS, "extrapolated": len(seconds) < rounds}
