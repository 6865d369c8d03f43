"""FedBABU (Oh et al., ICLR 2022): the head stays at its common start, only the body is trained and shared.

At the end each site tunes its whole network alone.

Deviations: 20 epochs at 1e-4 (`tune_epochs`, `tune_lr`), ours, as for IGC's control.
"""

from __future__ import annotations

from feddp.methods.base import TRAIN, TUNE, Method, Round
from feddp.partition import HEAD


class FedBABU(Method):
    private = (HEAD,)
    stages = (TRAIN, TUNE)

    def round(self, site: Round) -> float:
        return site.fit(epochs=site.plan.training.local_epochs, freeze=(HEAD,))
