"""A hospital's stages at home, after the federation: tuning, calibration, evaluation. FLARE's executors call it."""

import csv
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feddp.errors import FedDPError
from feddp.methods.aggregation import Spec
from feddp.methods.base import CALIBRATE, HEADS, TRAIN, TUNE
from feddp.methods.order import require, state_before
from feddp.methods.results import VOLUMES, WHEN
from feddp.methods.spectra import SLOT as SPECTRA
from feddp.methods.trainer import START, Trainer
from feddp.partition import Rule
from feddp.plan.resolve import exchanged, head_names
from feddp.training.calibration import Report, Tuned, calibration_loss, tune, with_inconsistency
from feddp.training.loop import Batch, BatchLoss, predict
from feddp.training.metrics import Row, measure, summarize
from feddp.training.store import State, Tensors, by_site, together
from feddp.training.volumes import measure_volumes

TUNED, HEADED, CALIBRATED, PEERS = "tuned", "heads", "calibrated", "peers"
SLOT_OF = {TRAIN: START, TUNE: TUNED, HEADS: HEADED, CALIBRATE: CALIBRATED}  # each stage's network on disk, in their order
SLOTS = tuple(SLOT_OF.values())
Rows = dict[str, Row]  # by the name of an image, or of a case


def last_network(folder: Path) -> Path | None:
    """The file of the last network that a site's stages left in its `folder`, if there is one."""
    files = [folder / f"{slot}.safetensors" for slot in SLOTS]
    return next((file for file in reversed(files) if file.exists()), None)


class Site(Trainer):
    """A site of a run, from its first round to its evaluation."""

    # --- stage 2 ---------------------------------------------------------------------------------------------------

    def personal(self) -> Tensors:
        """What rebuilds this site's network for a peer that knows γ: given only with consent."""
        state, _ = self.store.read(self._latest(before=CALIBRATED))
        return {name: state[name] for name in exchanged(self.plan, self.partition)}

    def tune(self, train: Rule = (), report: Report = lambda epoch, loss, score: None) -> Tuned:
        """Local epochs at a reduced rate, without peers; of the roles `train` only, if any are given."""
        settings = self.plan.tuning
        self._restore(self._latest(before=TUNED))
        with self._only(train):
            return self._tune(TUNED, settings.tune_epochs, settings.tune_lr, self._batch_loss, self.samples, report)

    def calibrate(self, peers: Mapping[str, Tensors]) -> Tuned:
        """Inconsistency-guided calibration among `peers`, the personal tensors of other sites; λ = 0 without any.

        Raises:
            ContributionError: a peer's tensors are not exactly what rebuilds its network.
        """
        settings, samples, loss = self.plan.calibration, self.samples, self._batch_loss
        self._restore(self._latest(before=CALIBRATED))
        self.store.remove(PEERS)
        if peers and settings.lambda_ > 0:
            own = self.network.state_dict()
            spec = Spec.of(own, exchanged(self.plan, self.partition))
            for site, tensors in peers.items():
                spec.check(site, tensors)
            self.store.write(PEERS, together(peers))
            samples = with_inconsistency(self.network, self._peer_networks(), samples, settings.delta)
            loss = calibration_loss(loss, settings.lambda_, settings.delta)
        return self._tune(CALIBRATED, settings.calibration_epochs, settings.calibration_lr, loss, samples)

    def head(self, epoch: int) -> Tensors:
        """This site's segmentation head before `epoch` of FedLC's head calibration: given only with consent.

        Raises:
            PolicyError: the plan has no such epoch, or the state before it is gone.
        """
        self._open_heads(epoch)
        state = self.copy()
        return {name: state[name] for name in head_names(self.network)}

    def calibrate_heads(self, peers: Mapping[str, Tensors], epoch: int) -> Tuned:
        """One epoch, from 1, of FedLC's head calibration with the heads of `peers`; the best epoch so far is kept.

        The start is not among the candidates: without the calibration it would be another network.

        Its states on disk continue the count of rounds.

        Raises:
            FedDPError: a peer's tensors are not exactly a head, or it is not among the plan's sites; or as for `head`.
        """
        settings = self.plan.calibration
        spec = Spec.of(self.network.state_dict(), head_names(self.network))
        for site, tensors in peers.items():
            spec.check(site, tensors)
        state = self._open_heads(epoch)
        losses, scores = (state.memory[name].tolist() if state.memory else [] for name in ("losses", "scores"))
        scores = scores or [self._validate()["iou"]]
        scores += [float("-inf")] * (epoch - len(scores))  # epochs that this site missed
        self.method.receive_heads(self, peers)
        self.optimizer = self._new_optimizer(settings.heads_lr, state.optimizer)
        self._begin(self._exchanges + epoch)
        losses.append(self.fit(1, train=self.method.private))
        scores.append(self._validate()["iou"])
        best = scores.index(max(scores[1:]), 1)
        if best == epoch:
            self._save(HEADED)
        self.personal_model = {}
        self.memory = {"losses": torch.tensor(losses, dtype=torch.float64), "scores": torch.tensor(scores, dtype=torch.float64)}
        _, private = self.partition.split(self.network.state_dict())
        self._keep(self._exchanges + epoch, private, {self._exchanges + epoch - 1})
        self.store.record(HEADED, epoch=epoch, of=settings.calibration_epochs, loss=losses[-1], iou=scores[-1])
        return Tuned(losses, scores, best)

    @property
    def _exchanges(self) -> int:
        """The states that stage 1 leaves behind it."""
        return self.plan.rounds * self.plan.phases

    def _open_heads(self, epoch: int) -> State:
        """The network as it is before `epoch`; the site's state there, empty where this is its first."""
        require(self.name, "epoch", epoch, 1, self.plan.calibration.calibration_epochs)
        start, _ = self.store.read(self._latest(before=HEADED))
        state = state_before(self.name, self.store, self._exchanges + epoch - 1, f"epoch {epoch}", first=epoch == 1)
        if state.round <= self._exchanges:
            state = State(self._exchanges)
        self.network.load_state_dict(start | state.private)
        return state

    def _tune(
        self,
        slot: str,
        epochs: int,
        lr: float,
        loss: BatchLoss,
        samples: list[Batch],
        also: Report = lambda epoch, loss, score: None,
    ) -> Tuned:
        def report(epoch: int, loss: float, score: float) -> None:
            self.store.record(slot, epoch=epoch, of=epochs, loss=loss, iou=score)
            also(epoch, loss, score)

        training, seed = self.plan.training, self.chance(slot)
        tuned = tune(self.network, samples, self.validation, loss, training, epochs, lr, seed, self.stopped, report)
        self._save(slot)
        return tuned

    def _peer_networks(self) -> dict[str, Tensors]:
        """The peers' whole networks, rebuilt from γ of the common start and what each of them gave."""
        if not self.store.has(PEERS):
            return {}
        start, _ = self.store.read(START)
        return {site: start | given for site, given in by_site(self.store.read(PEERS)[0]).items()}

    # --- networks and evaluation -----------------------------------------------------------------------------------

    def _slots(self, before: str = "") -> list[str]:
        """The networks that are there, in the order of the stages; only those of the stages before `before`, if given."""
        earlier = takewhile(lambda slot: slot != before, SLOTS)
        return [slot for slot in earlier if self.store.has(slot)]

    def _latest(self, before: str = "") -> str:
        slots = self._slots(before)
        if not slots:
            raise FedDPError(f"site {self.name}: stage 1 left no network here; the site was not there at its end")
        return slots[-1]

    def _restore(self, slot: str) -> None:
        self.network.load_state_dict(self.store.read(slot)[0])

    def evaluate(self) -> dict[str, Any]:
        """Test metrics of this site's network before and after its last stage at home, and of its peers' networks.

        The values of single images go to `images.csv` here and nowhere else, those of single cases to `cases.csv`.

        Returns:
            {"before_calibration": summary, "final": summary, "peers": {site: summary}}, a summary as `metrics.summarize`;
            where the folder's images are slices of volumes, VOLUMES: {"before_calibration": summary, "final": summary}
            over its cases too.
        """
        final = self._latest()
        before = (self._slots(before=SLOT_OF[self.plan.stages[-1]]) or [final])[-1]
        measured = {slot: self._measure(self.store.read(slot)[0]) for slot in dict.fromkeys((before, final))}
        found = self._summaries("image", {slot: images for slot, (images, _) in measured.items()}, before, final)
        if self.folder.volumes:
            found[VOLUMES] = self._summaries("case", {slot: cases for slot, (_, cases) in measured.items()}, before, final)
        found["peers"] = {site: _summary(self._measure(state)[0]) for site, state in self._peer_networks().items()}
        for received in (PEERS, SPECTRA):  # of other sites: nothing here needs them any more
            self.store.remove(received)
        return found

    def _summaries(self, what: str, rows: Mapping[str, Rows], before: str, final: str) -> dict[str, Any]:
        """Writes the rows of each network to `<what>s.csv`; what may leave of them."""
        with open(self.store.folder / f"{what}s.csv", "w", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, ["network", what, *next(iter(rows[final].values()))])
            writer.writeheader()
            for slot, values in rows.items():
                writer.writerows({"network": slot, what: name, **row} for name, row in values.items())
        return {when: _summary(rows[slot]) for when, slot in zip(WHEN, (before, final), strict=True)}

    def _measure(self, state: Mapping[str, Tensor]) -> tuple[Rows, Rows]:
        """The metrics of every test image by its stem, and those of every case, where images are slices of volumes."""
        self.network.load_state_dict(state)
        rows, maps = [], []
        for part, batch in predict(self.network, self.test):
            rows += measure(part, batch["mask"])
            if self.folder.volumes:
                maps.append(part)
        images = dict(zip((sample["stem"] for sample in self.test), rows, strict=True))
        if not maps:
            return images, {}
        masks, cases = torch.stack([s["mask"] for s in self.test]), [s["patient"] for s in self.test]
        return images, measure_volumes(torch.cat(maps), masks, cases)


def _summary(rows: Rows) -> dict[str, dict[str, float]]:
    return summarize(list(rows.values()))
