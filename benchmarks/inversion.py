"""What a site's tensors reveal of its images: gradient inversion of one training step, by method; no speed.

An image is sought whose gradient is the one observed, from a random start (benchmarks/leak/invert.py). The attacker is the
server, in the best position: a batch of one image, whose mask is known; no dropout, no augmentation. It observes only the
gradient of the shared parameters (`gradient`, what a step of plain SGD sends), or their change by AdamW's first step (`step`,
what a site sends if it trains a single batch).

Without training before, the private tensors are those of the common start, which everybody knows. After epochs of training at
the site the server knows the shared tensors only, and puts the start's in place of the private ones.

(Jiang et al., TMI 2023, Fig. 9) attacks gradients and latent features. The attack on latent features is left out, because no
method here sends them.

Errors are in units of the normalised image, of variance 1 in each channel: a flat image has 1, noise has 2.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common import count, images, line, natural, parser, pixels, report
from benchmarks.leak.invert import GRADIENT, STEP, Attack, Search, attack_on, errors
from benchmarks.leak.toy import Toy
from feddp.data.folder import SiteFolder
from feddp.data.loading import Sample, load
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.networks import NETWORKS
from feddp.plan.schema import Plan
from feddp.training.device import settle
from feddp.training.seeds import seed_of

SITES = ("site-1", "site-2")
SMALL = "attention"  # the network of benchmarks/leak; no run of FedDP knows it


def main(arguments: Sequence[str]) -> None:
    options = parser("inversion", __doc__)
    options.add_argument("--methods", nargs="+", default=["fedavg", "feddp", "fedbn", "fedper"])
    options.add_argument("--sent", nargs="+", choices=(GRADIENT, STEP), default=[GRADIENT, STEP])
    options.add_argument("--epochs", type=natural, nargs="+", default=[0, 10], help="of training at the site before the step")
    options.add_argument("--data", type=Path, help="a site's folder; synthetic images if left out")
    options.add_argument("--images", type=count, default=2, help="that are attacked")
    options.add_argument("--trained", type=count, default=12, help="images of the site")
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--size", type=pixels, default=32)
    options.add_argument("--iterations", type=count, default=600)
    options.add_argument("--tv", type=float, default=1e-4, help="the weight of the total variation")
    options.add_argument("--network", default=SMALL, help=f"{SMALL} is this benchmark's own")
    given = options.parse_args(arguments)
    if not given.tv >= 0:
        raise InputError(f"--tv {given.tv}: a weight is at least 0; the attack would look for the roughest image")
    settle("cpu", 1)
    samples = load(SiteFolder.open(given.data), "train", given.size) if given.data else images(given.trained, given.size)
    samples = samples[: given.trained]
    if len(samples) < given.images:
        raise InputError(f"{len(samples)} training images, but --images {given.images} are attacked; give fewer")
    with patch.dict(NETWORKS, {SMALL: Toy}):
        attacks = {
            (epochs, method, seed): attack_on(plan_of(method, samples, seed, given), samples, epochs)
            for seed in given.seeds
            for epochs in given.epochs
            for method in given.methods
        }
    jobs = [(*key, sent, at) for at in range(given.images) for sent in given.sent for key in attacks]
    search = Search(given.iterations, given.tv)
    found: dict[tuple[int, str, str], list[dict[str, float]]] = {}
    for epochs, method, seed, sent, at in track(jobs, "Attacking"):
        made, sample = attacks[epochs, method, seed], samples[at]
        truth = sample["image"][None]
        start = seed_of(seed, "attack", at)  # the same for all methods
        image = made.inverted(sample, sent, search, start)
        measured = errors(image, truth)
        found.setdefault((epochs, sent, method), []).append(measured)
        line("inversion", {"method": method, "epochs": epochs, "sent": sent, "image": at, "seed": seed, **measured})
    truths = [sample["image"][None] for sample in samples[: given.images]]
    rows: list[tuple[object, ...]] = [
        ("", "", f"({name})", "", *shown([errors(guess(truth), truth) for truth in truths]))
        for name, guess in guesses(samples).items()
    ]
    for (epochs, sent, method), values in sorted(found.items(), key=lambda item: item[0][:2]):
        share = part_shared(attacks[epochs, method, given.seeds[0]])
        rows.append((epochs, sent, method, f"{share:.1f}", *shown(values)))
    heads = ("epochs before", "observed", "method", "% of parameters", "MSE", "PSNR (dB)", "correlation")
    figures = {f"{epochs} epochs, {sent}, {method}": values for (epochs, sent, method), values in found.items()}
    about = vars(given) | {"data": str(given.data) if given.data else "synthetic"}
    report("inversion", heads, rows, about | {"attacks": figures})


def plan_of(method: str, samples: Sequence[Sample], seed: int, given: argparse.Namespace) -> Plan:
    channels, classes = samples[0]["image"].shape[0], tuple(f"class {n}" for n in range(len(samples[0]["mask"])))
    return Plan(method, given.network, channels, classes, "nested", given.size, rounds=1, sites=SITES, seed=seed)


def part_shared(made: Attack) -> float:
    """Returns how many per cent of the parameters' numbers are observed."""
    sizes = {name: value.numel() for name, value in made.victim.named_parameters()}
    return 100 * sum(sizes[name] for name in made.shared) / sum(sizes.values())


def guesses(samples: Sequence[Sample]) -> Mapping[str, Callable[[Tensor], Tensor]]:
    """What needs no attack, by its name: flat grey, noise, the mean of the site's other images."""
    every = torch.stack([sample["image"] for sample in samples])

    def others(truth: Tensor) -> Tensor:
        return (every.sum(dim=0)[None] - truth) / max(1, len(samples) - 1)

    def noise(truth: Tensor) -> Tensor:
        return torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed_of("noise")))

    return {"flat": torch.zeros_like, "noise": noise, "mean of the other images": others}


def shown(values: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns mean ± population standard deviation of each measure."""
    columns = {name: [value[name] for value in values] for name in values[0]}
    return [f"{mean(column):.2f} ± {pstdev(column):.2f}" for column in columns.values()]
