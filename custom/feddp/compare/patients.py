"""The test values of several methods by patient, and how they vary if other patients had been tested.

Images of one patient are alike, so a patient is one observation. Within each site the patients are drawn again with
replacement, one fewer than there are: of n values, the mean of n − 1 draws has the variance s²/n of the true mean, also where
a site has few patients (Rao & Wu, JASA 1988, Section 2, with m = n − 1; drawing n would give the smaller (n − 1)/n · s²/n).
Percentiles of the draws alone would take s for the true deviation; intervals are therefore wider by Student's factor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.stats import norm, rankdata, t, wilcoxon

from feddp.compare.scores import Rows
from feddp.compare.statistics import LEAST, LEVEL, RESAMPLES

Names = Mapping[str, Mapping[str, str]]  # {site: {test image: patient}}


@dataclass(frozen=True)
class PatientScores:
    """Values of the same test images under all methods, in per cent.

    Attributes:
        methods: the methods' labels.
        images: for each site, how many images each patient has (P,).
        sums: for each site, the sums of their values (P, methods).
    """

    methods: tuple[str, ...]
    images: tuple[np.ndarray, ...]
    sums: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, methods: Mapping[str, Mapping[str, Rows]], metric: str, names: Names) -> "PatientScores":
        """From {method: {site: rows}} that have a value of each of `names`."""
        images, sums = [], []
        for site, patients in names.items():
            of_patient: dict[str, list[str]] = {}
            for image, patient in patients.items():
                of_patient.setdefault(patient, []).append(image)
            values = [
                [[100 * rows[site][image][metric] for rows in methods.values()] for image in stems]
                for stems in of_patient.values()
            ]
            images.append(np.array([len(each) for each in values]))
            sums.append(np.array([np.sum(each, axis=0) for each in values]))
        return cls(tuple(methods), tuple(images), tuple(sums))

    @property
    def count(self) -> int:
        return sum(len(each) for each in self.images)

    @property
    def enough(self) -> bool:
        """Whether there are patients to draw: LEAST in all, two at each site."""
        return self.count >= LEAST and all(len(each) > 1 for each in self.images)

    def by_site(self) -> np.ndarray:
        """Each site's mean over its images (sites, methods)."""
        return np.array([sums.sum(axis=0) / images.sum() for images, sums in zip(self.images, self.sums, strict=True)])

    def means(self) -> np.ndarray:
        """The mean over the sites of each site's mean over its images (methods,)."""
        return np.asarray(np.mean(self.by_site(), axis=0))

    def resampled(self) -> np.ndarray:
        """`means` of RESAMPLES draws of the patients (RESAMPLES, methods), the same patients for all methods; seeded."""
        rng = np.random.default_rng(0)
        total = np.zeros((RESAMPLES, len(self.methods)))
        for images, sums in zip(self.images, self.sums, strict=True):
            drawn = rng.integers(len(images), size=(RESAMPLES, len(images) - 1))
            total += sums[drawn].sum(axis=1) / images[drawn].sum(axis=1)[:, None]
        return total / len(self.images)

    @cached_property
    def draws(self) -> np.ndarray | None:
        """`resampled`; None of too few patients."""
        return self.resampled() if self.enough else None

    def apart(self, one: int, other: int) -> tuple[float, tuple[float, float] | None]:
        """The mean of a method less that of another, and its interval; None of too few patients."""
        means = self.means()
        difference = float(means[one] - means[other])
        if self.draws is None:
            return difference, None
        return difference, self.interval(self.draws[:, one] - self.draws[:, other], difference)

    def interval(self, draws: np.ndarray, value: float) -> tuple[float, float]:
        """The interval of LEVEL % of `value`, whose draws are `draws`: percentiles, farther from it by t / z.

        t is Student's with Σ (n − 1) degrees of freedom over the sites of n patients, z the normal distribution's.
        """
        tail = (1 + LEVEL / 100) / 2
        wider = t.ppf(tail, sum(len(each) - 1 for each in self.images)) / norm.ppf(tail)
        low, high = (value + wider * (edge - value) for edge in percentiles(draws))
        return float(low), float(high)

    def differences(self, one: int, other: int) -> np.ndarray:
        """Each patient's mean over its images under a method, less that under another (patients,)."""
        each = [(sums[:, one] - sums[:, other]) / images for images, sums in zip(self.images, self.sums, strict=True)]
        return np.concatenate(each)

    def p_value(self, one: int, other: int) -> float:
        """Wilcoxon's two-sided signed-rank test over the patients' means; patients with equal values are dropped."""
        differences = self.differences(one, other)
        return float(wilcoxon(differences).pvalue) if np.any(differences) else 1.0


def percentiles(values: np.ndarray) -> tuple[float, float]:
    """The middle LEVEL % of the draws."""
    edge = (100 - LEVEL) / 2
    low, high = np.percentile(values, [edge, 100 - edge])
    return float(low), float(high)


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm, Scand. J. Statist. 1979): the i-th smallest of m times m − i + 1, and no
    smaller than those before it, at most 1."""
    order = np.argsort(values, kind="stable")
    adjusted, highest = [0.0] * len(values), 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - place) * values[index]))
        adjusted[index] = highest
    return adjusted


def ranks(means: np.ndarray) -> np.ndarray:
    """The rank of each method in each resample (draws, methods): 1 has the largest mean; equal ones share the mean rank."""
    return np.asarray(rankdata(-means, axis=1))


def firsts(places: np.ndarray) -> np.ndarray:
    """In per cent of the draws, how often each method is the best (methods,), from `ranks`; equal ones share a draw."""
    best = places == places.min(axis=1, keepdims=True)
    return np.asarray(100 * np.mean(best / best.sum(axis=1, keepdims=True), axis=0))
