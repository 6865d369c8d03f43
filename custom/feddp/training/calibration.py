"""Stage 2: a site tunes its own network at home, guided by the sites' disagreement (001, III-C).

δ = 1/(K-1) Σ_{j≠k} (ŷ^k − ŷ^j)²   (Eq. 7),   L = L_seg + λ L_aux   with L_aux of Eq. 8.

Deviations: Eq. 8 is printed with y and ŷ exchanged inside the logs, which is not finite for y in {0, 1}; we compute what the
released code does. With `delta=frozen` all K maps come from the networks at the start of the stage, so δ is a constant of
the sample and is computed once. The start itself is among the candidates for the best epoch, which the paper leaves open.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from feddp.data.loading import Batch, Sample
from feddp.errors import InputError
from feddp.training.loop import BatchLoss, adamw, copy_of, fit_epoch, predict
from feddp.training.losses import auxiliary_loss, inconsistency, inconsistency_std
from feddp.training.metrics import measure, summarize
from feddp.training.seeds import seed_of
from feddp.training.settings import Training

Report = Callable[[int, float, float], None]  # (epoch, its mean loss, its mean validation IoU)


@dataclass(frozen=True)
class Tuned:
    """What a tuning did: the scores of epoch 0 (the start) and of each epoch, and the one whose network was kept."""

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
    """Trains `network` in place for `epochs` at `lr` with a fresh AdamW and leaves it at its best mean validation IoU.

    `report(epoch, loss, score)` is called after each epoch. An equal score keeps the earlier network.
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
    """Every metric's mean over `samples`."""
    rows = [row for maps, batch in predict(network, samples) for row in measure(maps, batch["mask"])]
    return {metric: summary["mean"] for metric, summary in summarize(rows).items()}


def with_inconsistency(
    network: nn.Module, peers: Mapping[str, Mapping[str, Tensor]], samples: Sequence[Sample], delta: str
) -> list[Sample]:
    """`samples` with what δ needs as one more tensor each; computed once, from frozen networks.

    Args:
        network: the site's network at the start of the stage; its weights are the same after the call.
        peers: the other consenting sites' whole networks, as state dicts, by site.
        delta: "frozen" adds `delta` (C,H,W); "std" adds its unscaled standard deviation over all K maps under the same
            name; "live" adds the peers' maps, `peers` ((K-1)·C,H,W).
    """
    if not peers:
        raise InputError("a site without a peer has no inconsistency; it is tuned with λ = 0")
    own_state = copy_of(network)

    def maps_of(state: Mapping[str, Tensor]) -> Tensor:
        network.load_state_dict(state)
        return torch.cat([part for part, _ in predict(network, samples)])

    own = maps_of(own_state)
    others = (maps_of(peers[site]) for site in sorted(peers))
    if delta == "frozen":
        # peer by peer: at full size, all K maps of all samples at once would be several times the data
        values = torch.zeros_like(own)
        for maps in others:
            values = values + inconsistency(own, maps[None])
        values = values / len(peers)
    else:
        all_maps = torch.stack([own, *others])
        values = inconsistency_std(all_maps) if delta == "std" else all_maps[1:].transpose(0, 1).flatten(1, 2)
    network.load_state_dict(own_state)
    if delta == "live":
        return [{**sample, "peers": value} for sample, value in zip(samples, values, strict=True)]
    return [{**sample, "delta": value} for sample, value in zip(samples, values, strict=True)]


def calibration_loss(segmentation: BatchLoss, lambda_: float, delta: str) -> BatchLoss:
    """L = L_seg + λ L_aux for batches made by `with_inconsistency`."""

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
