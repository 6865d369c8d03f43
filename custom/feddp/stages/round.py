"""A round at a site, as a method's `round` works with it (`feddp.methods.base.Round`)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from feddp.partition import Rule
from feddp.stages.site import Site
from feddp.training.loop import BatchLoss, fit_epoch
from feddp.training.seeds import seed_of
from feddp.training.store import State, Tensors, optimizer_tensors

OPTIMIZER = "optimizer/"  # in a site's memory: the personal model's own


class LocalRound:
    """A round, or one of its phases, from the state before it; `state()` is the one after it.

    Args:
        site: its network holds what the round begins with.
        before: the state that the round begins with.
        step: the number of phases before this one, over all rounds; seeds come from it.
        lr: the optimiser's rate.
        phase: which of the round's phases it is.
    """

    def __init__(self, site: Site, before: State, step: int, lr: float, phase: int = 0):
        self.name, self.plan, self.network, self.store = site.name, site.plan, site.network, site.store
        self.device, self.phase = site.device, phase
        self.personal_model, self.memory = dict(before.personal), dict(before.memory)
        self._site, self._step, self._epochs = site, step, 0
        self._optimizer = site.new_optimizer(lr, before.optimizer)

    @property
    def samples(self) -> list[dict[str, Tensor]]:
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
            train: the only roles that are trained (all of the network if neither this nor `freeze` is given).
            freeze: the roles that are not.
            loss: of a batch; the method's own if not given.
            steps: optimiser steps on each batch, after which `after` is called.
            forward: from a batch's images to what `loss` is given; the network's logits if not given.

        Raises:
            InputError: a role is unknown or finds no tensor, or the loss is not finite.
        """
        mean, site = float("nan"), self._site
        with site.only(train, freeze):
            for _ in range(epochs):
                # counted over the whole round, so that a method's second call draws other samples than its first
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
        """Inside, the site's whole personal model, with an optimiser of its own, is the network; `start` is its first state."""
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

    Only where this is the step after the latest are states removed, all but those of the steps `besides`: who asks for it
    has the answer to the one before. A step that was pushed, or comes again or too early, removes none; where it left a
    state ahead of the others, these stay until the steps in order have come as far.
    """
    in_order = site.store.latest() == state.round - 1
    site.store.save_state(state)
    if in_order:
        site.store.prune_states({state.round} | besides)
