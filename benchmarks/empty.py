"""What keeps masks from staying empty: FedAvg with other losses, another first bias, a learning rate that rises.

Mean validation Dice of the sites after some of the rounds, by trial and seed, on synthetic vessels or on the sites below
--data; and what it is if nothing is found, which is above 0 where masks are empty. `loss=dice` is a setting. For the other
trials FedDP has none, and the method of this file takes the place of FedAvg's:

    feddp bench empty
    feddp bench empty --size 96 --trials default dice

Trials: `dice-per-image` takes soft Dice image by image, `weighted` the foreground ten times as heavy in the cross-entropy;
with `bias-P` the head's bias begins at the logit of P; with `warm-up-N` the learning rate rises in equal steps over N rounds.
"""

import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from monai.losses import DiceLoss
from torch import Tensor

from benchmarks.common import count, line, natural, parser, pixels, row
from feddp.data.folder import SiteFolder
from feddp.data.loading import Batch, load
from feddp.data.progress import track
from feddp.data.synthesize import synthesize
from feddp.errors import InputError
from feddp.files import PROGRESS, read_events
from feddp.jobs.folder import federation_of
from feddp.methods import OWN
from feddp.methods.base import AtSite, Method, Round
from feddp.networks import DEFAULT
from feddp.networks.weights import save_network
from feddp.partition import HEAD, select
from feddp.plan.resolve import build_network
from feddp.run.options import Options, run_here
from feddp.stages.round import LocalRound
from feddp.stages.scored import DICE, curves
from feddp.training.settings import require_bounds, require_positive, setting

NAME = "tried"  # of the method, while this benchmark runs
ROUNDS = "rounds"  # entry of a site's memory: how many it has trained


@dataclass(frozen=True)
class TriedSettings:
    foreground: float = setting(1.0, "weight of the foreground in the cross-entropy")
    per_image: bool = setting(False, "soft Dice image by image, instead of over the batch")
    warm_up: int = setting(1, "rounds over which the learning rate rises")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_positive(self, "foreground", "warm_up")


class Tried(Method):
    """FedAvg, unless a setting says otherwise."""

    Hyper = TriedSettings
    hyper: TriedSettings

    def round(self, site: Round) -> float:
        done = site.memory.get(ROUNDS, torch.zeros(1)) + 1
        site.memory[ROUNDS] = done
        for group in cast(LocalRound, site)._optimizer.param_groups:
            group["lr"] *= min(1.0, done.item() / self.hyper.warm_up)
        return super().round(site)

    def loss(self, site: AtSite, logits: Tensor, batch: Batch) -> Tensor:
        hyper = self.hyper
        if hyper.foreground == 1 and not hyper.per_image:
            return super().loss(site, logits, batch)
        mask = batch["mask"].float()
        soft: Tensor = DiceLoss(sigmoid=True, batch=not hyper.per_image, smooth_nr=1e-5, smooth_dr=1e-5)(logits, mask)
        return soft + F.binary_cross_entropy_with_logits(logits, mask, pos_weight=logits.new_tensor(hyper.foreground))


@dataclass(frozen=True)
class Trial:
    settings: tuple[str, ...] = ()
    bias: float | None = None  # the probability that a new network gives every pixel, about


TRIALS = {
    "default": Trial(),
    "dice": Trial(("loss=dice",)),
    "dice-per-image": Trial(("per_image=true",)),
    "weighted": Trial(("foreground=10",)),
    "bias-0.03": Trial(bias=0.03),
    "bias-0.1": Trial(bias=0.1),
    "warm-up-5": Trial(("warm_up=5",)),
    "warm-up-10": Trial(("warm_up=10",)),
}


def main(arguments: Sequence[str]) -> None:
    options = parser("empty", __doc__)
    options.add_argument("--data", type=Path, help="a federation's folder; default: four sites of 30 images with vessels")
    options.add_argument("--trials", nargs="+", choices=TRIALS, default=list(TRIALS), metavar="TRIAL", help=", ".join(TRIALS))
    options.add_argument("--rounds", type=count, default=15)
    options.add_argument("--size", type=pixels, default=64)
    options.add_argument("--seeds", type=natural, nargs="+", default=[0, 1, 2])
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    trials, seeds = dict.fromkeys(given.trials), dict.fromkeys(given.seeds)
    shown = [*range(1, given.rounds, 2), given.rounds]
    found: dict[str, dict[int, list[float]]] = {trial: {} for trial in trials}
    with tempfile.TemporaryDirectory() as folder, patch.dict(OWN, {NAME: Tried}):
        data = given.data or Path(folder) / "data"
        if not given.data:
            synthesize(data, images=30, size=given.size, thin=True)
        nothing = of_nothing(data, given.size)
        row("trial", "seed", *(f"round {round}" for round in shown))
        row(*["---"] * (2 + len(shown)))
        row("nothing found", "", *(f"{nothing:.2f}" for _ in shown))
        for seed, trial in track([(seed, trial) for seed in seeds for trial in trials], "Trials"):
            run = Options(NAME, given.rounds, None, given.network, given.size, seed, TRIALS[trial].settings)
            dice = found[trial][seed] = validated(run, TRIALS[trial].bias, data, Path(folder) / "run")
            row(trial, seed, *(f"{dice[round - 1]:.2f}" for round in shown))
    line("empty", vars(given) | {"data": str(given.data or "synthetic vessels"), "nothing": nothing, "dice": found})


def of_nothing(data: Path, size: int) -> float:
    """Returns the sites' mean Dice on their validation images if nothing is found: of each class 1 where its mask is empty.

    Raises:
        InputError: a site has no validation image.
    """
    shares = []
    for folder in (SiteFolder.open(data / site) for site in federation_of(data)[0]):
        if lacking := folder.lacking("val"):
            raise InputError(f"site {folder.site}: {lacking}")
        masks = torch.stack([sample["mask"] for sample in load(folder, "val", size)])
        shares.append((~masks.flatten(2).any(dim=2)).float().mean().item())
    return mean(shares)


def validated(run: Options, chance: float | None, data: Path, out: Path) -> list[float]:
    """Runs; returns the sites' mean validation Dice of each round. `out` is removed: it holds half a gigabyte."""
    if chance is not None:
        run = with_bias(run, data, out.with_suffix(".safetensors"), chance)
    run_here(data, out, run, "local")
    by_site = curves(read_events(out / PROGRESS), DICE).values()
    shutil.rmtree(out)
    return [mean(curve[round] for curve in by_site) for round in range(1, run.rounds + 1)]


def with_bias(run: Options, data: Path, file: Path, chance: float) -> Options:
    """Returns the run, from its own first network but for the head's bias, which is the logit of `chance`.

    Args:
        file: where the first network is written.
    """
    sites, metadata = federation_of(data)
    network = build_network(run.plan(metadata, sites))
    (bias,) = (name for name in select(network, HEAD) if name.endswith("bias"))
    network.get_parameter(bias).data.fill_(math.log(chance / (1 - chance)))
    save_network(file, network.state_dict(), {})
    return replace(run, weights=str(file))
