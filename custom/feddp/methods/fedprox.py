"""FedProx (Li et al., MLSys 2020, Algorithm 2): FedAvg with a proximal term that keeps a site's model near what it received.

L_k(w) = L_seg(w) + (μ/2) ‖w − w^t‖², where w^t is what the site received. μ = 0 is FedAvg.

Deviations: the authors give no default for μ and tune it from 0.001 to 1 for each data set; the default 0.01 is ours. Every
site trains `local_epochs` epochs, so the inexact solutions of slow devices, which the paper allows, do not occur. The paper
draws some devices for each round; here all sites take part, and the mean is uniform (`aggregation=samples` weighs by training
samples). AdamW takes the gradient of the whole loss (the authors' code: SGD) and keeps its moments from round to round (SGD
has none). The distance is over parameters, without batch normalisation's statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

from feddp.methods.base import Method, Round
from feddp.methods.proximal import near
from feddp.training.settings import require_bounds, require_not_negative, setting


@dataclass(frozen=True)
class FedProxSettings:
    prox_mu: float = setting(0.01, "FedProx: μ, weight of the distance to what was received (0.001, 0.01, 0.1, 1)")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_not_negative(self, "prox_mu")


class FedProx(Method):
    Hyper = FedProxSettings
    hyper: FedProxSettings

    def round(self, site: Round) -> float:
        received = site.parameters(site.copy())
        loss = near(self, site, self.hyper.prox_mu, received)
        return site.fit(epochs=site.plan.training.local_epochs, loss=loss)
