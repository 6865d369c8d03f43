"""Whether methods differ: intervals of mean differences."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import t

METRIC = "dice"
RESAMPLES, LEVEL = 4000, 95  # of the bootstrap, and per cent of its interval
# of differences: 5 are all of one sign by chance in 2 of 32, more than 100 − LEVEL %, and no resample of them changes the sign
LEAST = 6
FEW = 3  # sites: of 2, Student's interval has 12.7 times their standard error on each side, and says nothing
_BLOCK = 100  # resamples that are in memory at once


def interval(strata: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The percentile bootstrap interval (Efron & Tibshirani, 1993, ch. 13) of the mean over strata of each stratum's mean.

    Values are drawn again within each stratum; the seed is fixed. None where a stratum has fewer than LEAST values.

    Args:
        strata: the paired differences of each site's images.
    """
    if not strata or any(len(values) < LEAST for values in strata):
        return None
    rng = np.random.default_rng(0)
    means = np.zeros(RESAMPLES)
    for values in map(np.asarray, strata):
        for start in range(0, RESAMPLES, _BLOCK):
            drawn = rng.integers(len(values), size=(_BLOCK, len(values)))
            means[start : start + _BLOCK] += values[drawn].mean(axis=1)
    edge = (100 - LEVEL) / 2
    low, high = np.percentile(means / len(strata), [edge, 100 - edge])
    return float(low), float(high)


def interval_of_few(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's interval of the mean, mean ± t · s / √n; None of fewer than FEW values.

    For few values, such as sites: a bootstrap of 4 values of one sign never includes 0, though chance gives them in 1 of 8.
    """
    if len(values) < FEW:
        return None
    half = t.ppf((1 + LEVEL / 100) / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    mean = float(np.mean(values))
    return mean - float(half), mean + float(half)
