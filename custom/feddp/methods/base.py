"""What a method declares: which tensors are private, which stages it has, what a round and a batch's loss are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from feddp.partition import NONE

if TYPE_CHECKING:
    from torch import Tensor

    from feddp.methods.site import Site
    from feddp.plan.schema import Plan

SPECTRA, TRAIN, TUNE, HEADS, CALIBRATE = "spectra", "train", "tune", "heads", "calibrate"
STAGES = (SPECTRA, TRAIN, TUNE, HEADS, CALIBRATE)  # in the order they run


@dataclass(frozen=True)
class NoHyper:
    """A method without hyper-parameters of its own."""


class Method:
    """Federated averaging of what is shared; subclasses declare what differs."""

    private: tuple[str, ...] = (NONE,)  # the rule of feddp.partition
    own: tuple[str, ...] = ()  # of these, the roles that no setting may share: averaged, a site's own layers would be nobody's
    stages: tuple[str, ...] = (TRAIN,)
    personal = False  # a whole personal model beside the shared one, in `site.personal_model`: it is evaluated and deployed
    phases = 1  # of a round, each ended by an aggregation; `site.phase` says which it is
    federated = True  # False: it needs all images in one place, so that no job can carry it
    Hyper: type = NoHyper  # a frozen data class; its fields are reached by --set

    def __init__(self, hyper: Any):
        self.hyper = hyper

    @staticmethod
    def layers(plan: Plan) -> dict[str, dict[str, float]]:
        """What the method adds to the network: a name of feddp.networks.LAYERS with its options."""
        return {}

    @classmethod
    def rule(cls, plan: Plan) -> tuple[str, ...]:
        """What is private where the plan does not say so itself."""
        return cls.private

    def opened(self, site: Site) -> None:
        """Called once, when the site's network has been built."""

    def round(self, site: Site) -> float:
        """What a site does between receiving γ^t and sending γ_k, once a phase; returns the mean training loss."""
        return site.fit(epochs=site.plan.training.local_epochs)

    def loss(self, site: Site, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """A batch's loss from logits (B,C,H,W), in every stage; a scalar."""
        return site.segmentation_loss(logits, batch["mask"])

    def receive_heads(self, site: Site, peers: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Called at every epoch of the stage HEADS, for methods that have it, with the consenting peers' heads by site."""

    def aggregate(self, previous: Mapping[str, Tensor], mean: dict[str, Tensor]) -> dict[str, Tensor]:
        """γ^{t+1} from γ^t and the mean over sites of γ_k, at the server."""
        return mean
