"""Several sites on one GPU at once: their images per second together, against one site alone.

Each site is a process of its own, as in a federation; all begin a measurement together. Of the GPU's memory a site says the
most that its tensors took, the most that its process reserved for them, and what all processes together used at its end: the
largest of these has every site's context in it.
"""

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import closing
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from benchmarks.common import FP32, apart, computing, count, images, line, parser, pixels
from feddp.data.placing import placed
from feddp.errors import FedDPError
from feddp.networks import DEFAULT, build
from feddp.training.device import asked_for, settle, wait
from feddp.training.loop import adamw, fit_epoch
from feddp.training.losses import segmentation_loss
from feddp.training.settings import Training, from_settings

PATIENCE = 60  # seconds for what is not measured: the starts, the first epoch


def main(arguments: Sequence[str]) -> None:
    options = parser("gpu_sites", __doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--sites", type=count, default=4)
    options.add_argument("--size", type=pixels, default=384)
    options.add_argument("--images", type=count, default=24)
    options.add_argument("--seconds", type=float, default=8.0)
    options.add_argument("--compute", default=FP32)
    options.add_argument("--graphs", action="store_true", help="train with CUDA graphs")
    options.add_argument("--network", default=DEFAULT)
    given = vars(options.parse_args(arguments))
    asked_for(given["device"])
    alone = together(1, given)
    line("gpu_sites", given | {"measured": "alone"} | alone, given["device"])
    found = together(given["sites"], given)
    gain = found["rate"] / alone["rate"]
    line("gpu_sites", given | {"measured": "together", "gain": gain} | found, given["device"])


def together(sites: int, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the images per second of all sites, and a list of each figure of theirs.

    Raises:
        FedDPError: a site failed; names it and the cause. The others are ended.
    """
    start = multiprocessing.get_context("spawn").Barrier(sites)
    calls = {f"site {number + 1} of {sites}": (number, start, given) for number in range(sites)}
    found = []
    with closing(apart(trained, calls, sites, PATIENCE + given["seconds"])) as answers:
        for site, answer in answers:
            if "error" in answer:
                raise FedDPError(f"{site} failed, the others were ended: {answer['error']}")
            found.append(answer)
    return {"rate": sum(site["rate"] for site in found), "each": {name: [site[name] for site in found] for name in found[0]}}


def trained(site: int, start: Barrier, given: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(given["device"])
    settle(device.type, 1)
    training = from_settings(Training, computing(given["compute"], given["graphs"]))
    network = build(given["network"], 3, 1, seed=site).to(device)
    optimizer, loss = adamw(network, training.lr, training.weight_decay), segmentation_loss(training.loss)
    samples, done = placed(images(given["images"], given["size"]), device), 0

    def epoch() -> None:
        fit_epoch(network, optimizer, samples, lambda logits, batch: loss(logits, batch["mask"]), training, seed=done)

    epoch()
    wait(given["device"])
    start.wait()  # not for ever: where a site fails, or takes too long, all are ended
    started = time.perf_counter()
    while time.perf_counter() - started < given["seconds"]:
        epoch()
        done += len(samples)
    wait(given["device"])
    return {"rate": done / (time.perf_counter() - started)} | memory(device)


def memory(device: torch.device) -> dict[str, int]:
    """Returns bytes on the GPU: tensors' and reserved ones, the most of this process, and all that is in use; {} on the CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.max_memory_reserved(device)
    return {"tensors": torch.cuda.max_memory_allocated(device), "reserved": reserved, "in_use": total - free}
