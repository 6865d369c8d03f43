"""One hospital's side of stage 1: its data, its network, what it remembers. Methods' rounds are written on it.

A round is a function of what the server sent, the site's stored state and the round's number; the result is on disk
before it is returned, so any process can take the next step.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor

from feddp.data.folder import SiteFolder, facts_of, misfit
from feddp.data.loading import load
from feddp.errors import InputError
from feddp.methods.order import require, state_before
from feddp.partition import Rule, chosen
from feddp.plan.resolve import build_method, build_network, partition_of
from feddp.plan.schema import Plan
from feddp.training.calibration import mean_scores
from feddp.training.device import usable
from feddp.training.loop import Batch, BatchLoss, adamw, copy_of, fit_epoch, frozen
from feddp.training.losses import segmentation_loss
from feddp.training.seeds import seed_of
from feddp.training.store import State, Store, Tensors, optimizer_tensors, restore_optimizer

START = "start"
OPTIMIZER = "optimizer/"  # in a site's memory: the personal model's own
Scores = dict[str, float]


class Trainer:
    """A site of a run, in stage 1; `feddp.methods.site.Site` adds the stages at home.

    Args:
        name: the site's name; seeds come from it.
        folder: its images and masks.
        plan: the run; the folder's channels, classes and labels must be the plan's.
        store: where its private tensors, its optimiser and its networks live.
        device: "cpu", "cuda" or "cuda:N".
        initial: a whole network's tensors to start from; the plan's seed decides where it is not given.
        secret: this site's own part of every seed that it draws by; without one, what it draws follows from the plan's seed.
        job: the job's id, which goes with the secret: two jobs of one seed, compared, would show the image that one left out.
        stopped: asked before every step; training ends with an error once it is true.

    Raises:
        InputError: the data set does not fit the plan, or the device is not there.
    """

    def __init__(
        self,
        name: str,
        folder: SiteFolder,
        plan: Plan,
        store: Store,
        device: str = "cpu",
        initial: Mapping[str, Tensor] | None = None,
        stopped: Callable[[], bool] = lambda: False,
        secret: str = "",
        job: str = "",
    ):
        if differing := misfit(folder, facts_of(plan)):
            found, wanted = differing
            raise InputError(
                f"site {name}: {folder.path / 'dataset.json'} says (channels, classes, labels) = {found}, the job {wanted};"
                " submit a job for this data set, or prepare the folder for the job's"
            )
        self.device = usable(device, f"site {name}: device", "correct it in the site's policy")
        self.name, self.folder, self.plan, self.store, self.stopped = name, folder, plan, store, stopped
        self._secret, self._job = secret, job
        self.method = build_method(plan)
        self.network = build_network(plan)
        if initial is not None:
            self.network.load_state_dict(initial)
        self.method.opened(self)
        self.partition = partition_of(plan, self.network)
        _, self._first_private = self.partition.split(self.network.state_dict())
        self._loss = segmentation_loss(plan.training.loss)
        self.network.to(self.device)
        if self.device.type == "cpu":
            torch.use_deterministic_algorithms(True)

    @cached_property
    def samples(self) -> list[Batch]:
        return self._split("train")

    @cached_property
    def validation(self) -> list[Batch]:
        return self._split(self.plan.training.selection)

    @cached_property
    def test(self) -> list[Batch]:
        return self._split("test")

    def _split(self, split: str) -> list[Batch]:
        samples = load(self.folder, split, self.plan.size)
        if not samples:
            raise InputError(f"site {self.name}: {self.folder.path / 'split.csv'} has no image in split {split}; add some")
        return samples

    # --- stage 1 ---------------------------------------------------------------------------------------------------

    def train(
        self, shared: Mapping[str, Tensor], round: int, keep: int | None = None, phase: int = 0
    ) -> tuple[Tensors, Scores]:
        """One round, or one of its phases: v_k = γ^t ∪ ρ_k^t, scored, trained, stored; returns γ_k and scalars.

        Args:
            shared: γ^t, exactly the shared tensors.
            round: t, from 0. The next one, or a later one where the site missed some; again the last one, or the first.
            keep: a round whose state must stay on disk, because it is the best so far.
            phase: from 0; each phase of the method's ends with an aggregation, and what it received is scored in the first.

        Returns:
            The site's shared tensors after training, and its metrics: the loss; from the second round on Dice and IoU of
            v_k as it was received; the number of training samples; the seconds it took.

        Raises:
            PolicyError: the plan has no such round or phase, `keep` is none that was scored, or the state that the round begins
                with is gone.
        """
        started = time.monotonic()
        phases = self.plan.phases
        require(self.name, "round", round, 0, self.plan.rounds - 1)
        require(self.name, "phase", phase, 0, phases - 1)
        if keep is not None:
            require(self.name, "keep", keep, 1, round)
        step = round * phases + phase
        state = state_before(self.name, self.store, step, f"round {round}", first=step == 0)
        received = self._received(shared, state)
        scores = {}
        if round and not phase:
            self.network.load_state_dict(state.personal or received)
            scores = self._validate()
        self.network.load_state_dict(received)
        self.optimizer = self._new_optimizer(self.plan.training.lr, state.optimizer)
        self.personal_model, self.memory, self.phase = dict(state.personal), dict(state.memory), phase
        self._begin(step)
        loss = self.method.round(self)
        mine, private = self.partition.split(self.network.state_dict())
        self._keep(step + 1, private, {step} | ({keep * phases} if keep is not None else set()))
        seconds = time.monotonic() - started
        metrics = {"loss": loss, **scores, "samples": float(len(self.samples)), "seconds": seconds}
        self.store.record("train", round=round, phase=phase, **metrics)
        return mine, metrics

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
        """Trains the network for `epochs`, for methods' `round`; returns the mean loss of the last epoch.

        Args:
            train: the only roles that are trained (all of the network if neither this nor `freeze` is given).
            freeze: the roles that are not.
            loss: of a batch; the method's own if not given.
            steps: optimiser steps on each batch, after which `after` is called.
            forward: from a batch's images to what `loss` is given; the network's logits if not given.

        Raises:
            InputError: a role is unknown or finds no tensor, or the loss is not finite.
        """
        mean = float("nan")
        with self._only(train, freeze):
            for _ in range(epochs):
                # counted over the whole round, so that a method's second call draws other samples than its first
                seed = seed_of(*self.chance(self._round, self._epochs))
                training, batch_loss = self.plan.training, loss or self._batch_loss
                mean = fit_epoch(
                    *(self.network, self.optimizer, self.samples, batch_loss, training, seed, self.stopped),
                    *(steps, after, forward),
                )
                self._epochs += 1
        return mean

    def _only(self, train: Rule, freeze: Rule = ()) -> AbstractContextManager[None]:
        """Inside, nothing of the network changes but the roles `train`, if there are any, without the roles `freeze`."""
        still = chosen(self.network, freeze) if freeze else set()
        if train:
            still |= self.network.state_dict().keys() - chosen(self.network, train)
        return frozen(self.network, still) if still else nullcontext()

    def copy(self) -> Tensors:
        """The network's whole state, as it is now."""
        return copy_of(self.network)

    def parameters(self, state: Mapping[str, Tensor]) -> Tensors:
        """The parameters, without the buffers, of a whole state, on this site's device."""
        return {name: state[name].to(self.device) for name, _ in self.network.named_parameters()}

    @contextmanager
    def as_personal(self, start: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the site's whole personal model, with an optimiser of its own, is the network; `start` is its first state."""
        network, optimizer = self.copy(), self.optimizer
        self.network.load_state_dict(self.personal_model or start)
        own = {key.removeprefix(OPTIMIZER): value for key, value in self.memory.items() if key.startswith(OPTIMIZER)}
        self.optimizer = self._new_optimizer(self.plan.training.lr, own)
        yield
        self.personal_model = self.copy()
        self.memory |= {f"{OPTIMIZER}{key}": v for key, v in optimizer_tensors(self.optimizer, self.network).items()}
        self.network.load_state_dict(network)
        self.optimizer = optimizer

    def segmentation_loss(self, logits: Tensor, mask: Tensor) -> Tensor:
        """L_seg from logits and masks (B,C,H,W); a scalar."""
        return self._loss(logits, mask)

    def _batch_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        return self.method.loss(self, logits, batch)

    def score(self, shared: Mapping[str, Tensor], round: int) -> Scores:
        """The validation scores of v̂_k = γ^r ∪ ρ_k^r, both of round r; of the personal model where the method keeps one.

        Raises:
            PolicyError: the plan has no γ of such a round.
        """
        require(self.name, "round", round, 0, self.plan.rounds)
        state = self.store.load_state(round * self.plan.phases)
        self.network.load_state_dict(state.personal or self._received(shared, state))
        scores = self._validate()
        self.store.record("score", round=round, **scores)
        return scores

    def adopt(self, shared: Mapping[str, Tensor], round: int) -> Scores:
        """Keeps v̂_k = γ^r ∪ ρ_k^r, both of round r, as what stage 1 hands on; returns its validation scores."""
        scores = self.score(shared, round)
        self._save(START)
        return scores

    # --- what every stage needs ------------------------------------------------------------------------------------

    def chance(self, *what: int | str) -> tuple[int | str, ...]:
        """What the seed of a draw at this site is made of; `what` says which draw it is."""
        own = (self._secret, self._job) if self._secret else ()
        return *own, self.plan.seed, self.name, *what

    def standing(self, what: str) -> tuple[int | str, ...]:
        """The same for a draw that comes out alike in every job of a real site, whatever its id and its seed."""
        return (self._secret, self.name, what) if self._secret else self.chance(what)

    def _received(self, shared: Mapping[str, Tensor], state: State) -> Tensors:
        return self.partition.join(shared, state.private or self._first_private)

    def _begin(self, round: int) -> None:
        self._round, self._epochs = round, 0

    def _new_optimizer(self, lr: float, history: Tensors) -> torch.optim.AdamW:
        optimizer = adamw(self.network, lr, self.plan.training.weight_decay)
        restore_optimizer(optimizer, self.network, history)
        return optimizer

    def _keep(self, round: int, private: Tensors, besides: set[int]) -> None:
        """Writes the state after `round` rounds.

        Only where this is the round after the latest are states removed, all but those of the rounds `besides`: who asks for it
        has the answer to the one before. A round that was pushed, or comes again or too early, removes none; where it left a
        state ahead of the others, these stay until the rounds in order have come as far.
        """
        in_order = self.store.latest() == round - 1
        optimizer = optimizer_tensors(self.optimizer, self.network)
        self.store.save_state(State(round, private, self.personal_model, optimizer, self.memory))
        if in_order:
            self.store.prune_states({round} | besides)

    def _save(self, slot: str) -> None:
        self.store.write(slot, self.network.state_dict(), **self.plan.facts, site=self.name)

    def _validate(self) -> Scores:
        scores = mean_scores(self.network, self.validation)
        return {"dice": scores["dice"], "iou": scores["iou"]}
