"""How a hospital outside gets a network from the M models, by name: 004's routing and what it is compared with.

A way is a function of the models, the images and the settings; it returns networks whose probabilities are averaged: one,
but for the ensemble. Whatever it trains, it trains on the images alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddp.adaptation.adapt import Fit, Report, Settings, entropy_loss, fit, routing_loss, turning_loss
from feddp.adaptation.models import GLOBAL, Models
from feddp.adaptation.routing import route
from feddp.errors import InputError
from feddp.partition import ENCODER, chosen, is_normalisation
from feddp.training.seeds import seeded


@dataclass(frozen=True)
class Adapted:
    """Networks in eval mode, and how they were fitted."""

    networks: list[nn.Module]
    fit: Fit = field(default_factory=Fit)


Strategy = Callable[[Models, Sequence[Tensor], Settings, torch.device, Report], Adapted]


def routing(models: Models, images: Sequence[Tensor], settings: Settings, device: torch.device, report: Report) -> Adapted:
    """004: the layers' weights are mixed for each image; the routers are trained (`feddp.adaptation.routing`).

    `norm="batch"` is the released code's: batch normalisation by the batch's own statistics, its affine tensors trained too.
    Predictions then depend on which images share a batch.
    """
    with seeded(torch.device("cpu"), settings.seed, "routers"):
        network = route(models.network(models.mean()), models.stacks, settings.mix).to(device)
    if settings.norm == "batch":
        if not _by_batch(network, images, settings.batch):
            raise InputError("--norm batch: this network has no batch normalisation; leave it out")
        for layer in network.modules():
            if isinstance(layer, _BatchNorm):
                layer.requires_grad_(True)
    return Adapted([network], fit(network, images, routing_loss(settings), settings, report))


def tent(models: Models, images: Sequence[Tensor], settings: Settings, device: torch.device, report: Report) -> Adapted:
    """Tent (Wang et al., ICLR 2021) from the global model: entropy is minimised over the normalisations' affine parameters.

    Batch normalisation uses the batch's own statistics, as Tent's does, in prediction too. Deviations: layer and group
    normalisation, which have no statistics to replace, are trained too; not online but `epochs` passes over all images,
    of which the one of lowest entropy is kept.
    """
    network = models.network(models.state(GLOBAL)).requires_grad_(False).to(device)
    _by_batch(network, images, settings.batch)
    layers = [m for m in network.modules() if is_normalisation(m)]
    if not any(True for layer in layers for _ in layer.parameters()):
        raise InputError("--how tent: this network's normalisations have no affine parameters; choose another --how")
    for layer in layers:
        layer.requires_grad_(True)
    return Adapted([network], fit(network, images, entropy_loss, settings, report))


def ttt(models: Models, images: Sequence[Tensor], settings: Settings, device: torch.device, report: Report) -> Adapted:
    """TTT (Sun et al., ICML 2020) from the global model of a run of the method `ttt`: the rotation loss over the encoder.

    Decoder, segmentation head and rotation head stay. Deviations: one encoder for all images and `epochs` passes over them,
    where the original starts anew for each image; every image in all four turns, where it draws one; batch normalisation by
    its running statistics.
    """
    network = models.network(models.state(GLOBAL)).requires_grad_(False).to(device)
    if not hasattr(network, "rotation_head"):
        method = models.facts.get("method", "its method")
        raise InputError(f"--how ttt: {method} trains no rotation head; name a run of `feddp run --method ttt`")
    encoder = chosen(network, (ENCODER,))
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in encoder)
    return Adapted([network], fit(network, images, turning_loss, settings, report))


def alone(models: Models, images: Sequence[Tensor], settings: Settings, device: torch.device, report: Report) -> Adapted:
    """The global model as it is."""
    return Adapted([models.network(models.state(GLOBAL)).to(device)])


def average(models: Models, images: Sequence[Tensor], settings: Settings, device: torch.device, report: Report) -> Adapted:
    """The mean of all M models' tensors."""
    return Adapted([models.network(models.mean()).to(device)])


def ensemble(models: Models, images: Sequence[Tensor], settings: Settings, device: torch.device, report: Report) -> Adapted:
    """All M models; their probabilities are averaged."""
    return Adapted([models.network(models.state(name)).to(device) for name in models.names])


DEFAULT = "routing"
STRATEGIES: dict[str, Strategy] = {
    DEFAULT: routing,
    GLOBAL: alone,
    "average": average,
    "ensemble": ensemble,
    "tent": tent,
    "ttt": ttt,
}


@torch.no_grad()
def predict(networks: Sequence[nn.Module], images: Sequence[Tensor], batch: int, device: torch.device) -> Iterator[Tensor]:
    """Every image's logits by every network, (networks, classes, H, W) on the CPU, in the images' order."""
    for start in range(0, len(images), batch):
        part = torch.stack(list(images[start : start + batch])).to(device)
        yield from torch.stack([network(part).float() for network in networks], dim=1).cpu()


def probabilities(logits: Tensor, shape: tuple[int, int]) -> Tensor:
    """One image's (networks, classes, H, W) -> the mean probability (classes, *shape), each network's logits resized."""
    return F.interpolate(logits, shape, mode="bilinear").sigmoid().mean(dim=0)


def _by_batch(network: nn.Module, images: Sequence[Tensor], batch: int) -> bool:
    """Lets batch normalisation use the batch's own statistics, in eval mode too; whether there is any.

    Raises:
        InputError: the last batch would be one image, of which the deepest layer makes one value a channel.
    """
    layers = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    for layer in layers:
        layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    if layers and (batch == 1 or len(images) % batch == 1):
        try:
            with torch.no_grad():
                network(images[-1][None].to(next(network.parameters()).device))
        except ValueError as error:  # torch's word for statistics of a single value
            raise InputError(
                f"{len(images)} images in batches of {batch} leave one alone, too small for a batch's statistics ({error});"
                " choose another --batch"
            ) from None
    return bool(layers)
