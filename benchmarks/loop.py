"""Our local epoch against a bare PyTorch loop.

Same network, optimiser, batches, augmentation, loss and clipping, with the data in memory: ours on the GPU, where one computes.
Ours is what a site runs: with deterministic algorithms on the CPU, and draws from seeds. Both compute in one type, unless
--against names the bare loop's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.common import BF16, FP32, computing, count, images, interleaved, parser, pixels, ratio, report, shown
from feddp.data.loading import Batch, Sample
from feddp.data.placing import placed
from feddp.networks import DEFAULT, build
from feddp.training.device import asked_for, settle
from feddp.training.loop import adamw, fit_epoch
from feddp.training.losses import segmentation_loss
from feddp.training.settings import Training, from_settings


def main(arguments: Sequence[str]) -> None:
    options = parser("loop", __doc__)
    options.add_argument("--size", type=pixels, default=96)
    options.add_argument("--pairs", type=count, default=9)
    options.add_argument("--images", type=count, default=24)
    options.add_argument("--network", default=DEFAULT)
    options.add_argument("--compute", choices=(FP32, BF16), default=FP32)
    options.add_argument("--against", choices=(FP32, BF16), help="what the bare loop computes in; default: as --compute")
    options.add_argument("--device", default="cpu")
    given = options.parse_args(arguments)
    device = asked_for(given.device)
    training = from_settings(Training, computing(given.compute))
    samples = images(given.images, given.size)
    settle(device.type, 1)
    calls, against = {}, given.against or given.compute
    sides: dict[str, Callable[..., float]] = {"ours": ours, "bare": partial(bare, compute=against)}
    for name, epoch in sides.items():
        network = build(given.network, 3, 1, seed=0).to(device)
        optimizer = adamw(network, training.lr, training.weight_decay)
        chosen = placed(samples, device) if epoch is ours else samples
        calls[name] = partial(epoch, network, optimizer, chosen, training)
    seconds = interleaved("Epochs", given.pairs, calls, given.device)
    found = ratio(seconds["ours"], seconds["bare"])
    rows = [[name, f"{median(values):.3f}"] for name, values in seconds.items()]
    rows.append(["ours / bare, per pair", shown(found)])
    about = {"compute": given.compute, "against": against, "size": given.size, "images": given.images, "network": given.network}
    figures = about | {"seconds": seconds, "ratio": found}
    report("loop", ("an epoch", "seconds, median"), rows, figures, given.device)


def ours(network: nn.Module, optimizer: torch.optim.Optimizer, samples: Sequence[Sample], training: Training) -> float:
    torch.use_deterministic_algorithms(next(network.parameters()).device.type == "cpu")  # as a site has it
    measured = segmentation_loss(training.loss)

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        return measured(logits, batch["mask"])

    return fit_epoch(network, optimizer, samples, loss, training, seed=0)


def bare(
    network: nn.Module, optimizer: torch.optim.Optimizer, samples: Sequence[Sample], training: Training, compute: str
) -> float:
    """An epoch as one writes it in a notebook."""
    torch.use_deterministic_algorithms(False)
    device, loss = next(network.parameters()).device, segmentation_loss(training.loss)
    every_image, every_mask = (torch.stack([sample[name] for sample in samples]) for name in ("image", "mask"))
    losses = []
    network.train()
    for chosen in torch.randperm(len(samples)).split(training.batch):
        image, mask = every_image[chosen].to(device), every_mask[chosen].to(device)
        for axis in (-1, -2):
            flipped = (torch.rand(len(chosen), 1, 1, 1) < 0.5).to(device)
            image, mask = (torch.where(flipped, value.flip(axis), value) for value in (image, mask))
        turned = (torch.rand(len(chosen), 1, 1, 1) < 0.5).to(device)
        image, mask = (torch.where(turned, value.mT, value) for value in (image, mask))
        with torch.autocast(device.type, torch.bfloat16, enabled=compute == BF16):
            logits = network(image)
        value = loss(logits.float(), mask)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_value_(network.parameters(), training.clip)
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses).mean().item()
