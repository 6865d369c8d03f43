"""The local training loop of all methods, and prediction."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from feddp.data.loading import Batch, Sample, batches
from feddp.errors import InputError, Stopped
from feddp.training.graphs import replayed
from feddp.training.seeds import seed_of, seeded
from feddp.training.settings import Training

BatchLoss = Callable[[Tensor, Batch], Tensor]  # (logits (B,C,H,W), batch) -> scalar


def adamw(network: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Returns the optimiser. `fused` updates all parameters in one pass of compiled code."""
    return torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=weight_decay, fused=True)


def fit_epoch(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    loss: BatchLoss,
    training: Training,
    seed: int,
    stopped: Callable[[], bool] = lambda: False,
    steps: int = 1,
    after: Callable[[], None] = lambda: None,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> float:
    """Trains one epoch over `samples`, in place: `steps` optimiser steps per batch, then `after()`; returns the mean loss.

    If `forward` is given, `loss` receives its output instead of the network's.

    The order, the augmentation and the dropout masks depend only on `seed`. With `precision_compute=bfloat16` the forward pass
    uses bfloat16, which has the range of float32, so the loss needs no scaling; the loss itself is computed in float32.

    Raises:
        InputError: the loss is not finite (the learning rate is too high, or the data are broken), or batch normalisation gets
            one value per channel.
        Stopped: `stopped()` returned True.
    """
    parameters = list(network.parameters())
    device = parameters[0].device
    mixed = training.precision_compute == "bfloat16"
    network.train()
    losses = []
    if training.cuda_graphs and samples and forward is None:
        shape = min(training.batch, len(samples)), *samples[0]["image"].shape
        with _several_values(torch.empty(shape, device="meta")):
            forward = replayed(network, shape, mixed)
    with seeded(device, seed, "dropout"):
        for batch in batches(samples, training.batch, seed_of(seed, "order"), training.augment, device):
            if stopped():
                raise Stopped("training was stopped: the job was aborted")
            for _ in range(steps):
                with _several_values(batch["image"]), torch.autocast(device.type, torch.bfloat16, enabled=mixed):
                    logits = (forward or network)(batch["image"])
                value = loss(logits.float(), batch)
                optimizer.zero_grad(set_to_none=True)
                value.backward()
                torch.nn.utils.clip_grad_value_(parameters, training.clip)
                optimizer.step()
                losses.append(value.detach())
            after()
    mean = torch.stack(losses).mean().item()
    if mean != mean or mean in (float("inf"), float("-inf")):
        raise InputError(f"the training loss is {mean}; lower lr (now {optimizer.param_groups[0]['lr']}) or check the data")
    return mean


@contextmanager
def _several_values(images: Tensor) -> Iterator[None]:
    """Raises InputError with the remedy where torch refuses to normalise the one value per channel of `images` (B,C,H,W)."""
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        what = f"the network's features of {len(images)} image(s) of {images.shape[-1]} pixels have one value per channel"
        raise InputError(f"{what}, and batch normalisation needs more; raise --size or batch") from error


@contextmanager
def frozen(network: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Keeps the parameters and buffers `names` unchanged: no gradient, no weight decay, no update of running statistics.

    A frozen batch normalisation still normalises with the statistics of the batch.
    """
    parameters = [p for name, p in network.named_parameters() if name in names and p.requires_grad]
    norms = [
        module
        for path, module in network.named_modules()
        if getattr(module, "track_running_stats", False) and f"{path}.running_mean" in names
    ]
    for parameter in parameters:
        parameter.requires_grad_(False)
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for norm in norms:
            norm.track_running_stats = True


def copy_of(network: nn.Module) -> dict[str, Tensor]:
    """Returns the network's whole state: detached clones on the CPU."""
    return {name: value.detach().to("cpu", copy=True) for name, value in network.state_dict().items()}


@torch.no_grad()
def predict(network: nn.Module, samples: Sequence[Sample], batch: int = 8) -> Iterator[tuple[Tensor, Batch]]:
    """Yields probabilities (B,C,H,W) with their batches, on the network's device, in the order of the samples, in eval mode."""
    network.eval()
    for part in batches(samples, batch, seed=None, augment=False, device=next(network.parameters()).device):
        yield torch.sigmoid(network(part["image"]).float()), part
