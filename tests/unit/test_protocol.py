"""The table of tasks: what must hold of every row, whoever adds one."""

import pytest

from feddp import protocol
from feddp.methods.base import STAGES
from feddp.protocol import MEASURED, SCALARS, TASKS, Kind, Number, Sent
from feddp.stages import stage_of

EXCHANGES = (Kind.HANDSHAKE, Kind.COLLECTION, Kind.DELIVERY)
ROWS = pytest.mark.parametrize("row", TASKS.values(), ids=TASKS)


@ROWS
def test_tensors_leave_in_a_round_or_with_a_consent(row):
    """A round's are the plan's shared ones; whatever else leaves is given to peers, who are named by a word of the policy."""
    assert (row.tensors is not Sent.NONE) == (row.kind in (Kind.ROUND, Kind.COLLECTION))
    assert (row.tensors is Sent.SHARED) == (row.kind is Kind.ROUND)
    assert bool(row.consent) == (row.kind in EXCHANGES)
    assert row.consent in ("", *protocol.CONSENTS)


@ROWS
def test_a_delivery_brings_what_one_collection_gathered_under_the_same_consent(row):
    assert bool(row.delivers) == (row.kind is Kind.DELIVERY)
    if row.delivers:
        collection = TASKS[row.delivers]
        assert collection.kind is Kind.COLLECTION
        assert (collection.stage, collection.consent) == (row.stage, row.consent)


@ROWS
def test_an_exchange_is_introduced(row):
    if row.kind in EXCHANGES:
        assert [other.name for other in TASKS.values() if other.kind is Kind.HANDSHAKE and other.consent == row.consent]


@ROWS
def test_every_scalar_is_known_and_coarse_where_it_tells_of_images(row):
    """A count is an integer of at most 53 bits (test_hostile); a measured number that is no count is rounded."""
    assert set(row.scalars) <= SCALARS.keys()
    for name in row.scalars:
        scalar = SCALARS[name]
        if isinstance(scalar, Number) and scalar.measured and name != "empty_masks":
            assert (scalar.decimals is None) != (scalar.digits is None), name
        assert (name in MEASURED) == scalar.measured


@ROWS
def test_the_file_of_its_stage_has_both_halves(row):
    stage = stage_of(row.stage)
    assert row.stage in (*STAGES, protocol.EVALUATE_STAGE, protocol.ADAPT_STAGE)
    assert callable(stage.serve)
    assert callable(stage.answer)
    assert row.name in protocol.tasks_of([row.stage])


def test_no_scalar_is_of_no_task():
    assert {name for row in TASKS.values() for name in row.scalars} == SCALARS.keys()


def test_a_task_of_no_row_may_carry_nothing():
    row = protocol.spec_of("trian")
    assert (row.consent, row.tensors, row.scalars, row.kind) == ("", Sent.NONE, (), None)


def test_numbers_are_rounded_as_their_row_says():
    """By hand: three decimals, three significant digits, tenths; a count stays."""
    assert SCALARS["dice"].rounded(0.12349) == 0.123
    assert SCALARS["loss"].rounded(0.00123456) == 0.00123
    assert SCALARS["seconds"].rounded(1.26) == 1.3
    assert SCALARS["samples"].rounded(123456) == 123456
