"""A training step as the product makes it, with CUDA graphs, and in ways that it does not offer: what each would gain.

The networks have no dropout, whose masks each way would draw for itself. The batch lies on the device. A step is the forward
pass, the loss, the backward pass, clipping and AdamW, with FedDP's defaults; the benchmark waits for the GPU after each. The
ways: kernels launched one by one; CUDA graphs; the channels-last layout without graphs and with them, where a step first copies
the images into the usual layout; `torch.compile`, whose kernels are launched one by one or, with "reduce-overhead", as CUDA
graphs. A line has the median step, the seconds of the first forward and backward pass (a compilation, or FedDP's capture, is in
it), and the distance of its gradient from that of kernels launched one by one, ‖a − b‖ / ‖b‖.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.common import BF16, FP32, computing, count, images, line, parser, pixels
from benchmarks.gpu_agree import still
from benchmarks.gpu_speed import peak, reset, timed
from feddp.data.loading import Sample
from feddp.networks import DEFAULT
from feddp.training.device import asked_for, settle, wait
from feddp.training.graphs import replayed
from feddp.training.loop import adamw
from feddp.training.losses import segmentation_loss
from feddp.training.settings import Training, from_settings

Forward = Callable[[Tensor], Tensor]
LAST = torch.channels_last
# {its name: (layout, what makes the forward pass of (network, shape, whether in bfloat16))}
WAYS: dict[str, tuple[torch.memory_format, Callable[[nn.Module, Sequence[int], bool], Forward]]] = {
    "one by one": (torch.contiguous_format, lambda network, *_: network),
    "CUDA graphs": (torch.contiguous_format, replayed),
    "channels-last": (LAST, lambda network, *_: network),
    "channels-last, CUDA graphs": (LAST, replayed),
    "torch.compile": (torch.contiguous_format, lambda network, *_: torch.compile(network, dynamic=False)),
    "torch.compile, CUDA graphs": (
        torch.contiguous_format,
        lambda network, *_: torch.compile(network, dynamic=False, mode="reduce-overhead"),
    ),
}


def main(arguments: Sequence[str]) -> None:
    options = parser("gpu_steps", __doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--size", type=pixels, default=384)
    options.add_argument("--batches", type=count, nargs="+", default=[6, 32])
    options.add_argument("--computes", choices=(FP32, BF16), nargs="+", default=[FP32, BF16])
    options.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    options.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    asked_for(given.device)
    settle(torch.device(given.device).type, 1)
    samples = images(max(given.batches), given.size)
    for way in given.ways:
        for compute in given.computes:
            for batch in given.batches:
                about = {"way": way, "compute": compute, "batch": batch, "size": given.size, "network": given.network}
                line("gpu_steps", about | measured(given, way, compute, samples[:batch]), given.device)


def measured(given: argparse.Namespace, way: str, compute: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the seconds of a step and of the first one, the first gradient's error, and the peak memory."""
    image, mask = (torch.stack([sample[name] for sample in samples]).to(given.device) for name in ("image", "mask"))
    settings, mixed = from_settings(Training, computing(compute)), compute == BF16
    measure = segmentation_loss(settings.loss)

    def network(layout: torch.memory_format) -> nn.Module:
        torch.manual_seed(0)
        return still(given.network, 3, 1).to(given.device).to(memory_format=layout).train()

    def backward(forward: Forward, one: nn.Module, image: Tensor) -> None:
        with torch.autocast(image.device.type, torch.bfloat16, enabled=mixed):
            logits = forward(image)
        one.zero_grad(set_to_none=True)
        measure(logits.float(), mask).backward()

    def gradient(one: nn.Module) -> Tensor:
        found = [parameter.grad.contiguous().flatten() for parameter in one.parameters() if parameter.grad is not None]
        return torch.cat(found).double()

    usual = network(torch.contiguous_format)
    backward(usual, usual, image)
    wanted = gradient(usual).cpu()
    del usual
    layout, making = WAYS[way]
    reset(given.device)
    own, image = network(layout), image.to(memory_format=layout)
    started = time.perf_counter()
    forward = making(own, image.shape, mixed)
    backward(forward, own, image)
    wait(given.device)
    first = time.perf_counter() - started
    error = float((gradient(own).cpu() - wanted).norm() / wanted.norm())
    optimizer = adamw(own, settings.lr, settings.weight_decay)

    def step() -> None:
        backward(forward, own, image)
        torch.nn.utils.clip_grad_value_(own.parameters(), settings.clip)
        optimizer.step()

    step()  # the optimiser's moments
    seconds = median(timed(step, given.device, given.seconds))
    return {"seconds": seconds, "first_seconds": first, "gradient_error": error} | peak(given.device)
