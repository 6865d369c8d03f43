"""Bootstrap intervals of mean differences, where the distribution of the resamples' means is known."""

import numpy as np
import pytest

from feddp.compare.statistics import LEAST, interval, interval_of_few


def test_equal_differences_leave_nothing_to_draw():
    assert interval([[2.5] * 6]) == (2.5, 2.5)
    assert interval([[1.0] * 6, [3.0] * 9]) == (2.0, 2.0), "each stratum weighs the same, however many values it has"


def test_the_binomial_by_hand():
    """Eight values, four 0 and four 10: a resample's mean is 10/8 Binomial(8, 1/2). P(0) = 1/256 = 0.4 %, P(<= 1) = 9/256 =
    3.5 %: the 2.5 % point is at 1, 10/8 = 1.25; by symmetry the 97.5 % point is at 7, 8.75."""
    assert interval([[0.0, 10.0] * 4]) == (1.25, 8.75)


def test_strata_by_hand():
    """Two strata of three 0 and three 10 each: a resample's mean over both is 10/12 Binomial(12, 1/2). P(<= 2) = 79/4096 =
    1.9 %, P(<= 3) = 299/4096 = 7.3 %: the 2.5 % point is at 3, 2.5; by symmetry the 97.5 % point is at 9, 7.5."""
    assert interval([[0.0, 10.0] * 3, [10.0, 0.0] * 3]) == pytest.approx((2.5, 7.5))


def test_too_few_values_have_no_interval():
    """Five of one sign are chance in 2/32 > 5 %, and no resample has a mean of the other sign; six in 2/64 = 3 %."""
    assert LEAST == 6
    assert interval([[1.0, 2.0, 3.0, 4.0, 5.0]]) is None
    assert interval([[1.0] * LEAST, [1.0] * (LEAST - 1)]) is None
    assert interval([[]]) is None
    assert interval([]) is None


def test_students_interval_by_hand():
    """Gosset's table: t(0.975; 2) = 4.303. Of 1, 2, 3: s = 1, s/√3 = 0.577, 2 ± 2.484."""
    assert interval_of_few([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.484, 2 + 2.484), abs=0.001)
    assert interval_of_few([1.0, 2.0]) is None
    assert interval_of_few([2.0] * 4) == (2, 2)


def test_a_normal_sample():
    """Of 400 standard normal values, shifted and scaled to mean 1 and population standard deviation 2, the bootstrap's mean has
    the standard error 2/20 = 0.1: 1 ± 1.96 · 0.1, to the accuracy of 4000 resamples."""
    values = np.random.default_rng(1).standard_normal(400)
    values = 1 + 2 * (values - values.mean()) / values.std()
    assert interval([values]) == pytest.approx((0.804, 1.196), abs=0.02)
    assert interval([values]) == interval([values])
