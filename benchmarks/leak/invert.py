"""Gradient inversion: seeks the image whose gradient is an observed one.

By L-BFGS on squared distances (Zhu et al., NeurIPS 2019), or on angles (Geiping et al., NeurIPS 2020), with the latter's total
variation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from feddp.data.loading import Batch, Sample
from feddp.plan.resolve import build_network, partition_of
from feddp.plan.schema import Plan
from feddp.training.loop import adamw, fit_epoch
from feddp.training.losses import segmentation_loss
from feddp.training.seeds import seed_of

GRADIENT, STEP = "gradient", "step"


@dataclass(frozen=True)
class Search:
    """How long the attacker searches, and the weight of the total variation."""

    iterations: int
    tv: float


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

    def inverted(self, sample: Sample, what: str, given: Search, seed: int) -> Tensor:
        """Returns the image (1, channels, size, size) that the attacker finds, who knows the mask and what is sent."""
        observed, mask, shape = self.sent(sample, what), sample["mask"], sample["image"][None].shape
        image = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        optimizer = torch.optim.LBFGS(
            [image],
            max_iter=given.iterations,
            max_eval=given.iterations,
            history_size=50,
            tolerance_grad=0,
            tolerance_change=0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            normal = normalised(image)
            gradients = self._gradient(self.known, normal, mask[None], graph=True)
            loss = DISTANCES[what](gradients, observed) + given.tv * total_variation(normal)
            (image.grad,) = torch.autograd.grad(loss, [image])
            return loss.detach()

        optimizer.step(closure)
        return normalised(image.detach())

    def _gradient(self, network: nn.Module, image: Tensor, mask: Tensor, graph: bool = False) -> list[Tensor]:
        parameters = dict(network.named_parameters())
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            loss = segmentation_loss(self.plan.training.loss)(network(image), mask)
            wanted = [parameters[name] for name in self.shared]
            return list(torch.autograd.grad(loss, wanted, create_graph=graph, materialize_grads=True))


def attack_on(plan: Plan, samples: Sequence[Sample], epochs: int) -> Attack:
    """Returns the attack on a site that has trained its whole network for `epochs` from the common start."""
    victim, known = build_network(plan), build_network(plan)
    partition = partition_of(plan, victim)
    optimizer = adamw(victim, plan.training.lr, plan.training.weight_decay)
    loss = segmentation_loss(plan.training.loss)

    def segmented(logits: Tensor, batch: Batch) -> Tensor:
        return loss(logits, batch["mask"])

    for epoch in range(epochs):
        fit_epoch(victim, optimizer, samples, segmented, plan.training, seed_of(plan.seed, epoch))
    shared, _ = partition.split(victim.state_dict())
    _, start = partition.split(known.state_dict())
    known.load_state_dict(partition.join(shared, start))
    parameters = dict(victim.named_parameters())
    names = tuple(name for name in partition.shared if name in parameters)
    return Attack(plan, victim.eval(), known.eval(), names)


def squared(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Returns ‖left − right‖² / ‖right‖² of two lists of tensors of the same shapes, each as one vector."""
    apart = torch.stack([(a - b).square().sum() for a, b in zip(left, right, strict=True)]).sum()
    return apart / torch.stack([b.square().sum() for b in right]).sum().clamp_min(1e-24)


def cosine(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Returns the cosine of the angle between two lists of tensors of the same shapes, each as one vector."""
    dot = torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)]).sum()
    norms = [torch.stack([value.square().sum() for value in values]).sum().sqrt() for values in (left, right)]
    return dot / (norms[0] * norms[1]).clamp_min(1e-12)


def angle(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return 1 - cosine(left, right)


# AdamW's first step has about the gradient's signs, so only its direction can be compared with a gradient's
DISTANCES = {GRADIENT: squared, STEP: angle}


def normalised(image: Tensor) -> Tensor:
    """Returns (B, C, H, W) with zero mean and unit variance per channel, which the attacker knows of every image."""
    centred = image - image.mean(dim=(2, 3), keepdim=True)
    return centred / centred.square().mean(dim=(2, 3), keepdim=True).sqrt().clamp_min(1e-6)


def total_variation(image: Tensor) -> Tensor:
    """Returns the mean absolute difference of neighbours, down and across, of (B, C, H, W)."""
    return image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean()


def errors(image: Tensor, truth: Tensor) -> dict[str, float]:
    """Returns MSE, PSNR = 10 log10(range² / MSE) with the range of the true image, and Pearson's correlation."""
    mse = F.mse_loss(image, truth)
    span = truth.max() - truth.min()
    together = torch.corrcoef(torch.stack([image.flatten(), truth.flatten()]))[0, 1].nan_to_num()
    return {"mse": mse.item(), "psnr": (10 * torch.log10(span.square() / mse)).item(), "correlation": together.item()}
