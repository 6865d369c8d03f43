"""FedNova (Wang et al., NeurIPS 2020): normalised averaging; a site does not weigh more because it takes more steps.

γ^{t+1} = γ^t − τ_eff Σ p_k (γ^t − γ_k)/τ_k. τ_k is the number of local steps of a round, τ_eff = Σ p_k τ_k. With weights
w_k = τ_eff p_k/τ_k and their sum s this is γ^t + s (Σ w_k γ_k / s − γ^t): a weighted mean, then a step s towards it or beyond
it, because s is at least 1. Where all τ_k are equal, it is FedAvg.

Deviations: the paper divides a site's change by ‖a_k‖₁, where a_k are the factors with which its gradients enter the change.
This is τ_k for SGD; with momentum it is another number. This package uses AdamW, for which the authors' code has no a_k: each
of its steps moves a parameter by about lr, so τ_k stands for it here too. AdamW keeps its moments from round to round, so
gradients of earlier rounds enter a round's change too, and τ_k does not count them; the authors' code sets the momentum to 0
after every round. The server computes τ_k from `batch`, `local_epochs` and the number of training samples that the site
states. A τ_k more than ten times above or below the sites' median counts as ten times (ours): otherwise one false number could
make s, and with it the step, as large as it likes. Of two sites the median is their mean, so there the bound starts at a ratio
of 19. p_k is 1/K (`aggregation=samples`: n_k/n, as in the paper). Batch normalisation's statistics are the mean with the
weights w_k (the authors' code does not average them). The median and the trimmed mean have no weights and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING

from feddp.methods.base import SAMPLES, UNIFORM, Method, RunPlan

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.training.settings import Training


MOST = 10.0


class FedNova(Method):
    aggregations = (UNIFORM, SAMPLES)

    def weights(self, plan: RunPlan, samples: Mapping[str, float]) -> dict[str, float]:
        shares = super().weights(plan, samples)
        steps = within({site: local_steps(plan.training, count) for site, count in samples.items()})
        total = sum(shares.values())
        effective = sum(shares[site] / total * steps[site] for site in shares)
        return {site: effective * shares[site] / total / steps[site] for site in shares}

    def aggregate(
        self, previous: Mapping[str, Tensor], mean: Mapping[str, Tensor], weights: Mapping[str, float]
    ) -> Mapping[str, Tensor]:
        from feddp.methods.aggregation import towards

        return towards(previous, mean, sum(weights.values()))


def within(steps: Mapping[str, int]) -> dict[str, float]:
    """Returns the steps, none of them more than MOST times above or below the sites' median."""
    middle = median(steps.values())
    return {site: min(max(count, middle / MOST), middle * MOST) for site, count in steps.items()}


def local_steps(training: Training, samples: float) -> int:
    """Returns the optimiser's steps of a round at a site with so many training samples."""
    from feddp.data.loading import steps_in_an_epoch

    return training.local_epochs * steps_in_an_epoch(int(samples), training.batch)
