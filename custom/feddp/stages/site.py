"""A site of a run: its data, its network and its files on disk. The stages' site halves work on it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from feddp.data.folder import SiteFolder, facts_of, misfit
from feddp.data.loading import load
from feddp.errors import FedDPError, InputError
from feddp.methods.base import STAGES
from feddp.partition import Rule, chosen
from feddp.plan.resolve import build_method, build_network, partition_of
from feddp.plan.schema import Plan
from feddp.training.calibration import mean_scores
from feddp.training.device import usable
from feddp.training.loop import Batch, adamw, copy_of, frozen
from feddp.training.losses import segmentation_loss
from feddp.training.store import State, Store, Tensors, restore_optimizer

SLOTS = tuple(slot for slot in STAGES.values() if slot)
PEERS = "peers"  # the file of what consenting peers gave
Scores = dict[str, float]


def last_network(folder: Path) -> Path | None:
    """The file of the last network that a site's stages left in its `folder`, if there is one."""
    files = [folder / f"{slot}.safetensors" for slot in SLOTS]
    return next((file for file in reversed(files) if file.exists()), None)


class Site:
    """A site of a run. What it remembers between two tasks is on its disk, so any process can take the next step.

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

    # --- data --------------------------------------------------------------------------------------------------------

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

    # --- the network -------------------------------------------------------------------------------------------------

    def copy(self) -> Tensors:
        """The network's whole state, as it is now."""
        return copy_of(self.network)

    def received(self, shared: Mapping[str, Tensor], state: State) -> Tensors:
        """v_k = γ ∪ ρ_k: the whole network from shared tensors and a state's private ones, the first ones where it has none."""
        return self.partition.join(shared, state.private or self._first_private)

    def new_optimizer(self, lr: float, history: Tensors) -> torch.optim.AdamW:
        """An optimiser of the network that goes on from `history`, which may be empty."""
        optimizer = adamw(self.network, lr, self.plan.training.weight_decay)
        restore_optimizer(optimizer, self.network, history)
        return optimizer

    def only(self, train: Rule, freeze: Rule = ()) -> AbstractContextManager[None]:
        """Inside, nothing of the network changes but the roles `train`, if there are any, without the roles `freeze`."""
        still = chosen(self.network, freeze) if freeze else set()
        if train:
            still |= self.network.state_dict().keys() - chosen(self.network, train)
        return frozen(self.network, still) if still else nullcontext()

    def segmentation_loss(self, logits: Tensor, mask: Tensor) -> Tensor:
        """L_seg from logits and masks (B,C,H,W); a scalar."""
        return self._loss(logits, mask)

    def batch_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The method's loss of a batch from logits (B,C,H,W); a scalar."""
        return self.method.loss(self, logits, batch)

    def validate(self) -> Scores:
        """Mean Dice and IoU of the network over the validation images."""
        scores = mean_scores(self.network, self.validation)
        return {"dice": scores["dice"], "iou": scores["iou"]}

    # --- seeds -------------------------------------------------------------------------------------------------------

    def seed(self, *what: int | str) -> tuple[int | str, ...]:
        """What the seed of a draw at this site is made of; `what` says which draw it is."""
        own = (self._secret, self._job) if self._secret else ()
        return *own, self.plan.seed, self.name, *what

    def standing_seed(self, what: str) -> tuple[int | str, ...]:
        """The same for a draw that comes out alike in every job of a real site, whatever its id and its seed."""
        return (self._secret, self.name, what) if self._secret else self.seed(what)

    # --- networks on disk --------------------------------------------------------------------------------------------

    def save(self, slot: str) -> None:
        """Writes the network as a stage's result."""
        self.store.write(slot, self.network.state_dict(), **self.plan.facts, site=self.name)

    def restore(self, slot: str) -> None:
        """Loads a stage's result into the network."""
        self.network.load_state_dict(self.store.read(slot)[0])

    def slots(self, before: str = "") -> list[str]:
        """The results that are there, in the stages' order; only those of the stages before the slot `before`, if given."""
        earlier = takewhile(lambda slot: slot != before, SLOTS)
        return [slot for slot in earlier if self.store.has(slot)]

    def latest(self, before: str = "") -> str:
        """The last of `slots`.

        Raises:
            FedDPError: there is none.
        """
        slots = self.slots(before)
        if not slots:
            raise FedDPError(f"site {self.name}: stage 1 left no network here; the site was not there at its end")
        return slots[-1]
