"""The models of a finished run for an unseen site: K personal models and the global one, each weight in memory once."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from feddp.adaptation.choices import GLOBAL
from feddp.data.preparation import KEY, Preparation
from feddp.errors import InputError
from feddp.files import NETWORK, RESULTS, SHARED, read_results, site_folder
from feddp.methods import METHODS
from feddp.methods.aggregation import Spec, average
from feddp.networks.header import outline
from feddp.networks.metadata import Metadata
from feddp.networks.weights import read_network
from feddp.partition import Tensors
from feddp.plan.schema import Plan
from feddp.reading import short

REQUIRED = ("network", "channels", "classes", "labels", "size")


@dataclass(frozen=True)
class Models:
    """M = K+1 models of one network: the sites' models in the order of their names, then GLOBAL.

    Attributes:
        names: the M names, in the order of the stacks' first dimension.
        stacks: every tensor of the network by name, (M, ...): the only copy of the weights, read-only.
        metadata: metadata of the networks' files: network, channels, classes (JSON), labels, size, normalise, and layers
            (JSON) if any.
        prepared: the heights and widths to which sites resized their training images before the run, as far as they are known.
    """

    names: tuple[str, ...]
    stacks: Tensors
    metadata: Mapping[str, str]
    prepared: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        personal: Mapping[str, Tensors],
        common: Tensors,
        metadata: Mapping[str, str],
        prepared: frozenset[int] = frozenset(),
    ) -> "Models":
        """Returns the models from K personal states by site and the global state `common`.

        Raises:
            InputError: a state does not have exactly the network's tensors, or has a value that is not finite; names it.
        """
        states = {**{site: personal[site] for site in sorted(personal)}, GLOBAL: common}
        network = _metadata(metadata).outline()
        spec = Spec.of(network, tuple(network))
        for name, state in states.items():
            spec.check(name, state)
        return cls(tuple(states), {key: torch.stack([s[key] for s in states.values()]) for key in network}, metadata, prepared)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def channels(self) -> int:
        return _metadata(self.metadata).channels

    @property
    def classes(self) -> tuple[str, ...]:
        return _metadata(self.metadata).classes

    @property
    def labels(self) -> str:
        return self.metadata["labels"]

    @property
    def size(self) -> int:
        """Width and height of the network's input, in pixels."""
        return _metadata(self.metadata).size

    @property
    def normalise(self) -> str:
        """How an image becomes the network's input (`feddp.data.loading.network_input`)."""
        return _metadata(self.metadata).normalise

    def state(self, name: str) -> Tensors:
        """Returns the tensors of one model, as views into the stacks."""
        return {key: stack[self.names.index(name)] for key, stack in self.stacks.items()}

    def mean(self) -> Tensors:
        """Returns the uniform mean of every tensor over all M models; counters are rounded."""
        return average({name: self.state(name) for name in self.names}, dict.fromkeys(self.names, 1.0))

    def network(self, state: Mapping[str, Tensor]) -> nn.Module:
        """Returns a new network with the values of `state`, in eval mode, on the CPU."""
        network = _metadata(self.metadata).build()
        network.load_state_dict(state)
        return network.eval()


def network_files(run: Path) -> dict[str, Path]:
    """Returns {site: file of its final network} of a finished run's folder; raises InputError if the run is not finished."""
    return {site: site_folder(run, site) / NETWORK for site in sorted(read_results(run)["sites"])}


def read_models(run: Path) -> Models:
    """Returns the models of a finished run from its `--out` folder, with layers that the method adds at all sites.

    The personal models are the sites' final networks; the global model is `completed`.

    Raises:
        InputError: the folder holds no finished federated run, or its method gives each site layers of its own.
    """
    files = network_files(run)
    if gone := [site for site, file in files.items() if not file.exists()]:
        raise InputError(
            f"{run} has no network of {', '.join(gone)}: it ended without one, or `feddp runs slim` removed them; name another"
            " run, or remove its folder and run it again"
        )
    sizes = set()
    for file in files.values():  # checks all metadata before it reads tensors
        described(file)
        if (made := prepared(file)) and made.size:
            sizes.add(made.size)
    shared = read_shared(run)
    read = {site: read_network(file) for site, file in files.items()}
    state, metadata = read[min(files)]
    refuse_layers(metadata, state, shared, run)
    personal = {site: state for site, (state, _) in read.items()}
    return Models.of(personal, completed(shared, personal), metadata, frozenset(sizes))


def read_shared(run: Path) -> Tensors:
    """Returns γ of the round that stage 1 of a finished run selected; raises InputError if there is no γ or it is empty."""
    if not (run / SHARED).exists():
        raise InputError(
            f"{run} has no {SHARED}: it is not a federated run, an older one, or its networks were removed (`feddp runs slim`);"
            " name another run, or run it again with a federated method"
        )
    return some(read_network(run / SHARED)[0], run)


def some(shared: Tensors, run: Path) -> Tensors:
    """Returns `shared`; raises InputError if it is empty, because the global model would then be an untrained network."""
    if not shared:
        raise InputError(f"{run}: its method shares nothing, so there is no global model to start from; name another run")
    return shared


def plan_of(run: Path, results: Mapping[str, Any]) -> Plan:
    """Returns the plan of a finished run from its results.json, whichever version of this package ran it: its networks are used
    as they are. Raises InputError if it is missing or out of bounds."""
    names = {field.name for field in fields(Plan)} & results.keys() - {"behaviour"}
    sites = sorted({*results["sites"], *results.get("missing", ())})
    plan = Plan.from_json({name: results[name] for name in names} | {"sites": sites})
    Metadata.of(run / RESULTS, plan.metadata)
    return plan


def described(file: Path) -> Metadata:
    """Returns the metadata of a network's file without reading its tensors.

    Raises:
        InputError: an entry of REQUIRED is missing, unknown or out of range.
    """
    metadata = outline(file)[1]
    if lacking := [name for name in REQUIRED if name not in metadata]:
        raise InputError(f"{file}: its metadata lacks {', '.join(lacking)}; name a network that `feddp run` wrote")
    if metadata.get("method", "fedavg") not in METHODS:
        raise InputError(f"{file}: unknown method {short(metadata['method'])!r}; the methods are {', '.join(METHODS)}")
    return Metadata.of(file, metadata)


def prepared(network: Path) -> Preparation | None:
    """Returns how the training images of a network were made; None if its file does not say so.

    Raises:
        InputError: the file cannot be read, or says it in a way that is not ours.
    """
    text = outline(network)[1].get(KEY)
    try:
        return None if text is None else Preparation.of(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{network}: {KEY!r} in its metadata is wrong ({error}); name a network of `feddp run`") from None


def refuse_layers(metadata: Mapping[str, str], state: Collection[str], shared: Collection[str], run: Path) -> None:
    """Raises InputError if the tensors `state` of the network that `metadata` describes have added layers outside `shared`."""
    plain = _metadata({name: metadata[name] for name in REQUIRED}).outline()
    if own := [name for name in state if name not in plain and name not in shared]:
        raise InputError(
            f"{run}: {metadata.get('method')} gives every site layers of its own ({own[0]}, ...), which an unseen site does not"
            " have; adapt a run without added layers, or with shared ones"
        )


def completed(shared: Tensors, personal: Mapping[str, Tensors]) -> Tensors:
    """Returns the global model: `shared`, γ of the round that stage 1 selected, and the mean of the personal models' private
    tensors (FedDP's queries), which the server never receives.

    Raises:
        InputError: there is no personal model, or the tensor names of two models differ.
    """
    own = {site: {key: value for key, value in state.items() if key not in shared} for site, state in personal.items()}
    return shared | average(own, dict.fromkeys(own, 1.0))


def _metadata(metadata: Mapping[str, str]) -> Metadata:
    return Metadata.of(Path("the models' file"), metadata)
