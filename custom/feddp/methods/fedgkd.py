"""FedGKD (Yao et al., 2021): FedAvg with distillation from recent global models.

L = L_seg + (γ/2) KL(ŷ_w̄ ‖ ŷ), γ = 0.2. The teacher w̄ is the mean of the last M global models, in eval mode, without
gradients.

Deviations: the KL is per pixel and class between Bernoulli variables, as sigmoid maps need (FedDP's released `fedgkd` feeds
sigmoid outputs to a KL over log-probabilities). M = 5 as in the original (1 in the released code). Each site remembers the
last M global models that it received, while the original's server sends their mean: half the traffic. A site that missed a
round averages those that it has.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from feddp.methods.base import Method, Round
from feddp.training.settings import require_bounds, require_not_negative, require_positive, setting

if TYPE_CHECKING:
    from torch import Tensor, nn

    from feddp.data.loading import Batch
    from feddp.partition import Tensors


@dataclass(frozen=True)
class FedGKDSettings:
    gkd_gamma: float = setting(0.2, "FedGKD: γ, twice the weight of the distillation")
    gkd_models: int = setting(5, "FedGKD: M, number of global models whose mean is the teacher", most=100)

    def __post_init__(self) -> None:
        require_bounds(self)
        require_not_negative(self, "gkd_gamma")
        require_positive(self, "gkd_models")


class FedGKD(Method):
    Hyper = FedGKDSettings
    hyper: FedGKDSettings

    def round(self, site: Round) -> float:
        import torch

        from feddp.training.losses import bernoulli_kl

        teacher = self._teacher(site)

        def distilled(logits: Tensor, batch: Batch) -> Tensor:
            with torch.no_grad():
                taught = torch.sigmoid(teacher(batch["image"]))
            return self.loss(site, logits, batch) + self.hyper.gkd_gamma / 2 * bernoulli_kl(taught, logits)

        return site.fit(epochs=site.plan.training.local_epochs, loss=distilled)

    def _teacher(self, site: Round) -> nn.Module:
        """Returns the mean of the received global models; stores those that the next round needs in the site's memory."""
        from feddp.methods.aggregation import average

        recent: dict[str, Tensors] = {}  # {age in rounds: global model}
        for key, value in site.memory.items():
            age, name = key.split("/", 1)
            recent.setdefault(age, {})[name] = value
        models = [site.copy(), *(recent[age] for age in sorted(recent, key=int))][: self.hyper.gkd_models]
        kept = models[: self.hyper.gkd_models - 1]
        site.memory = {f"{age}/{name}": value for age, model in enumerate(kept, 1) for name, value in model.items()}
        teacher = copy.deepcopy(site.network).eval().requires_grad_(False)
        ages = {f"{age:05d}": model for age, model in enumerate(models)}
        mean = average(ages, dict.fromkeys(ages, 1.0))
        teacher.load_state_dict(mean)
        return teacher
