"""Virtual classes with personalized affinity aggregation (Liu et al., 2024): frozen kernels beside the real ones; private Q, M.

The head gives similarities between pixel features and C real and V = C·N virtual kernels, where N is the number of sites (Eq.
3). The virtual kernels start orthogonal, the same at every site, and stay frozen: they travel with the shared tensors, but a
site keeps its own, even if those that return are rounded (`precision=float16`) or carry a privacy filter's noise. L = L_dice +
λ_r L_r + λ_v L_v (Eq. 8; `feddp.training.virtual`). In every level of the decoder Q · M takes the skip connection's place (PAA,
Eq. 9 to 12; `feddp.networks.virtual_classes`): conv_q and conv_m are private, conv_k and the rest, the real kernels included,
are shared. Ablations: `virtual=0`, `paa=false`, `private=none` (PAA shared), `private=affinity_query`, `affinity_key`,
`affinity_matrix` or several of them; `virtual=4` (V = 4CN).

Deviations: that PAA stands in the place of the skip connection is our reading of the paper. The paper states neither the
sizes of conv_q, conv_k and conv_m nor how D_l gets the size of E_{l-1}: ours are 1 × 1 and upsampling to the nearest. If C + V
exceeds the features' width, no C + V kernels can be orthogonal; then each block of as many kernels as features is (ours). The
similarities, which lie in [-1, 1], are divided by a temperature of 0.1 (ours: a softmax over them as they are is never
confident). Eq. 7 writes 0 for the real maps (and C ≤ c < V for c < C + V); here they are left out of the softmax, and
`mask=literal` keeps the zeros. A class is foreground at a probability above 1/2, as everywhere in this package: where none of
several exclusive classes reaches it, a pixel is background. L_dice is MONAI's over all C classes; the setting `loss` is not
used. V is rounded to a whole number, at least 1. Without virtual classes the head still gives similarities. The paper: Adam,
batch 12; ours, as everywhere, AdamW and 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from feddp.errors import InputError
from feddp.methods.base import AtSite, Method, RunPlan
from feddp.partition import AFFINITY_MATRIX, AFFINITY_QUERY, NONE, Rule
from feddp.training.settings import require_bounds, require_choice, require_not_negative, require_positive, setting
from feddp.training.virtual import EXCLUDED, LITERAL, dice, real_loss, virtual_loss

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.data.loading import Batch


@dataclass(frozen=True)
class VirtualClassSettings:
    lambda_r: float = setting(1.0, "virtual classes: weight of the cross-entropy over the real classes")
    lambda_v: float = setting(1.0, "virtual classes: weight of the cross-entropy over the virtual ones")
    temperature: float = setting(
        0.1, "virtual classes: divisor of the similarities, which lie in [-1, 1]; our choice", most=100
    )
    virtual: float = setting(1.0, "virtual classes: V, in units of C classes (background included) times N sites; 0: none", 100)
    paa: bool = setting(True, "virtual classes: personalized affinity aggregation; false keeps the skip connections (Table II)")
    mask: str = setting(EXCLUDED, "virtual classes: real maps excluded from L_v's softmax, or literal zeros in it (Eq. 7)")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_not_negative(self, "lambda_r", "lambda_v", "virtual")
        require_positive(self, "temperature")
        require_choice(self, "mask", (EXCLUDED, LITERAL))


class VirtualClass(Method):
    private = (AFFINITY_QUERY, AFFINITY_MATRIX)
    uses_loss = False
    Hyper = VirtualClassSettings
    hyper: VirtualClassSettings

    @classmethod
    def rule(cls, plan: RunPlan) -> Rule:
        return cls.private if plan.hyper.paa else (NONE,)

    @staticmethod
    def layers(plan: RunPlan) -> dict[str, dict[str, float]]:
        hyper = plan.hyper
        if hyper.virtual and not plan.sites:
            raise InputError(
                "virtual_class needs the number of sites for its virtual classes; export it with `feddp job --sites A,B`,"
                " or set virtual=0"
            )
        several = (len(plan.classes) + 1) * len(plan.sites)
        virtual = max(1, round(hyper.virtual * several)) if hyper.virtual else 0
        nested = plan.labels == "nested"
        options = {"virtual": virtual, "temperature": hyper.temperature, "nested": nested, "paa": hyper.paa}
        return {"virtual_classes": options}

    def loss(self, site: AtSite, logits: Tensor, batch: Batch) -> Tensor:
        from feddp.data.loading import class_index
        from feddp.networks.virtual_classes import SimilarityHead

        head = site.network.segmentation_head
        if not isinstance(head, SimilarityHead) or head.maps is None:
            raise TypeError(f"site {site.name}: the loss needs the similarities of a forward pass; call the network first")
        maps, classes = head.maps, len(site.plan.classes) + 1
        real, virtual = maps[:, :classes], maps[:, classes:]
        index = class_index(batch["mask"], site.plan.labels)
        loss = dice(real, index) + self.hyper.lambda_r * real_loss(real, index)
        if self.hyper.virtual:
            loss = loss + self.hyper.lambda_v * virtual_loss(virtual, classes, self.hyper.mask)
        return loss
