"""FedRep (Collins et al., ICML 2021, Algorithm 1): a shared representation, a private head, in two phases per round.

First the head is trained, with the body frozen; then the body, with the head frozen. (FedDP's released `fedrep` trains both
together: that is FedPer.)

Deviations: `head_epochs` is 1 (the paper takes several, up to 10; Wang et al., TMI 2024 does not state it), so that a round
costs two epochs. The frozen body is still in training mode: it normalises by each batch's own statistics without recording
them, and its dropout acts.
"""

from __future__ import annotations

from dataclasses import dataclass

from feddp.methods.base import Method, Round, RunPlan
from feddp.partition import HEAD
from feddp.training.settings import require_bounds, require_positive, setting


@dataclass(frozen=True)
class FedRepSettings:
    head_epochs: int = setting(1, "FedRep: epochs of the head, before the body's local_epochs", most=1_000)

    def __post_init__(self) -> None:
        require_bounds(self)
        require_positive(self, "head_epochs")


class FedRep(Method):
    private = (HEAD,)
    Hyper = FedRepSettings
    hyper: FedRepSettings

    def passes(self, plan: RunPlan) -> float:
        """Each tensor is trained in one of the two phases; a plan may share the head."""
        return max(self.hyper.head_epochs, plan.training.local_epochs)

    def round(self, site: Round) -> float:
        site.fit(epochs=self.hyper.head_epochs, train=(HEAD,))
        return site.fit(epochs=site.plan.training.local_epochs, freeze=(HEAD,))
