"""FedOAP (Tashdeed et al., 2025): local queries, global keys and values, then a calibration with perturbed predictions.

Rounds: decoupled cross-attention, in which each site keeps its queries and attends to keys and values that all sites train. The
query layers, a spatial adapter before the segmentation head (`feddp.networks.spatial_adapter`) and the head are private.
Then local epochs at a reduced rate (`tune_epochs`, `tune_lr`) on

L = (1 − η) L_seg(z, y) + η L_seg(z + σ ε · [|sigmoid(z) − y| > t], y),   ε from N(0, 1), one number per logit z:

noise where the prediction is far from the mask y (`feddp.training.losses.perturbed`); η = σ = 0.1, t = 0.75.

Source: the authors' released code (ishmamt/Federated-Tumor-Segmentation, commit 87468b8, 2025-07-12, before the paper); of the
paper, only title, abstract and a summary in one sentence could be read. The abstract says that keys and values are "aggregated
from all clients" and the title speaks of features; in the code, parameters are averaged and no feature leaves a site.

Deviations: their network is a U-Net with one attention, in the bottleneck, whose queries come from a private copy of the last
level and whose keys and values come from a shared one. PVTv2 has an attention in every block and no second branch; here the
query layers of all of them are private. Their adapter has the full resolution, before a 1×1 head; here it has the decoder's. In
their code the private tensors are sent and averaged too, then replaced at the site; here they never leave it. It averages by
the number of batches (`aggregation=samples` is nearest), with a new AdamW in every round, at 1e-4, with weight decay 1e-5 and
without clipping. Their L_seg is half the cross-entropy plus Dice; ours is the setting `loss`. After 5 rounds they train 2
epochs from each site's private tensors of its own best round, by the Dice of test images, and from a whole network that one
site left, and keep the better epoch by validation Dice. Here all sites train `tune_epochs` epochs from the last round's mean,
and by validation IoU the start may be kept too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from feddp.methods.base import TRAIN, TUNE, AtSite, Method, Round, RunPlan
from feddp.partition import HEAD, QUERY, SPATIAL_ADAPTER
from feddp.training.settings import require_bounds, require_not_negative, setting

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.data.loading import Batch


@dataclass(frozen=True)
class FedOAPSettings:
    perturbed_weight: float = setting(0.1, "FedOAP: η, weight of the loss of the perturbed logits after the rounds", most=1)
    perturbed_noise: float = setting(0.1, "FedOAP: σ, standard deviation of the noise on a logit")
    perturbed_above: float = setting(0.75, "FedOAP: t, error of a probability above which its logit is perturbed", most=1)

    def __post_init__(self) -> None:
        require_bounds(self)
        require_not_negative(self, "perturbed_weight", "perturbed_noise", "perturbed_above")


class FedOAP(Method):
    private = (QUERY, SPATIAL_ADAPTER, HEAD)
    changed = 1  # until 2026-11-27 it was ours, from the paper's abstract
    stages = (TRAIN, TUNE)
    Hyper = FedOAPSettings
    hyper: FedOAPSettings

    @staticmethod
    def layers(plan: RunPlan) -> dict[str, dict[str, float]]:
        return {"spatial_adapter": {}}

    def round(self, site: Round) -> float:
        def plain(logits: Tensor, batch: Batch) -> Tensor:
            return site.segmentation_loss(logits, batch["mask"])

        return site.fit(epochs=site.plan.training.local_epochs, loss=plain)

    def loss(self, site: AtSite, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the loss of every stage after the rounds."""
        import torch

        from feddp.training.losses import perturbed

        own, mask = self.hyper, batch["mask"]
        noise = own.perturbed_noise * torch.randn_like(logits)
        noisy = site.segmentation_loss(perturbed(logits, mask, noise, own.perturbed_above), mask)
        return (1 - own.perturbed_weight) * site.segmentation_loss(logits, mask) + own.perturbed_weight * noisy
