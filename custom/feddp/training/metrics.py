"""Segmentation metrics from MONAI: Dice, IoU, and distances between boundaries in pixels, or in millimetres where known.

Rule for empty masks: if prediction and mask are both empty, dice = iou = 1 and every distance is 0; if exactly one is empty,
dice = iou = 0 and every distance is the image's diagonal sqrt(H² + W²), longer than any distance in the image. So every number
is finite, and an empty prediction is right only where the mask is empty.

The paper on virtual classes (Liu et al., 2024) reports "mean Intersection over Union" and "Hausdorff distance" without
definitions. We report its Hausdorff distance as `hd`, the maximum, and its mean IoU as `iou`: the mean over the foreground
classes of an image, then over images, without the background, also for methods with a softmax, because all methods are measured
on the same masks. If its IoU included the background, the reported 67 % at a polyp site (EndoPolyp B, FedDP) would mean an IoU
of about 40 % for the polyp, at a maximal distance of 4.6 of 384 pixels; only a tiny polyp has both.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from feddp.errors import ContributionError, InputError
from feddp.training.columns import DISTANCES, MM_METRICS, in_mm, of_class

THRESHOLD = 0.5
DIVERGED = "predictions are not finite; the network has diverged: lower the learning rate"

Row = dict[str, float]


def averaged(rows: Sequence[Row], classes: Sequence[str]) -> Row:
    """Returns `columns` of one image or case, from its metrics per class, one row per class."""
    found = {metric: float(np.mean([row[metric] for row in rows])) for metric in rows[0]}
    if len(classes) > 1:
        found |= {of_class(m, name): value for name, row in zip(classes, rows, strict=True) for m, value in row.items()}
    return found


def measure(probabilities: Tensor, mask: Tensor, classes: Sequence[str] = ()) -> list[Row]:
    """Returns METRICS of every image of a batch, each the mean over the image's classes; with `classes`, `columns` of them.

    probabilities and mask (B, C, H, W); a pixel is foreground above 0.5. Raises InputError if the shapes differ or a
    probability is not finite (it would count as background).
    """
    if probabilities.shape != mask.shape or mask.ndim != 4:
        raise InputError(f"predictions {tuple(probabilities.shape)} and masks {tuple(mask.shape)} must be (B, C, H, W)")
    return [averaged(measure_classes(p, m), classes) for p, m in zip(probabilities, mask, strict=True)]


def overlap(probabilities: Tensor, mask: Tensor) -> Tensor:
    """Returns dice and iou of every image of a batch, each the mean over the image's classes: (B, 2), on the batch's device.

    The same values as `measure` gives, without the distances. A prediction that is not finite gives nan.
    """
    from monai.metrics import compute_iou

    predicted, truth = (probabilities > THRESHOLD).float(), (mask > THRESHOLD).float()
    iou = compute_iou(predicted, truth, ignore_empty=False)
    iou = iou.where(probabilities.isfinite().all(dim=(2, 3)), torch.nan)
    return torch.stack([2 * iou / (1 + iou), iou], dim=-1).mean(dim=1)  # Dice = 2 IoU / (1 + IoU)


def measure_classes(probabilities: Tensor, mask: Tensor) -> list[Row]:
    """Returns METRICS of one image, one row per class. probabilities and mask (C, H, W); errors as in `measure`.

    dice and iou in [0, 1]; distances in pixels. hd95 is the larger 95th percentile of the two directions, as in
    MONAI. assd is one mean over the distances of both boundaries (Wang et al., TMI 2024, Eq. 9):
    (Σ_{a∈P_b} d(a, G_b) + Σ_{b∈G_b} d(b, P_b)) / (|P_b| + |G_b|). assd-medpy is the mean of the two directions' means, as in
    medpy, whose ASSD the released code reports; the paper does not say which of the two its tables have.
    The boundary of a mask consists of its pixels that have one of four neighbours outside the mask or outside the image.
    """
    if probabilities.shape != mask.shape or mask.ndim != 3:
        raise InputError(f"prediction {tuple(probabilities.shape)} and mask {tuple(mask.shape)} must both be (C, H, W)")
    from monai.metrics import compute_dice, compute_iou

    predicted, truth = foreground(probabilities), (mask > THRESHOLD).cpu()
    dice = compute_dice(predicted[None].float(), truth[None].float(), ignore_empty=False)[0]
    iou = compute_iou(predicted[None].float(), truth[None].float(), ignore_empty=False)[0]
    return [{"dice": float(dice[c]), "iou": float(iou[c])} | _distances(predicted[c], truth[c]) for c in range(len(predicted))]


def millimetres(predicted: Tensor, truth: Tensor, spacing: Sequence[float], classes: Sequence[str] = ()) -> Row:
    """Returns MM_METRICS of one image or volume, by the names of `in_mm`, the mean over its classes and those of each class.

    predicted and truth: boolean (C, H, W) or (C, S, H, W); spacing: millimetres from one element to the next of each axis
    after the first. The boundary of a volume consists of the voxels that have one of six neighbours outside. Empty masks
    follow the rule of this module, with the diagonal in millimetres.
    """
    found = [_distances(p, t, spacing) for p, t in zip(predicted, truth, strict=True)]
    return averaged([{in_mm(metric): row[metric] for metric in MM_METRICS} for row in found], classes)


def require_finite(probabilities: Tensor) -> Tensor:
    """Returns the probabilities; raises InputError if one is not finite, which would count as background."""
    if not torch.isfinite(probabilities).all():
        raise InputError(DIVERGED)
    return probabilities


def require_finite_of(peer: str, maps: Tensor) -> Tensor:
    """Returns the maps of a peer's network; raises ContributionError, which names the peer, if a value is not finite."""
    if not torch.isfinite(maps).all():
        raise ContributionError(f"site {peer}: its network's maps of this site's images are not finite, so it is not used")
    return maps


def foreground(probabilities: Tensor) -> Tensor:
    """Returns whether each probability is above one half, on the CPU; raises InputError as `require_finite`."""
    return (require_finite(probabilities) > THRESHOLD).cpu()


def largest_components(probabilities: Tensor) -> Tensor:
    """Returns the probabilities, on the CPU, with 0 at foreground pixels outside the largest component of their class.

    (B, C, H, W) -> (B, C, H, W), each image and class on its own. Pixels that share a side are connected; of equal components,
    the first in reading order stays. The code released with FedDP does so on fundus images, but makes an empty map a full one.
    """
    from scipy.ndimage import label

    maps = probabilities.detach().to("cpu", copy=True)
    for image in maps.flatten(0, 1):  # views
        labels, count = label((image > THRESHOLD).numpy())
        if count > 1:
            largest = np.bincount(labels.ravel())[1:].argmax() + 1
            image[torch.from_numpy((labels > 0) & (labels != largest))] = 0
    return maps


def summarize(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Returns {metric: {"mean", "std", "n"}} over rows with the same metrics; raises InputError if there are no rows.

    std is the population's (ddof 0), as in the Average columns of the papers.
    """
    if not rows:
        raise InputError("there is nothing to summarize: no image was measured")
    columns = {metric: np.array([row[metric] for row in rows], dtype=float) for metric in rows[0]}
    return {
        metric: {"mean": float(column.mean()), "std": float(column.std()), "n": len(column)}
        for metric, column in columns.items()
    }


def _distances(predicted: Tensor, truth: Tensor, spacing: Sequence[float] | None = None) -> Row:
    """Returns the distances of boolean masks, (H, W) or (S, H, W); in pixels without a spacing.

    Empty masks bypass MONAI, which warns and returns nan for them.
    """
    empty = (not predicted.any()) + (not truth.any())
    if empty:
        sides = truth.shape if spacing is None else [n * mm for n, mm in zip(truth.shape, spacing, strict=True)]
        return dict.fromkeys(DISTANCES, 0.0 if empty == 2 else math.hypot(*sides))
    from monai.metrics.utils import get_mask_edges, get_surface_distance

    edges, true_edges = get_mask_edges(predicted, truth, crop=False)
    step = None if spacing is None else list(spacing)
    there = get_surface_distance(edges, true_edges, spacing=step).double().numpy()
    back = get_surface_distance(true_edges, edges, spacing=step).double().numpy()
    return {
        "hd": float(max(there.max(), back.max())),
        "hd95": float(max(np.percentile(there, 95), np.percentile(back, 95))),
        "assd": float(np.concatenate((there, back)).mean()),
        "assd-medpy": float((there.mean() + back.mean()) / 2),
    }
