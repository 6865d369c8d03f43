"""Several sites on one GPU at once: their images per second together, against one site alone.

Each site is a process of its own, as in a federation; all begin a measurement together.
"""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from benchmarks.common import FP32, compute_settings, count, images, line, parser, wait
from feddp.networks import DEFAULT, build
from feddp.training.device import asked_for, settle
from feddp.training.loop import adamw, fit_epoch
from feddp.training.losses import segmentation_loss
from feddp.training.settings import Training, from_settings

PATIENCE = 300  # seconds until every process must have started


def main(arguments: Sequence[str]) -> None:
    options = parser("gpu_sites", __doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--sites", type=count, default=4)
    options.add_argument("--size", type=count, default=384)
    options.add_argument("--images", type=count, default=24)
    options.add_argument("--seconds", type=float, default=8.0)
    options.add_argument("--compute", default=FP32)
    options.add_argument("--network", default=DEFAULT)
    given = vars(options.parse_args(arguments))
    asked_for(given["device"])
    alone = together(1, given)[0]
    found = together(given["sites"], given)
    rates = {"alone": alone["rate"], "together": sum(site["rate"] for site in found), "each": [site["rate"] for site in found]}
    gain = rates["together"] / rates["alone"]
    line("gpu_sites", given | rates | {"gain": gain, "peak_bytes": [site["peak"] for site in found]}, given["device"])


def together(sites: int, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns each site's images per second and the most bytes that its tensors took on the GPU."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        start = manager.Barrier(sites)
        with context.Pool(sites) as pool:
            return pool.starmap(trained, [(site, start, given) for site in range(sites)], chunksize=1)


def trained(site: int, start: Barrier, given: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(given["device"])
    settle(device.type, 1)
    training = from_settings(Training, compute_settings(given["compute"], given["device"]))
    network = build(given["network"], 3, 1, seed=site).to(device)
    optimizer, loss = adamw(network, training.lr, training.weight_decay), segmentation_loss(training.loss)
    samples, done = images(given["images"], given["size"]), 0

    def epoch() -> None:
        fit_epoch(network, optimizer, samples, lambda logits, batch: loss(logits, batch["mask"]), training, seed=done)

    epoch()
    wait(given["device"])
    start.wait(PATIENCE)
    started = time.perf_counter()
    while time.perf_counter() - started < given["seconds"]:
        epoch()
        done += len(samples)
    wait(given["device"])
    rate = done / (time.perf_counter() - started)
    return {"rate": rate, "peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None}
