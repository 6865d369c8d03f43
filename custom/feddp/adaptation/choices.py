"""How an unseen site adapts a run's models: the strategy and its settings, which also a process without torch reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from feddp.errors import InputError
from feddp.training.settings import (
    defaults,
    from_settings,
    require_bounds,
    require_choice,
    require_not_negative,
    require_positive,
    setting,
)

GLOBAL = "global"  # the global model's name among the sites' models, and the strategy that uses it
ROUTING, AVERAGE, ENSEMBLE, TENT, TTT = "routing", "average", "ensemble", "tent", "ttt"
STRATEGY_NAMES = (ROUTING, GLOBAL, AVERAGE, ENSEMBLE, TENT, TTT)  # `feddp.adaptation.strategies`
SIGMOID, SOFTMAX = MIXES = ("sigmoid", "softmax")
NORMS = ("mean", "batch")


@dataclass(frozen=True)
class Settings:
    """How a network is adapted; the defaults are the paper's if it states them (Jiang et al., TMI 2023, section IV)."""

    epochs: int = setting(10, "passes over the images, at most; 0 only measures the initial loss", most=10_000)
    lr: float = setting(1e-3, "Adam's learning rate", most=100)
    beta: float = setting(0.01, "weight of the shape loss; 0 disables it")
    noise: float = setting(0.5, "standard deviation of the noise in the consistency loss; 0 disables that loss")
    neighbourhood: int = setting(10, "pixels on each side within which the shape loss makes probabilities similar", most=1024)
    mix: str = setting("softmax", "softmax over the models, or sigmoid (as in the released code)")
    norm: str = setting("mean", "mean of the models' normalisations, or batch: batch statistics, trained affine tensors")
    batch: int = setting(4, "images per step; the paper does not state it", most=4096)
    seed: int = setting(0, "seed of every random draw", most=2**63 - 1)

    def __post_init__(self) -> None:
        require_bounds(self)
        require_not_negative(self, "epochs", "beta", "noise", "neighbourhood")
        require_positive(self, "lr", "batch")
        require_choice(self, "mix", MIXES)
        require_choice(self, "norm", NORMS)


def read_settings(values: Mapping[str, Any]) -> Settings:
    """Returns the settings from values by name, as given by `--set` or a job's JSON.

    Raises:
        InputError: a name is unknown, or a value cannot be read or is out of range.
    """
    if unknown := sorted(values.keys() - defaults(Settings).keys()):
        raise InputError(f"unknown setting {unknown[0]!r}; known: {', '.join(defaults(Settings))}")
    return from_settings(Settings, values)


@dataclass(frozen=True)
class AdaptationOptions:
    """A strategy, its settings, and whether the predicted masks are scored with the site's own masks.

    Raises:
        InputError: the strategy does not exist.
    """

    how: str
    settings: Settings
    score: bool = False

    def __post_init__(self) -> None:
        if self.how not in STRATEGY_NAMES:
            raise InputError(f"--how {self.how}: unknown strategy; choose one of {', '.join(STRATEGY_NAMES)}")
