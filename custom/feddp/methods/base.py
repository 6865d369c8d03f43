"""What a method declares: which tensors are private, which stages it has, what a round and a batch's loss are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from feddp.partition import NONE, Rule

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from feddp.data.loading import Batch, Sample
    from feddp.partition import Tensors
    from feddp.training.loop import BatchLoss
    from feddp.training.settings import Training
    from feddp.training.store import Store

SPECTRA, TRAIN, TUNE, HEADS, CALIBRATE = "spectra", "train", "tune", "heads", "calibrate"
# in the order they run; the file that each leaves a site's network in, "" where it leaves none
STAGES = {SPECTRA: "", TRAIN: "start", TUNE: "tuned", HEADS: "heads", CALIBRATE: "calibrated"}


class RunPlan(Protocol):
    """What a method may read of the plan (`feddp.plan.schema.Plan`), which is above the methods."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def labels(self) -> str: ...

    @property
    def rounds(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def sites(self) -> tuple[str, ...]: ...

    @property
    def training(self) -> Training: ...

    @property
    def hyper(self) -> Any: ...

    def place(self, site: str) -> int:
        """The position of a site among the plan's sites. InputError where it is not one of them."""


class AtSite(Protocol):
    """What a method's hooks may use of a site, in every stage."""

    name: str
    device: torch.device

    @property
    def plan(self) -> RunPlan: ...

    @property
    def network(self) -> nn.Module:
        """Trained in place."""

    @property
    def store(self) -> Store:
        """The site's own files; `store.record` writes to its log."""

    @property
    def samples(self) -> Sequence[Sample]:
        """The training images and masks."""

    def segmentation_loss(self, logits: Tensor, mask: Tensor) -> Tensor:
        """L_seg from logits and masks (B,C,H,W); a scalar."""


class Round(AtSite, Protocol):
    """What a method's `round` works with. What is in `personal_model` and in `memory` at its end is there in the next round."""

    phase: int  # of the round, from 0
    personal_model: Tensors  # a whole network beside the shared one; empty at first
    memory: Tensors  # whatever else the method remembers; empty at first

    def fit(
        self,
        epochs: int,
        train: Rule = (),
        freeze: Rule = (),
        loss: BatchLoss | None = None,
        steps: int = 1,
        after: Callable[[], None] = ...,
        forward: Callable[[Tensor], Tensor] | None = None,
    ) -> float:
        """Trains the network for `epochs` (`feddp.stages.round.LocalRound.fit`); returns the mean loss of the last one."""

    def copy(self) -> Tensors:
        """The network's whole state, as it is now."""

    def parameters(self, state: Mapping[str, Tensor]) -> Tensors:
        """The parameters, without the buffers, of a whole state, on this site's device."""

    def as_personal(self, start: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Inside, the personal model, with an optimiser of its own, is the network; `start` is its first state."""


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
    Hyper: type[Any] = NoHyper  # a frozen data class; its fields are reached by --set

    def __init__(self, hyper: Any):
        self.hyper = hyper

    @staticmethod
    def layers(plan: RunPlan) -> dict[str, dict[str, float]]:
        """What the method adds to the network: a name of feddp.networks.LAYERS with its options."""
        return {}

    @classmethod
    def rule(cls, plan: RunPlan) -> tuple[str, ...]:
        """What is private where the plan does not say so itself."""
        return cls.private

    def opened(self, site: AtSite) -> None:
        """Called once, when the site's network has been built."""

    def round(self, site: Round) -> float:
        """What a site does between receiving γ^t and sending γ_k, once a phase; returns the mean training loss."""
        return site.fit(epochs=site.plan.training.local_epochs)

    def loss(self, site: AtSite, logits: Tensor, batch: Batch) -> Tensor:
        """A batch's loss from logits (B,C,H,W), in every stage; a scalar."""
        return site.segmentation_loss(logits, batch["mask"])

    def receive_heads(self, site: AtSite, peers: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Called at every epoch of the stage HEADS, for methods that have it, with the consenting peers' heads by site."""

    def aggregate(self, previous: Mapping[str, Tensor], mean: dict[str, Tensor]) -> dict[str, Tensor]:
        """γ^{t+1} from γ^t and the mean over sites of γ_k, at the server."""
        return mean
