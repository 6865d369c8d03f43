"""A site's bounds for jobs, approved or not. They limit the influence of a single image on each training step."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from feddp.errors import PolicyError
from feddp.methods import METHODS
from feddp.plan.schema import MOVEMENT, STATISTICS, Plan
from feddp.training.settings import LOSS_NAMES

LEAST_SITES = 3
# every plan has these above 0, so such a bound of 0 would refuse all
POSITIVE = ("lr", "clip", "local_epochs", "rounds", "movement", "statistics")
# the plan's settings that are learning rates, and those that count passes over a batch or over the images
RATES = ("lr", "tune_lr", "calibration_lr", "heads_lr")
LOCAL = ("local_epochs", "head_epochs", "inner_steps")
PASSES = ("tune_epochs", "heads_epochs", "calibration_epochs")  # after the rounds: an epoch is as long as a round
MIN_SITES = "with two sites, each can compute the other's contribution"
SMALL_BATCH = "the change made by a step over few images reveals them"


@dataclass(frozen=True)
class Bounds:
    """Bounds of the plan's settings of the same names; `losses` are the accepted loss functions."""

    min_sites: int = LEAST_SITES  # at least: sites of the job, and answers required per round
    batch: int = 4  # at least: images per step, and training images at the site
    lr: float = 0.01  # at most: any learning rate
    clip: float = 1.0  # at most
    weight_decay: float = 0.1  # at most: a larger one drives weights to zero, as a high learning rate does
    local_epochs: int = 5  # at most: epochs per round, epochs of the head, steps per batch
    rounds: int = 1000  # at most: rounds, and epochs of each later stage
    losses: tuple[str, ...] = LOSS_NAMES
    augment: bool = True  # whether augmentation must be on
    movement: float = MOVEMENT  # at most: how far a round may move the shared parameters
    statistics: float = STATISTICS  # at most: and the running statistics

    @classmethod
    def of(cls, site: str, given: Any) -> "Bounds":
        """Reads the bounds of a site's privacy.json; missing ones have the defaults above.

        Raises:
            PolicyError: a wrong key or value.
        """
        known = {f.name: f.default for f in fields(cls)}
        if not isinstance(given, Mapping) or given.keys() - known.keys():
            raise PolicyError(f"site {site}: privacy.json's bounds is {given!r}; write values for {', '.join(known)}")
        values = {name: _read(site, name, value, known[name]) for name, value in given.items()}
        return cls(**values)

    @classmethod
    def admitting(cls, plan: Plan) -> dict[str, Any]:
        """Returns bounds that accept the plan, as properties: only those that must differ from the defaults."""
        training, own = plan.training, cls()
        values = {
            "min_sites": min(own.min_sites, plan.federation.min_sites, len(plan.sites)),
            "batch": min(own.batch, training.batch),
            "lr": max(own.lr, *_settings(plan, RATES).values()),
            "clip": max(own.clip, training.clip),
            "weight_decay": max(own.weight_decay, training.weight_decay),
            "local_epochs": max(own.local_epochs, *_settings(plan, LOCAL).values()),
            "rounds": max(own.rounds, plan.rounds, *_settings(plan, PASSES).values()),
            "augment": own.augment and training.augment,
            "movement": max(own.movement, plan.federation.movement * _server_step(plan)),
            "statistics": max(own.statistics, plan.federation.statistics),
        }
        defaults = asdict(own)
        return {name: value for name, value in values.items() if value != defaults[name]}

    def problems(self, plan: Plan) -> list[str]:
        """Returns a message for every value of the plan beyond a bound, with the bound and the remedy."""
        training = plan.training
        problems = [
            self._least("min_sites", plan.federation.min_sites, "min_sites", MIN_SITES),
            self._least("the number of sites", len(plan.sites), "min_sites", MIN_SITES),
            self._least("batch", training.batch, "batch", SMALL_BATCH),
            *(self._most(name, value, "lr") for name, value in _settings(plan, RATES).items()),
            self._most("clip", training.clip, "clip"),
            self._most("weight_decay", training.weight_decay, "weight_decay"),
            *(self._most(name, value, "local_epochs") for name, value in _settings(plan, LOCAL).items()),
            self._most("rounds", plan.rounds, "rounds"),
            *(self._most(name, value, "rounds") for name, value in _settings(plan, PASSES).items()),
        ]
        step = _server_step(plan)
        movement = "movement" if step == 1 else f"movement={plan.federation.movement} times the server's step {step}"
        problems += [
            self._most(movement, plan.federation.movement * step, "movement"),
            self._most("statistics", plan.federation.statistics, "statistics"),
        ]
        if training.loss not in self.losses:
            accepted = ", ".join(self.losses) or "none"
            problems.append(f"loss={training.loss} is not among the losses of its bounds, {accepted}; {_change('losses')}")
        if self.augment and not training.augment:
            problems.append(f"augment=false, but its bounds require augmentation; {_change('augment')}")
        return [problem for problem in problems if problem]

    def adaptation(self, settings: Mapping[str, Any]) -> list[str]:
        """Returns the same for the settings of an adaptation at an unseen site (`adaptation.fitting.Settings`)."""
        problems = [
            self._most("epochs", settings["epochs"], "rounds"),
            self._most("lr", settings["lr"], "lr"),
            self._least("batch", settings["batch"], "batch", SMALL_BATCH),
        ]
        return [problem for problem in problems if problem]

    def too_few(self, images: int) -> list[str]:
        """Returns a message if the site has too few training images for a step of `batch`."""
        if images >= self.batch:
            return []
        what = f"it has {images} training images, but its bounds require at least {self.batch} per step"
        return [f"{what}; add images, leave this site out, or lower `batch` in the bounds of its privacy.json"]

    def _least(self, name: str, value: float, bound: str, why: str) -> str:
        least = getattr(self, bound)
        return f"{name}={value} is below its lower bound {least} ({why}); {_change(bound)}" if value < least else ""

    def _most(self, name: str, value: float, bound: str) -> str:
        most = getattr(self, bound)
        return f"{name}={value} is above its upper bound {most}; {_change(bound)}" if value > most else ""


def _server_step(plan: Plan) -> float:
    """Returns how far γ may be from the one before, in units of the furthest contribution."""
    # not by `plan.resolve`: a parent process admits jobs without the networks' libraries
    return METHODS[plan.method](plan.hyper).server_step


def _change(bound: str) -> str:
    return f"export the job within the bounds, or change `{bound}` in the bounds of privacy.json"


def _settings(plan: Plan, names: tuple[str, ...]) -> dict[str, float]:
    """Returns the values of those settings that the plan's method has."""
    known = Plan.known_settings(plan.method)
    return {name: plan.settings.get(name, known[name]) for name in names if name in known}


def _read(site: str, name: str, value: Any, default: Any) -> Any:
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(word in default for word in value):
            raise PolicyError(f"site {site}: privacy.json's bounds: {name} is {value!r}; write a list of {', '.join(default)}")
        return tuple(value)
    kinds = {bool: bool, int: int, float: int | float}[type(default)]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool) or not 0 <= value < math.inf:
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(default)]
        raise PolicyError(f"site {site}: privacy.json's bounds: {name} is {value!r}; write {kind}")
    if name in POSITIVE and not value:
        raise PolicyError(f"site {site}: privacy.json's bounds: {name}=0 refuses every job; write a number above 0")
    return value
