"""IOP-FL inside (Jiang et al., TMI 2023): FedAvg, and beside it a personal model accumulated over the rounds.

P_k^0 = w_k^1, then P_k ← τ w_k + (1−τ) P_k, where w_k is the site's model after each round's local training and τ = 0.9. P_k
is evaluated and deployed; nothing more travels. (After the first round P_k is, by definition, what was sent.)

Deviations: the update follows the paper's text on τ (a higher τ weighs the current round more; τ = 1 discards all history)
and the authors' code, whose alpha is 1−τ. The mean over sites is uniform (`aggregation=samples` is the released code's).
Batch normalisation's running statistics are accumulated like weights; its counters are the last round's. AdamW and the loss
are this package's, and AdamW's state is kept over the rounds; the authors' code makes a new Adam (amsgrad) in every round.
"""

from __future__ import annotations

from dataclasses import dataclass

from feddp.methods.base import Method, Round
from feddp.training.settings import require_bounds, require_positive, setting


@dataclass(frozen=True)
class IOPFLSettings:
    tau: float = setting(0.9, "IOP-FL: weight of the current round in the personal model; 1 discards all history", most=1)

    def __post_init__(self) -> None:
        require_bounds(self)
        require_positive(self, "tau")


class IOPFL(Method):
    personal = True
    Hyper = IOPFLSettings
    hyper: IOPFLSettings

    def round(self, site: Round) -> float:
        loss = site.fit(epochs=site.plan.training.local_epochs)
        trained, history = site.copy(), site.personal_model
        accumulated = (
            {name: history[name].lerp(value, self.hyper.tau) for name, value in trained.items() if value.is_floating_point()}
            if history
            else {}
        )
        site.personal_model = trained | accumulated
        return loss
