"""FedOAP (Tashdeed et al., 2025): local queries, global keys and values, then a calibration at the boundaries.

Stage 1: decoupled cross-attention, in which each site keeps its queries and attends to keys and values that all sites train;
the query layers are private, as in FedDP. Stage 2: local epochs at a reduced rate (`tune_epochs`, `tune_lr`) on
L = L_seg + λ_b L_b, where the boundary loss L_b is the cross-entropy over the pixels near the mask's boundary:

L_b = −Σ b [y log ŷ + (1−y) log(1−ŷ)] / Σ b,   b = dilation(y) − erosion(y), with a square of (2w+1)² pixels.

Deviations: only the paper's title and abstract could be read, and a summary in one sentence; no code is public. So tables say
"FedOAP from its abstract". The title speaks of shared feature aggregation; the abstract says that each client retains local
queries, attends to key-value pairs aggregated from all clients, models dependencies among the shared features of different
clients, and is trained with a perturbed boundary loss on the inconsistencies of the predicted mask's boundary; the summary,
that attention fuses globally aggregated features with local queries, that the loss is used in local fine-tuning, and that each
client has a spatial adapter. Here no feature leaves a site: the attention is PVTv2's own, and its key and value layers are
averaged, so the rounds are FedDP's. Ours are also L_b (the paper's formula could not be read; nothing is perturbed here, and
the boundary is the mask's, not the prediction's), λ_b, w and the epochs. There is no spatial adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from feddp.methods.base import TRAIN, TUNE, AtSite, Method, Round
from feddp.partition import QUERY
from feddp.training.settings import require_bounds, require_not_negative, require_positive, setting

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.data.loading import Batch


@dataclass(frozen=True)
class FedOAPSettings:
    boundary: float = setting(1.0, "FedOAP: λ_b, weight of the boundary loss after the rounds; our choice")
    boundary_width: int = setting(1, "FedOAP: w, pixels on each side of the mask's boundary; our choice", most=100)

    def __post_init__(self) -> None:
        require_bounds(self)
        require_not_negative(self, "boundary")
        require_positive(self, "boundary_width")


class FedOAP(Method):
    label = "FedOAP from its abstract"
    private = (QUERY,)
    stages = (TRAIN, TUNE)
    Hyper = FedOAPSettings
    hyper: FedOAPSettings

    def round(self, site: Round) -> float:
        def plain(logits: Tensor, batch: Batch) -> Tensor:
            return site.segmentation_loss(logits, batch["mask"])

        return site.fit(epochs=site.plan.training.local_epochs, loss=plain)

    def loss(self, site: AtSite, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the loss of every stage after the rounds."""
        from feddp.training.losses import boundary_loss

        near = boundary_loss(logits, batch["mask"], self.hyper.boundary_width)
        return site.segmentation_loss(logits, batch["mask"]) + self.hyper.boundary * near
