"""Metrics of a whole case, against small volumes worked out by hand."""

import math

import pytest
import torch

from feddp.errors import FedDPError
from feddp.training.columns import VOLUME_METRICS
from feddp.training.metrics import measure, summarize
from feddp.training.volumes import measure_in_mm, measure_volumes


def bar(pixels, start=0):
    """(1, 1, 10), ones in `pixels` columns from `start` on."""
    row = torch.zeros(1, 1, 10)
    row[..., start : start + pixels] = 1
    return row


def test_a_volume_is_not_the_mean_of_its_slices():
    """Case A: slice 1 has P of 8 pixels in G of 8, slice 2 P of 1 beside G of 1. Case B: P of 2 in G of 6, one slice.

    A, over 20 voxels: |P ∩ G| = 8, |P| = |G| = 9: Dice 2·8/18 = 8/9, IoU 8/10 = 4/5; its slices' Dice are 1 and 0, mean 1/2.
    B: Dice 2·2/8 = 1/2, IoU 2/6 = 1/3, as the slice itself. The mean over cases is (8/9 + 1/2)/2 = 25/36.
    The cases' slices come mixed.
    """
    predicted = torch.stack([bar(8), bar(2), bar(1)])
    masks = torch.stack([bar(8), bar(6), bar(1, start=5)])
    rows = measure_volumes(predicted, masks, ["A", "B", "A"])
    assert list(rows) == ["A", "B"]
    assert tuple(rows["A"]) == VOLUME_METRICS
    assert rows["A"] == pytest.approx({"dice": 8 / 9, "iou": 4 / 5})
    assert rows["B"] == pytest.approx({"dice": 1 / 2, "iou": 1 / 3})
    assert [row["dice"] for row in measure(predicted, masks)] == pytest.approx([1, 1 / 2, 0])
    assert summarize(list(rows.values()))["dice"]["mean"] == pytest.approx(25 / 36)


def test_classes_are_measured_apart_and_averaged():
    """Class 1: P of 4 in G of 4 in both slices, Dice 1, IoU 1. Class 2: P of 1 in G of 3, then P of 2 in G of 2.

    |P ∩ G| = 3, |P| = 3, |G| = 5: Dice 6/8, IoU 3/5. Means 7/8 and 4/5. (All voxels in one: 11 of 11 and 13, 22/24.)
    """
    predicted = torch.stack([torch.cat([bar(4), bar(1)]), torch.cat([bar(4), bar(2)])])
    masks = torch.stack([torch.cat([bar(4), bar(3)]), torch.cat([bar(4), bar(2)])])
    mean = {"dice": 7 / 8, "iou": 4 / 5}
    assert measure_volumes(predicted, masks, ["A", "A"])["A"] == pytest.approx(mean)
    apart = {"dice_one": 1, "iou_one": 1, "dice_two": 6 / 8, "iou_two": 3 / 5}
    assert measure_volumes(predicted, masks, ["A", "A"], ("one", "two"))["A"] == pytest.approx(mean | apart)


@pytest.mark.parametrize(
    ("predicted", "masks", "score"),
    [
        ((0, 0), (0, 0), 1.0),
        ((0, 0), (0, 3), 0.0),
        ((2, 0), (0, 0), 0.0),
        ((0, 3), (0, 3), 1.0),
    ],
    ids=["both", "prediction", "mask", "neither"],
)
def test_empty_is_said_of_the_case_not_of_a_slice(predicted, masks, score):
    rows = measure_volumes(*(torch.stack([bar(n) for n in pixels]) for pixels in (predicted, masks)), ["A", "A"])
    assert rows == {"A": {"dice": score, "iou": score}}


def test_foreground_is_above_one_half():
    mask = bar(3)[None]
    assert measure_volumes(0.51 * mask, mask, ["A"])["A"]["dice"] == 1
    assert measure_volumes(0.5 * mask, mask, ["A"])["A"]["dice"] == 0


@pytest.mark.parametrize(
    ("shape", "cases"), [((2, 1, 4, 5), ["A", "A"]), ((2, 1, 4, 4), ["A"]), ((2, 1, 4), ["A", "A"])], ids=str
)
def test_what_does_not_fit_is_refused(shape, cases):
    with pytest.raises(FedDPError, match=rf"{len(cases)} cases: .*\(N, C, H, W\)"):
        measure_volumes(torch.zeros(2, 1, 4, 4), torch.zeros(shape), cases)


def test_predictions_that_are_not_finite_are_refused():
    with pytest.raises(FedDPError, match="not finite"):
        measure_volumes(torch.full((1, 1, 4, 4), math.nan), torch.ones(1, 1, 4, 4), ["A"])


def test_distances_of_a_volume_in_millimetres_are_those_of_its_slices_in_order():
    """Case a: one voxel on slice 4, predicted on slice 6, 2 · 2.5 mm away; its slices come in another order.

    Cases b, c and d have a gap, no spacing and two spacings: they have no distances.
    """
    numbers = [6, 4, 5, 0, 2, 0, 1, 0, 1]
    cases = list("aaabbccdd")
    spacing = {"c": None}
    places = [(n, spacing.get(case, (0.5, 0.5)), 2.5) for n, case in zip(numbers, cases, strict=True)]
    places[-1] = (1, (0.6, 0.6), 2.5)
    predicted, truth = torch.zeros(9, 1, 4, 4), torch.zeros(9, 1, 4, 4)
    predicted[0, 0, 2, 2] = truth[1, 0, 2, 2] = 1
    assert measure_in_mm(predicted, truth, cases, places) == {"a": pytest.approx({"assd-mm": 5.0, "hd95-mm": 5.0})}


def test_rows_and_columns_have_distances_of_their_own():
    """One voxel, predicted two rows below: 2 · 0.5 mm. Three columns to the right: 3 · 0.8 mm."""
    truth = torch.zeros(2, 1, 8, 8)
    truth[0, 0, 2, 2] = 1
    places = [(n, (0.5, 0.8), 3.0) for n in range(2)]
    for row, column, apart in ((4, 2, 1.0), (2, 5, 2.4)):
        predicted = torch.zeros(2, 1, 8, 8)
        predicted[0, 0, row, column] = 1
        assert measure_in_mm(predicted, truth, ["a", "a"], places)["a"]["assd-mm"] == pytest.approx(apart)


def test_a_volume_whose_slices_are_not_equally_far_apart_has_no_distances():
    one = torch.ones(3, 1, 4, 4)
    for last, measured in ((2.5, True), (3.0, False)):
        places = [(n, (0.5, 0.5), apart) for n, apart in enumerate((2.5, 2.5, last))]
        assert bool(measure_in_mm(one, one, ["a"] * 3, places)) is measured
