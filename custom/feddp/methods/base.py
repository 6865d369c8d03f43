"""What a method declares: which tensors are private, which stages it has, what a round and a batch's loss are."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from feddp.partition import NONE

if TYPE_CHECKING:
    from feddp.methods.site import Site

TRAIN, TUNE, CALIBRATE = "train", "tune", "calibrate"


@dataclass(frozen=True)
class NoHyper:
    """A method without hyper-parameters of its own."""


class Method:
    """Federated averaging of what is shared; subclasses declare what differs."""

    private: tuple[str, ...] = (NONE,)  # the rule of feddp.partition
    stages: tuple[str, ...] = (TRAIN,)
    Hyper: type = NoHyper  # a frozen data class; its fields are reached by --set

    def __init__(self, hyper: Any):
        self.hyper = hyper

    def round(self, site: "Site") -> float:
        """What a site does between receiving γ^t and sending γ_k; returns the mean training loss."""
        return site.fit(epochs=site.plan.training.local_epochs)

    def loss(self, site: "Site", logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """A batch's loss from logits (B,C,H,W); a scalar."""
        return site.segmentation_loss(logits, batch["mask"])
