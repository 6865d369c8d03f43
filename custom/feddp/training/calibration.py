"""Stage 2: local post-training, guided by the inconsistency between the sites (FedDP; Wang et al., TMI 2024, III-C).

δ = 1/(K-1) Σ_{j≠k} (ŷ^k − ŷ^j)²   (Eq. 7),   L = L_seg + λ L_aux   with L_aux of Eq. 8.

Deviations: Eq. 8 is printed with y and ŷ exchanged inside the logs, which is not finite for y in {0, 1}; we compute the loss of
the released code. With `delta=frozen` all K maps come from the networks at the start of the stage, so δ is constant per sample
and is computed once. The best epoch can also be epoch 0, the network before the stage; the paper does not say.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from feddp.data.loading import Batch, Sample
from feddp.errors import InputError
from feddp.sealing.peers import LeftOut, good, unnoted
from feddp.training.loop import BatchLoss, adamw, copy_of, fit_epoch, predict
from feddp.training.losses import auxiliary_loss, inconsistency, inconsistency_std
from feddp.training.metrics import DIVERGED, overlap, require_finite_of
from feddp.training.seeds import seed_of
from feddp.training.settings import Training

Report = Callable[[int, float, float], None]  # (epoch, its mean loss, its mean validation IoU)


@dataclass(frozen=True)
class Tuned:
    """The losses per epoch, the scores from epoch 0 (before the training) on, and the epoch whose network was kept."""

    losses: list[float]
    scores: list[float]
    best: int


def tune(
    network: nn.Module,
    samples: Sequence[Sample],
    validation: Sequence[Sample],
    loss: BatchLoss,
    training: Training,
    epochs: int,
    lr: float,
    seed: tuple[int | str, ...],
    stopped: Callable[[], bool],
    report: Report,
) -> Tuned:
    """Trains `network` in place for `epochs` at `lr` with a new AdamW; it ends with the best mean validation IoU.

    `report(epoch, loss, score)` is called after each epoch. Of equal scores, the earlier network is kept.
    """
    scores, losses = [mean_scores(network, validation)["iou"]], []
    best, kept = 0, copy_of(network)
    optimizer = adamw(network, lr, training.weight_decay)
    for epoch in range(1, epochs + 1):
        losses.append(fit_epoch(network, optimizer, samples, loss, training, seed_of(*seed, epoch), stopped))
        scores.append(mean_scores(network, validation)["iou"])
        if scores[-1] > scores[best]:
            best, kept = epoch, copy_of(network)
        report(epoch, losses[-1], scores[-1])
    network.load_state_dict(kept)
    return Tuned(losses, scores, best)


def mean_scores(network: nn.Module, samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the mean dice and iou over `samples`, computed on the network's device.

    Raises:
        InputError: there is no sample, or a prediction is not finite.
    """
    if not samples:
        raise InputError("there is nothing to measure: no image was given")
    rows = torch.cat([overlap(maps, batch["mask"]) for maps, batch in predict(network, samples)])
    dice, iou = rows.double().mean(dim=0).tolist()
    if math.isnan(iou):
        raise InputError(DIVERGED)
    return {"dice": dice, "iou": iou}


def with_inconsistency(
    network: nn.Module,
    peers: Mapping[str, Mapping[str, Tensor]],
    samples: Sequence[Sample],
    delta: str,
    left_out: LeftOut = unnoted,
) -> list[Sample]:
    """Returns `samples`, each with one more tensor for δ, computed once from frozen networks.

    A peer is left out whose network's maps of any sample are not finite: one such value would spoil the site's loss.

    Args:
        network: the site's network at the start of the stage; its weights do not change.
        peers: the whole networks of the other consenting sites, as state dicts, by site.
        delta: "frozen" adds `delta` (C,H,W); "std" adds its unscaled standard deviation over all K maps under the same
            name; "live" adds the peers' maps, `peers` ((K-1)·C,H,W).
        left_out: is told each peer that is left out, and why.

    Raises:
        InputError: there is no peer.
        ContributionError: all are left out.
    """
    if not peers:
        raise InputError("inconsistency needs at least one peer; a site without peers is tuned with λ = 0")
    own_state = copy_of(network)

    def maps_of(state: Mapping[str, Tensor]) -> Tensor:
        network.load_state_dict(state)
        return torch.cat([part.cpu() for part, _ in predict(network, samples)])

    def maps_of_peer(peer: str) -> Tensor:
        return require_finite_of(peer, maps_of(peers[peer]))

    own, names = maps_of(own_state), sorted(peers)
    try:
        if delta == "frozen":
            # peer by peer: at full size, all K maps of all samples would take several times the memory of the data
            values = torch.zeros_like(own)
            used = good(names, lambda peer: values.add_(inconsistency(own, maps_of_peer(peer)[None])), left_out)
            values = values / len(used)
        else:
            all_maps = torch.stack([own, *good(names, maps_of_peer, left_out).values()])
            values = inconsistency_std(all_maps) if delta == "std" else all_maps[1:].transpose(0, 1).flatten(1, 2)
    finally:
        network.load_state_dict(own_state)
    if delta == "live":
        return [{**sample, "peers": value} for sample, value in zip(samples, values, strict=True)]
    return [{**sample, "delta": value} for sample, value in zip(samples, values, strict=True)]


def calibration_loss(segmentation: BatchLoss, lambda_: float, delta: str) -> BatchLoss:
    """Returns L = L_seg + λ L_aux for batches from `with_inconsistency`."""

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        if delta == "live":
            peers = batch["peers"].unflatten(1, (-1, logits.shape[1])).transpose(0, 1)
            weight = inconsistency(torch.sigmoid(logits.detach()), peers)
        elif delta == "std":
            weight = batch["delta"] / batch["delta"].max().clamp_min(1e-12)
        else:
            weight = batch["delta"]
        return segmentation(logits, batch) + lambda_ * auxiliary_loss(logits, batch["mask"], weight)

    return loss
