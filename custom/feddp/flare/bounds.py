"""Within what a hospital takes jobs, approved or not: what makes a single image count is kept out of every step."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from feddp.errors import PolicyError
from feddp.plan.schema import Plan
from feddp.training.losses import LOSSES

LEAST_SITES = 3
# of the plan's settings, those that are learning rates, and those that are passes over a batch or over the images
RATES = ("lr", "tune_lr", "calibration_lr", "heads_lr")
LOCAL = ("local_epochs", "head_epochs", "inner_steps")
PASSES = ("tune_epochs", "calibration_epochs")  # after the rounds: each is as long as a round
MIN_SITES = "at two sites each can compute the other's contribution"


@dataclass(frozen=True)
class Bounds:
    """Every value is a bound of a plan's setting of that name; `losses` are those that a job may train with."""

    min_sites: int = LEAST_SITES  # at least: sites of the job, and answers without which no round counts
    batch: int = 4  # at least: images in a step, and training images at the site
    lr: float = 0.01  # at most: any learning rate
    clip: float = 1.0  # at most
    weight_decay: float = 0.1  # at most: more would silence weights as a high rate does
    local_epochs: int = 5  # at most: epochs a round, a head's epochs, steps on a batch
    rounds: int = 1000  # at most: rounds, and the epochs of each stage after them
    losses: tuple[str, ...] = tuple(LOSSES)
    augment: bool = True  # whether augmentation must be on

    @classmethod
    def of(cls, site: str, given: Any) -> "Bounds":
        """The bounds of a site's privacy.json; what it leaves out is as above.

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
        """Those that admit a plan, as properties: the defaults but for what the plan goes beyond."""
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
        }
        defaults = asdict(own)
        return {name: value for name, value in values.items() if value != defaults[name]}

    def problems(self, plan: Plan) -> list[str]:
        """Every value of a plan that is beyond a bound, each with the bound and the remedy."""
        training = plan.training
        found = [
            self._least("min_sites", plan.federation.min_sites, "min_sites", MIN_SITES),
            self._least("the number of sites", len(plan.sites), "min_sites", MIN_SITES),
            self._least("batch", training.batch, "batch", "few images in a step show in what it changes"),
            *(self._most(name, value, "lr") for name, value in _settings(plan, RATES).items()),
            self._most("clip", training.clip, "clip"),
            self._most("weight_decay", training.weight_decay, "weight_decay"),
            *(self._most(name, value, "local_epochs") for name, value in _settings(plan, LOCAL).items()),
            self._most("rounds", plan.rounds, "rounds"),
            *(self._most(name, value, "rounds") for name, value in _settings(plan, PASSES).items()),
        ]
        if training.loss not in self.losses:
            found.append(f"loss={training.loss}, and its bounds take {', '.join(self.losses) or 'none'}; {_change('losses')}")
        if self.augment and not training.augment:
            found.append(f"augment=false, and its bounds want augmentation; {_change('augment')}")
        return [problem for problem in found if problem]

    def adaptation(self, settings: Mapping[str, Any]) -> list[str]:
        """The same of a newcomer's adaptation, whose `settings` are all that it has (`adaptation.adapt.Settings`)."""
        found = [
            self._most("epochs", settings["epochs"], "rounds"),
            self._most("lr", settings["lr"], "lr"),
            self._least("batch", settings["batch"], "batch", "few images in a step show in what it changes"),
        ]
        return [problem for problem in found if problem]

    def too_few(self, images: int) -> list[str]:
        """What is wrong where a site has too few training images for a step of `batch`."""
        if images >= self.batch:
            return []
        what = f"it has {images} training images, and its bounds want a step over {self.batch} at least"
        return [f"{what}; add images, leave this site out, or lower `batch` among the bounds of privacy.json"]

    def _least(self, name: str, value: float, bound: str, why: str) -> str:
        least = getattr(self, bound)
        return f"{name}={value} is below the least of its bounds, {least} ({why}); {_change(bound)}" if value < least else ""

    def _most(self, name: str, value: float, bound: str) -> str:
        most = getattr(self, bound)
        return f"{name}={value} is above the largest of its bounds, {most}; {_change(bound)}" if value > most else ""


def _change(bound: str) -> str:
    return f"export the job within them, or change `{bound}` among the bounds of privacy.json"


def _settings(plan: Plan, names: tuple[str, ...]) -> dict[str, float]:
    """Those of the settings that the plan's method has, with their values."""
    known = Plan.known_settings(plan.method)
    return {name: plan.settings.get(name, known[name]) for name in names if name in known}


def _read(site: str, name: str, value: Any, default: Any) -> Any:
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(word in default for word in value):
            raise PolicyError(f"site {site}: privacy.json's bounds: {name} is {value!r}; write a list of {', '.join(default)}")
        return tuple(value)
    kinds = {bool: bool, int: int, float: int | float}[type(default)]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool) or not value >= 0:
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(default)]
        raise PolicyError(f"site {site}: privacy.json's bounds: {name} is {value!r}; write {kind}")
    return value
