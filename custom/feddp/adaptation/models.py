"""What a finished run leaves to a hospital outside: K personal models and the global one, each weight held once."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from feddp.errors import InputError
from feddp.files import NETWORK, RESULTS, SHARED, read_results, site_folder
from feddp.methods import METHODS
from feddp.methods.aggregation import Spec, Tensors, average
from feddp.networks.header import outline
from feddp.networks.metadata import Metadata
from feddp.networks.weights import read_network
from feddp.plan.schema import Plan
from feddp.reading import short

GLOBAL = "global"
FACTS = ("network", "channels", "classes", "labels", "size")


@dataclass(frozen=True)
class Models:
    """M = K+1 models of one network: the sites' by name, then GLOBAL.

    Attributes:
        names: the M names, in the order of the stacks' first dimension.
        stacks: every tensor of the network by name, (M, ...): the only copy of the weights. Nobody writes to them.
        facts: of the networks' files: network, channels, classes (JSON), labels, size; and layers (JSON), if there are any.
    """

    names: tuple[str, ...]
    stacks: Tensors
    facts: Mapping[str, str]

    @classmethod
    def of(cls, personal: Mapping[str, Tensors], common: Tensors, facts: Mapping[str, str]) -> "Models":
        """K personal states by site, and the global one.

        Raises:
            InputError: a state is not exactly the network's, or holds a value that is not finite; names it.
        """
        states = {**{site: personal[site] for site in sorted(personal)}, GLOBAL: common}
        network = _metadata(facts).outline()
        spec = Spec.of(network, tuple(network))
        for name, state in states.items():
            spec.check(name, state)
        return cls(tuple(states), {key: torch.stack([s[key] for s in states.values()]) for key in network}, facts)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def channels(self) -> int:
        return _metadata(self.facts).channels

    @property
    def classes(self) -> tuple[str, ...]:
        return _metadata(self.facts).classes

    @property
    def labels(self) -> str:
        return self.facts["labels"]

    @property
    def size(self) -> int:
        """Pixels: what the images are resized to, on both sides."""
        return _metadata(self.facts).size

    def state(self, name: str) -> Tensors:
        """The tensors of one model, as views into the stacks."""
        return {key: stack[self.names.index(name)] for key, stack in self.stacks.items()}

    def mean(self) -> Tensors:
        """The uniform mean over all M models, every tensor of it; counters rounded."""
        return average({name: self.state(name) for name in self.names}, dict.fromkeys(self.names, 1.0))

    def network(self, state: Mapping[str, Tensor]) -> nn.Module:
        """A network of its own with the values of `state`, in eval mode, on the CPU."""
        network = _metadata(self.facts).build()
        network.load_state_dict(state)
        return network.eval()


def network_files(run: Path) -> dict[str, Path]:
    """The file of each site's own network in a finished run's `--out` folder. InputError where the folder holds no such run."""
    return {site: site_folder(run, site) / NETWORK for site in sorted(read_results(run)["sites"])}


def read_models(run: Path) -> Models:
    """The models of a finished run, from its `--out` folder. Layers that its method adds for all alike are part of them.

    The personal models are the sites' final networks; the global one, `completed`.

    Raises:
        InputError: the folder holds no finished run of a federation, or one whose method gives each site layers of its own.
    """
    files = network_files(run)
    for file in files.values():  # before any of them is read
        described(file)
    shared = read_shared(run)
    read = {site: read_network(file) for site, file in files.items()}
    state, facts = read[min(files)]
    refuse_layers(facts, state, shared, run)
    personal = {site: state for site, (state, _) in read.items()}
    return Models.of(personal, completed(shared, personal), facts)


def read_shared(run: Path) -> Tensors:
    """γ of the round that stage 1 of a finished run handed on. InputError where the run has none, or none that is shared."""
    if not (run / SHARED).exists():
        raise InputError(
            f"{run} has no {SHARED}: it is no federation's run, or an older one; run `feddp run` again with a federated method"
        )
    return some(read_network(run / SHARED)[0], run)


def some(shared: Tensors, run: Path) -> Tensors:
    """`shared` itself. InputError where it is empty: what the sites have in common would be a network that nobody trained."""
    if not shared:
        raise InputError(f"{run}: its method shares nothing, so there is no global model to start from; name another run")
    return shared


def plan_of(run: Path, results: Mapping[str, Any]) -> Plan:
    """The plan of a finished run, from its results.json. InputError where it says none, or one of a network out of bounds."""
    names = {field.name for field in fields(Plan)} & results.keys()
    sites = sorted({*results["sites"], *results.get("missing", ())})
    plan = Plan.from_json({name: results[name] for name in names} | {"sites": sites})
    Metadata.of(run / RESULTS, plan.facts)
    return plan


def described(file: Path) -> Metadata:
    """What a network's file says of it; none of its tensors is read.

    Raises:
        InputError: it does not say all of FACTS, or one is unknown or out of range.
    """
    said = outline(file)[1]
    if lacking := [name for name in FACTS if name not in said]:
        raise InputError(f"{file} does not say its {', '.join(lacking)}; it is no network that feddp run left")
    if said.get("method", "fedavg") not in METHODS:
        raise InputError(f"{file}: unknown method {short(said['method'])!r}; the methods are {', '.join(METHODS)}")
    return Metadata.of(file, said)


def refuse_layers(facts: Mapping[str, str], state: Collection[str], shared: Collection[str], run: Path) -> None:
    """InputError where a network of `facts` with the tensors `state` has added layers that are not `shared`."""
    plain = _metadata({name: facts[name] for name in FACTS}).outline()
    if own := [name for name in state if name not in plain and name not in shared]:
        raise InputError(
            f"{run}: {facts.get('method')} gives every site layers of its own ({own[0]}, ...), which nobody outside has;"
            " adapt a run whose added layers, if any, are shared"
        )


def completed(shared: Tensors, personal: Mapping[str, Tensors]) -> Tensors:
    """The global model: γ of the round that stage 1 handed on, and for tensors that the method keeps private (FedDP's
    queries), which the server never had, the mean of the personal models'.

    Raises:
        InputError: there is no personal model, or the names of two differ.
    """
    own = {site: {key: value for key, value in state.items() if key not in shared} for site, state in personal.items()}
    return shared | average(own, dict.fromkeys(own, 1.0))


def _metadata(facts: Mapping[str, str]) -> Metadata:
    return Metadata.of(Path("the models' file"), facts)
