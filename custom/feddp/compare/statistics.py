"""Whether methods differ: Wilcoxon's signed-rank test over the test images, and intervals of mean differences."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from scipy.stats import t, wilcoxon

from feddp.compare.scores import Scores

METRIC = "dice"
RESAMPLES, LEVEL = 4000, 95  # of the bootstrap, and per cent of its interval
# of differences: 5 are all of one sign by chance in 2 of 32, more than 100 − LEVEL %, and no resample of them changes the sign
LEAST = 6
FEW = 3  # sites: of 2, Student's interval has 12.7 times their standard error on each side, and says nothing
_BLOCK = 100  # resamples that are in memory at once


def best_two(methods: Mapping[str, Scores]) -> list[str]:
    """The methods with the two highest averages of Dice, the best first; fewer where fewer methods have an average."""
    means = {name: scores.average[METRIC]["mean"] for name, scores in methods.items() if scores.average}
    return sorted(means, key=lambda name: -means[name])[:2]


def compare_images(best: Scores, second: Scores) -> str:
    """The two-sided test in one sentence, over all test images of all sites, paired by site and image.

    Images with equal values are dropped, as Wilcoxon does. Dice is in points of per cent.
    """
    pairs = [(row[METRIC], second.rows[site][image][METRIC]) for site, rows in best.rows.items() for image, row in rows.items()]
    differences = 100 * np.array([one - other for one, other in pairs])
    differing = int(np.count_nonzero(differences))
    if not differing:
        return f"no difference in any image (n = {len(pairs)})"
    p = wilcoxon(differences, alternative="two-sided").pvalue
    median = f"median difference {np.median(differences):+.2f} points of Dice"
    return f"n = {len(pairs)} test images, {differing} of them differ, {median}, p = {p:.4g}"


def sentence(methods: Mapping[str, Scores], last: Collection[str]) -> str:
    """The note below Table I.

    Args:
        last: the methods whose networks are of the last round, or went on from it. The choice of the round may move a method
            as much as methods differ, so the note says where the two differ in it.
    """
    names = best_two(methods)
    if len(names) < 2:
        return "Wilcoxon signed-rank test: needs two methods that finished at every site."
    found = compare_images(methods[names[0]], methods[names[1]])
    test = f"Wilcoxon signed-rank test (two-sided, per image, seeds averaged), {names[0]} against {names[1]}: {found}."
    ends, best = ([name for name in names if (name in last) == wanted] for wanted in (True, False))
    return (
        f"{test} {ends[0]} is of the last round or went on from it; {best[0]} is of the best round." if ends and best else test
    )


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
