"""δ once for all epochs of the calibration against δ at every batch, with equal losses.

Both train the same batches with the loss of Eq. 7 and 8 (Wang et al., TMI 2024) and δ from the networks at the start of the
stage. Without augmentation: a prediction for a flipped image is not the flipped prediction.
"""

from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.common import count, images, interleaved, parser, pixels, ratio, report, shown
from feddp.data.loading import Batch, Sample
from feddp.errors import FedDPError
from feddp.networks import DEFAULT, build
from feddp.training.calibration import calibration_loss, with_inconsistency
from feddp.training.device import settle
from feddp.training.loop import BatchLoss, adamw, copy_of, fit_epoch
from feddp.training.losses import inconsistency, segmentation_loss
from feddp.training.settings import Calibration, Training

# of one loss, relative: predictions in batches of 8 and of 6 differ by rounding, 2^-24 a number, and the optimiser's steps are
# the same then but for such roundings; a δ of other networks changes the loss in its first digits
EQUAL = 1e-4


def main(arguments: Sequence[str]) -> None:
    options = parser("calibration", __doc__)
    options.add_argument("--peers", type=count, nargs="+", default=[2, 3, 4, 8])
    options.add_argument("--size", type=pixels, default=96)
    options.add_argument("--pairs", type=count, default=5)
    options.add_argument("--images", type=count, default=12)
    options.add_argument("--epochs", type=count, default=Calibration().calibration_epochs, help="that the ratio is for")
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    settle("cpu", 1)
    samples, rows, figures = images(given.images, given.size), [], {}
    for peers in given.peers:
        found = compared(samples, given.network, peers, given.pairs)
        epochs = given.epochs
        once = [first + epochs * epoch for first, epoch in zip(found["δ"], found["epoch, δ once"], strict=True)]
        every = [epochs * epoch for epoch in found["epoch, δ every batch"]]
        gain = ratio(every, once)
        rows.append((peers, *(f"{median(values):.3f}" for values in found.values()), shown(gain)))
        figures[peers] = {"seconds": found, "ratio": gain}
    about = {"size": given.size, "images": given.images, "epochs": given.epochs, "network": given.network}
    heads = ("peers", "s: δ, once", "s: epoch with it", "s: epoch, δ every batch", f"{given.epochs} epochs: every batch / once")
    report("calibration", heads, rows, about | {"peers": figures})


def compared(samples: Sequence[Sample], name: str, peers: int, pairs: int) -> dict[str, list[float]]:
    """Returns seconds by what they were spent on.

    Raises:
        FedDPError: the two do not compute the same losses.
    """
    own, hyper, training = build(name, 3, 1, seed=0), Calibration(), Training(augment=False)
    states = {f"site-{at}": build(name, 3, 1, seed=at).state_dict() for at in range(1, peers + 1)}
    weighted = with_inconsistency(own, states, samples, "frozen")
    segmentation = segmentation_loss(training.loss)

    def segmented(logits: Tensor, batch: Batch) -> Tensor:
        return segmentation(logits, batch["mask"])

    once = calibration_loss(segmented, hyper.lambda_, "frozen")
    every = at_every_batch(own, name, states, once)
    networks = {"once": (build(name, 3, 1, seed=0), weighted, once), "every": (build(name, 3, 1, seed=0), samples, every)}
    optimizers = {key: adamw(network, hyper.calibration_lr, training.weight_decay) for key, (network, _, _) in networks.items()}
    losses: dict[str, list[float]] = {"once": [], "every": []}

    def epoch(key: str) -> None:
        network, seen, loss = networks[key]
        losses[key].append(fit_epoch(network, optimizers[key], seen, loss, training, seed=len(losses[key])))

    calls = {
        "δ": lambda: with_inconsistency(own, states, samples, "frozen"),
        "epoch, δ once": lambda: epoch("once"),
        "epoch, δ every batch": lambda: epoch("every"),
    }
    seconds = interleaved(f"{peers} peers", pairs, calls)
    for at, (one, other) in enumerate(zip(*losses.values(), strict=True)):
        if abs(one - other) > EQUAL * abs(one):
            raise FedDPError(f"epoch {at} with {peers} peers: the losses differ, {one} and {other}")
    return seconds


def at_every_batch(own: nn.Module, name: str, peers: Mapping[str, Mapping[str, Tensor]], loss: BatchLoss) -> BatchLoss:
    """Returns the same loss for batches without δ: K networks predict every batch."""
    frozen = [build(name, 3, 1) for _ in peers]
    for network, state in zip(frozen, peers.values(), strict=True):
        network.load_state_dict(state)
    start = build(name, 3, 1)
    start.load_state_dict(copy_of(own))

    def every(logits: Tensor, batch: Batch) -> Tensor:
        with torch.no_grad():
            maps = [torch.sigmoid(network.eval()(batch["image"])) for network in (start, *frozen)]
        return loss(logits, {**batch, "delta": inconsistency(maps[0], torch.stack(maps[1:]))})

    return every
