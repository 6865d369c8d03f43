"""Test-time training of a few parameters of a network on images without labels; the epoch with the lowest loss is kept."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from feddp.adaptation.choices import Settings
from feddp.adaptation.losses import consistency, entropy, shape
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.training.rotation import every_turn
from feddp.training.seeds import generator

# training ends when the loss changed by at most this share of it in each of so many epochs: models that hardly differ leave
# routing nothing to choose, and the paper's ten epochs take as long as for any others
STILL, PATIENCE = 1e-5, 3
Loss = Callable[[nn.Module, Tensor, torch.Generator], Tensor]  # (network, images (B,C,H,W), rng) -> scalar
Report = Callable[[int, float], None]  # (epoch, its loss)


@dataclass(frozen=True)
class Fit:
    """The loss over all images before training and after every epoch, and the index of the kept one."""

    losses: list[float] = field(default_factory=list)
    kept: int = 0


def fit(
    network: nn.Module,
    images: Sequence[Tensor],
    loss: Loss,
    settings: Settings,
    report: Report = lambda epoch, loss: None,
) -> Fit:
    """Trains the parameters of `network` that require gradients, in place; its other tensors do not change.

    The images are used in the given order. The loss is measured on all of them before training and after every epoch, each
    time with the same noise. The network ends with the parameters of the lowest loss (of equal ones, the first). No dropout.
    Training ends before the last epoch where the loss stands still (STILL, PATIENCE).

    Args:
        network: in eval mode, on the device to use.
        images: (C, H, W) each, as `feddp.data.loading.network_input` returns them.
        report: called after every epoch; the first is 1.

    Raises:
        InputError: a loss is not finite.
    """
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=settings.lr)

    def part(start: int, epoch: int | str) -> tuple[Tensor, torch.Generator]:
        images_here = torch.stack(list(images[start : start + settings.batch])).to(trained[0].device)
        # a generator on the CPU draws the same noise for every device
        return images_here, generator(settings.seed, "noise", epoch, start)

    @torch.no_grad()
    def measure() -> float:
        total = 0.0
        for start in range(0, len(images), settings.batch):
            batch, rng = part(start, "measure")
            total += loss(network, batch, rng).item() * len(batch)
        if not math.isfinite(total):
            raise InputError(f"the unsupervised loss is {total}; lower --lr (now {settings.lr})")
        return total / len(images)

    losses, kept, best = [measure()], 0, [p.detach().clone() for p in trained]
    for epoch in range(1, settings.epochs + 1):
        steps = range(0, len(images), settings.batch)
        for start in track(steps, f"Adapting, epoch {epoch} of {settings.epochs}", len(steps)):
            optimizer.zero_grad(set_to_none=True)
            loss(network, *part(start, epoch)).backward()
            optimizer.step()
        losses.append(measure())
        report(epoch, losses[-1])
        if losses[-1] < losses[kept]:
            kept, best = epoch, [p.detach().clone() for p in trained]
        if _stands_still(losses):
            break
    with torch.no_grad():
        for parameter, value in zip(trained, best, strict=True):
            parameter.copy_(value)
    return Fit(losses, kept)


def _stands_still(losses: Sequence[float]) -> bool:
    latest = losses[-PATIENCE - 1 :]
    changes = [abs(after - before) for before, after in zip(latest, latest[1:], strict=False)]
    return len(changes) == PATIENCE and max(changes) <= STILL * abs(losses[-1])


def routing_loss(settings: Settings) -> Loss:
    """Returns L_t = L_cons + β L_shape (Jiang et al., TMI 2023, III-C); a term of weight 0 is not computed."""

    def value(network: nn.Module, images: Tensor, rng: torch.Generator) -> Tensor:
        logits = network(images)
        total = settings.beta * shape(logits, settings.neighbourhood) if settings.beta else logits.sum() * 0
        if not settings.noise:
            return total
        noise = settings.noise * torch.randn(images.shape, generator=rng).to(images)
        return total + consistency(logits, network(images + noise))

    return value


def entropy_loss(network: nn.Module, images: Tensor, rng: torch.Generator) -> Tensor:
    """Returns the mean entropy of the prediction (Tent)."""
    return entropy(network(images))


def rotation_loss(network: nn.Module, images: Tensor, rng: torch.Generator) -> Tensor:
    """Returns the loss of the rotation head on every image in all four rotations (TTT)."""
    return every_turn(network, images)
