"""Ditto (Li et al., ICML 2021, Algorithm 1): FedAvg, and beside it a whole personal model at every site.

w is trained and averaged as in FedAvg. v_k is trained on L_seg(v_k) + (λ/2) ‖v_k − w^t‖², where w^t is what the site
received. v_k is evaluated and deployed.

Deviations: v_k starts from the first w that the site receives, takes `local_epochs` epochs per round like w, and has an AdamW
of its own (the paper: SGD). The distance is over parameters; batch normalisation's statistics follow v_k's own batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from feddp.methods.base import Method, Round
from feddp.methods.proximal import near
from feddp.training.settings import require_bounds, require_not_negative, setting


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
        received = site.copy()
        loss = site.fit(epochs=site.plan.training.local_epochs)
        pulled = near(self, site, self.hyper.ditto_lambda, site.parameters(received))
        with site.as_personal(start=received):
            site.fit(epochs=site.plan.training.local_epochs, loss=pulled)
        return loss
