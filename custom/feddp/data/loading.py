"""Loads a site's folder into samples in memory, and makes the batches of one epoch. The seed determines all random draws."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict, cast

import numpy as np
import torch
from torch.utils.data import default_collate

from feddp.data.folder import SiteFolder
from feddp.data.pixels import read_image, read_mask, same_size
from feddp.data.progress import track

Warp = Callable[["Sample"], "Sample"]


class _Image(TypedDict):
    image: torch.Tensor  # (channels, size, size)
    mask: torch.Tensor  # (classes, size, size)


class _Maps(TypedDict, total=False):
    """Tensors that the calibration adds to image and mask (`feddp.training.calibration.with_inconsistency`)."""

    delta: torch.Tensor
    peers: torch.Tensor


class Sample(_Image, _Maps):
    stem: str
    patient: str


class Batch(_Image, _Maps):
    """Collated samples: tensors have an additional first dimension."""

    stem: list[str]
    patient: list[str]


def load(folder: SiteFolder, split: str, size: int) -> list[Sample]:
    """Decodes one split, in the order of split.csv, into plain tensors that stay in memory.

    Each sample is {"image": float32 (channels, size, size), zero mean and unit variance per image and channel (a
    channel without contrast becomes 0), "mask": float32 (classes, size, size) of 0 and 1, "stem": str, "patient": str}.
    Images are resized bilinearly, masks by nearest neighbour, without keeping the aspect ratio. An empty split gives [].
    InputError (naming the file) for an unreadable, wrongly shaped or out-of-range PNG, or an unknown split.
    """
    from monai.transforms import Resize  # imported here, as everywhere: admitting a job does not need MONAI

    samples: list[Sample] = []
    for row in track(folder.rows_of(split), f"Loading {folder.site} {split}"):
        image = read_image(folder.image_path(row.image), folder.channels, folder.path)
        mask = read_mask(folder.mask_path(row.image), len(folder.classes), folder.path)
        same_size(folder.image_path(row.image), image, mask)
        # "nearest-exact" samples at pixel centres, as bilinear does; torch's "nearest" would shift masks by half a pixel
        # against their images
        values = _plain(Resize((size, size), mode="nearest-exact"))(mask[None].astype(np.float32))[0]
        maps = class_maps(values, len(folder.classes), folder.labels)
        samples.append({"image": network_input(image, size), "mask": maps, "stem": row.image, "patient": row.patient})
    return samples


def network_input(image: np.ndarray, size: int) -> torch.Tensor:
    """Returns the network's input for an image (H, W, channels) or (H, W): float32 (channels, size, size), as in `load`."""
    from monai.transforms import NormalizeIntensity, Resize

    channels_first = np.moveaxis(np.atleast_3d(image), -1, 0).astype(np.float32)
    return _plain(Resize((size, size), mode="bilinear"), NormalizeIntensity(channel_wise=True))(channels_first)


def _plain(*transforms: Callable[..., np.ndarray]) -> Callable[[np.ndarray], torch.Tensor]:
    from monai.transforms import Compose, EnsureType

    warp: Callable[[np.ndarray], torch.Tensor] = Compose([*transforms, EnsureType(dtype=torch.float32, track_meta=False)])
    return warp


def class_maps(mask: torch.Tensor, classes: int, labels: str) -> torch.Tensor:
    """Converts a mask (H, W) of 0 to C to float32 maps (C, H, W): mask >= c for nested labels, mask == c for exclusive ones."""
    values = torch.arange(1, classes + 1).view(-1, 1, 1)
    return (mask >= values if labels == "nested" else mask == values).float()


def class_index(maps: torch.Tensor, labels: str) -> torch.Tensor:
    """Inverts `class_maps`, for methods with a softmax: (B, C, H, W) of 0 and 1 -> int64 (B, H, W) of 0 to C."""
    if labels == "nested":
        return maps.sum(dim=1).long()
    values = torch.arange(1, maps.shape[1] + 1, device=maps.device).view(-1, 1, 1)
    return (maps * values).amax(dim=1).long()


def batches(samples: Sequence[Sample], batch: int, seed: int | None, augment: bool) -> Iterator[Batch]:
    """Yields the collated batches of one epoch: tensor entries are (B, ...), other entries are lists.

    With a seed, the order (and, with `augment`, flips on both axes and quarter turns) depend only on the seed; no global
    generator is used. All tensor entries of a sample, each (channels, H, W), are warped together, so additional maps stay
    aligned with image and mask. A last batch of exactly one sample is dropped, because batch normalisation cannot train on one
    sample; another seed drops another sample. It is kept if it is the only batch or if `batch` is 1.

    With seed None, for evaluation, all samples come in their order, without augmentation. The samples are never modified.

    Raises:
        ValueError: `batch` is below 1, or augmentation is requested without a seed.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}, but must be at least 1")
    if seed is None:
        if augment:
            raise ValueError("augmentation needs a seed")
        return _collated(samples, range(len(samples)), batch, None)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(samples)).tolist()[: in_an_epoch(len(samples), batch)]
    warp = _warp(samples[0], int(rng.integers(2**31))) if augment and samples else None
    return _collated(samples, order, batch, warp)


def in_an_epoch(count: int, batch: int) -> int:
    """Returns how many of `count` samples an epoch with a seed uses: all, or all except one (see `batches`)."""
    return count - 1 if batch > 1 and count > 1 and count % batch == 1 else count


def _collated(samples: Sequence[Sample], order: Sequence[int], batch: int, warp: Warp | None) -> Iterator[Batch]:
    for start in range(0, len(order), batch):
        chosen = (samples[i] for i in order[start : start + batch])
        # "is None", never "if warp": MONAI reseeds the transforms of a Compose to compute its length, and so its truth
        yield cast(Batch, default_collate([sample if warp is None else warp(sample) for sample in chosen]))


def _warp(sample: Sample, seed: int) -> Warp:
    from monai.transforms import Compose, EnsureTyped, RandFlipd, RandRotate90d

    keys = [key for key, value in sample.items() if isinstance(value, torch.Tensor)]
    transforms = [RandFlipd(keys, prob=0.5, spatial_axis=axis) for axis in (0, 1)]
    transforms += [RandRotate90d(keys, prob=0.75), EnsureTyped(keys, track_meta=False)]
    warp: Warp = Compose(transforms).set_random_state(seed=seed)
    return warp
