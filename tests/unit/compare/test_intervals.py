"""Bootstrap intervals of mean differences, where the distribution of the resamples' means is known."""

import numpy as np
import pytest

from feddp.compare.statistics import LEAST, interval


def test_equal_differences_leave_nothing_to_draw():
    assert interval([[2.5] * 6]) == (2.5, 2.5)
    assert interval([[1.0] * 4, [3.0] * 9]) == (2.0, 2.0), "each stratum weighs the same, however many values it has"


def test_the_binomial_by_hand():
    """Eight values, four 0 and four 10: a resample's mean is 10/8 Binomial(8, 1/2). P(0) = 1/256 = 0.4 %, P(<= 1) = 9/256 =
    3.5 %: the 2.5 % point is at 1, 10/8 = 1.25; by symmetry the 97.5 % point is at 7, 8.75."""
    assert interval([[0.0, 10.0] * 4]) == (1.25, 8.75)


def test_strata_by_hand():
    """Two strata of two 0 and two 10 each: a resample's mean over both is again 10/8 Binomial(8, 1/2). As one stratum of
    4 + 12 values in one list, the larger would weigh three times as much."""
    assert interval([[0.0, 10.0] * 2, [10.0, 0.0] * 2]) == (1.25, 8.75)


def test_too_few_values_have_no_interval():
    """Of 3 values a resample is the largest alone with probability 1/27 > 2.5 %: the interval would be the range."""
    assert interval([[1.0, 2.0, 3.0]]) is None
    assert interval([[1.0] * LEAST, [1.0] * (LEAST - 1)]) is None
    assert interval([[]]) is None
    assert interval([]) is None


def test_a_normal_sample():
    """Of 400 standard normal values, shifted and scaled to mean 1 and population standard deviation 2, the bootstrap's mean has
    the standard error 2/20 = 0.1: 1 ± 1.96 · 0.1, to the accuracy of 4000 resamples."""
    values = np.random.default_rng(1).standard_normal(400)
    values = 1 + 2 * (values - values.mean()) / values.std()
    assert interval([values]) == pytest.approx((0.804, 1.196), abs=0.02)
    assert interval([values]) == interval([values])
