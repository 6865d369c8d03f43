"""A site's store on disk: it keeps the site's private tensors between rounds and processes.

plan.json                 the plan of the job that opened this folder; jobs with another plan are refused
samples.json              the numbers of training images that the sites have signed
terms.json                `data`, `private`, `consent`, `recipients` and `senders` of the policy under which the run began
initial.safetensors       the initial network, if the job brought one
state_00007.safetensors   the state after 7 rounds: private tensors, personal model, optimiser, memory of the method, and the
                          shared tensors with which the last of them began
start.safetensors         the whole network of the round that stage 1 selected; later stages add tuned, heads, calibrated
spectra.safetensors       amplitude spectra of other sites, received with consent (FedDG), removed after the evaluation
peers.safetensors         personal tensors of other sites, received with consent, removed after the evaluation
evaluation.json           the site's answer to the evaluation
images.csv, cases.csv     metrics per image and, if images are slices, per volume, of each class too; they never leave the site
record.jsonl              the log of the rounds, 64 MiB at most; the last lines of a longer one are in record.before.jsonl and
                          record.last.jsonl; it never leaves the site
masks/                    of an adaptation job: the masks, adapt.json and, with --score, scores.json; they never leave the site
"""

import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from feddp.errors import BadFile, Problem
from feddp.files import RECORD, append_event, writing
from feddp.limits import NETWORK_BYTES, STORED_BYTES
from feddp.logs import place_for, removed_line
from feddp.networks.weights import read_network, save_network
from feddp.partition import Tensors
from feddp.reading import short
from feddp.training.claim import AS_NEW, claim

_recording = threading.Lock()
_STATE = re.compile(r"state_(\d{5,})\.safetensors")
INITIAL = "initial"
EVALUATION = "evaluation.json"

GROUPS = ("private", "personal", "optimizer", "memory", "received")


@dataclass(frozen=True)
class State:
    """A site's state after `round` rounds.

    `personal` is a whole second network with the same tensor names, for methods that keep a personal model. `received` are the
    shared tensors with which the last of these rounds began: the next ones may not be far from them (`feddp.stages.movement`).
    """

    round: int
    private: Tensors = field(default_factory=dict)
    personal: Tensors = field(default_factory=dict)
    optimizer: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    received: Tensors = field(default_factory=dict)


class Store:
    """The files of one site in one job; each file is written whole or not at all."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.least = 0  # the first step that may be asked for; higher in a job that continues a run
        with writing(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def claim(self, plan: Mapping[str, Any]) -> None:
        """As `claim`, for this store's folder; an extension of the run starts without the results of its former end."""
        claim(self.folder, plan, extends=self._remove_results)

    def _remove_results(self) -> None:
        """Removes the stages' networks, what peers sent, and the evaluation: a site that is absent at the new end must not
        answer with those of the former end."""
        (self.folder / EVALUATION).unlink(missing_ok=True)
        for path in self.folder.glob("*.safetensors"):
            if path.stem != INITIAL and not _STATE.fullmatch(path.name):
                path.unlink()

    def write(self, name: str, tensors: Mapping[str, Tensor], **metadata: str) -> None:
        save_network(self._path(name), tensors, metadata)

    def read(self, name: str) -> tuple[Tensors, dict[str, str]]:
        """Returns tensors and metadata of `name`.safetensors; raises InputError if the file is missing or damaged."""
        return read_kept(self._path(name), STORED_BYTES)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def save_state(self, state: State) -> None:
        tensors = {f"{group}/{key}": value for group in GROUPS for key, value in getattr(state, group).items()}
        self.write(f"state_{state.round:05d}", tensors, round=str(state.round))

    def load_state(self, round: int) -> State:
        """Returns the state after `round` rounds, or an earlier one if the site missed rounds; empty before the first round.

        A damaged file is renamed, with a line in the log, if there is a state before it; that one is returned.

        Raises:
            BadFile: the file is damaged and there is no state before it.
        """
        known = sorted(r for r in self._rounds() if r <= round)
        while known:
            name = f"state_{known.pop():05d}"
            try:
                return self._state(name)
            except BadFile as bad:
                if not known and self.latest() > round:
                    raise  # without the file, the site would take its start for the state of a later round
                if not known:
                    remedy = f"{bad.problem.remedy}, or remove the file: this site's private tensors then start again"
                    raise BadFile(replace(bad.problem, remedy=remedy)) from bad
                what = f"{bad.problem.file}: {bad.problem.what}"
                self.record("damaged", message=f"{what}; it was renamed, and the state before it is used")
                self._path(name).rename(self._path(name).with_suffix(".damaged"))
        return State(0)

    def read_state(self, round: int) -> State:
        """Returns the state after exactly `round` rounds; raises InputError if its file is missing or damaged."""
        return self._state(f"state_{round:05d}")

    def _state(self, name: str) -> State:
        return _state(self._path(name), *self.read(name))

    def latest(self) -> int:
        """Returns the number of rounds before the latest state; 0 if there is no state."""
        return max(self._rounds(), default=0)

    def prune_states(self, keep: Iterable[int]) -> None:
        """Removes every state that `load_state` does not need for the rounds `keep`."""
        rounds = self._rounds()
        kept = {max((r for r in rounds if r <= wanted), default=None) for wanted in keep}
        for r in rounds:
            if r not in kept:
                self.remove(f"state_{r:05d}")

    def _rounds(self) -> list[int]:
        return sorted(int(m[1]) for m in map(_STATE.fullmatch, os.listdir(self.folder)) if m)

    def record(self, event: str, **values: Any) -> None:
        """Appends an event with its time to this site's log, or to that of its last lines (`feddp.logs`): who sends tasks can
        cause any number of them."""
        with _recording:
            path, removed = place_for(self.folder / RECORD)
            if removed:
                append_event(path, "removed_lines", message=removed_line(removed))
            append_event(path, event, **values)


def read_kept(path: Path, most: int = NETWORK_BYTES) -> tuple[Tensors, dict[str, str]]:
    """As `read_network`, for a file of a run's own folder, which nobody can save again."""
    try:
        return read_network(path, most)
    except BadFile as bad:
        raise _damaged(path, bad.problem.what) from bad


def _damaged(path: Path, what: str) -> BadFile:
    return BadFile(Problem(path, what, AS_NEW.capitalize()))


def _state(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> State:
    """Returns the state in a file's content; raises BadFile if it is not one that `save_state` wrote."""
    round = metadata.get("round", "")
    if not re.fullmatch(r"[0-9]{1,9}", round):
        raise _damaged(path, f"is no state: its round is {short(repr(round))}")
    groups: dict[str, Tensors] = {group: {} for group in GROUPS}
    for key, value in tensors.items():
        group, _, name = key.partition("/")
        if group not in groups or not name:
            raise _damaged(path, f"is no state: {short(repr(key))} is no tensor of one")
        groups[group][name] = value
    return State(int(round), **groups)


def together(tensors: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
    """Returns {site: {tensor: value}} as {`<site>/<tensor>`: value}, for a file or a message."""
    return {f"{site}/{name}": value for site, own in tensors.items() for name, value in own.items()}


def by_site(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """Inverts `together`."""
    sites: dict[str, Tensors] = {}
    for key, value in tensors.items():
        site, _, name = key.partition("/")
        sites.setdefault(site, {})[name] = value
    return sites


def optimizer_tensors(optimizer: torch.optim.Optimizer, network: nn.Module) -> Tensors:
    """Returns an optimiser's state by parameter name: {`<parameter name>/<slot>`: value}."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    return {f"{names[p]}/{slot}": value for p, slots in optimizer.state.items() for slot, value in slots.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, network: nn.Module, tensors: Tensors) -> None:
    """Inverts `optimizer_tensors`: writes the state into a new optimiser of the same network."""
    parameters = dict(network.named_parameters())
    for key, value in tensors.items():
        name, slot = key.rsplit("/", 1)
        parameter = parameters[name]
        optimizer.state[parameter][slot] = value.to(parameter.device, copy=True)
