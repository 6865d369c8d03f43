"""pFLFE (Xie et al., 2024): feature enhancement without labels, then supervised training, an aggregation after each.

The encoder E is shared; decoder D_k, with the head, and projector P_k are private. Phase 1 trains E and P_k on two views of
each image (Eq. 2, 3; `feddp.training.enhancement`); the target network is dropped after it. Phase 2 trains E and D_k on Dice
+ cross-entropy (Eq. 1). FC-pFLFE does both locally and aggregates once per round. Table 4: `enhance=false`;
`private=head,projector` shares the decoder, `private=decoder.1,head,projector` all of it but the level nearest the output.

Deviations: the paper states neither the target's momentum (0.99, BYOL's lower end), nor the projector's size (256-128), nor
the augmentations: ours; the crops are zooms into the image's centre. With PVTv2 as with U-Net, E is the encoder. One
optimiser serves both phases, as E is in both. There is no predictor, so the outputs may collapse: their spread is in the
site's record in each round, and the first round of a collapse is warned of in its log.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from feddp.files import RECORD, read_events
from feddp.methods.base import Method, Round, RunPlan
from feddp.partition import DECODER, HEAD, PROJECTOR
from feddp.training.settings import require_bounds, require_positive, setting

EVENT = "enhancement"  # of the site's record
COLLAPSED = 0.01  # as a fraction of the spread of outputs that fill the sphere evenly


@dataclass(frozen=True)
class PFLFESettings:
    ema: float = setting(0.99, "pFLFE: momentum of the target network", most=1)
    enhance: bool = setting(True, "pFLFE: the enhancement; false leaves only the supervised training (Table 4)")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_positive(self, "ema")


class PFLFE(Method):
    private = (DECODER, HEAD, PROJECTOR)
    phases = 2
    Hyper = PFLFESettings
    hyper: PFLFESettings

    @staticmethod
    def layers(plan: RunPlan) -> dict[str, dict[str, float]]:
        return {"projector": {}}

    def round(self, site: Round) -> float:
        if site.phase == 0:
            return self.enhancement(site)
        return site.fit(epochs=site.plan.training.local_epochs)

    def enhancement(self, site: Round) -> float:
        """Runs phase 1 and returns the mean loss, 0 if the phase is disabled."""
        from feddp.networks.projector import project
        from feddp.training.enhancement import Enhancement

        if not self.hyper.enhance:
            return 0.0
        phase = Enhancement(site.network, project, self.hyper.ema)
        epochs = site.plan.training.local_epochs
        loss = site.fit(epochs, loss=phase.loss, forward=phase.forward, after=phase.after)
        if _collapsed(phase.spread):
            before = (event for event in read_events(site.store.folder / RECORD) if event["event"] == EVENT)
            if not any(_collapsed(event["spread"]) for event in before):
                message = "site %s: pFLFE's outputs have collapsed (spread %.2g); lower ema or lr"
                logging.getLogger("feddp").warning(message, site.name, phase.spread)
        site.store.record(EVENT, loss=loss, spread=phase.spread)
        return loss


def _collapsed(spread: float | None) -> bool:
    return spread is not None and spread < COLLAPSED


class FCPFLFE(PFLFE):
    """FC-pFLFE (Xie et al., 2024, Sec. 2.3): both phases at the site, one aggregation per round."""

    phases = 1

    def passes(self, plan: RunPlan) -> float:
        return 2 * plan.training.local_epochs

    def round(self, site: Round) -> float:
        self.enhancement(site)
        return site.fit(epochs=site.plan.training.local_epochs)
