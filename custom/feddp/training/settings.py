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
from feddp.reading import PLAIN_NAME, is_plain_name, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

DICE_CE, DICE = LOSS_NAMES = ("dice_ce", "dice")  # `feddp.training.losses`
MOST = 1e6  # the largest value of a setting without a limit of its own
COUNT = 1_000  # the largest number of sites, or of names in any other list of a plan
# int() and float() read digits of other scripts too, underscores and blanks
_NUMBER = re.compile(r"[-+.0-9A-Za-z]{1,64}")


def setting(default: Any, meaning: str, most: float = MOST) -> Any:
    """Returns a field that `--set` can set; `feddp methods` prints its meaning. `most` is the largest allowed number."""
    return field(default=default, metadata={"meaning": meaning, "most": most})


@dataclass(frozen=True)
class Training:
    """Hyper-parameters of the local loop; the defaults are FedDP's if the paper states them (Wang et al., TMI 2024, IV-B)."""

    lr: float = setting(1e-3, "AdamW's learning rate", most=100)
    batch: int = setting(6, "samples per step", most=4096)
    local_epochs: int = setting(1, "epochs per round", most=1_000)
    weight_decay: float = setting(0.01, "AdamW's weight decay; torch's default, the paper does not state it", most=10)
    clip: float = setting(1.0, "gradients are clipped element-wise to [-clip, clip]")
    loss: str = setting(
        "dice_ce",
        "dice_ce, or dice: as in the released code; finds thin structures sooner, but sites that train alone may find nothing",
    )
    augment: bool = setting(True, "random flips and quarter turns; the paper does not state it, the released code has none")
    normalise: str = setting("zscore", "zscore, per image and channel; or scale, division by 255 (as in the released code)")
    precision_compute: str = setting(
        "float32",
        "float32, or bfloat16 in the forward pass: faster on GPUs with large batches or with cuda_graphs, and on CPUs with"
        " AVX512-BF16; other bits",
    )
    cuda_graphs: bool = setting(
        False, "a GPU launches the network's kernels in a training step as CUDA graphs: faster with small batches; more memory"
    )
    largest_component: bool = setting(
        False, "the last evaluation keeps the largest component of each class alone (as the released code, on fundus images)"
    )
    selection: str = setting(
        "val",
        "the split whose IoU selects round and epoch: val, or test (as in the papers, optimistic; val is trained on)",
    )

    def __post_init__(self) -> None:
        from feddp.networks.metadata import NORMALISATIONS, SELECTIONS

        require_bounds(self)
        require_positive(self, "lr", "batch", "local_epochs", "clip")
        require_not_negative(self, "weight_decay")
        require_choice(self, "loss", LOSS_NAMES)
        require_choice(self, "precision_compute", ("float32", "bfloat16"))
        require_choice(self, "normalise", NORMALISATIONS)
        require_choice(self, "selection", SELECTIONS)

    @property
    def trained_on(self) -> tuple[str, ...]:
        """The splits to train on: where the test images select, as in the papers, validation images are training images too."""
        return ("train", "val") if self.selection == "test" else ("train",)


@dataclass(frozen=True)
class Tuning:
    """Local epochs at a reduced learning rate after the rounds, without peers (FineTune, FedBABU, FedOAP)."""

    tune_epochs: int = setting(20, "epochs of the tuning; our choice, equal to the calibration's", most=10_000)
    tune_lr: float = setting(1e-4, "learning rate of the tuning; our choice, equal to the calibration's", most=100)

    def __post_init__(self) -> None:
        require_bounds(self)
        require_positive(self, "tune_epochs", "tune_lr")


@dataclass(frozen=True)
class Calibration:
    """Hyper-parameters of the inconsistency-guided calibration (Wang et al., TMI 2024, IV-B and Fig. 9)."""

    calibration_epochs: int = setting(20, "epochs of the calibration", most=10_000)
    calibration_lr: float = setting(1e-4, "learning rate of the calibration", most=100)
    lambda_: float = setting(1.0, "weight of L_aux; 0 trains the same epochs without peers (control)")
    delta: str = setting("frozen", "frozen, live (ŷ^k is the current prediction) or std (as in the released code)")

    def __post_init__(self) -> None:
        require_bounds(self)
        require_positive(self, "calibration_epochs", "calibration_lr")
        require_choice(self, "delta", ("frozen", "live", "std"))
        require_not_negative(self, "lambda_")


@dataclass(frozen=True)
class Heads:
    """The hyper-parameters of FedLC's head calibration."""

    heads_epochs: int = setting(20, "epochs of FedLC's head calibration, each with an exchange of the heads", most=10_000)
    heads_lr: float = setting(1e-3, "learning rate of FedLC's head calibration, whose head is new; the paper: 1e-4", most=100)

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
        if not 0 < getattr(settings, name) < math.inf:  # refuses nan too
            raise InputError(f"{key(name)}={shown(getattr(settings, name))} must be a number above 0; correct {key(name)}")


def require_not_negative(settings: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(settings, name) < math.inf:  # refuses nan too
            raise InputError(
                f"{key(name)}={shown(getattr(settings, name))} must be a number of at least 0; correct {key(name)}"
            )


def require_most(name: str, value: float, most: float) -> None:
    """Raises InputError if `value` is above `most`, beyond which a job would take endless time or fill the disk."""
    if value > most:
        raise InputError(f"{name}={shown(value)}: at most {most:.15g}; lower {name}")


def require_name(what: str, value: Any) -> None:
    """Raises InputError if `value` is not a plain name."""
    if not is_plain_name(value):
        raise InputError(f"{what} {shown(value)} must have {PLAIN_NAME}; correct it")


def as_name(text: str) -> str:
    """Returns a similar name that `require_name` takes, if `text` begins with a letter, a digit or an underscore."""
    return re.sub(r"[^\w .+-]", "-", text, flags=re.ASCII)[:64]


def require_choice(settings: Any, name: str, choices: tuple[str, ...]) -> None:
    if getattr(settings, name) not in choices:
        raise InputError(f"{key(name)}={shown(getattr(settings, name))} is not one of {', '.join(choices)}; choose one of them")


def key(field: str) -> str:
    """Returns the name that a user sets: `lambda` for the field `lambda_`, because `lambda` is a keyword of Python."""
    return field.rstrip("_")


def defaults(cls: type[DataclassInstance]) -> dict[str, Any]:
    """Returns the keys of a settings class with their defaults."""
    return {key(f.name): f.default for f in fields(cls)}


def meanings(cls: type[DataclassInstance]) -> dict[str, str]:
    """Returns the keys of a settings class with their meanings."""
    return {key(f.name): f.metadata["meaning"] for f in fields(cls)}


def from_settings(cls: type[T], settings: Mapping[str, Any]) -> T:
    """Returns a `cls` from the entries of `settings` that are its fields; strings are converted to the field's type.

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
        if isinstance(value, bool) != (kind is bool):  # in JSON, true is not 1
            raise ValueError
        if not isinstance(value, str if kind is str else int | float | str):
            raise ValueError
        if kind in (int, float) and isinstance(value, str) and not _NUMBER.fullmatch(value):
            raise ValueError
        if kind is int and not isinstance(value, str) and int(value) != value:
            raise ValueError
        return kind(value)
    except (KeyError, ValueError, TypeError, OverflowError):
        kind = getattr(kind, "__name__", kind)
        raise InputError(f"{name}={shown(value)} cannot be read as {kind}; correct the value") from None


def _words(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > COUNT:
        raise ValueError
    for word in value:
        require_name(name, word)
    return tuple(value)


def pairs(settings: Sequence[str]) -> dict[str, str]:
    """Returns the values of `--set` by name; raises InputError if one is not key=value."""
    for text in settings:
        if "=" not in text:
            raise InputError(f"--set {text}: write key=value")
    return dict(text.split("=", 1) for text in settings)
