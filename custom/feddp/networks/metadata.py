"""What a network's file says of it, held against bounds before anything is built or read for its sake."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddp.errors import FedDPError, InputError
from feddp.limits import CHANNELS, CLASSES, JSON_BYTES, LAYER_OPTION, NAME, SIZE
from feddp.networks import LAYERS, NETWORKS, build
from feddp.reading import is_name, parse, short

if TYPE_CHECKING:
    from torch import Tensor, nn

LABELS = ("nested", "exclusive")
STEP = 32  # the networks halve their input five times


@dataclass(frozen=True)
class Metadata:
    """Of a network that feddp saved; a file that only `load_personal` reads may lack labels and size ("" and 0 then)."""

    network: str
    channels: int
    classes: tuple[str, ...]
    labels: str
    size: int
    layers: dict[str, dict[str, float]]

    @classmethod
    def of(cls, file: Path, said: Mapping[str, str]) -> Metadata:
        """From a file's text by name: `network` (a name in NETWORKS), `channels`, `classes` (a JSON list of names), and where
        there are any, `labels`, `size`, and `layers` (JSON: names in LAYERS with their options).

        Raises:
            InputError: one is absent, unknown or out of range; names `file`.
        """
        if lacking := [name for name in ("network", "channels", "classes") if name not in said]:
            raise _no_network(file, repr(KeyError(lacking[0])))
        if said["network"] not in NETWORKS:
            raise InputError(f"{file}: unknown network {short(said['network'])!r}; the networks are {', '.join(NETWORKS)}")
        if said.get("labels", LABELS[0]) not in LABELS:
            raise InputError(f"{file}: unknown labels {short(said['labels'])!r}; there are {', '.join(LABELS)}")
        return cls(
            network=said["network"],
            channels=_number(file, said, "channels", range(1, CHANNELS + 1)),
            classes=_classes(file, said["classes"]),
            labels=said.get("labels", ""),
            size=_number(file, said, "size", range(STEP, SIZE + 1, STEP)) if "size" in said else 0,
            layers=_layers(file, said.get("layers", "{}")),
        )

    def build(self) -> nn.Module:
        """The network, its random numbers from a seed of its own: the caller's are left alone."""
        return build(self.network, self.channels, len(self.classes), seed=0, layers=self.layers)

    def outline(self) -> dict[str, Tensor]:
        """Its tensors by name without their values, which costs no memory however many they are.

        Raises:
            InputError: the layers' options are not what the layers take.
        """
        import torch

        try:
            with torch.device("meta"):
                return self.build().state_dict()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"the metadata's layers {short(str(self.layers))} cannot be built ({short(str(error))})") from None


def _number(file: Path, said: Mapping[str, str], name: str, allowed: range) -> int:
    # int() takes blanks, underscores and signs too
    if not re.fullmatch(r"[0-9]{1,9}", said[name]) or int(said[name]) not in allowed:
        steps = f" in steps of {allowed.step}" if allowed.step > 1 else ""
        why = f"{name}={short(said[name])!r}, not {allowed[0]} to {allowed[-1]}{steps}"
        raise _no_network(file, why)
    return int(said[name])


def _classes(file: Path, said: str) -> tuple[str, ...]:
    names = _json(file, said, "classes")
    if not isinstance(names, list):
        raise InputError(f"{file}: the metadata's 'classes' must be a JSON list of names, not {short(str(names))}")
    if not 0 < len(names) <= CLASSES or not all(map(is_name, names)) or len(set(names)) < len(names):
        why = f"{len(names)} classes, not 1 to {CLASSES} different names of at most {NAME} characters"
        raise _no_network(file, why)
    return tuple(names)


def _layers(file: Path, said: str) -> dict[str, dict[str, float]]:
    layers = _json(file, said, "layers")
    if not isinstance(layers, dict) or not all(isinstance(options, dict) for options in layers.values()):
        raise _no_network(file, f"layers={short(said)!r}, not names with their options")
    for name, options in layers.items():
        if name not in LAYERS:
            raise InputError(f"{file}: unknown layers {short(name)!r}; there are {', '.join(LAYERS)}")
        for option, value in options.items():
            if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= LAYER_OPTION:
                why = f"{name} with {short(option)}={short(str(value))}, not a number from 0 to {LAYER_OPTION}"
                raise _no_network(file, why)
    return layers


def _json(file: Path, said: str, name: str) -> Any:
    if len(said) > JSON_BYTES:
        raise _no_network(file, f"{name} of {len(said)} characters")
    try:
        return parse(said, file)
    except FedDPError as error:
        raise _no_network(file, f"{name}={short(said)!r}") from error


def _no_network(file: Path, why: str) -> InputError:
    return InputError(f"{file} is no network that feddp saved ({why}): its metadata must say network, channels and classes")
