"""Hyper-parameters as frozen data classes, set by name."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from feddp.errors import InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

MOST = 1e6  # the largest value of a setting that names none of its own
COUNT = 1_000  # the most sites, or names in any other list, of a plan
# nothing that a parser of FLARE's expands: no $, no brace; no letters of other scripts, which look like these
_NAME = re.compile(r"\w[\w .+-]{0,63}", re.ASCII)


def setting(default: Any, meaning: str, most: float = MOST) -> Any:
    """A field that `--set` reaches; its meaning is what `feddp methods` prints. A number is at most `most`."""
    return field(default=default, metadata={"meaning": meaning, "most": most})


@dataclass(frozen=True)
class Training:
    """The local loop's hyper-parameters; defaults are FedDP's (001, IV-B) where the paper states them."""

    lr: float = setting(1e-3, "AdamW's learning rate", most=100)
    batch: int = setting(6, "samples a step", most=4096)
    local_epochs: int = setting(1, "epochs a round", most=1_000)
    weight_decay: float = setting(0.01, "AdamW's; torch's default, the paper does not state it", most=10)
    clip: float = setting(1.0, "gradients are clipped element-wise to [-clip, clip]")
    loss: str = setting("dice_ce", "dice_ce, or dice (the released code's)")
    augment: bool = setting(True, "random flips and quarter turns; the paper does not state it")
    selection: str = setting("val", "the split whose IoU chooses round and epoch: val, or test (the paper's, optimistic)")

    def __post_init__(self) -> None:
        from feddp.training.losses import LOSSES

        require_bounds(self)
        require_positive(self, "lr", "batch", "local_epochs", "clip")
        require_not_negative(self, "weight_decay")
        require_choice(self, "loss", tuple(LOSSES))
        require_choice(self, "selection", ("val", "test"))


@dataclass(frozen=True)
class Tuning:
    """Local epochs at a reduced rate after the federation, without peers (FineTune, FedBABU)."""

    tune_epochs: int = setting(20, "epochs of the tuning; ours, as IGC's control", most=10_000)
    tune_lr: float = setting(1e-4, "its learning rate; ours, as IGC's control", most=100)

    def __post_init__(self) -> None:
        require_bounds(self)
        require_positive(self, "tune_epochs", "tune_lr")


@dataclass(frozen=True)
class Calibration:
    """Inconsistency-guided calibration's hyper-parameters (001, IV-B and Fig. 9)."""

    calibration_epochs: int = setting(20, "epochs of the calibration", most=10_000)
    calibration_lr: float = setting(1e-4, "its learning rate", most=100)
    lambda_: float = setting(1.0, "weight of L_aux; 0 is the control: the same epochs without peers")
    delta: str = setting("frozen", "frozen, live (ŷ^k is the current prediction) or std (the released code's)")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_positive(self, "calibration_epochs", "calibration_lr")
        require_choice(self, "delta", ("frozen", "live", "std"))
        require_not_negative(self, "lambda_")


@dataclass(frozen=True)
class Heads:
    """The hyper-parameters of FedLC's head calibration."""

    heads_epochs: int = setting(20, "epochs of FedLC's head calibration, each with an exchange of the heads", most=10_000)
    heads_lr: float = setting(1e-3, "the learning rate of FedLC's head calibration, whose own head is new", most=100)

    def __post_init__(self) -> None:
        require_bounds(self)
        require_positive(self, "heads_epochs", "heads_lr")


def require_bounds(settings: DataclassInstance) -> None:
    """Checks every number against the bound of its field (`setting`). Raises InputError if it is larger; names the bound."""
    for f in fields(settings):
        value = getattr(settings, f.name)
        if isinstance(value, int | float):
            require_most(key(f.name), value, f.metadata.get("most", MOST))


def require_positive(settings: Any, *names: str) -> None:
    for name in names:
        if not 0 < getattr(settings, name) < math.inf:  # nor is nan
            raise InputError(f"{key(name)}={getattr(settings, name)} must be a number above 0; correct {key(name)}")


def require_not_negative(settings: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(settings, name) < math.inf:  # nor is nan
            raise InputError(f"{key(name)}={getattr(settings, name)} must be a number of at least 0; correct {key(name)}")


def require_most(name: str, value: float, most: float) -> None:
    """InputError for a number that no run needs, and that would keep a machine busy for ever or fill it."""
    if value > most:
        raise InputError(f"{name}={value}: at most {most:.15g}; lower {name}")


def require_name(what: str, value: Any) -> None:
    """InputError for what is no plain name of at most 64 characters."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InputError(
            f"{what} {str(value)[:80]!r} is no name of at most 64 letters, digits, spaces and '_', '.', '+', '-'; correct it"
        )


def require_choice(settings: Any, name: str, choices: tuple[str, ...]) -> None:
    if getattr(settings, name) not in choices:
        raise InputError(f"{key(name)}={getattr(settings, name)!r} is not one of {', '.join(choices)}; choose one of them")


def key(field: str) -> str:
    """The name a user sets: `lambda` for the field `lambda_`, which Python cannot call by its own name."""
    return field.rstrip("_")


def defaults(cls: type[DataclassInstance]) -> dict[str, Any]:
    """Every key of a settings class with its default."""
    return {key(f.name): f.default for f in fields(cls)}


def meanings(cls: type[DataclassInstance]) -> dict[str, str]:
    """Every key of a settings class with what it means."""
    return {key(f.name): f.metadata["meaning"] for f in fields(cls)}


def from_settings(cls: type[T], settings: Mapping[str, Any]) -> T:
    """An instance of `cls` from the entries of `settings` that are its own; strings are read as the field's type.

    Raises:
        InputError: a value cannot be read as its field's type, or is out of range.
    """
    hints = typing.get_type_hints(cls)
    given = {f.name: _read(key(f.name), settings[key(f.name)], hints[f.name]) for f in fields(cls) if key(f.name) in settings}
    made = cls(**given)
    require_bounds(made)  # a method of another package may not check its own
    return made


def _read(name: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kind = next(a for a in typing.get_args(kind) if a is not type(None))
    try:
        if typing.get_origin(kind) is tuple:
            return _words(name, value.split(",") if isinstance(value, str) else value)
        if kind is bool and isinstance(value, str):
            return {"true": True, "false": False}[value.lower()]
        if isinstance(value, bool) != (kind is bool):  # true is no 1
            raise ValueError
        if kind is str and not isinstance(value, str):
            raise ValueError
        if kind is int and not isinstance(value, str) and int(value) != value:
            raise ValueError
        return kind(value)
    except (KeyError, ValueError, TypeError, OverflowError):
        raise InputError(f"{name}={value!r} cannot be read as {getattr(kind, '__name__', kind)}; correct the value") from None


def _words(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > COUNT:
        raise ValueError
    for word in value:
        require_name(name, word)
    return tuple(value)


def pairs(settings: Sequence[str]) -> dict[str, str]:
    """What `--set` was given, by name. InputError for what is not key=value."""
    for text in settings:
        if "=" not in text:
            raise InputError(f"--set {text}: write key=value")
    return dict(text.split("=", 1) for text in settings)
