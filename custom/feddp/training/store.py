"""A site's store on disk: it keeps the site's private tensors between rounds and processes.

plan.json                 the plan of the job that opened this folder; jobs with another plan are refused
initial.safetensors       the initial network, if the job brought one
state_00007.safetensors   the state after 7 rounds: private tensors, personal model, optimiser, memory of the method
start.safetensors         the whole network of the round that stage 1 selected; later stages add tuned, heads, calibrated
spectra.safetensors       amplitude spectra of other sites, received with consent (FedDG), removed after the evaluation
peers.safetensors         personal tensors of other sites, received with consent, removed after the evaluation
images.csv, cases.csv     metrics per image and, if images are slices, per volume; they never leave the site
record.jsonl              the log of the rounds; it never leaves the site
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from feddp.errors import InputError, PolicyError
from feddp.files import RECORD, append_event, write_text
from feddp.limits import STORED_BYTES
from feddp.networks.weights import read_network, save_network
from feddp.partition import Tensors

_STATE = re.compile(r"state_(\d{5,})\.safetensors")
_PLAN = "plan.json"
INITIAL = "initial"


GROUPS = ("private", "personal", "optimizer", "memory")


@dataclass(frozen=True)
class State:
    """A site's state after `round` rounds.

    `personal` is a whole second network with the same tensor names, for methods that keep a personal model.
    """

    round: int
    private: Tensors = field(default_factory=dict)
    personal: Tensors = field(default_factory=dict)
    optimizer: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)


class Store:
    """The files of one site in one job; each file is written whole or not at all."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def claim(self, plan: Mapping[str, Any]) -> None:
        """Saves the plan with which the folder is first opened, and refuses any other plan.

        The server chooses a job's id. With another plan under the same id, that plan's private rule would apply to the tensors
        stored here.

        Raises:
            PolicyError: the folder belongs to another plan, or holds tensors but no plan.
        """
        path, text = self.folder / _PLAN, json.dumps(plan, indent=2, sort_keys=True) + "\n"
        if path.exists():
            first, now = json.loads(path.read_text(encoding="utf-8")), json.loads(text)
            if wrong := sorted(key for key in first.keys() | now.keys() if first.get(key) != now.get(key)):
                key = wrong[0]
                raise PolicyError(
                    f"{self.folder} belongs to a job with {key}={first.get(key)!r}, but this job of the same id has"
                    f" {key}={now.get(key)!r}. Refused: the stored state belongs to another plan; submit the job as a new one"
                )
        elif any(self.folder.glob("*.safetensors")):
            raise PolicyError(f"{self.folder} holds tensors but no {_PLAN}; submit the job as a new one")
        else:
            write_text(path, text)

    def write(self, name: str, tensors: Mapping[str, Tensor], **metadata: str) -> None:
        save_network(self._path(name), tensors, metadata)

    def read(self, name: str) -> tuple[Tensors, dict[str, str]]:
        """Returns tensors and metadata of `name`.safetensors; raises InputError if the file is missing or broken."""
        return read_network(self._path(name), STORED_BYTES)

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
        """Returns the state after `round` rounds, or an earlier one if the site missed rounds; empty before the first round."""
        known = [r for r in self._rounds() if r <= round]
        if not known:
            return State(0)
        tensors, metadata = self.read(f"state_{known[-1]:05d}")
        groups: dict[str, Tensors] = {group: {} for group in GROUPS}
        for key, value in tensors.items():
            group, name = key.split("/", 1)
            groups[group][name] = value
        return State(int(metadata["round"]), **groups)

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

    def record(self, event: str, **facts: Any) -> None:
        """Appends an event with its time to this site's log."""
        append_event(self.folder / RECORD, event, **facts)


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
        # AdamW expects the step counter on the CPU
        optimizer.state[parameter][slot] = value.clone() if slot == "step" else value.to(parameter.device, copy=True)


def require_job_id(job: str) -> None:
    """Raises InputError if `job` is not a job's id; another text could lead out of the site's folder of jobs."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", str(job)):
        raise InputError(f"{job!r} is not a job's id; give the id of the finished run")
