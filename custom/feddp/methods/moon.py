"""MOON (Li et al., CVPR 2021): FedAvg with a model-contrastive loss.

L = L_seg + μ L_con,   L_con = −log [e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ})],

with the cosine similarity sim. z is the representation of an image in the network in training, z_glob in the global model that
the site received (the positive), z_prev in the site's own model after its last training (the negative). The two others are in
eval mode, without gradients.

Deviations: the representation is the average over pixels of the encoder's deepest features; the paper's is the output of a
projection head between encoder and classifier, through which its prediction goes, and which no decoder here has. Only the
encoder of the last local model is kept. μ = 1, as in the released code: the paper tunes it for each data set. In a site's first
round there is no previous model, so L_con is left out, as in the released code (whose default is one previous model too). The
released code makes a new optimiser in every round; here AdamW keeps its moments.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from feddp.methods.base import Method, Round
from feddp.training.settings import require_bounds, require_not_negative, require_positive, setting

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.data.loading import Batch


@dataclass(frozen=True)
class MOONSettings:
    moon_mu: float = setting(1.0, "MOON: μ, weight of the contrastive loss; as the released code; the paper tunes it")
    moon_temperature: float = setting(0.5, "MOON: τ, divisor of the similarities, which lie in [-1, 1]", most=100)

    def __post_init__(self) -> None:
        require_bounds(self)
        require_not_negative(self, "moon_mu")
        require_positive(self, "moon_temperature")


class MOON(Method):
    Hyper = MOONSettings
    hyper: MOONSettings

    def round(self, site: Round) -> float:
        import torch

        from feddp.networks.parts import part
        from feddp.training.loop import copy_of
        from feddp.training.losses import model_contrast

        encoder, epochs = part(site.network, "encoder", "MOON"), site.plan.training.local_epochs
        if site.memory:
            received = copy.deepcopy(encoder).eval().requires_grad_(False)
            previous = copy.deepcopy(received)
            previous.load_state_dict(site.memory)
            own: list[Tensor] = []  # of the last pass

            def keep(module: Any, images: Any, features: list[Tensor]) -> None:
                own[:] = [_pooled(features)]

            def contrasted(logits: Tensor, batch: Batch) -> Tensor:
                with torch.no_grad():
                    positive, negative = (_pooled(model(batch["image"])) for model in (received, previous))
                contrast = model_contrast(own[0], positive, negative, self.hyper.moon_temperature)
                return self.loss(site, logits, batch) + self.hyper.moon_mu * contrast

            with encoder.register_forward_hook(keep):
                loss = site.fit(epochs=epochs, loss=contrasted)
        else:
            loss = site.fit(epochs=epochs)
        site.memory = copy_of(encoder)
        return loss


def _pooled(features: list[Tensor]) -> Tensor:
    """Returns the representation z (B, width): the average over pixels of the deepest features."""
    return features[-1].float().mean(dim=(2, 3))
