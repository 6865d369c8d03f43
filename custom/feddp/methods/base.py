"""What a method declares: which tensors are private, which stages it has, what a round and a batch's loss are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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

# how the server combines the sites' contributions: a mean, weighted or not, or a robust statistic (`aggregation.combine`)
AGGREGATIONS = UNIFORM, SAMPLES, MEDIAN, TRIMMED = "uniform", "samples", "median", "trimmed"
LEAST = 3  # contributions among which one can be told from the others: what MEDIAN, TRIMMED and `norm_factor` need
SPECTRA, TRAIN, TUNE, HEADS, CALIBRATE = "spectra", "train", "tune", "heads", "calibrate"
# in the order in which they run: {stage: file in which it leaves a site's network, "" if it leaves none}
STAGES = {SPECTRA: "", TRAIN: "start", TUNE: "tuned", HEADS: "heads", CALIBRATE: "calibrated"}
LOCAL_STAGES = frozenset((TUNE, HEADS, CALIBRATE))  # after the rounds


def round_of(start: str, stages: Iterable[str]) -> str:
    """The round that the networks are of, or go on from: `start`, or of auto the last if a local stage follows, else best.

    Source: Wang et al., TMI 2024, Algorithm 1 (last) and IV-B (best).
    """
    return start if start != "auto" else ("last" if LOCAL_STAGES & set(stages) else "best")


class RunFederation(Protocol):
    """The part of the federation's settings that a method may read (`feddp.plan.schema.Federation`)."""

    @property
    def aggregation(self) -> str: ...


class RunPlan(Protocol):
    """The part of the plan that a method may read (`feddp.plan.schema.Plan`; the package plan is above the methods)."""

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
    def federation(self) -> RunFederation: ...

    @property
    def hyper(self) -> Any: ...

    def place(self, site: str) -> int:
        """Returns the index of a site among the plan's sites; raises InputError if it is not one of them."""


class AtSite(Protocol):
    """The part of a site that a method's hooks may use, in every stage."""

    name: str
    device: torch.device

    @property
    def plan(self) -> RunPlan: ...

    @property
    def network(self) -> nn.Module:
        """Trained in place."""

    @property
    def store(self) -> Store:
        """The site's files; `store.record` writes to its log."""

    @property
    def samples(self) -> Sequence[Sample]:
        """The training images and masks. Their tensors lie on the network's device or on the CPU."""

    def segmentation_loss(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Returns L_seg of logits and masks (B,C,H,W), a scalar."""


class Round(AtSite, Protocol):
    """The site in a method's `round`. `personal_model` and `memory` are saved at its end and restored in the next round."""

    phase: int  # the phase of the round, from 0
    personal_model: Tensors  # a whole second network beside the shared one; empty before the first round
    memory: Tensors  # any other tensors that the method remembers; empty before the first round

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
        """Returns a copy of the network's whole state."""

    def parameters(self, state: Mapping[str, Tensor]) -> Tensors:
        """Returns the parameters, without the buffers, of a whole state, on this site's device."""

    def as_personal(self, start: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Makes the personal model, with an optimiser of its own, the network inside the block; `start` is its first state."""


@dataclass(frozen=True)
class NoHyper:
    """The hyper-parameters of a method that has none."""


class Method:
    """Federated averaging of the shared tensors; subclasses declare the differences."""

    private: tuple[str, ...] = (NONE,)  # the rule of feddp.partition
    own: tuple[str, ...] = ()  # private roles that no setting may share: these layers exist for one site
    stages: tuple[str, ...] = (TRAIN,)
    personal = False  # True: the method evaluates and deploys a whole personal model, `site.personal_model`
    phases = 1  # number of phases per round, each ended by an aggregation; `site.phase` is the current one
    aggregations: tuple[str, ...] = AGGREGATIONS  # the settings of `aggregation` with which the method is defined
    label = ""  # the method's name in tables of a comparison, where the name it is called by would claim more than it does
    best_per_site = False  # True: sites that share nothing deploy the best round of their own, not a common one
    uses_loss = True  # False: the setting `loss` has no part in its training
    # is raised, and never lowered, by a change after which an equal plan of this method and those that build on it alone gives
    # other results (`behaviour_of`)
    changed = 0
    federated = True  # False: the method needs all images in one place, so it cannot be a job
    Hyper: type[Any] = NoHyper  # a frozen data class; `--set` sets its fields

    def __init__(self, hyper: Any):
        self.hyper = hyper

    @staticmethod
    def layers(plan: RunPlan) -> dict[str, dict[str, float]]:
        """Returns the layers that the method adds to the network: {name in feddp.networks.LAYERS: options}."""
        return {}

    @classmethod
    def rule(cls, plan: RunPlan) -> tuple[str, ...]:
        """Returns the private rule for a plan without one."""
        return cls.private

    def passes(self, plan: RunPlan) -> float:
        """Returns how many steps of AdamW per batch of its images a site's round may move the shared tensors by, in one phase.

        A site refuses shared tensors that have moved further (`feddp.stages.movement`).
        """
        return plan.training.local_epochs

    @property
    def server_step(self) -> float:
        """How far `aggregate` may go beyond γ^t, in units of the furthest contribution; at least 1."""
        return 1.0

    def opened(self, site: AtSite) -> None:
        """Is called once, after the site's network has been built."""

    def round(self, site: Round) -> float:
        """Runs a site's training between receiving γ^t and sending γ_k, once per phase; returns the mean training loss."""
        return site.fit(epochs=site.plan.training.local_epochs)

    def loss(self, site: AtSite, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the loss of a batch from logits (B,C,H,W), a scalar; used in every stage."""
        return site.segmentation_loss(logits, batch["mask"])

    def receive_heads(self, site: AtSite, peers: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Is called at every epoch of the stage HEADS with the consenting peers' heads by site."""

    def weights(self, plan: RunPlan, samples: Mapping[str, float]) -> dict[str, float]:
        """Returns each site's weight in the mean, at the server, from the sites' numbers of training samples.

        The mean divides by the sum of the weights; the median and the trimmed mean do not use them.
        """
        by_samples = plan.federation.aggregation == SAMPLES
        return {site: count if by_samples else 1.0 for site, count in samples.items()}

    def aggregate(
        self, previous: Mapping[str, Tensor], mean: Mapping[str, Tensor], weights: Mapping[str, float]
    ) -> Mapping[str, Tensor]:
        """Returns the parameters of γ^{t+1}, at the server, from those of γ^t and their mean over the sites with `weights`.

        Buffers are always the mean's: a step beyond the mean could make a variance negative.
        """
        return mean
