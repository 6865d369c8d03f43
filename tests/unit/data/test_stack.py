"""Arrays that lie in a temporary file if they are large, and what is computed of them slice by slice."""

import os

import numpy as np
import pytest

from feddp.data.formats import stack
from feddp.data.formats.scan import eight_bits, stretch
from feddp.data.formats.stack import Stack, room
from feddp.errors import InputError


@pytest.fixture(params=[10**6, 0], ids=["memory", "file"])
def place(request, monkeypatch):
    monkeypatch.setattr(stack, "IN_MEMORY", request.param)
    return request.param


def test_slices_come_in_the_order_that_is_asked_for(place):
    values, rng = np.arange(7 * 6, dtype=np.float32).reshape(7, 2, 3), np.random.default_rng(0)
    for order in (np.arange(7), np.arange(7)[::-1], *(rng.permutation(7) for _ in range(20))):
        gathered = Stack()
        for each in values:
            gathered.add(each, 7)
        found = gathered.ordered(order)
        assert isinstance(found, np.memmap) == (place == 0)
        assert (found == values[order]).all()


def test_values_have_8_bits_as_long_as_all_slices_have(place):
    gathered = Stack()
    for each in (np.full((2, 2), 200, np.uint8), np.full((2, 2), 201, np.uint8)):
        gathered.add(each, 3)
    assert gathered.ordered(np.arange(3)).dtype == np.uint8
    gathered.add(np.full((2, 2), -7, np.float32), 3)
    found = gathered.ordered(np.arange(3))
    assert found.dtype == np.float32
    assert found[:, 0, 0].tolist() == [200, 201, -7]
    assert not gathered.eight


def test_masked_values_have_no_number_and_the_others_still_have_8_bits(place):
    gathered, values = Stack(), np.array([[5, 7]], np.uint8)
    gathered.add(np.ma.array(values, mask=False), 3)
    gathered.add(np.ma.array(values, mask=values == 5), 3)
    gathered.add(values, 3)
    found = gathered.ordered(np.arange(3))
    assert np.array_equal(found[:, 0], [[5, 7], [np.nan, 7], [5, 7]], equal_nan=True)
    assert gathered.eight


def test_a_disk_without_room_is_named(monkeypatch):
    monkeypatch.setattr(stack, "IN_MEMORY", 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match="a volume needs 24 bytes in a temporary file .No space left.*Set TMPDIR"):
        room((2, 3), np.float32)


@pytest.mark.parametrize("kind", [np.float32, np.uint16, np.float64, np.int32])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 9, 11), (5, 7, 3), (40, 20, 30), (3, 50, 1)])
def test_the_99th_percentile_is_that_of_all_slices(kind, shape):
    """As numpy has it of the whole array, with values that occur often and ones that do not."""
    rng = np.random.default_rng(0)
    for draw in (rng.integers(0, 20, shape), rng.integers(0, 60_000, shape), np.zeros(shape)):
        values = draw.astype(kind)
        high = np.quantile(values, 0.99)
        assert stretch(values) == (values.min(), pytest.approx(values.max() if high == values.min() else high, rel=1e-6))


def test_what_has_no_value_is_black_and_counts_for_nothing():
    values = np.linspace(10, 110, 101, dtype=np.float32).reshape(1, 1, 101)
    padded = np.concatenate([values, np.full((1, 1, 50), np.nan, np.float32)], axis=2)
    assert (eight_bits(padded, None)[..., :101] == eight_bits(values, None)).all()
    assert not eight_bits(padded, None)[..., 101:].any()
    assert not eight_bits(np.full((2, 2, 2), np.nan, np.float32), None).any()
