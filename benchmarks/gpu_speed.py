"""Images per second and peak memory at 384 px, against what the GPU can compute and copy at most.

The bounds are measured on the same machine, each by the fastest call: the rate of a large matrix product, and the bandwidth of
a copy inside the GPU's memory (bytes read and written). Training and inference are measured by the median call. PyTorch counts
an epoch's arithmetic. Its least traffic is what the forward pass keeps for the backward pass, written and read once, and what
the optimiser reads and writes; of inference, the parameters and images read, and the maps written. Shares of the bounds say how
far the loop is from them.

A site holds its images on the GPU where there is room; `training, images on the CPU` is of a site without. Each line says
where the images were; on the GPU they count in its peak memory.

`inference` in bfloat16 is under an autocast of this benchmark, which the product's `predict` does not have: it predicts in
float32 whatever the training computes in.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from benchmarks.common import BF16, FP32, computing, count, images, line, parser, pixels
from feddp.data.loading import Sample
from feddp.data.placing import placed
from feddp.networks import DEFAULT, build
from feddp.training.device import asked_for, settle, wait
from feddp.training.loop import adamw, fit_epoch, predict
from feddp.training.losses import segmentation_loss
from feddp.training.settings import Training, from_settings

DTYPES = {FP32: torch.float32, BF16: torch.bfloat16}
GRAPHS = "training, CUDA graphs"
FROM_CPU = "training, images on the CPU"
INFERENCE_BF16 = "inference under an autocast of the benchmark, which predict does not have"
# bytes that AdamW moves for a float32 parameter: reads it, its gradient and both moments, writes it and both moments
ADAMW = 7 * 4


def main(arguments: Sequence[str]) -> None:
    options = parser("gpu_speed", __doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--size", type=pixels, default=384)
    options.add_argument("--batches", type=count, nargs="+", default=[6, 32], help="of training; 6 is the paper's")
    options.add_argument("--computes", choices=DTYPES, nargs="+", default=list(DTYPES))
    options.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    options.add_argument("--matrix", type=count, default=8192, help="side of the matrices")
    options.add_argument("--copied", type=count, default=1024, help="MiB")
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    device = asked_for(given.device)
    settle(device.type, 1)
    bandwidth = copied(device, given.copied, given.seconds)
    line("gpu_speed", {"measured": "copy", "bytes_per_second": bandwidth}, given.device)
    rates: dict[str, float] = {}
    dtypes = {compute: DTYPES[compute] for compute in given.computes}
    for compute, dtype in dtypes.items():
        rates[compute] = multiplied(device, given.matrix, dtype, given.seconds)
        line("gpu_speed", {"measured": "matrix", "compute": compute, "flop_per_second": rates[compute]}, given.device)
    samples = images(8, given.size)
    for compute, dtype in dtypes.items():
        for batch in given.batches:
            about = {"compute": compute, "batch": batch, "size": given.size, "network": given.network}
            on_cpu = (samples * batch)[: 4 * batch]
            inferred = INFERENCE_BF16 if compute == BF16 else inference.__name__
            for label, measured, at_site in (
                (FROM_CPU, training, False),
                (training.__name__, training, True),
                (GRAPHS, partial(training, graphs=True), True),
                (inferred, inference, True),
            ):
                chosen = placed(on_cpu, device) if at_site else on_cpu
                found = measured(given, compute, dtype, batch, chosen)
                found["of_matrix_rate"] = found["flop"] / found["seconds"] / rates[compute]
                found["of_bandwidth"] = found["least_bytes"] / found["seconds"] / bandwidth
                at = {"images_on": chosen[0]["image"].device.type}
                line("gpu_speed", {"measured": label} | about | at | found, given.device)


def copied(device: torch.device, mebibytes: int, seconds: float) -> float:
    """Returns bytes per second, read and written."""
    source = torch.empty(mebibytes << 20, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(timed(lambda: target.copy_(source), str(device), seconds))


def multiplied(device: torch.device, side: int, dtype: torch.dtype, seconds: float) -> float:
    """Returns floating-point operations per second of a product of random square matrices."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / min(timed(lambda: a @ b, str(device), seconds))


def timed(call: Callable[[], object], device: str, seconds: float) -> list[float]:
    """Returns the seconds of each call within `seconds`, of one at least, after one that is not counted."""
    call()
    wait(device)
    taken, end = list[float](), time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        started = time.perf_counter()
        call()
        wait(device)
        taken.append(time.perf_counter() - started)
    return taken


def training(
    given: argparse.Namespace, compute: str, dtype: torch.dtype, batch: int, samples: Sequence[Sample], graphs: bool = False
) -> dict[str, float]:
    """Our epoch, with a site's augmentation, loss and optimiser. Seconds, arithmetic and bytes are a batch's."""
    settings = from_settings(Training, computing(compute) | {"batch": batch})
    network = build(given.network, 3, 1, seed=0).to(given.device)
    optimizer, loss = adamw(network, settings.lr, settings.weight_decay), segmentation_loss(settings.loss)

    def epoch(chosen: Sequence[Sample], cuda_graphs: bool = False) -> float:
        own = replace(settings, cuda_graphs=cuda_graphs)
        return fit_epoch(network, optimizer, chosen, lambda logits, part: loss(logits, part["mask"]), own, seed=0)

    epoch(samples[:batch])  # the optimiser's moments are there from the first step on
    with counting() as counter:  # it does not see what a graph computes
        epoch(samples[:batch])
    parameters = sum(value.numel() for value in network.parameters())
    least = 2 * kept(network, torch.stack([sample["image"] for sample in samples[:batch]]).to(given.device), dtype)
    reset(given.device)
    seconds = median(timed(lambda: epoch(samples, graphs), given.device, given.seconds)) * batch / len(samples)
    found = {"seconds": seconds, "flop": counter.get_total_flops(), "least_bytes": least + ADAMW * parameters}
    return found | {"images_per_second": batch / seconds} | peak(given.device)


def inference(
    given: argparse.Namespace, compute: str, dtype: torch.dtype, batch: int, samples: Sequence[Sample]
) -> dict[str, float]:
    network = build(given.network, 3, 1, seed=0).to(given.device)

    def every(chosen: Sequence[Sample]) -> int:
        """Returns the bytes of images and maps. It keeps no batch: that would count as memory that `predict` needs."""
        with torch.autocast(torch.device(given.device).type, torch.bfloat16, enabled=compute == BF16):
            return sum(part["image"].nbytes + maps.nbytes for maps, part in predict(network, chosen, batch))

    with counting() as counter:
        least = every(samples[:batch]) + sum(value.nbytes for value in network.parameters())
    reset(given.device)
    seconds = median(timed(lambda: every(samples), given.device, given.seconds)) * batch / len(samples)
    found = {"seconds": seconds, "flop": counter.get_total_flops(), "least_bytes": least}
    return found | {"images_per_second": batch / seconds} | peak(given.device)


def counting() -> FlopCounterMode:
    """PyTorch's counter, mended for grouped convolutions: in their backward pass it counts the weights' gradient by group."""

    def backward(*given: Any, **_: Any) -> int:
        gradient, image, weight, _bias, _stride, _padding, _dilation, transposed, _out, _groups, wanted = given
        return sum(map(bool, wanted[:2])) * conv_flop_count(image, weight, gradient, transposed)

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: backward})


def kept(network: nn.Module, image: Tensor, dtype: torch.dtype) -> int:
    """Returns the bytes that a forward pass keeps for the backward pass, without the parameters, each storage once."""
    own = {value.untyped_storage().data_ptr() for value in network.parameters()}
    found: dict[int, int] = {}
    alive = []  # a storage that is freed could give its address to another

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(value.detach())
        return value.detach()  # a saved output that is returned itself would refer to itself, and never be freed

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value),
        torch.autocast(image.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16),
    ):
        network.train()(image)
    return sum(found.values())


def reset(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: str) -> dict[str, float]:
    """Returns the most bytes of tensors and of all that PyTorch held; {} on the CPU, where it does not count them."""
    if torch.device(device).type != "cuda":
        return {}
    tensors, held = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"peak_bytes": float(tensors), "peak_held_bytes": float(held)}
