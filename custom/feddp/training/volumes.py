"""Metrics per case: Dice and IoU of all its slices as one volume, in addition to the metrics per slice.

Surface distances of a volume need the distances between its pixels and slices, which a site's folder may hold
(`feddp.data.description.Position`), and slices without a gap (in the prostate data, those without prostate are missing). Where
both are there, `measure_in_mm` gives them in millimetres.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from feddp.errors import InputError
from feddp.training.columns import VOLUME_METRICS
from feddp.training.metrics import THRESHOLD, Row, averaged, foreground, millimetres

Where = tuple[
    int | None, tuple[float, float] | None, float | None
]  # a slice's number, its spacing in the plane, and to the next


def measure_volumes(probabilities: Tensor, masks: Tensor, cases: Sequence[str], classes: Sequence[str] = ()) -> dict[str, Row]:
    """Returns VOLUME_METRICS per case, each the mean over its classes, in the order of the cases' first slices.

    With `classes`, the names of the classes, also VOLUME_METRICS of each (`feddp.training.columns.columns`).

    probabilities and masks (N, C, H, W) are N slices in any order; `cases` gives the case of each slice (`patient` of its row).
    A class is measured over all voxels of a case, so slices with more foreground weigh more than in a mean over slices. If
    prediction and mask of a class are both empty in the whole case, dice = iou = 1; if exactly one is empty, 0. All voxels
    weigh the same, whatever the distance between slices. `feddp.training.metrics.summarize(list(result.values()))` returns the
    mean over cases.

    Raises:
        InputError: the shapes differ, a slice has no case, or a probability is not finite.
    """
    if probabilities.shape != masks.shape or masks.ndim != 4 or len(cases) != len(masks):
        shapes = f"predictions {tuple(probabilities.shape)}, masks {tuple(masks.shape)} and {len(cases)} cases"
        raise InputError(f"{shapes}: predictions and masks must be (N, C, H, W), with a case for each of the N slices")
    from monai.metrics import compute_dice, compute_iou

    predicted, truth = foreground(probabilities), (masks > THRESHOLD).cpu()
    slices: dict[str, list[int]] = {}
    for place, case in enumerate(cases):
        slices.setdefault(case, []).append(place)
    rows = {}
    for case, places in slices.items():
        pair = [maps[places].transpose(0, 1)[None].float() for maps in (predicted, truth)]  # (1, C, S, H, W)
        dice, iou = (compute(*pair, ignore_empty=False)[0].tolist() for compute in (compute_dice, compute_iou))
        rows[case] = averaged([dict(zip(VOLUME_METRICS, both, strict=True)) for both in zip(dice, iou, strict=True)], classes)
    return rows


def measure_in_mm(
    probabilities: Tensor, masks: Tensor, cases: Sequence[str], places: Sequence[Where], classes: Sequence[str] = ()
) -> dict[str, Row]:
    """Returns `millimetres` per case, as volumes, of the cases whose geometry is known.

    probabilities, masks and cases as in `measure_volumes`; `places` says of each slice where it lies. A case has no distances,
    and no entry, if a number or a spacing of a slice is unknown or differs from the others', or a slice between two is missing.
    """
    predicted, truth = foreground(probabilities), (masks > THRESHOLD).cpu()
    slices: dict[str, list[int]] = {}
    for place, case in enumerate(cases):
        slices.setdefault(case, []).append(place)
    rows = {}
    for case, found in slices.items():
        if spacing := _spacing([places[i] for i in found]):
            order = sorted(found, key=lambda i: places[i][0] or 0)
            # (C, S, H, W)
            rows[case] = millimetres(predicted[order].transpose(0, 1), truth[order].transpose(0, 1), spacing, classes)
    return rows


def _spacing(places: Sequence[Where]) -> tuple[float, float, float] | None:
    """Returns the millimetres between slices, rows and columns of a volume; None if they are unknown or not the same."""
    numbers = sorted(number for number, _, _ in places if number is not None)
    whole = len(numbers) == len(places) and all(b == a + 1 for a, b in pairwise(numbers))
    (_, plane, apart), *others = places
    same = all(other[1:] == (plane, apart) for other in others)
    return None if not whole or not same or plane is None or apart is None else (apart, *plane)
