"""Metrics, against small figures worked out by hand, and against MONAI's own functions."""

import math
import warnings

import pytest
import torch
from monai.metrics import compute_average_surface_distance, compute_hausdorff_distance
from torch import tensor

from feddp.errors import FedDPError
from feddp.training.columns import METRICS, class_names, columns
from feddp.training.metrics import largest_components, measure, measure_classes, millimetres, overlap, summarize


def figure(*boxes, height=9, width=12):
    """(1, H, W) with ones in the boxes (top, left, bottom, right), ends included."""
    canvas = torch.zeros(1, height, width)
    for top, left, bottom, right in boxes:
        canvas[:, top : bottom + 1, left : right + 1] = 1
    return canvas


def scores(prediction, mask):
    return measure_classes(prediction, mask)[0]


def test_a_pixel_against_a_bar():
    """P one pixel, G that pixel and the three to its right. P to G: 0. G to P: 0, 1, 2, 3.

    ASSD pools the five distances: 6/5; medpy's is the mean of the means 0 and 6/4: 3/4. HD 3. HD95: 0 one way; the other way
    the 95th percentile of 0, 1, 2, 3 lies at 0.95·3 = 2.85. Dice 2·1/(1+4), IoU 1/4.
    """
    row = scores(figure((2, 2, 2, 2)), figure((2, 2, 2, 5)))
    assert row == pytest.approx({"dice": 0.4, "iou": 0.25, "hd": 3.0, "hd95": 2.85, "assd": 1.2, "assd-medpy": 0.75})
    assert tuple(row) == METRICS


def test_several_classes_are_kept_apart_beside_their_mean():
    """Disc: P is G, Dice and IoU 1, distances 0. Cup: the pixel against the bar of above. The means are half their sums.

    One class is its own mean: nothing is kept beside it.
    """
    square = figure((1, 1, 4, 5))
    predicted, masks = (torch.cat([square, cup])[None] for cup in (figure((2, 2, 2, 2)), figure((2, 2, 2, 5))))
    (row,) = measure(predicted, masks, ("disc", "optic cup"))
    cup = {"dice": 0.4, "iou": 0.25, "hd": 3.0, "hd95": 2.85, "assd": 1.2, "assd-medpy": 0.75}
    disc = {"dice": 1.0, "iou": 1.0, "hd": 0.0, "hd95": 0.0, "assd": 0.0, "assd-medpy": 0.0}
    mean = {"dice": 0.7, "iou": 0.625, "hd": 1.5, "hd95": 1.425, "assd": 0.6, "assd-medpy": 0.375}
    apart = {f"{m}_{name}": v for name, each in (("disc", disc), ("optic cup", cup)) for m, v in each.items()}
    assert row == pytest.approx(mean | apart)
    assert tuple(row) == columns(METRICS, ("disc", "optic cup"))
    assert class_names(row) == ["disc", "optic cup"]
    assert measure(predicted, masks) == [pytest.approx(mean)]
    (alone,) = measure(predicted[:, :1], masks[:, :1], ("disc",))
    assert tuple(alone) == METRICS == columns(METRICS, ("disc",))


def test_a_square_in_a_square():
    """P 3 × 3 in the middle of G 5 × 5: boundaries of 8 and 16 pixels (the inside is no boundary).

    P to G: 1 for each of the 8. G to P: sqrt 2 at the 4 corners, 1 at the 12 others.
    ASSD (8 + 12 + 4 sqrt 2)/24, medpy's (1 + (12 + 4 sqrt 2)/16)/2, HD sqrt 2, Dice 2·9/(9+25), IoU 9/25. HD95: of 16 sorted
    distances the last four are sqrt 2, and position 0.95·15 = 14.25 is among them.
    """
    expected = {"dice": 18 / 34, "iou": 9 / 25, "hd": math.sqrt(2), "hd95": math.sqrt(2)}
    expected |= {"assd": (20 + 4 * math.sqrt(2)) / 24, "assd-medpy": (1 + (12 + 4 * math.sqrt(2)) / 16) / 2}
    assert scores(figure((2, 2, 4, 4)), figure((1, 1, 5, 5))) == pytest.approx(expected)
    assert scores(figure((1, 1, 5, 5)), figure((2, 2, 4, 4))) == pytest.approx(expected)


def test_a_square_moved_by_two():
    """3 × 3 squares, G two columns to the right. P's boundary, by column: 3 pixels at 2, 2 pixels at 1, 3 pixels at 0.

    Sum 8 each way, 8 pixels each: ASSD 1, medpy's too, HD 2; position 0.95·7 = 6.65 of 0 0 0 1 1 2 2 2 is 2. Dice 2·3/18,
    IoU 3/15.
    """
    row = scores(figure((1, 1, 3, 3)), figure((1, 3, 3, 5)))
    assert row == pytest.approx({"dice": 1 / 3, "iou": 0.2, "hd": 2.0, "hd95": 2.0, "assd": 1.0, "assd-medpy": 1.0})


def test_a_mask_s_boundary_runs_along_the_image_s_edge():
    """A mask that fills the image (3 × 3) has the 8 outer pixels as boundary; against its centre pixel: 4·1 + 4·sqrt 2,
    and 1 back. ASSD (5 + 4 sqrt 2)/9."""
    full, centre = figure((0, 0, 2, 2), height=3, width=3), figure((1, 1, 1, 1), height=3, width=3)
    assert scores(full, centre)["assd"] == pytest.approx((5 + 4 * math.sqrt(2)) / 9)


EMPTY = figure()
DIAGONAL = 15.0  # of 9 × 12


@pytest.mark.parametrize(
    ("prediction", "mask", "overlap", "distance"),
    [
        (EMPTY, EMPTY, 1.0, 0.0),
        (EMPTY, figure((2, 2, 4, 4)), 0.0, DIAGONAL),
        (figure((2, 2, 4, 4)), EMPTY, 0.0, DIAGONAL),
    ],
    ids=["both", "prediction", "mask"],
)
def test_empty_masks_have_finite_scores_and_no_warning(prediction, mask, overlap, distance, capfd):
    """sqrt(9² + 12²) = 15."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = scores(prediction, mask)
    assert row == {"dice": overlap, "iou": overlap} | dict.fromkeys(("hd", "hd95", "assd", "assd-medpy"), distance)
    assert capfd.readouterr() == ("", "")


def test_nothing_is_worse_than_leaving_an_image_empty():
    """The farthest a prediction can be, opposite corners of 9 × 12: sqrt(8² + 11²) = 13.6, below the diagonal."""
    row = scores(figure((0, 0, 0, 0)), figure((8, 11, 8, 11)))
    assert row["hd"] == pytest.approx(math.hypot(8, 11))
    assert row["hd"] < DIAGONAL


def test_the_largest_component_of_each_image_and_class_stays():
    """Image 0, class 0: 5 pixels at the left and 2 apart: the 5 stay. Class 1: 2 pixels, 1 at a corner of theirs and 2 apart:
    corners do not connect, so of two components of 2 the first stays. Image 1: two components of 1, the first stays; an empty
    map stays empty.
    Values stay as they are, those below 1/2 too."""
    before = tensor(
        [
            [
                [[0.9, 0.0, 0.0, 0.6], [0.9, 0.3, 0.0, 0.6], [0.9, 0.8, 0.2, 0.2], [0.7, 0.0, 0.0, 0.0]],
                [[0.6, 0.6, 0.0, 0.0], [0.0, 0.0, 0.6, 0.0], [0.0, 0.0, 0.0, 0.0], [0.9, 0.9, 0.0, 0.0]],
            ],
            [
                [[0.0, 0.0, 0.0, 0.6], [0.0, 0.0, 0.0, 0.0], [0.6, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
                [[0.0, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
            ],
        ]
    )
    wanted = before.clone()
    wanted[0, 0, :2, 3] = 0
    wanted[0, 1, 1, 2] = 0
    wanted[0, 1, 3, :2] = 0
    wanted[1, 0, 2, 0] = 0
    given = before.clone()
    assert largest_components(given).equal(wanted)
    assert given.equal(before)


def test_foreground_is_above_one_half():
    mask = figure((2, 2, 4, 4))
    assert scores(0.51 * mask, mask)["dice"] == 1
    assert scores(0.5 * mask, mask)["dice"] == 0


def test_a_batch_is_measured_image_by_image_with_a_mean_over_classes():
    """Image 0: the bar (Dice 0.4, ASSD 1.2) and a perfect class (1, 0): means 0.7 and 0.6. Image 1: perfect in both."""
    bar, pixel = figure((2, 2, 2, 5)), figure((2, 2, 2, 2))
    probabilities = torch.stack([torch.cat([pixel, bar]), torch.cat([bar, bar])])
    rows = measure(probabilities, torch.cat([bar, bar]).expand(2, 2, -1, -1))
    assert [row["dice"] for row in rows] == pytest.approx([0.7, 1.0])
    assert [row["assd"] for row in rows] == pytest.approx([0.6, 0.0])


def test_distances_are_monai_s():
    """Random blobs: our one pass over the boundaries gives what MONAI's three functions give."""
    noise = torch.rand(2, 4, 1, 24, 20, generator=torch.Generator().manual_seed(0))
    prediction, mask = (torch.nn.functional.avg_pool2d(n, 5, 1, 2).gt(0.5).float() for n in noise)
    ours = [measure_classes(p, m)[0] for p, m in zip(prediction, mask, strict=True)]
    pair = {"y_pred": prediction, "y": mask, "include_background": True}
    theirs = {
        "hd": compute_hausdorff_distance(**pair),
        "hd95": compute_hausdorff_distance(**pair, percentile=95),
        "assd": compute_average_surface_distance(**pair, symmetric=True),
    }
    for metric, values in theirs.items():
        assert [row[metric] for row in ours] == pytest.approx(values.flatten().tolist(), rel=1e-5)


def test_predictions_that_are_not_finite_are_refused():
    with pytest.raises(FedDPError, match="not finite"):
        measure(torch.full((1, 1, 4, 4), math.nan), torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize("shape", [(1, 1, 4, 5), (2, 1, 4, 4), (1, 4, 4)])
def test_shapes_that_differ_are_refused(shape):
    with pytest.raises(FedDPError, match=r"\(B, C, H, W\)"):
        measure(torch.zeros(1, 1, 4, 4), torch.zeros(shape))


def test_summarize_is_the_papers_average_column():
    """FedDP's Table I: 83.21, 95.16, 84.51, 83.45 are averaged as 86.58 ± 4.98.

    Mean 346.33/4 = 86.5825. Deviations −3.3725, 8.5775, −2.0725, −3.1325; squares 11.374, 73.574, 4.295, 9.813, sum
    99.055; over 4, 24.764, root 4.976. Over 3 the root would be 5.746: it is the population's deviation.
    """
    summary = summarize([{"dice": value} for value in (83.21, 95.16, 84.51, 83.45)])
    assert summary == {"dice": {"mean": pytest.approx(86.5825), "std": pytest.approx(4.976, abs=5e-4), "n": 4}}


def test_there_must_be_something_to_summarize():
    with pytest.raises(FedDPError, match="no image was measured"):
        summarize([])


def test_overlap_is_measure_without_distances():
    """Two classes, two images. Image 1: class 1 as in `a_pixel_against_a_bar` (Dice 2/5, IoU 1/4), class 2 empty in both
    (1 and 1): means 0.7 and 0.625. Image 2: class 1 predicted where there is none (0 and 0), class 2 found whole: 1/2 and 1/2.
    """
    nothing, pixel, bar = figure(), figure((2, 2, 2, 2)), figure((2, 2, 2, 5))
    predicted = torch.stack([torch.cat([pixel, nothing]), torch.cat([pixel, bar])])
    truth = torch.stack([torch.cat([bar, nothing]), torch.cat([nothing, bar])])
    found = overlap(predicted, truth)
    assert found.tolist() == [pytest.approx([0.7, 0.625]), pytest.approx([0.5, 0.5])]
    assert found.tolist() == [pytest.approx([row["dice"], row["iou"]]) for row in measure(predicted, truth)]


def test_a_prediction_that_is_not_finite_has_no_overlap():
    """One image of the batch; the other keeps its value."""
    predicted = torch.stack([figure((0, 0, 1, 1)), figure((0, 0, 1, 1))])
    predicted[1, 0, 5, 5] = float("inf")
    found = overlap(predicted, torch.stack([figure((0, 0, 1, 1))] * 2))
    assert found[0].tolist() == [1, 1]
    assert found[1].isnan().all()


def dot(shape, *place):
    """A mask of one pixel or voxel, of one class."""
    mask = torch.zeros(1, *shape, dtype=torch.bool)
    mask[(0, *place)] = True
    return mask


@pytest.mark.parametrize(
    ("spacing", "distance"),
    [((1.0, 1.0), 5.0), ((2.0, 2.0), 10.0), ((0.5, 2.0), math.hypot(1.5, 8.0))],
    ids=["pixels", "doubled", "anisotropic"],
)
def test_millimetres_by_hand(spacing, distance):
    """One pixel and another 3 rows and 4 columns away: 5 pixels, 10 mm at 2 mm; 3 · 0.5 and 4 · 2 mm are 8.14 mm."""
    found = millimetres(dot((8, 9), 1, 1), dot((8, 9), 4, 5), spacing)
    assert found == pytest.approx({"hd95-mm": distance, "assd-mm": distance})


@pytest.mark.parametrize(("spacing", "step"), [((2.0, 1.0), 2), ((1.0, 2.0), 1), ((0.5, 8.0), 0.5)])
def test_millimetres_of_a_bar_by_hand(spacing, step):
    """A bar of 5 rows and the pixel at its end; `step` is the distance of its rows, whatever that of the columns.

    From the pixel to the bar it is 0; from the bar to the pixel 0, 1, 2, 3 and 4 steps: ASSD 10/6 of a step. The 95th
    percentile of the five is 0.95 · 4 = 3.8 steps.
    """
    found = millimetres(figure((1, 2, 5, 2)).bool(), figure((1, 2, 1, 2)).bool(), spacing)
    assert found == pytest.approx({"assd-mm": 10 / 6 * step, "hd95-mm": 3.8 * step})


def test_millimetres_of_a_volume_by_hand():
    """2 slices of 3 mm, 1 row of 0.5 mm: hypot(6, 0.5)."""
    found = millimetres(dot((4, 6, 6), 0, 2, 3), dot((4, 6, 6), 2, 3, 3), (3.0, 0.5, 0.5))
    assert found["assd-mm"] == pytest.approx(math.hypot(6, 0.5))


def test_millimetres_of_empty_masks_are_the_diagonal_or_0():
    """8 rows of 0.5 mm and 9 columns of 2 mm: hypot(4, 18)."""
    empty = torch.zeros(1, 8, 9, dtype=torch.bool)
    assert millimetres(empty, dot((8, 9), 0, 0), (0.5, 2.0))["hd95-mm"] == pytest.approx(math.hypot(4, 18))
    assert millimetres(empty, empty, (0.5, 2.0))["hd95-mm"] == 0


def test_millimetres_in_square_pixels_are_the_distances_in_pixels_times_their_width():
    """An independent path to the same number: ASSD in pixels, of blots of any form."""
    rng = torch.Generator().manual_seed(0)
    prediction, mask = (torch.nn.functional.avg_pool2d(torch.rand(2, 20, 20, generator=rng), 5, 1, 2) for _ in range(2))
    prediction, mask = (prediction > 0.5).float(), (mask > 0.5).float()
    pixels = measure_classes(prediction, mask)
    found = millimetres(prediction.bool(), mask.bool(), (2.0, 2.0), ("a", "b"))
    for name, row in zip("ab", pixels, strict=True):
        assert found[f"assd-mm_{name}"] == pytest.approx(2 * row["assd"])
        assert found[f"hd95-mm_{name}"] == pytest.approx(2 * row["hd95"])
    assert found["assd-mm"] == pytest.approx(sum(row["assd"] for row in pixels))
