"""A round at a site: the object that a method's `round` receives (`feddp.methods.base.Round`)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from feddp.data.loading import Sample
from feddp.partition import Rule, Tensors
from feddp.stages.site import Site
from feddp.training.loop import BatchLoss, fit_epoch
from feddp.training.seeds import seed_of
from feddp.training.store import State, optimizer_tensors

OPTIMIZER = "optimizer/"  # entry of a site's memory: the optimiser of the personal model


class LocalRound:
    """A round, or one of its phases, from the state before it; `state()` returns the state after it.

    Args:
        site: its network holds the tensors with which the round begins.
        before: the state that the round begins with.
        step: the number of phases before this one, over all rounds; seeds come from it.
        lr: the optimiser's learning rate.
        phase: which of the round's phases it is.
    """

    def __init__(self, site: Site, before: State, step: int, lr: float, phase: int = 0):
        self.name, self.plan, self.network, self.store = site.name, site.plan, site.network, site.store
        self.device, self.phase = site.device, phase
        self.personal_model, self.memory = dict(before.personal), dict(before.memory)
        self._site, self._step, self._epochs = site, step, 0
        self._optimizer = site.new_optimizer(lr, before.optimizer)

    @property
    def samples(self) -> list[Sample]:
        return self._site.samples

    def fit(
        self,
        epochs: int,
        train: Rule = (),
        freeze: Rule = (),
        loss: BatchLoss | None = None,
        steps: int = 1,
        after: Callable[[], None] = lambda: None,
        forward: Callable[[Tensor], Tensor] | None = None,
    ) -> float:
        """Trains the network for `epochs`; returns the mean loss of the last one.

        Args:
            train: train only these roles; all roles if neither this nor `freeze` is given.
            freeze: do not train these roles.
            loss: the loss of a batch; default: the method's loss.
            steps: optimiser steps per batch; `after` is called after them.
            forward: computes the input of `loss` from a batch of images; default: the network's logits.

        Raises:
            InputError: a role is unknown or selects no tensor, or the loss is not finite.
        """
        mean, site = float("nan"), self._site
        with site.only(train, freeze):
            for _ in range(epochs):
                # counted over the round, so that a second call of `fit` draws other samples than the first
                seed = seed_of(*site.seed(self._step, self._epochs))
                mean = fit_epoch(
                    self.network,
                    self._optimizer,
                    site.samples,
                    loss or site.batch_loss,
                    self.plan.training,
                    seed,
                    site.stopped,
                    steps,
                    after,
                    forward,
                )
                self._epochs += 1
        return mean

    def copy(self) -> Tensors:
        """The network's whole state, as it is now."""
        return self._site.copy()

    def parameters(self, state: Mapping[str, Tensor]) -> Tensors:
        """The parameters, without the buffers, of a whole state, on this site's device."""
        return {name: state[name].to(self.device) for name, _ in self.network.named_parameters()}

    @contextmanager
    def as_personal(self, start: Mapping[str, Tensor]) -> Iterator[None]:
        """Within this context the network is the site's personal model with its own optimiser; `start` is its first state."""
        network, optimizer = self.copy(), self._optimizer
        self.network.load_state_dict(self.personal_model or start)
        own = {key.removeprefix(OPTIMIZER): value for key, value in self.memory.items() if key.startswith(OPTIMIZER)}
        self._optimizer = self._site.new_optimizer(self.plan.training.lr, own)
        yield
        self.personal_model = self.copy()
        self.memory |= {f"{OPTIMIZER}{key}": v for key, v in optimizer_tensors(self._optimizer, self.network).items()}
        self.network.load_state_dict(network)
        self._optimizer = optimizer

    def segmentation_loss(self, logits: Tensor, mask: Tensor) -> Tensor:
        """L_seg from logits and masks (B,C,H,W); a scalar."""
        return self._site.segmentation_loss(logits, mask)

    def state(self) -> State:
        """The site's state after this step."""
        _, private = self._site.partition.split(self.network.state_dict())
        optimizer = optimizer_tensors(self._optimizer, self.network)
        return State(self._step + 1, private, self.personal_model, optimizer, self.memory)


def keep(site: Site, state: State, besides: set[int]) -> None:
    """Writes the state after a step.

    Older states, except those of the steps `besides`, are removed only if this step directly follows the latest: then the
    server has the answer to the step before. A repeated or early step removes none; if it left a state ahead of the others,
    these stay until the steps in order have reached it.
    """
    in_order = site.store.latest() == state.round - 1
    site.store.save_state(state)
    if in_order:
        site.store.prune_states({state.round} | besides)
