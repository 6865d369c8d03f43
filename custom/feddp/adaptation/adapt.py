"""Test-time training: a few parameters of a network, on images without labels; the epoch of the lowest loss is kept."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from feddp.adaptation.losses import consistency, entropy, shape
from feddp.adaptation.routing import MIXES
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.training.rotation import every_turn
from feddp.training.seeds import seed_of
from feddp.training.settings import defaults, from_settings, require_choice, require_not_negative, require_positive, setting

NORMS = ("mean", "batch")
Loss = Callable[[nn.Module, Tensor, torch.Generator], Tensor]  # (network, images (B,C,H,W), chance) -> scalar
Report = Callable[[int, float], None]  # (epoch, its loss)


@dataclass(frozen=True)
class Settings:
    """How a network is adapted; the defaults are the paper's (004, IV) where it states them."""

    epochs: int = setting(10, "passes over the images; 0 only measures the start", most=10_000)
    lr: float = setting(1e-3, "Adam's learning rate", most=100)
    beta: float = setting(0.01, "weight of the shape loss; 0 leaves it out")
    noise: float = setting(0.5, "standard deviation of the consistency loss's noise; 0 leaves that loss out")
    neighbourhood: int = setting(10, "pixels on either side within which the shape loss wants probabilities alike", most=1024)
    mix: str = setting("softmax", "softmax over the models, or sigmoid (the released code's)")
    norm: str = setting("mean", "mean of the models' normalisations, or batch: its own statistics, affine tensors trained")
    batch: int = setting(4, "images a step; the paper does not state it", most=4096)
    seed: int = setting(0, "every random draw comes from it", most=2**63 - 1)

    def __post_init__(self) -> None:
        require_not_negative(self, "epochs", "beta", "noise", "neighbourhood")
        require_positive(self, "lr", "batch")
        require_choice(self, "mix", tuple(MIXES))
        require_choice(self, "norm", NORMS)


def read_settings(values: Mapping[str, Any]) -> Settings:
    """Settings by name, as `--set` and a job's JSON give them.

    Raises:
        InputError: a name is unknown, or a value cannot be read or is out of range.
    """
    if unknown := sorted(values.keys() - defaults(Settings).keys()):
        raise InputError(f"unknown setting {unknown[0]!r}; known: {', '.join(defaults(Settings))}")
    return from_settings(Settings, values)


@dataclass(frozen=True)
class Fit:
    """The loss over all images of the start and after every epoch, and which of these was kept."""

    losses: list[float] = field(default_factory=list)
    kept: int = 0


def fit(
    network: nn.Module,
    images: Sequence[Tensor],
    loss: Loss,
    settings: Settings,
    report: Report = lambda epoch, loss: None,
) -> Fit:
    """Trains, in place, the parameters of `network` that require gradients; nothing else of it changes.

    The images are taken in their order. After every epoch the loss is measured on all of them with the same noise each time;
    the network ends with the parameters of its lowest, the first of equals, the start among the candidates. Dropout is off.

    Args:
        network: in eval mode, on the device to use.
        images: (C, H, W) each, as `feddp.data.loading.network_input` gives them.
        report: called after every epoch, from 1.

    Raises:
        InputError: a loss is not finite.
    """
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=settings.lr)

    def part(start: int, epoch: int | str) -> tuple[Tensor, torch.Generator]:
        images_here = torch.stack(list(images[start : start + settings.batch])).to(trained[0].device)
        # the CPU's generator: the same noise on every device
        return images_here, torch.Generator().manual_seed(seed_of(settings.seed, "noise", epoch, start))

    @torch.no_grad()
    def measure() -> float:
        total = 0.0
        for start in range(0, len(images), settings.batch):
            batch, chance = part(start, "measure")
            total += loss(network, batch, chance).item() * len(batch)
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
    with torch.no_grad():
        for parameter, value in zip(trained, best, strict=True):
            parameter.copy_(value)
    return Fit(losses, kept)


def routing_loss(settings: Settings) -> Loss:
    """L_t = L_cons + β L_shape (004, III-C); a term of weight 0 costs nothing."""

    def value(network: nn.Module, images: Tensor, chance: torch.Generator) -> Tensor:
        logits = network(images)
        total = settings.beta * shape(logits, settings.neighbourhood) if settings.beta else logits.sum() * 0
        if not settings.noise:
            return total
        noise = settings.noise * torch.randn(images.shape, generator=chance).to(images)
        return total + consistency(logits, network(images + noise))

    return value


def entropy_loss(network: nn.Module, images: Tensor, chance: torch.Generator) -> Tensor:
    """Tent's: the mean entropy of the prediction."""
    return entropy(network(images))


def turning_loss(network: nn.Module, images: Tensor, chance: torch.Generator) -> Tensor:
    """TTT's: what the rotation head says of every image in all four turns."""
    return every_turn(network, images)
