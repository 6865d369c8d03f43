"""How good a case's segmentation is: Dice and IoU of all its slices as one volume, beside the slices' own metrics.

No distance between surfaces is measured: it needs the distance between slices, which a site's folder does not hold, whose
images are resized in the plane and may leave slices out (the prostate's without prostate).
"""

from collections.abc import Sequence

from torch import Tensor

from feddp.errors import InputError
from feddp.training.metrics import THRESHOLD, Row, foreground

VOLUME_METRICS = ("dice", "iou")


def measure_volumes(probabilities: Tensor, masks: Tensor, cases: Sequence[str]) -> dict[str, Row]:
    """VOLUME_METRICS of every case, each the mean over its classes, in the order in which the cases first come.

    probabilities and masks (N, C, H, W), N slices in any order; `cases` says whose each is (a row's `patient`). A class is
    measured over all the voxels of a case: slices weigh by what is in them, unlike in a mean over slices. Where prediction and
    mask of a class are both empty in the whole case, dice = iou = 1; where exactly one is, 0. Voxels count alike, whatever
    the slices' distance. `feddp.training.metrics.summarize(list(result.values()))` is the mean over cases.
    InputError where shapes differ, a slice has no case, or a probability is not finite.
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
        scores = (compute(*pair, ignore_empty=False)[0] for compute in (compute_dice, compute_iou))
        rows[case] = {m: float(classes.double().mean()) for m, classes in zip(VOLUME_METRICS, scores, strict=True)}
    return rows
