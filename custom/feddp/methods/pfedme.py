"""pFedMe (Dinh et al., NeurIPS 2020, Algorithm 1), as in (Jiang et al., TMI 2023): a personal model by Moreau envelopes.

On every batch θ ≈ argmin L_seg(θ) + (λ/2) ‖θ − w_k‖² by a few inner steps, then w_k ← w_k − ηλ (w_k − θ). The sites send w_k,
the server takes (1−β) w + β mean(w_k). θ is the personal model: it is evaluated and deployed.

Deviations: the inner steps are AdamW's (the authors' code: SGD), from the last θ, which starts at the received w. η is 0.05,
ours, so that w moves three quarters of the way to θ (ηλ = 0.75); at the authors' 0.005 w hardly moves in the number of rounds
that (Wang et al., TMI 2024) and (Jiang et al., TMI 2023) train. w's batch-normalisation statistics follow θ's by the same outer
step: θ's own are never sent. The server averages them whatever β is, because β above 1 could make a variance negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from feddp.errors import InputError
from feddp.methods.base import Method, Round, RunPlan
from feddp.methods.proximal import near
from feddp.training.settings import require_bounds, require_positive, setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PFedMeSettings:
    pfedme_lambda: float = setting(15.0, "pFedMe: λ, weight of the distance between θ and w")
    pfedme_eta: float = setting(0.05, "pFedMe: η, step of w towards θ; ηλ is at most 1")
    pfedme_beta: float = setting(1.0, "pFedMe: β, the server's step towards the mean")
    inner_steps: int = setting(5, "pFedMe: steps of θ on each batch", most=1_000)

    def __post_init__(self) -> None:
        require_bounds(self)
        require_positive(self, "pfedme_lambda", "pfedme_eta", "pfedme_beta", "inner_steps")
        if self.pfedme_eta * self.pfedme_lambda > 1:
            product = f"pfedme_eta={self.pfedme_eta} times pfedme_lambda={self.pfedme_lambda}"
            raise InputError(f"{product} is above 1, so that w would overshoot θ; lower one of them")


class PFedMe(Method):
    personal = True
    Hyper = PFedMeSettings
    hyper: PFedMeSettings

    def passes(self, plan: RunPlan) -> float:
        """w never moves further than θ, which moves in each of the inner steps."""
        return plan.training.local_epochs * self.hyper.inner_steps

    @property
    def server_step(self) -> float:
        return max(1.0, self.hyper.pfedme_beta)

    def round(self, site: Round) -> float:
        import torch

        hyper, w = self.hyper, {name: value.clone() for name, value in site.network.state_dict().items()}

        @torch.no_grad()
        def outer() -> None:
            for name, theta in site.network.state_dict().items():
                if theta.is_floating_point():
                    w[name] -= hyper.pfedme_eta * hyper.pfedme_lambda * (w[name] - theta)
                else:
                    w[name].copy_(theta)

        loss = site.fit(
            epochs=site.plan.training.local_epochs,
            loss=near(self, site, hyper.pfedme_lambda, w),
            steps=hyper.inner_steps,
            after=outer,
        )
        site.personal_model = site.copy()
        site.network.load_state_dict(w)
        return loss

    def aggregate(
        self, previous: Mapping[str, Tensor], mean: Mapping[str, Tensor], weights: Mapping[str, float]
    ) -> Mapping[str, Tensor]:
        from feddp.methods.aggregation import towards

        return towards(previous, mean, self.hyper.pfedme_beta)
