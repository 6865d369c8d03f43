"""Metrics per case: Dice and IoU of all its slices as one volume, in addition to the metrics per slice.

Surface distances are not measured. They need the distance between slices, which a site's folder does not hold; its images are
also resized in the plane, and slices may be missing (in the prostate data, those without prostate).
"""

from collections.abc import Sequence

from torch import Tensor

from feddp.errors import InputError
from feddp.training.metrics import THRESHOLD, Row, averaged, foreground

VOLUME_METRICS = ("dice", "iou")


def measure_volumes(probabilities: Tensor, masks: Tensor, cases: Sequence[str], classes: Sequence[str] = ()) -> dict[str, Row]:
    """Returns VOLUME_METRICS per case, each the mean over its classes, in the order of the cases' first slices.

    With `classes`, the names of the classes, also VOLUME_METRICS of each (`feddp.training.metrics.columns`).

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
