"""A site of a run: its images, its network and its files on disk. The stages' site halves use it."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feddp.data.folder import SiteFolder, metadata_of, misfit
from feddp.data.loading import Batch, Sample, load
from feddp.data.placing import placed
from feddp.errors import FedDPError, InputError, SharedError
from feddp.files import write_json
from feddp.methods.base import STAGES
from feddp.partition import Rule, Tensors, chosen, constants
from feddp.plan.resolve import build_method, build_network
from feddp.plan.schema import Plan
from feddp.protocol import WHEN, Sent
from feddp.stages.movement import Reach
from feddp.stages.tensors import Expected
from feddp.training.calibration import mean_scores
from feddp.training.columns import METRICS, columns
from feddp.training.device import require_bfloat16, usable
from feddp.training.graphs import leave
from feddp.training.loop import adamw, copy_of, frozen
from feddp.training.losses import segmentation_loss
from feddp.training.store import EVALUATION, State, Store, restore_optimizer

SLOTS = tuple(slot for slot in STAGES.values() if slot)
PEERS = "peers"  # the file with the consenting peers' tensors
Scores = dict[str, float]


def last_network(folder: Path) -> Path | None:
    """Returns the file of the last network in a site's `folder`, or None."""
    files = [folder / f"{slot}.safetensors" for slot in SLOTS]
    return next((file for file in reversed(files) if file.exists()), None)


class Site:
    """A site of a run. Its state between two tasks is on disk, so any process can answer the next task.

    Args:
        name: the site's name; seeds come from it.
        folder: its images and masks.
        plan: the run; the folder's channels, classes and labels must be the plan's.
        store: the files of its private tensors, its optimiser and its networks.
        device: "cpu", "cuda" or "cuda:N".
        initial: the whole network to start from; default: initialised from the plan's seed.
        secret: this site's part of every seed; without it, all draws follow from the plan's seed.
        run: the run's id, used with the secret: otherwise a comparison of two runs with one seed reveals an image that one
            of them left out.
        warned: told, each time that it is seen, what this site's administrator should look at.
        stopped: asked before every step and in every batch of an evaluation, which raise Stopped once it returns true.

    Raises:
        InputError: the data set does not fit the plan, no image can select a round or is a test image, or the device is not
            available.
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
        run: str = "",
        warned: Callable[[str], None] = lambda why: None,
    ):
        if differing := misfit(folder, metadata_of(plan)):
            found, wanted = differing
            raise InputError(
                f"site {name}: {folder.path / 'dataset.json'} says (channels, classes, labels) = {found}, the job {wanted};"
                " submit a job for this data set, or prepare the folder for the job's"
            )
        for split in (plan.training.selection, "test"):  # before a round is trained, not after it or at the end
            if lacking := folder.lacking(split):
                raise InputError(f"site {name}: {lacking}")
        self.device = usable(device, f"site {name}: device", "correct it in the site's policy")
        if plan.training.precision_compute == "bfloat16":
            require_bfloat16(self.device, f"site {name}")
        self.name, self.folder, self.plan, self.store, self.stopped = name, folder, plan, store, stopped
        self._secret, self._run, self.warned = secret, run, warned
        self._may_place, self._has_placed = True, False  # images on the GPU
        self.method = build_method(plan)
        self.network = build_network(plan)
        if initial is not None:
            self.network.load_state_dict(initial)
        self.method.opened(self)
        self.expected = Expected(plan, self.network)
        self.partition = self.expected.partition
        self._first_shared, self._first_private = self.partition.split(self.network.state_dict())
        self._constants = constants(self.network)
        self._loss = segmentation_loss(plan.training.loss)
        self.network.to(self.device)

    # --- data --------------------------------------------------------------------------------------------------------

    @cached_property
    def samples(self) -> list[Sample]:
        return self.placed(self._split(*self.plan.training.trained_on))

    @cached_property
    def validation(self) -> list[Sample]:
        return self.placed(self._split(self.plan.training.selection))

    @cached_property
    def test(self) -> list[Sample]:
        return self._split("test")

    def leave_gpu(self) -> bool:
        """Keeps the images in the CPU's memory, and the network without graphs, from now on, in this process.

        Returns:
            whether that frees memory of the GPU.
        """
        left, self._may_place, self._has_placed = self._has_placed, False, False
        if left:
            for name in ("samples", "validation"):
                self.__dict__.pop(name, None)  # loaded again when needed
        return leave(self.network) or left

    def placed(self, samples: list[Sample]) -> list[Sample]:
        """Returns the samples on the GPU if there is room (`feddp.data.placing`), else as they are."""
        found = placed(samples, self.device) if self._may_place else samples
        self._has_placed |= found is not samples
        return found

    def _split(self, *splits: str) -> list[Sample]:
        if lacking := self.folder.lacking(*splits):
            raise InputError(f"site {self.name}: {lacking}")
        normalise = self.plan.training.normalise
        return [sample for split in splits for sample in load(self.folder, split, self.plan.size, normalise)]

    # --- the network -------------------------------------------------------------------------------------------------

    def copy(self) -> Tensors:
        """The network's whole state, as it is now."""
        return copy_of(self.network)

    def require_near(self, shared: Mapping[str, Tensor], state: State, step: int, steps: float) -> None:
        """Refuses shared tensors that honest training cannot have reached from those that this site knows, and warns of
        those that it can have reached, but was never seen to.

        Args:
            shared: γ before `step`, or after the last one.
            state: the state before it. Without one, the tensors are compared with the first ones, which this site computes.
            steps: of an epoch, by which a combination of contributions is bounded (`feddp.stages.movement.steps_of`).

        Raises:
            SharedError: names the tensor, by how much it moved, and how far it could have.
        """
        known, since = (state.received, step - state.round + 1) if state.received else (self._first_shared, step)
        reach = Reach(self.expected, steps)
        if beyond := reach.beyond(known, shared, since):
            what = "the first ones" if not state.received else "those that it knows"
            raise SharedError(
                f"site {self.name}: it refuses the shared tensors of step {step}, {since} after {what}: {beyond}. Ask the"
                " server's operator where they come from; a job may have a larger `movement` or `statistics`"
            )
        if far := reach.drifted(self._first_shared, shared, step, since):
            self.warned(
                f"the shared tensors of step {step} are unusually far from the first ones: {far} by then; honest runs stayed"
                " below 0.15. A server that steers them to where they copy training images looks like this. Ask who runs it, or"
                " stop this site's client to take no further part (docs/explanation/who-gets-what.md)"
            )

    def received(self, shared: Mapping[str, Tensor], state: State) -> Tensors:
        """Returns v_k = γ ∪ ρ_k: shared tensors and the state's private tensors, or the initial ones if the state has none.

        Constant buffers are this site's own: those that return may be rounded, or carry a privacy filter's noise.

        Raises:
            InputError, ContributionError: `shared` is not exactly the shared tensors, with values in their domains.
        """
        joined = self.partition.join(shared, state.private or self._first_private)
        self.expected.check(Sent.SHARED, f"{self.name} was sent γ", shared)
        return joined | self._constants

    def new_optimizer(self, lr: float, history: Tensors) -> torch.optim.AdamW:
        """Returns an optimiser of the network that continues from `history`, which may be empty."""
        optimizer = adamw(self.network, lr, self.plan.training.weight_decay)
        restore_optimizer(optimizer, self.network, history)
        return optimizer

    def only(self, train: Rule, freeze: Rule = ()) -> AbstractContextManager[None]:
        """Within this context only the roles `train` (default: all) without the roles `freeze` are trained."""
        still = chosen(self.network, freeze) if freeze else set()
        if train:
            still |= self.network.state_dict().keys() - chosen(self.network, train)
        return frozen(self.network, still) if still else nullcontext()

    def segmentation_loss(self, logits: Tensor, mask: Tensor) -> Tensor:
        """L_seg from logits and masks (B,C,H,W); a scalar."""
        return self._loss(logits, mask)

    def batch_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the method's loss of a batch from logits (B,C,H,W); a scalar."""
        return self.method.loss(self, logits, batch)

    def validate(self) -> Scores:
        """Returns mean Dice and IoU of the network over the validation images."""
        return mean_scores(self.network, self.validation)

    # --- seeds -------------------------------------------------------------------------------------------------------

    def seed(self, *what: int | str) -> tuple[int | str, ...]:
        """Returns the parts of the seed of a draw at this site; `what` names the draw."""
        own = (self._secret, self._run) if self._secret else ()
        return *own, self.plan.seed, self.name, *what

    def standing_seed(self, what: str) -> tuple[int | str, ...]:
        """Returns the parts of a seed for a draw that is the same in every job of a real site."""
        return (self._secret, self.name, what) if self._secret else self.seed(what)

    # --- networks on disk --------------------------------------------------------------------------------------------

    def save(self, slot: str) -> None:
        """Writes the network as the result of a stage; later stages' results, and an evaluation, are of an earlier one."""
        self._remove(SLOTS[SLOTS.index(slot) + 1 :])
        self.store.write(slot, self.network.state_dict(), **self.plan.metadata, **self.folder.metadata, site=self.name)

    def forget(self, slots: Collection[str]) -> None:
        """Removes the results `slots`, which do not count, the peers' tensors behind them, and an evaluation of them."""
        self.store.remove(PEERS)
        if unused := [slot for slot in self.slots() if slot in slots]:
            self._remove(unused)
            self.store.record("removed", networks=unused, message="the server has no answer to the stage that made them")

    def _remove(self, slots: Iterable[str]) -> None:
        self._evaluation.unlink(missing_ok=True)
        for slot in slots:
            self.store.remove(slot)

    def restore(self, slot: str) -> None:
        """Loads a stage's result into the network."""
        self.network.load_state_dict(self.store.read(slot)[0])

    @property
    def _evaluation(self) -> Path:
        return self.store.folder / EVALUATION

    def evaluated(self) -> dict[str, Any] | None:
        """Returns the evaluation of the present results, if there was one; not one of a version with other metrics."""
        if not self._evaluation.exists():
            return None
        stored: dict[str, Any] = json.loads(self._evaluation.read_text(encoding="utf-8"))
        return stored if tuple(stored[WHEN[-1]]) == columns(METRICS, self.plan.classes) else None

    def keep_evaluation(self, found: dict[str, Any]) -> None:
        """Stores the evaluation of the present results."""
        write_json(self._evaluation, found)

    def slots(self, before: str = "") -> list[str]:
        """Returns the existing results in the stages' order; with `before`, only those of stages before that slot."""
        earlier = takewhile(lambda slot: slot != before, SLOTS)
        return [slot for slot in earlier if self.store.has(slot)]

    def latest(self, before: str = "") -> str:
        """Returns the last of `slots`.

        Raises:
            FedDPError: there is no result.
        """
        slots = self.slots(before)
        if not slots:
            raise FedDPError(f"site {self.name}: stage 1 left no network here; the site was absent at its end")
        return slots[-1]
