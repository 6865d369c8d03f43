"""One hospital's side of a run: its data, its network, what it remembers. FLARE's executors call it, methods use it.

A round is a function of what the server sent, the site's stored state and the round's number; the result is on disk
before it is returned, so any process can take the next step.
"""

import csv
import json
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from feddp.data.folder import SiteFolder
from feddp.data.loading import load
from feddp.errors import FedDPError
from feddp.methods.aggregation import Spec
from feddp.methods.plan import Plan
from feddp.training.calibration import Tuned, calibration_loss, image_scores, mean_scores, tune, with_inconsistency
from feddp.training.loop import Batch, adamw, fit_epoch
from feddp.training.losses import segmentation_loss
from feddp.training.metrics import summarize
from feddp.training.seeds import seed_of
from feddp.training.store import State, Store, Tensors, optimizer_tensors, restore_optimizer

START, TUNED, CALIBRATED, PEERS = "start", "tuned", "calibrated", "peers"
Scores = dict[str, float]


class Site:
    """A site of a run.

    Args:
        name: the site's name; seeds come from it.
        folder: its images and masks.
        plan: the run; the folder's channels, classes and labels must be the plan's.
        store: where its private tensors, its optimiser and its networks live.
        device: "cpu", "cuda" or "cuda:N".
        initial: a whole network's tensors to start from; the plan's seed decides where it is not given.
        stopped: asked before every step; training ends with an error once it is true.

    Raises:
        FedDPError: the data set does not fit the plan, or the device is not there.
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
    ):
        wanted = (plan.channels, plan.classes, plan.labels)
        found = (folder.channels, folder.classes, folder.labels)
        if found != wanted:
            raise FedDPError(
                f"site {name}: {folder.path / 'dataset.json'} says (channels, classes, labels) = {found}, the job {wanted};"
                " submit a job for this data set, or prepare the folder for the job's"
            )
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise FedDPError(
                f"site {name}: device {device} cannot be used ({reason}); correct it in the site's policy"
            ) from None
        self.name, self.folder, self.plan, self.store, self.stopped = name, folder, plan, store, stopped
        self.method = plan.build_method()
        self.network = plan.build_network()
        if initial is not None:
            self.network.load_state_dict(initial)
        self.partition = plan.partition(self.network)
        _, self._first_private = self.partition.split(self.network.state_dict())
        self._loss = segmentation_loss(plan.training.loss)
        self.device = torch.device(device)
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
            raise FedDPError(f"site {self.name}: {self.folder.path / 'split.csv'} has no image in split {split}; add some")
        return samples

    # --- stage 1 ---------------------------------------------------------------------------------------------------

    def train(self, shared: Mapping[str, Tensor], round: int, keep: int | None = None) -> tuple[Tensors, Scores]:
        """One round: v_k = γ^t ∪ ρ_k^t, scored, trained, stored; returns γ_k and scalars.

        Args:
            shared: γ^t, exactly the shared tensors.
            round: t, from 0.
            keep: a round whose state must stay on disk, because it is the best so far.

        Returns:
            The site's shared tensors after training, and its metrics: the loss; from the second round on Dice and IoU of
            v_k as it was received; the number of training samples; the seconds it took.
        """
        started = time.monotonic()
        state = self._load(shared, round)
        scores = self._validate() if round else {}
        self.optimizer = adamw(self.network, self.plan.training.lr, self.plan.training.weight_decay)
        restore_optimizer(self.optimizer, self.network, state.optimizer)
        self.memory, self._round, self._epochs = dict(state.memory), round, 0
        loss = self.method.round(self)
        mine, private = self.partition.split(self.network.state_dict())
        optimizer = optimizer_tensors(self.optimizer, self.network)
        self.store.save_state(State(round + 1, private, optimizer, self.memory))
        self.store.prune_states({round, round + 1} | ({keep} if keep is not None else set()))
        seconds = time.monotonic() - started
        metrics = {"loss": loss, **scores, "samples": float(len(self.samples)), "seconds": seconds}
        self.store.record("train", round=round, **metrics)
        return mine, metrics

    def fit(self, epochs: int) -> float:
        """Trains the whole network for `epochs`, for methods' `round`; returns the mean loss of the last epoch."""
        loss = float("nan")
        for _ in range(epochs):
            # counted over the whole round, so that a method's second call draws other samples than its first
            seed = seed_of(self.plan.seed, self.name, self._round, self._epochs)
            loss = fit_epoch(
                self.network, self.optimizer, self.samples, self._batch_loss, self.plan.training, seed, self.stopped
            )
            self._epochs += 1
        return loss

    def segmentation_loss(self, logits: Tensor, mask: Tensor) -> Tensor:
        """L_seg from logits and masks (B,C,H,W); a scalar."""
        return self._loss(logits, mask)

    def _batch_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        return self.method.loss(self, logits, batch)

    def score(self, shared: Mapping[str, Tensor], round: int) -> Scores:
        """The validation scores of v̂_k = γ^r ∪ ρ_k^r, both of round r."""
        self._load(shared, round)
        scores = self._validate()
        self.store.record("score", round=round, **scores)
        return scores

    def adopt(self, shared: Mapping[str, Tensor], round: int) -> Scores:
        """Keeps v̂_k = γ^r ∪ ρ_k^r, both of round r, as what stage 1 hands on; returns its validation scores."""
        scores = self.score(shared, round)
        self._save(START)
        return scores

    def _load(self, shared: Mapping[str, Tensor], round: int) -> State:
        state = self.store.load_state(round)
        self.network.load_state_dict(self.partition.join(shared, state.private or self._first_private))
        return state

    # --- stage 2 ---------------------------------------------------------------------------------------------------

    def personal(self) -> Tensors:
        """What rebuilds this site's network for a peer that knows γ: given only with consent."""
        state, _ = self.store.read(self._latest(before=CALIBRATED))
        return {name: state[name] for name in self.plan.exchanged(self.partition)}

    def tune(self) -> Tuned:
        """Local epochs at a reduced rate, without peers."""
        settings = self.plan.tuning
        self._restore(self._latest(before=TUNED))
        return self._tune(TUNED, settings.tune_epochs, settings.tune_lr, self._batch_loss, self.samples)

    def calibrate(self, peers: Mapping[str, Tensors]) -> Tuned:
        """Inconsistency-guided calibration among `peers`, the personal tensors of other sites; λ = 0 without any.

        Raises:
            FedDPError: a peer's tensors are not exactly what rebuilds its network.
        """
        settings, samples, loss = self.plan.calibration, self.samples, self._batch_loss
        self._restore(self._latest(before=CALIBRATED))
        self.store.remove(PEERS)
        if peers and settings.lambda_ > 0:
            own = self.network.state_dict()
            spec = Spec.of(own, self.plan.exchanged(self.partition))
            for site, tensors in peers.items():
                spec.check(site, tensors)
            self.store.write(PEERS, {f"{site}/{name}": v for site, part in peers.items() for name, v in part.items()})
            samples = with_inconsistency(self.network, self._peer_networks(), samples, settings.delta)
            loss = calibration_loss(loss, settings.lambda_, settings.delta)
        return self._tune(CALIBRATED, settings.calibration_epochs, settings.calibration_lr, loss, samples)

    def _tune(self, slot: str, epochs: int, lr: float, loss: Callable[[Tensor, Batch], Tensor], samples: list[Batch]) -> Tuned:
        def report(epoch: int, loss: float, score: float) -> None:
            self.store.record(slot, epoch=epoch, of=epochs, loss=loss, iou=score)

        seed = (self.plan.seed, self.name, slot)
        training = self.plan.training
        tuned = tune(self.network, samples, self.validation, loss, training, epochs, lr, seed, self.stopped, report)
        self._save(slot)
        return tuned

    def _peer_networks(self) -> dict[str, Tensors]:
        """The peers' whole networks, rebuilt from γ of the common start and what each of them gave."""
        if not self.store.has(PEERS):
            return {}
        start, _ = self.store.read(START)
        networks: dict[str, Tensors] = {}
        for key, value in self.store.read(PEERS)[0].items():
            site, name = key.split("/", 1)
            networks.setdefault(site, dict(start))[name] = value
        return networks

    # --- networks and evaluation -----------------------------------------------------------------------------------

    def _slots(self, before: str = "") -> list[str]:
        """The networks that are there, in the order of the stages; only those of the stages before `before`, if given."""
        earlier = takewhile(lambda slot: slot != before, (START, TUNED, CALIBRATED))
        return [slot for slot in earlier if self.store.has(slot)]

    def _latest(self, before: str = "") -> str:
        slots = self._slots(before)
        if not slots:
            raise FedDPError(f"site {self.name}: stage 1 left no network here; the site was not there at its end")
        return slots[-1]

    def _save(self, slot: str) -> None:
        plan = self.plan
        facts = {"network": plan.network, "channels": str(plan.channels), "size": str(plan.size), "labels": plan.labels}
        facts |= {"method": plan.method, "seed": str(plan.seed), "site": self.name}
        self.store.write(slot, self.network.state_dict(), classes=json.dumps(plan.classes), **facts)

    def _restore(self, slot: str) -> None:
        self.network.load_state_dict(self.store.read(slot)[0])

    def _validate(self) -> Scores:
        scores = mean_scores(self.network, self.validation)
        return {"dice": scores["dice"], "iou": scores["iou"]}

    def evaluate(self) -> dict[str, Any]:
        """Test metrics of this site's network before and after its last stage at home, and of its peers' networks.

        The values of single images go to `images.csv` here and nowhere else.

        Returns:
            {"before_calibration": summary, "final": summary, "peers": {site: summary}}, a summary as `metrics.summarize`.
        """
        slots = self._slots()
        final = self._latest()
        rows = {slot: self._measure(self.store.read(slot)[0]) for slot in slots[-2:]}
        with open(self.store.folder / "images.csv", "w", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, ["network", "image", *rows[final][0]])
            writer.writeheader()
            for slot, values in rows.items():
                for sample, row in zip(self.test, values, strict=True):
                    writer.writerow({"network": slot, "image": sample["stem"], **row})
        peers = {site: summarize(self._measure(state)) for site, state in self._peer_networks().items()}
        self.store.remove(PEERS)
        before = next(iter(rows))
        return {"before_calibration": summarize(rows[before]), "final": summarize(rows[final]), "peers": peers}

    def _measure(self, state: Mapping[str, Tensor]) -> list[Scores]:
        self.network.load_state_dict(state)
        return image_scores(self.network, self.test)
