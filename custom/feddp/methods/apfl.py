"""APFL (Deng et al., 2020, Algorithm 1): FedAvg, and beside it at every site a mix of the shared model with a local one.

w is trained and averaged as in FedAvg. The personal model is m_k = α_k v_k + (1 − α_k) w_k, a mix of parameters. The local
model v_k is trained on L_seg(m_k), so its gradient is α_k ∇L_seg(m_k). m_k is evaluated and deployed. With `apfl_adaptive`
α_k is trained too: α_k ← α_k − η ⟨v_k − w_k, ∇L_seg(m_k)⟩, clipped to [0, 1], where η is `lr`.

Deviations: the paper steps w_k and v_k in turn on each batch; here w_k is trained first, for `local_epochs` epochs, then v_k as
long, against the trained w_k. v_k has an AdamW of its own (the paper: SGD), which divides a gradient by its size, so that the
factor α_k in it hardly matters. α_k takes a plain gradient step on every batch; the authors' code takes one per round, and adds
0.02 α_k to the gradient. Their code mixes the two models' predictions; here, as in the paper, parameters are mixed. m_k's
batch-normalisation statistics follow its own passes. α_k starts at 0.5 and is fixed by default, as in the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from feddp.methods.base import Method, Round
from feddp.training.settings import require_bounds, require_not_negative, setting

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.partition import Tensors

ALPHA, LOCAL = "alpha", "local/"  # entries of a site's memory: α_k, and the parameters of v_k


@dataclass(frozen=True)
class APFLSettings:
    apfl_alpha: float = setting(
        0.5, "APFL: α, weight of the local model in the mix; where it starts, if it is adaptive", most=1
    )
    apfl_adaptive: bool = setting(False, "APFL: trains α at every site, with the learning rate lr")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_not_negative(self, "apfl_alpha")


class APFL(Method):
    personal = True
    Hyper = APFLSettings
    hyper: APFLSettings

    def round(self, site: Round) -> float:
        import torch
        from torch.func import functional_call

        received, epochs = site.copy(), site.plan.training.local_epochs
        loss = site.fit(epochs=epochs)
        w = site.parameters(site.copy())
        alpha = site.memory.get(ALPHA, torch.tensor(self.hyper.apfl_alpha)).to(site.device, copy=True)
        alpha.requires_grad_(self.hyper.apfl_adaptive)

        def mix() -> Tensors:
            return {name: w[name].lerp(v, alpha) for name, v in site.network.named_parameters()}

        def forward(images: Tensor) -> Tensor:
            logits: Tensor = functional_call(site.network, mix(), (images,))
            return logits

        @torch.no_grad()
        def adapt() -> None:
            if alpha.grad is not None:
                alpha.sub_(site.plan.training.lr * alpha.grad).clamp_(0, 1)
                alpha.grad = None

        local = {key.removeprefix(LOCAL): value for key, value in site.memory.items() if key.startswith(LOCAL)}
        site.personal_model = site.personal_model | local  # v_k, with the statistics of m_k
        with site.as_personal(start=received):
            site.fit(epochs=epochs, forward=forward, after=adapt)
            with torch.no_grad():
                mixed = {name: value.cpu() for name, value in mix().items()}
        site.memory |= {f"{LOCAL}{name}": site.personal_model[name] for name in mixed} | {ALPHA: alpha.detach().cpu()}
        site.personal_model = site.personal_model | mixed
        return loss
