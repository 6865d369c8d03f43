"""The habits of synthetic sites, and the dials that say how far sites differ.

From site 5 on, the four kinds of site repeat with other random numbers. A site's habits depend on (seed, site) and the dials.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from feddp.errors import InputError


@dataclass(frozen=True)
class Dials:
    """How far sites differ in each respect: 0 makes them alike, 1 is the difference between `KINDS`.

    Raises:
        InputError: a dial is not from 0 to 1.
    """

    appearance: float = 1.0  # colours, texture, noise, vignette and contrast, around the mean of the kinds
    prevalence: float = 1.0  # size of the lesions, around the mean of the kinds
    style: float = 1.0  # outlines by a site's raters, around the true edge
    label_noise: float = 0.0  # random errors of every outline, equally at all sites; 1: a standard deviation of ERROR

    def __post_init__(self) -> None:
        for dial in fields(self):
            value = getattr(self, dial.name)
            if not 0 <= value <= 1:  # refuses nan too
                raise InputError(f"{dial.name} is {value}: a dial goes from 0 to 1; correct it")


@dataclass(frozen=True)
class Habits:
    """The characteristics of a site. Lengths are fractions of the image's side, intensities of full scale."""

    tint: tuple[float, float, float]  # tissue colour
    gain: float  # of the whole image
    gamma: float
    texture_scale: float  # of the smooth noise
    texture: float  # standard deviation of the smooth noise
    noise: float  # standard deviation of the pixel noise
    vignette: float  # darkening at the corners
    contrast: float  # of a lesion against tissue
    lesion_radius: tuple[float, float]
    margin: float  # distance of the outline outside (> 0) or inside (< 0) the lesion's edge
    smoothing: float  # of the drawn outline of a lesion; a curve's (`thin`) is not smoothed


WIDE_AND_TIGHT = {"texture_scale": 0.06, "texture": 0.05, "noise": 0.03, "vignette": 0.3, "contrast": 0.16}
KINDS = (
    Habits((0.62, 0.40, 0.34), 1.0, 1.0, lesion_radius=(0.10, 0.20), margin=0.045, smoothing=0.0, **WIDE_AND_TIGHT),
    Habits((0.55, 0.42, 0.30), 1.1, 1.0, lesion_radius=(0.11, 0.20), margin=-0.03, smoothing=0.0, **WIDE_AND_TIGHT),
    Habits((0.45, 0.36, 0.42), 0.85, 1.5, 0.02, 0.08, 0.05, 0.1, 0.2, (0.07, 0.14), margin=0.0, smoothing=0.0),
    Habits((0.66, 0.50, 0.34), 1.05, 0.7, 0.12, 0.06, 0.015, 0.5, 0.13, (0.13, 0.24), margin=0.0, smoothing=0.03),
)
# the fields that each dial moves
MOVED = {
    "appearance": ("tint", "gain", "gamma", "texture_scale", "texture", "noise", "vignette", "contrast"),
    "prevalence": ("lesion_radius",),
    "style": ("margin", "smoothing"),
}
ERROR = 0.04  # of an outline, in fractions of the side


def habits_of(index: int, seed: int, dials: Dials = Dials()) -> Habits:
    """Returns the habits of site `index`: one of the four kinds, with small random changes of tint, gain and gamma."""
    rng = rng_of(seed, index)
    kind = KINDS[index % len(KINDS)]
    tint = [round(float(c), 4) for c in kind.tint + rng.uniform(-0.03, 0.03, 3)]
    own = replace(
        kind,
        tint=(tint[0], tint[1], tint[2]),
        gain=round(float(kind.gain * rng.uniform(0.95, 1.05)), 4),
        gamma=round(float(kind.gamma * rng.uniform(0.95, 1.05)), 4),
    )
    return replace(own, **{name: _moved(own, name, getattr(dials, dial)) for dial in MOVED for name in MOVED[dial]})


def _moved(own: Habits, name: str, dial: float) -> Any:
    """Returns a field between its common value, at 0, and the site's own, at 1, where it is exactly that."""
    kinds = np.array([getattr(kind, name) for kind in KINDS])
    common = np.zeros(()) if name in MOVED["style"] else kinds.mean(axis=0)
    value = ((1 - dial) * common + dial * np.array(getattr(own, name))).round(6).tolist()
    return tuple(value) if isinstance(value, list) else value


def rng_of(*parts: int) -> np.random.Generator:
    """Returns a generator that depends on all of `parts`."""
    # the length comes first, because numpy ignores zeros at the end of a list of seeds
    return np.random.default_rng([len(parts), *parts])
