"""The plan of a run: the settings that a job carries and that every participant reads alike, validated on construction.

`feddp.plan.resolve` derives networks and tensors from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from hashlib import sha256
from typing import Any

from feddp.data.names import require_sites
from feddp.errors import InputError
from feddp.limits import CHANNELS, CLASSES, SIZE
from feddp.methods import METHODS
from feddp.methods.base import AGGREGATIONS, HEADS, LEAST, MEDIAN, SPECTRA, STAGES, TRAIN, TRIMMED, UNIFORM, round_of
from feddp.networks import NETWORKS
from feddp.networks.metadata import LABELS
from feddp.partition import ALL
from feddp.reading import shown
from feddp.training.settings import (
    COUNT,
    Calibration,
    Heads,
    Training,
    Tuning,
    defaults,
    from_settings,
    key,
    meanings,
    require_bounds,
    require_choice,
    require_most,
    require_name,
    require_not_negative,
    require_positive,
    setting,
)

# limits far above the need of a run, so that no job can keep a site busy for ever or fill its disk. Channels, classes and size
# have the limits of a network's file, so every trained network can be read
LARGEST = {"channels": CHANNELS, "size": SIZE, "rounds": 100_000, "seed": 2**63 - 1, "behaviour": 1_000}
# is raised by a change after which an equal plan trains on other images or gives other results: a hospital then approves anew,
# and no run is continued that began before it. A change of one method raises its `changed`, which is added
BEHAVIOUR = 4
LONGEST = {"classes": CLASSES, "stages": len(STAGES), "sites": COUNT}


# how far rounds can move the shared tensors (`feddp.stages.movement`)
MOVEMENT, STATISTICS = 7.3, 16.0


@dataclass(frozen=True)
class Federation:
    """Settings of the federation: how the server collects and aggregates the contributions."""

    aggregation: str = setting(
        UNIFORM,
        "uniform: the mean of the contributions (as in all four papers); samples: weighted by training samples; median: of each"
        " number; trimmed: the mean of each number without its lowest and its highest value. The last two need 3 answers",
    )
    norm_factor: float = setting(
        0.0, "refuses a contribution whose change ‖γ_k − γ‖ is above this many times the median; needs 3 answers; 0: none"
    )
    min_sites: int = setting(2, "valid answers that a task needs; `feddp job` and `run` set 3 for 3 sites or more", COUNT)
    task_timeout: int = setting(0, "seconds to wait for a site's answer; 0: until FLARE reports the site dead")
    start: str = setting("auto", "the round that stage 1 selects: last or best; auto: last if a stage follows, else best")
    precision: str = setting("float32", "type of the rounds' tensors on the wire; float16: half the bytes, rounded both ways")
    movement: float = setting(
        MOVEMENT,
        "how far a round may move a parameter, in units of lr times the steps of the sites with most images; what is further is"
        " refused, by the server and by every site; a site's privacy filter that adds noise may need more",
    )
    statistics: float = setting(STATISTICS, "the same of running means and variances, in standard deviations")
    private: tuple[str, ...] | None = setting(None, "the private roles, comma-separated; the method's roles if not set")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_choice(self, "aggregation", AGGREGATIONS)
        require_choice(self, "start", ("auto", "last", "best"))
        require_choice(self, "precision", ("float32", "float16"))
        require_positive(self, "min_sites", "movement", "statistics")
        require_not_negative(self, "task_timeout", "norm_factor")
        if 0 < self.norm_factor < 1:
            raise InputError(
                f"norm_factor={self.norm_factor} would refuse half of the sites; give 0, or a number of at least 1"
            )

    @property
    def half(self) -> bool:
        """Whether the tensors of the rounds travel in half precision."""
        return self.precision == "float16"


@dataclass(frozen=True)
class Plan:
    """Everything that defines a run, except the location of a site's data and a site's consent."""

    method: str
    network: str
    channels: int
    classes: tuple[str, ...]
    labels: str  # "nested" or "exclusive"
    size: int  # images are resized to size x size pixels
    rounds: int
    seed: int = 0
    stages: tuple[str, ...] = ()  # the method's stages if empty
    sites: tuple[str, ...] = ()  # the names of the sites, for methods that need a site's index
    weights: str = ""  # SHA-256 (`networks.weights.fingerprint`) of the initial tensors that the job brings; "" if none
    settings: dict[str, Any] = field(default_factory=dict)  # hyper-parameters that differ from their defaults
    behaviour: int | None = None  # what a version of this package does with equal settings (`behaviour_of`); None: this one

    def __post_init__(self) -> None:
        self._check_types()
        if self.method not in METHODS:
            raise InputError(f"unknown method {shown(self.method)}; known: {', '.join(METHODS)}")
        here = behaviour_of(self.method)
        if self.behaviour not in (None, here):
            raise InputError(
                f"behaviour={self.behaviour}: the plan was made for another version of FedDP (here: {here}); install the"
                " version that made the plan, or export the job anew with `feddp job`; for a run, choose another --out"
            )
        object.__setattr__(self, "behaviour", here)
        if self.network not in NETWORKS:
            raise InputError(f"unknown network {shown(self.network)}; known: {', '.join(NETWORKS)}")
        if self.weights and not re.fullmatch(r"[0-9a-f]{64}", self.weights):
            # a path would point to a file of the participant's machine
            raise InputError(
                f"weights={shown(self.weights)} is not a SHA-256 in hex: a plan holds the fingerprint of its initial tensors;"
                " export the job with `feddp job --weights`"
            )
        if self.labels not in LABELS:
            raise InputError(f"labels={shown(self.labels)} is unknown; choose one of {', '.join(LABELS)}")
        if self.rounds < 1:
            raise InputError(f"rounds={self.rounds}: a run needs at least 1 round; raise rounds")
        if self.seed < 0:
            raise InputError(f"seed={self.seed}: seeds are whole numbers from 0 on; correct seed")
        if self.channels < 1 or not self.classes:
            raise InputError(
                f"channels={self.channels}, {len(self.classes)} classes: a network needs at least one of each; correct the plan"
            )
        if self.size < 32 or self.size % 32:
            raise InputError(f"size={self.size}: the networks need a multiple of 32, at least 32; correct size")
        method = METHODS[self.method]
        stages = tuple(self.stages) or method.stages
        if list(stages) != [s for s in STAGES if s in stages] or TRAIN not in stages:
            raise InputError(
                f"stages {', '.join(stages)}: expected {TRAIN} and others of {', '.join(STAGES)}, in this order; correct them"
            )
        for stage in (SPECTRA, HEADS):
            if stage in stages and stage not in method.stages:
                raise InputError(f"stages {', '.join(stages)}: {self.method} does not use {stage}; leave it out")
        if not method.federated and len(stages) > 1:
            raise InputError(f"stages {', '.join(stages)}: {self.method} has no sites, so no stage can follow; leave them out")
        known = self.known_settings(self.method)
        for name in self.settings:
            if name not in known:
                raise InputError(f"unknown setting {shown(name)}; known for {self.method}: {', '.join(known)}")
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "classes", tuple(self.classes))
        object.__setattr__(self, "sites", tuple(self.sites))
        groups = (self.training, self.federation, self.tuning, self.calibration, self.heads, self.hyper)
        values = {key(name): value for group in groups for name, value in vars(group).items()}
        object.__setattr__(self, "settings", {name: values[name] for name in values if values[name] != known[name]})
        if self.federation.aggregation not in method.aggregations:
            allowed = " or ".join(method.aggregations)
            raise InputError(f"aggregation={self.federation.aggregation}: {self.method} needs {allowed}; set one of them")
        private = self.federation.private
        if private and not set(method.own) <= set(private):
            raise InputError(f"private={','.join(private)}: {self.method} keeps {', '.join(method.own)} private; add them")
        if self.sites and method.federated:
            self._check_sites()

    def _check_sites(self) -> None:
        """Raises InputError if the sites are too few for a robust rule, in which case no round could end."""
        count = len(self.sites)
        if count >= LEAST or self.rule == (ALL,):  # where nothing is shared, nothing is combined
            return
        several = {"aggregation": self.federation.aggregation in (MEDIAN, TRIMMED), "norm_factor": self.federation.norm_factor}
        for name in several:
            if several[name]:
                asked = f"{name}={self.settings[name]}"
                raise InputError(f"{asked} needs {LEAST} sites, but there are {count}; name more sites, or leave it out")

    def _check_types(self) -> None:
        """Raises InputError for the first entry of a wrong type; a job's JSON may be written by hand."""
        for name in ("method", "network", "labels", "weights"):
            if not isinstance(getattr(self, name), str):
                raise InputError(f"{name}={shown(getattr(self, name))} is not a text; correct the plan")
        for name in ("channels", "size", "rounds", "seed", *(("behaviour",) if self.behaviour is not None else ())):
            if type(getattr(self, name)) is not int:
                raise InputError(f"{name}={shown(getattr(self, name))} is not a whole number; correct the plan")
            require_most(name, abs(getattr(self, name)), LARGEST[name])
        for name in ("classes", "stages", "sites"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                raise InputError(f"{name}={shown(value)} is not a list of names; correct the plan")
            require_most(f"the number of {name}", len(value), LONGEST[name])
            for item in value:
                require_name(name, item)
            if name != "stages" and len(set(value)) < len(value):
                raise InputError(f"{name}={shown(value)} has a name twice; correct the plan")
        require_sites(self.sites)
        if not isinstance(self.settings, Mapping):
            raise InputError(f"settings={shown(self.settings)} is not an object of names and values; correct the plan")

    @cached_property
    def training(self) -> Training:
        return from_settings(Training, self.settings)

    @cached_property
    def federation(self) -> Federation:
        return from_settings(Federation, self.settings)

    @cached_property
    def tuning(self) -> Tuning:
        return from_settings(Tuning, self.settings)

    @cached_property
    def calibration(self) -> Calibration:
        return from_settings(Calibration, self.settings)

    @cached_property
    def heads(self) -> Heads:
        return from_settings(Heads, self.settings)

    @cached_property
    def hyper(self) -> Any:
        """The method's hyper-parameters."""
        return from_settings(METHODS[self.method].Hyper, self.settings)

    @staticmethod
    def known_settings(method: str) -> dict[str, Any]:
        """Returns every setting that `--set` accepts for a method, with its default."""
        known: dict[str, Any] = {}
        for group in _groups(method):
            if taken := known.keys() & defaults(group).keys():
                raise InputError(f"method {method}: the setting {min(taken)!r} exists already; rename it in the method's Hyper")
            known |= defaults(group)
        return known

    @staticmethod
    def meanings(method: str) -> dict[str, str]:
        """Returns the meanings of these settings."""
        return {name: text for group in _groups(method) for name, text in meanings(group).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Returns the plan in a job's JSON.

        Raises:
            InputError: a key is missing or unknown, or a value is out of range.
        """
        if not isinstance(data, Mapping):
            raise InputError(f"the job's plan is {shown(data)}, not an object; export it with `feddp job`")
        optional = {f.name for f in fields(cls) if f.default is not MISSING or f.default_factory is not MISSING}
        known = {f.name for f in fields(cls)}
        unknown, missing = sorted(data.keys() - known), sorted(known - optional - data.keys())
        if unknown or missing:
            raise InputError(
                f"the job's plan has unknown keys {shown(unknown)} and lacks {missing}; export it with `feddp job`"
            )
        if data.get("behaviour", BEHAVIOUR) is None:  # `Plan` takes it for this version's; a job may not leave that open
            raise InputError("behaviour=None is not a whole number; correct the plan")
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON from which `from_json` restores an equal plan; empty entries are left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["settings"] = {name: _jsonable(value) for name, value in self.settings.items()}
        return {name: _jsonable(value) for name, value in values.items() if value not in ("", (), {})}

    def digest(self, request: Mapping[str, Any] | None = None) -> str:
        """Returns the digest that a site approves: SHA-256 of the plan and the adaptation request, as compact, sorted JSON."""
        content = self.to_json() | ({} if request is None else {"outside": dict(request)})
        return sha256(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()

    @property
    def rule(self) -> tuple[str, ...]:
        """The private rule: the setting `private`, or without it the method's."""
        return tuple(self.federation.private or METHODS[self.method].rule(self))

    @property
    def layers(self) -> dict[str, dict[str, float]]:
        """The layers that the method adds to the network."""
        return METHODS[self.method].layers(self)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of a network's file (`feddp.networks.weights.load_personal`)."""
        metadata = {"network": self.network, "channels": str(self.channels), "classes": json.dumps(self.classes)}
        metadata |= {"labels": self.labels, "size": str(self.size), "method": self.method, "seed": str(self.seed)}
        metadata |= {"normalise": self.training.normalise, "selection": self.training.selection}
        return metadata | ({"layers": json.dumps(self.layers)} if self.layers else {})

    @property
    def phases(self) -> int:
        """The number of phases per round; every phase ends with an aggregation."""
        return METHODS[self.method].phases

    def place(self, site: str) -> int:
        """Returns the index of a site among the job's sites; raises InputError if it is not one of them."""
        if site not in self.sites:
            raise InputError(f"site {site} is not among the job's sites {', '.join(self.sites)}; export the job for it too")
        return self.sites.index(site)

    @property
    def home(self) -> tuple[str, ...]:
        """The local stages after the rounds."""
        return self.stages[self.stages.index(TRAIN) + 1 :]

    @property
    def start(self) -> str:
        """The round that stage 1 selects: last or best."""
        return round_of(self.federation.start, self.stages)

    @property
    def best_per_site(self) -> bool:
        """Whether each site adopts its own best round: the method says so, nothing is shared, and `start` is best."""
        method = METHODS[self.method]
        return method.best_per_site and self.start == "best" and tuple(self.federation.private or method.private) == (ALL,)

    @property
    def needs_scores(self) -> bool:
        """Whether a site's validation scores must leave: the server selects the best round by them."""
        return self.start == "best" and not self.best_per_site


def behaviour_of(method: str) -> int:
    """Returns the number of what this version does with an equal plan of `method`."""
    changes: list[int] = [vars(one).get("changed", 0) for one in METHODS[method].__mro__]
    return BEHAVIOUR + sum(changes)


def _groups(method: str) -> tuple[type, ...]:
    return Training, Federation, Tuning, Calibration, Heads, METHODS[method].Hyper


def _jsonable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
