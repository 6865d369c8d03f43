"""The metadata of a network's file, checked against bounds before a network is built or a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddp.errors import FedDPError, InputError
from feddp.lean import meta_device
from feddp.limits import CHANNELS, CLASSES, JSON_BYTES, LAYER_OPTION, NAME, SIZE
from feddp.networks import LAYERS, NETWORKS, build
from feddp.reading import is_name, parse, short

if TYPE_CHECKING:
    from torch import Tensor, nn

LABELS = ("nested", "exclusive")
# how an image becomes the network's input (`feddp.data.loading.network_input`)
ZSCORE, SCALE = NORMALISATIONS = "zscore", "scale"
# the split that selected rounds and epochs; with test, the network was trained on the split val, too
VAL, TEST = SELECTIONS = "val", "test"
STEP = 32  # the networks halve their input five times


@dataclass(frozen=True)
class Metadata:
    """Metadata of a network that feddp saved.

    Labels and size may be missing ("" and 0): `load_personal` does not need them. A file of an earlier version lacks
    `normalise`; its network was trained on z-scores. It may lack `selection` (""), so two files of one run may differ in it.
    """

    network: str
    channels: int
    classes: tuple[str, ...]
    labels: str
    size: int
    normalise: str
    layers: dict[str, dict[str, float]]
    selection: str = field(default="", compare=False)

    @classmethod
    def of(cls, file: Path, texts: Mapping[str, str]) -> Metadata:
        """Returns the metadata from a file's texts by name.

        Args:
            texts: `network` (a name in NETWORKS), `channels`, `classes` (a JSON list of names); optional: `labels`, `size`,
                `normalise` (a word of NORMALISATIONS), `layers` (JSON: names in LAYERS with their options) and `selection`
                (a word of SELECTIONS).

        Raises:
            InputError: an entry is missing, unknown or out of range; names `file`.
        """
        if lacking := [name for name in ("network", "channels", "classes") if name not in texts]:
            raise _no_network(file, repr(KeyError(lacking[0])))
        if texts["network"] not in NETWORKS:
            raise InputError(f"{file}: unknown network {short(texts['network'])!r}; the networks are {', '.join(NETWORKS)}")
        if texts.get("labels", LABELS[0]) not in LABELS:
            raise InputError(f"{file}: unknown labels {short(texts['labels'])!r}; the labels are {', '.join(LABELS)}")
        normalise = texts.get("normalise", ZSCORE)
        if normalise not in NORMALISATIONS:
            raise InputError(f"{file}: unknown normalise {short(normalise)!r}; it is one of {', '.join(NORMALISATIONS)}")
        selection = texts.get("selection", "")
        if selection not in ("", *SELECTIONS):
            raise InputError(f"{file}: unknown selection {short(selection)!r}; it is one of {', '.join(SELECTIONS)}")
        return cls(
            network=texts["network"],
            channels=_number(file, texts, "channels", range(1, CHANNELS + 1)),
            classes=_classes(file, texts["classes"]),
            labels=texts.get("labels", ""),
            size=_number(file, texts, "size", range(STEP, SIZE + 1, STEP)) if "size" in texts else 0,
            normalise=normalise,
            layers=_layers(file, texts.get("layers", "{}")),
            selection=selection,
        )

    def build(self) -> nn.Module:
        """Returns the network, with random numbers from a fixed seed; torch's generator does not change."""
        return build(self.network, self.channels, len(self.classes), seed=0, layers=self.layers)

    def outline(self) -> dict[str, Tensor]:
        """Returns the network's tensors by name on the meta device: without values and without memory.

        Raises:
            InputError: the layers do not accept their options.
        """
        try:
            with meta_device():
                return self.build().state_dict()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"the metadata's layers {short(str(self.layers))} cannot be built ({short(str(error))})") from None


def _number(file: Path, texts: Mapping[str, str], name: str, allowed: range) -> int:
    # int() accepts blanks, underscores and signs too
    if not re.fullmatch(r"[0-9]{1,9}", texts[name]) or int(texts[name]) not in allowed:
        steps = f" in steps of {allowed.step}" if allowed.step > 1 else ""
        why = f"{name}={short(texts[name])!r}, not {allowed[0]} to {allowed[-1]}{steps}"
        raise _no_network(file, why)
    return int(texts[name])


def _classes(file: Path, text: str) -> tuple[str, ...]:
    names = _json(file, text, "classes")
    if not isinstance(names, list):
        raise InputError(f"{file}: the metadata's 'classes' must be a JSON list of names, not {short(str(names))}")
    if not 0 < len(names) <= CLASSES or not all(map(is_name, names)) or len(set(names)) < len(names):
        why = f"{len(names)} classes, not 1 to {CLASSES} different names of at most {NAME} characters"
        raise _no_network(file, why)
    return tuple(names)


def _layers(file: Path, text: str) -> dict[str, dict[str, float]]:
    layers = _json(file, text, "layers")
    if not isinstance(layers, dict) or not all(isinstance(options, dict) for options in layers.values()):
        raise _no_network(file, f"layers={short(text)!r}, not names with their options")
    for name, options in layers.items():
        if name not in LAYERS:
            raise InputError(f"{file}: unknown layers {short(name)!r}; the layers are {', '.join(LAYERS)}")
        for option, value in options.items():
            if not isinstance(value, int | float) or not 0 <= value <= LAYER_OPTION:  # nan is not
                why = f"{name} with {short(option)}={short(str(value))}, not a number from 0 to {LAYER_OPTION}"
                raise _no_network(file, why)
    return layers


def _json(file: Path, text: str, name: str) -> Any:
    if len(text) > JSON_BYTES:
        raise _no_network(file, f"{name} of {len(text)} characters")
    try:
        return parse(text, file)
    except FedDPError as error:
        raise _no_network(file, f"{name}={short(text)!r}") from error


def _no_network(file: Path, why: str) -> InputError:
    return InputError(
        f"{file} is not a network that feddp saved ({why}): its metadata must have network, channels and classes; name another"
    )
