"""pFedMe (Dinh et al., NeurIPS 2020, Algorithm 1), as in (Jiang et al., TMI 2023): a personal model by Moreau envelopes.

On every batch θ ≈ argmin L_seg(θ) + (λ/2) ‖θ − w_k‖² by a few inner steps, then w_k ← w_k − ηλ (w_k − θ). The sites send w_k,
the server takes (1−β) w + β mean(w_k). θ is the personal model: it is evaluated and deployed.

Deviations: the inner steps are AdamW's (the authors' code: SGD), from the last θ, which starts at the received w. η is 0.05,
ours, so that w moves three quarters of the way to θ (ηλ = 0.75); at the authors' 0.005 w hardly moves in the number of rounds
that (Wang et al., TMI 2024) and (Jiang et al., TMI 2023) train. w's batch-normalisation statistics follow θ's by the same outer
step: θ's own are never sent. β above 1, which the paper also tries, would extrapolate variances and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from feddp.errors import InputError
from feddp.methods.base import Method, Round
from feddp.training.settings import require_bounds, require_positive, setting

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.data.loading import Batch


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
        if self.pfedme_beta > 1:
            raise InputError(f"pfedme_beta={self.pfedme_beta} must be at most 1; correct pfedme_beta")


class PFedMe(Method):
    personal = True
    Hyper = PFedMeSettings
    hyper: PFedMeSettings

    def round(self, site: Round) -> float:
        import torch

        from feddp.training.losses import squared_distance

        hyper, w = self.hyper, {name: value.clone() for name, value in site.network.state_dict().items()}

        def near(logits: Tensor, batch: Batch) -> Tensor:
            return self.loss(site, logits, batch) + hyper.pfedme_lambda / 2 * squared_distance(site.network, w)

        @torch.no_grad()
        def outer() -> None:
            for name, theta in site.network.state_dict().items():
                if theta.is_floating_point():
                    w[name] -= hyper.pfedme_eta * hyper.pfedme_lambda * (w[name] - theta)
                else:
                    w[name].copy_(theta)

        loss = site.fit(epochs=site.plan.training.local_epochs, loss=near, steps=hyper.inner_steps, after=outer)
        site.personal_model = site.copy()
        site.network.load_state_dict(w)
        return loss

    def aggregate(self, previous: Mapping[str, Tensor], mean: dict[str, Tensor]) -> dict[str, Tensor]:
        floating = {name: value for name, value in previous.items() if value.is_floating_point()}
        return mean | {name: value.lerp(mean[name], self.hyper.pfedme_beta) for name, value in floating.items()}
