"""Strategies by name that turn the M models into networks for an unseen site: routing (Jiang et al., TMI 2023) and baselines.

A strategy is a function of the models, the images and the settings. It returns one network, or several whose probabilities are
averaged (ensemble). Training uses only images, no labels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddp.adaptation.choices import AVERAGE, ENSEMBLE, GLOBAL, ROUTING, TENT, TTT, Settings
from feddp.adaptation.fitting import Fit, Report, entropy_loss, fit, rotation_loss, routing_loss
from feddp.adaptation.models import Models
from feddp.adaptation.routing import route
from feddp.errors import InputError
from feddp.partition import ENCODER, chosen, is_normalisation
from feddp.training.seeds import seeded


@dataclass(frozen=True)
class Outcome:
    """Networks in eval mode, and the record of their training."""

    networks: list[nn.Module]
    fit: Fit = field(default_factory=Fit)


Strategy = Callable[[Models, Sequence[Tensor], Settings, torch.device, Report], Outcome]


def routing(models: Models, images: Sequence[Tensor], settings: Settings, device: torch.device, report: Report) -> Outcome:
    """Mixes the layers' weights per image and trains the routers (`feddp.adaptation.routing`).

    With `norm="batch"`, as in the released code, batch normalisation uses the statistics of the batch, and its affine tensors
    are trained too. Predictions then depend on which images share a batch.
    """
    with seeded(torch.device("cpu"), settings.seed, "routers"):
        network = route(models.network(models.mean()), models.stacks, settings.mix).to(device)
    if settings.norm == "batch":
        if not _by_batch(network, images, settings.batch):
            raise InputError("--norm batch: this network has no batch normalisation; leave --norm out")
        for layer in network.modules():
            if isinstance(layer, _BatchNorm):
                layer.requires_grad_(True)
    return Outcome([network], fit(network, images, routing_loss(settings), settings, report))


def tent(models: Models, images: Sequence[Tensor], settings: Settings, device: torch.device, report: Report) -> Outcome:
    """Tent (Wang et al., ICLR 2021), from the global model: trains the normalisations' affine parameters to minimise entropy.

    Batch normalisation uses the statistics of the batch, in prediction too, as in Tent. Deviations: layer and group
    normalisation, which have no running statistics, are trained too. Training is not online: it makes `epochs` passes over all
    images and keeps the epoch with the lowest entropy.
    """
    network = models.network(models.state(GLOBAL)).requires_grad_(False).to(device)
    _by_batch(network, images, settings.batch)
    layers = [m for m in network.modules() if is_normalisation(m)]
    if not any(True for layer in layers for _ in layer.parameters()):
        raise InputError("--how tent: this network's normalisations have no affine parameters; choose another --how")
    for layer in layers:
        layer.requires_grad_(True)
    return Outcome([network], fit(network, images, entropy_loss, settings, report))


def ttt(models: Models, images: Sequence[Tensor], settings: Settings, device: torch.device, report: Report) -> Outcome:
    """TTT (Sun et al., ICML 2020), from the global model of a run of the method `ttt`: trains the encoder on the rotation loss.

    Decoder, segmentation head and rotation head do not change. Deviations: one encoder is trained in `epochs` passes over all
    images (the original starts anew for each image); every image is used in all four rotations (the original draws one); batch
    normalisation uses its running statistics.
    """
    network = models.network(models.state(GLOBAL)).requires_grad_(False).to(device)
    if not hasattr(network, "rotation_head"):
        method = models.metadata.get("method", "its method")
        raise InputError(f"--how ttt: {method} trains no rotation head; name a run of `feddp run --method ttt`")
    encoder = chosen(network, (ENCODER,))
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in encoder)
    return Outcome([network], fit(network, images, rotation_loss, settings, report))


def global_model(models: Models, images: Sequence[Tensor], settings: Settings, device: torch.device, report: Report) -> Outcome:
    """Uses the global model unchanged."""
    return Outcome([models.network(models.state(GLOBAL)).to(device)])


def average(models: Models, images: Sequence[Tensor], settings: Settings, device: torch.device, report: Report) -> Outcome:
    """Uses the mean of the tensors of all M models."""
    return Outcome([models.network(models.mean()).to(device)])


def ensemble(models: Models, images: Sequence[Tensor], settings: Settings, device: torch.device, report: Report) -> Outcome:
    """Uses all M models; their probabilities are averaged."""
    return Outcome([models.network(models.state(name)).to(device) for name in models.names])


STRATEGIES: dict[str, Strategy] = {
    ROUTING: routing,
    GLOBAL: global_model,
    AVERAGE: average,
    ENSEMBLE: ensemble,
    TENT: tent,
    TTT: ttt,
}


@torch.no_grad()
def predict(networks: Sequence[nn.Module], images: Sequence[Tensor], batch: int, device: torch.device) -> Iterator[Tensor]:
    """Yields the logits of all networks per image, (networks, classes, H, W) on the CPU, in the order of the images."""
    for start in range(0, len(images), batch):
        part = torch.stack(list(images[start : start + batch])).to(device)
        yield from torch.stack([network(part).float() for network in networks], dim=1).cpu()


def probabilities(logits: Tensor, shape: tuple[int, int]) -> Tensor:
    """Resizes one image's logits (networks, classes, H, W) and returns the mean probability (classes, *shape)."""
    return F.interpolate(logits, shape, mode="bilinear").sigmoid().mean(dim=0)


def _by_batch(network: nn.Module, images: Sequence[Tensor], batch: int) -> bool:
    """Makes batch normalisation use the statistics of the batch, in eval mode too; returns whether the network has any.

    Raises:
        InputError: the last batch would be a single image, for which the deepest layer has one value per channel.
    """
    layers = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    for layer in layers:
        layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    if layers and (batch == 1 or len(images) % batch == 1):
        try:
            with torch.no_grad():
                network(images[-1][None].to(next(network.parameters()).device))
        except ValueError as error:  # torch raises it for the statistics of a single value
            raise InputError(
                f"{len(images)} images in batches of {batch} leave a batch of one image, too small for batch statistics"
                f" ({error}); choose another --batch"
            ) from None
    return bool(layers)
