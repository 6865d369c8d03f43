"""The table of tasks: what must hold of every row, whoever adds one."""

import pytest

from feddp import protocol
from feddp.methods.base import STAGES
from feddp.protocol import MEASURED, SCALARS, TASKS, Kind, Number, Over, Sent, Table, numbers_of
from feddp.stages import stage_of
from feddp.stages.tensors import Expected

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
        if isinstance(scalar, Number) and scalar.over and not scalar.flag and name != "empty_masks":
            assert (scalar.decimals is None) != (scalar.digits is None), name


@ROWS
def test_the_file_of_its_stage_has_both_halves(row):
    stage = stage_of(row.stage)
    assert row.stage in (protocol.READY_STAGE, *STAGES, protocol.EVALUATE_STAGE, protocol.ADAPT_STAGE)
    assert callable(stage.serve)
    assert callable(stage.answer)
    assert row.name in protocol.tasks_of([row.stage])


@ROWS
def test_the_tensors_of_every_row_are_known_to_the_guard(row, plan_for):
    """The rule of the guard and of the server (`Expected`) has names for whatever a row says may leave."""
    assert bool(Expected(plan_for(method="fedlc")).names(row.tensors)) == (row.tensors is not Sent.NONE)


@ROWS
def test_every_measured_number_says_over_which_images(row):
    """So that the guard can count them; a flag or a count of samples is measured over none."""
    over = {name: row.measured_over(name) for name in row.scalars}
    assert {name for name, images in over.items() if images} == MEASURED & set(row.scalars)
    assert (set(over.values()) <= {None, Over.UNSEEN}) == (row.stage == protocol.ADAPT_STAGE or not MEASURED & set(row.scalars))


def test_no_scalar_is_of_no_task():
    assert {name for row in TASKS.values() for name in row.scalars} == SCALARS.keys()


def test_a_task_of_no_row_may_carry_nothing():
    row = protocol.spec_of("trian")
    assert (row.consent, row.tensors, row.scalars, row.kind) == ("", Sent.NONE, (), None)


def test_every_table_has_the_numbers_of_each_class():
    """Of two classes: 6 metrics, then 6 of each class; 2 and 2 + 2 by case."""
    known = numbers_of("evaluate", ("A",), ("disc", "cup"))
    assert {name: len(table) for name, table in known["volumes"].items()} == {"before_calibration": 6, "final": 6}
    assert (len(known["before_calibration"]), len(known["final"]), len(known["peers"]["A"])) == (18, 18, 18)
    assert len(numbers_of("adapt", ("A",), ("disc", "cup"))["scores"]) == 18
    assert known["final"].keys() >= {"dice_disc", "assd_cup"}
    assert [known["final"][name]["mean"].most for name in ("dice_cup", "iou_cup")] == [1, 1]
    assert known["final"]["hd95_cup"]["mean"].most > 1
    assert len(numbers_of("evaluate", ("A",), ("lesion",))["final"]) == 6


def test_no_metric_could_be_taken_for_one_of_a_class():
    """The name of a metric of a class is split at its first underscore."""
    assert not [
        metric for scalar in SCALARS.values() if isinstance(scalar, Table) for metric in scalar.metrics if "_" in metric
    ]


def test_numbers_are_rounded_as_their_row_says():
    """By hand: three decimals, three significant digits, tenths; a count stays."""
    assert SCALARS["dice"].rounded(0.12349) == 0.123
    assert SCALARS["loss"].rounded(0.00123456) == 0.00123
    assert SCALARS["seconds"].rounded(1.26) == 1.3
    assert SCALARS["samples"].rounded(123456) == 123456
