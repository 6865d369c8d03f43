"""A site's own memory on disk: what is private stays here, and survives the process.

plan.json                 of the job that opened this folder: no other job's is served from it
initial.safetensors       the whole network that the job brought, if it did: what this site starts from
state_00007.safetensors   after 7 rounds: private tensors, a whole personal model, the optimiser, what the method remembers
start.safetensors         the whole network that stage 1 handed on; later stages add tuned, heads, calibrated
spectra.safetensors       amplitude spectra of other sites, received with consent (FedDG), removed after the evaluation
peers.safetensors         other sites' personal tensors, received with consent, removed after the evaluation
images.csv, cases.csv     metrics of single images, and of single volumes where images are slices: they never leave
record.jsonl              the log of rounds: it never leaves
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

Tensors = dict[str, Tensor]
_STATE = re.compile(r"state_(\d{5,})\.safetensors")
_PLAN = "plan.json"
INITIAL = "initial"


GROUPS = ("private", "personal", "optimizer", "memory")


@dataclass(frozen=True)
class State:
    """A site's state after `round` rounds.

    `personal` is a whole network, beside the shared one and under its names, for methods that keep such a model.
    """

    round: int
    private: Tensors = field(default_factory=dict)
    personal: Tensors = field(default_factory=dict)
    optimizer: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)


class Store:
    """The files of one site in one job, each written whole or not at all."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def claim(self, plan: Mapping[str, Any]) -> None:
        """Keeps the plan that the folder is first opened with. A job's id is the server's word: were another plan let in under
        the same id, its rule would decide over what this one keeps private.

        Raises:
            PolicyError: the folder is another plan's, or holds tensors and does not say whose.
        """
        path, said = self.folder / _PLAN, json.dumps(plan, indent=2, sort_keys=True) + "\n"
        if path.exists():
            first, now = json.loads(path.read_text(encoding="utf-8")), json.loads(said)
            if wrong := sorted(key for key in first.keys() | now.keys() if first.get(key) != now.get(key)):
                key = wrong[0]
                raise PolicyError(
                    f"{self.folder} is that of a job with {key}={first.get(key)!r}, and this job of the same id says"
                    f" {now.get(key)!r}: it is not let near what is stored here; submit it as a new job"
                )
        elif any(self.folder.glob("*.safetensors")):
            raise PolicyError(f"{self.folder} holds tensors and does not say of which plan; submit the job anew")
        else:
            write_text(path, said)

    def write(self, name: str, tensors: Mapping[str, Tensor], **metadata: str) -> None:
        save_network(self._path(name), tensors, metadata)

    def read(self, name: str) -> tuple[Tensors, dict[str, str]]:
        """The tensors and the metadata of `name`.safetensors; InputError where it is missing or broken."""
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
        """The state after `round` rounds, or the latest before it where the site missed some; empty at the start."""
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
        """How many rounds the latest state is after; 0 where there is none."""
        return max(self._rounds(), default=0)

    def prune_states(self, keep: Iterable[int]) -> None:
        """Removes every state that `load_state` of a round in `keep` would not read."""
        rounds = self._rounds()
        kept = {max((r for r in rounds if r <= wanted), default=None) for wanted in keep}
        for r in rounds:
            if r not in kept:
                self.remove(f"state_{r:05d}")

    def _rounds(self) -> list[int]:
        return sorted(int(m[1]) for m in map(_STATE.fullmatch, os.listdir(self.folder)) if m)

    def record(self, event: str, **facts: Any) -> None:
        """Appends a line to this site's own log, with the time."""
        append_event(self.folder / RECORD, event, **facts)


def together(tensors: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
    """{site: {tensor: value}} -> `<site>/<tensor>`, for a file or a message."""
    return {f"{site}/{name}": value for site, own in tensors.items() for name, value in own.items()}


def by_site(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """The inverse of `together`."""
    sites: dict[str, Tensors] = {}
    for key, value in tensors.items():
        site, _, name = key.partition("/")
        sites.setdefault(site, {})[name] = value
    return sites


def optimizer_tensors(optimizer: torch.optim.Optimizer, network: nn.Module) -> Tensors:
    """An optimiser's state by parameter name: `<parameter name>/<slot>`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    return {f"{names[p]}/{slot}": value for p, slots in optimizer.state.items() for slot, value in slots.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, network: nn.Module, tensors: Tensors) -> None:
    """The inverse of `optimizer_tensors`, onto a fresh optimiser of the same network."""
    parameters = dict(network.named_parameters())
    for key, value in tensors.items():
        name, slot = key.rsplit("/", 1)
        parameter = parameters[name]
        # a step counter stays on the CPU, where AdamW expects it
        optimizer.state[parameter][slot] = value.clone() if slot == "step" else value.to(parameter.device, copy=True)


def require_job_id(job: str) -> None:
    """InputError for what is no job's id, and would lead out of the site's folder of jobs."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", str(job)):
        raise InputError(f"{job!r} is no job's id; say that of the finished run")
