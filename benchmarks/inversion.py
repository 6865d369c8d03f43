"""What a site's tensors reveal of its images: gradient inversion of one training step, by method; no speed.

The attack is that of (Geiping et al., NeurIPS 2020): an image is sought whose gradient has the direction of the one observed,
L = 1 − cos(∇, ∇*) + w TV(x), by Adam on the signs of dL/dx from a random start. The attacker is the server, in the best
position: a batch of one image, whose mask is known; no dropout, no augmentation. It observes only the gradient of the shared
parameters (`gradient`, what a step of plain SGD sends), or their change by AdamW's first step (`step`, what a site sends).

Without training before, the private tensors are those of the common start, which everybody knows. After epochs of training at
the site the server knows the shared tensors only, and puts the start's in place of the private ones.

Errors are in units of the normalised image, of variance 1 in each channel: a flat image has 1, noise has 2.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import count, images, parser, report
from feddp.data.folder import SiteFolder
from feddp.data.loading import Sample, load
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.partition import Partition
from feddp.plan.resolve import build_network, partition_of
from feddp.plan.schema import Plan
from feddp.training.device import settle
from feddp.training.loop import adamw, fit_epoch
from feddp.training.losses import segmentation_loss
from feddp.training.seeds import seed_of

SITES = ("site-1", "site-2")
GRADIENT, STEP = "gradient", "step"
Images = list[Tensor]  # of one site, (1, channels, size, size) each


@dataclass(frozen=True)
class Attack:
    """What is attacked: a site's network before a step, and the network as far as the attacker knows it."""

    plan: Plan
    victim: nn.Module
    known: nn.Module
    shared: tuple[str, ...]  # the parameters whose change is sent

    def sent(self, sample: Sample, what: str) -> list[Tensor]:
        """Returns the observed direction, by parameter: the gradient, or the change by one step."""
        network, training = self.victim, self.plan.training
        gradients = self._gradient(network, sample["image"][None], sample["mask"][None])
        if what == GRADIENT:
            return [value.detach() for value in gradients]
        parameters = [dict(network.named_parameters())[name].detach().clone().requires_grad_() for name in self.shared]
        optimizer = torch.optim.AdamW(parameters, lr=training.lr, weight_decay=training.weight_decay, fused=True)
        before = [value.detach() * (1 - training.lr * training.weight_decay) for value in parameters]  # the decay is known
        for parameter, value in zip(parameters, gradients, strict=True):
            parameter.grad = value.detach().clamp(-training.clip, training.clip)
        optimizer.step()
        return [old - new.detach() for old, new in zip(before, parameters, strict=True)]

    def inverted(
        self, observed: Sequence[Tensor], mask: Tensor, shape: torch.Size, given: argparse.Namespace, seed: int
    ) -> Tensor:
        """Returns the image (1, channels, size, size) that the attacker finds."""
        image = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        optimizer = torch.optim.Adam([image], lr=given.lr)
        steps = [given.iterations * part // 8 for part in (3, 5, 7)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, steps)
        for _ in range(given.iterations):
            normal = normalised(image)
            gradients = self._gradient(self.known, normal, mask[None], graph=True)
            loss = 1 - cosine(gradients, observed) + given.tv * total_variation(normal)
            (image.grad,) = torch.autograd.grad(loss, [image])
            image.grad.sign_()
            optimizer.step()
            schedule.step()
        return normalised(image.detach())

    def _gradient(self, network: nn.Module, image: Tensor, mask: Tensor, graph: bool = False) -> list[Tensor]:
        parameters = dict(network.named_parameters())
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            loss = segmentation_loss(self.plan.training.loss)(network(image), mask)
            wanted = [parameters[name] for name in self.shared]
            return list(torch.autograd.grad(loss, wanted, create_graph=graph, materialize_grads=True))


def main(arguments: Sequence[str]) -> None:
    options = parser("inversion", __doc__)
    options.add_argument("--methods", nargs="+", default=["fedavg", "feddp", "fedbn", "fedper"])
    options.add_argument("--sent", nargs="+", choices=(GRADIENT, STEP), default=[GRADIENT, STEP])
    options.add_argument("--epochs", type=int, nargs="+", default=[0, 10], help="of training at the site before the step")
    options.add_argument("--data", type=Path, help="a site's folder; synthetic images if left out")
    options.add_argument("--images", type=count, default=2, help="that are attacked")
    options.add_argument("--trained", type=count, default=12, help="images of the site")
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--size", type=count, default=32)
    options.add_argument("--iterations", type=count, default=200)
    options.add_argument("--lr", type=float, default=0.1, help="the attacker's")
    options.add_argument("--tv", type=float, default=0.1, help="w, the weight of the total variation")
    options.add_argument("--network", default="pvt_v2_b0_s-fpn", help="the default network's queries do nothing below 64 px")
    given = options.parse_args(arguments)
    settle("cpu", 1)
    samples = load(SiteFolder.open(given.data), "train", given.size) if given.data else images(given.trained, given.size)
    samples = samples[: given.trained]
    if len(samples) < given.images:
        raise InputError(f"{len(samples)} training images, but --images {given.images} are attacked; give fewer")
    attacks = {
        (epochs, method, seed): attack(method, samples, epochs, seed, given)
        for seed in given.seeds
        for epochs in given.epochs
        for method in given.methods
    }
    jobs = [(*key, sent, at) for key in attacks for sent in given.sent for at in range(given.images)]
    found: dict[tuple[int, str, str], list[dict[str, float]]] = {}
    for epochs, method, seed, sent, at in track(jobs, "Attacking"):
        made, sample = attacks[epochs, method, seed], samples[at]
        truth = sample["image"][None]
        start = seed_of(seed, "attack", at)  # the same for all methods
        image = made.inverted(made.sent(sample, sent), sample["mask"], truth.shape, given, start)
        found.setdefault((epochs, sent, method), []).append(errors(image, truth))
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


def attack(method: str, samples: Sequence[Sample], epochs: int, seed: int, given: argparse.Namespace) -> Attack:
    """Returns the attack on a site that has trained its whole network for `epochs` from the common start."""
    channels, classes = samples[0]["image"].shape[0], tuple(f"class {n}" for n in range(len(samples[0]["mask"])))
    plan = Plan(method, given.network, channels, classes, "nested", given.size, rounds=1, sites=SITES, seed=seed)
    victim, known = build_network(plan), build_network(plan)
    partition: Partition = partition_of(plan, victim)
    optimizer = adamw(victim, plan.training.lr, plan.training.weight_decay)
    loss = segmentation_loss(plan.training.loss)
    for epoch in range(epochs):
        fit_epoch(
            victim, optimizer, samples, lambda logits, batch: loss(logits, batch["mask"]), plan.training, seed_of(seed, epoch)
        )
    shared, _ = partition.split(victim.state_dict())
    _, start = partition.split(known.state_dict())
    known.load_state_dict(partition.join(shared, start))
    parameters = dict(victim.named_parameters())
    names = tuple(name for name in partition.shared if name in parameters)
    return Attack(plan, victim.eval(), known.eval(), names)


def part_shared(made: Attack) -> float:
    """Returns how many per cent of the parameters' numbers are observed."""
    sizes = {name: value.numel() for name, value in made.victim.named_parameters()}
    return 100 * sum(sizes[name] for name in made.shared) / sum(sizes.values())


def cosine(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Returns the cosine of the angle between two lists of tensors of the same shapes, each as one vector."""
    dot = torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)]).sum()
    norms = [torch.stack([value.square().sum() for value in values]).sum().sqrt() for values in (left, right)]
    return dot / (norms[0] * norms[1]).clamp_min(1e-12)


def normalised(image: Tensor) -> Tensor:
    """Returns (B, C, H, W) with zero mean and unit variance per channel, which the attacker knows of every image."""
    centred = image - image.mean(dim=(2, 3), keepdim=True)
    return centred / centred.square().mean(dim=(2, 3), keepdim=True).sqrt().clamp_min(1e-6)


def total_variation(image: Tensor) -> Tensor:
    """Returns the mean absolute difference of neighbours, down and across, of (B, C, H, W)."""
    return image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean()


def guesses(samples: Sequence[Sample]) -> Mapping[str, Callable[[Tensor], Tensor]]:
    """What needs no attack, by its name: flat grey, noise, the mean of the site's other images."""
    every = torch.stack([sample["image"] for sample in samples])

    def others(truth: Tensor) -> Tensor:
        return (every.sum(dim=0)[None] - truth) / max(1, len(samples) - 1)

    def noise(truth: Tensor) -> Tensor:
        return torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed_of("noise")))

    return {"flat": torch.zeros_like, "noise": noise, "mean of the other images": others}


def errors(image: Tensor, truth: Tensor) -> dict[str, float]:
    """Returns MSE, PSNR = 10 log10(range² / MSE) with the range of the true image, and Pearson's correlation."""
    mse = F.mse_loss(image, truth)
    span = truth.max() - truth.min()
    together = torch.corrcoef(torch.stack([image.flatten(), truth.flatten()]))[0, 1].nan_to_num()
    return {"mse": mse.item(), "psnr": (10 * torch.log10(span.square() / mse)).item(), "correlation": together.item()}


def shown(values: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns mean ± population standard deviation of each measure."""
    columns = {name: [value[name] for value in values] for name in values[0]}
    return [f"{mean(column):.2f} ± {pstdev(column):.2f}" for column in columns.values()]
