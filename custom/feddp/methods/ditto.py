"""Ditto (Li et al., ICML 2021, Algorithm 1): FedAvg, and beside it a whole personal model at every site.

w is trained and averaged as in FedAvg. v_k is trained on L_seg(v_k) + (λ/2) ‖v_k − w^t‖², where w^t is what the site
received. v_k is evaluated and deployed.

Deviations: v_k starts from the first w that the site receives, takes `local_epochs` epochs per round like w, and has an AdamW
of its own (the paper: SGD). The distance is over parameters; batch normalisation's statistics follow v_k's own batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from feddp.methods.base import Method, Round
from feddp.training.settings import require_bounds, require_not_negative, setting

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.data.loading import Batch


@dataclass(frozen=True)
class DittoSettings:
    ditto_lambda: float = setting(1.0, "Ditto: weight of the personal model's distance to the global one (0.1, 1, 2)")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_not_negative(self, "ditto_lambda")


class Ditto(Method):
    personal = True
    Hyper = DittoSettings
    hyper: DittoSettings

    def round(self, site: Round) -> float:
        from feddp.training.losses import squared_distance

        received = site.copy()
        loss = site.fit(epochs=site.plan.training.local_epochs)
        anchor = site.parameters(received)

        def near(logits: Tensor, batch: Batch) -> Tensor:
            return self.loss(site, logits, batch) + self.hyper.ditto_lambda / 2 * squared_distance(site.network, anchor)

        with site.as_personal(start=received):
            site.fit(epochs=site.plan.training.local_epochs, loss=near)
        return loss
