"""What looks for a network's values in half a gigabyte of frames: it says what `in` says."""

import random

import pytest

from support.captured import those_in

PIECE = 2**20  # bytes that it looks at together
PLACES = (0, 1, 2, 777, PIECE - 64, PIECE - 63, PIECE - 8, PIECE - 7, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE - 1)


@pytest.mark.parametrize("length", [4, 8, 20, 64])
def test_it_says_of_each_value_what_in_says(length):
    """At even and odd places, across the bounds of pieces and at the end; near misses begin as values do, and differ last."""
    content = random.Random(0).randbytes(2 * PIECE + 131)
    there = {content[place : place + length] for place in (*PLACES, len(content) - length)}
    missing = {value[:-1] + bytes([value[-1] ^ 1]) for value in there} | {content[1 - length :] + bytes(1)}
    assert all(value in content for value in there)
    assert not any(value in content for value in missing)
    assert those_in(content, there | missing) == there


def test_lengths_may_differ_and_begins_be_the_same():
    values = {b"12345678", b"12345678abc", b"12345678abd"}
    assert those_in(b"_12345678abc", values) == {b"12345678", b"12345678abc"}
    assert those_in(b"1234567", values) == those_in(b"", values) == those_in(b"12345678", set()) == set()
