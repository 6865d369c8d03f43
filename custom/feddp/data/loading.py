"""Loads a site's folder into samples in memory, and makes the batches of one epoch. The seed determines all random draws."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypedDict, cast

import numpy as np
import torch
from torch.utils.data import default_collate

from feddp.data.description import Row
from feddp.data.folder import SiteFolder
from feddp.data.formats.scan import resized
from feddp.data.pixels import extent, read_image, read_mask, same_size
from feddp.data.progress import track


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


def spacing(folder: SiteFolder, row: Row, size: int) -> tuple[float, float] | None:
    """Returns the millimetres between rows and between columns of an image that is resized to size x size, if known.

    Reads the PNG's header.
    """
    return row.place.mm and resized(row.place.mm, extent(folder.image_path(row.image), folder.path), size)


class Batch(_Image, _Maps):
    """Collated samples: tensors have an additional first dimension."""

    stem: list[str]
    patient: list[str]


def load(folder: SiteFolder, split: str, size: int, normalise: str = "zscore") -> list[Sample]:
    """Decodes one split, in the order of split.csv, into plain tensors that stay in memory.

    Each sample is {"image": float32 (channels, size, size) as `network_input` returns it, "mask": float32 (classes, size,
    size) of 0 and 1, "stem": str, "patient": str}.
    Images are resized bilinearly, masks by nearest neighbour, without keeping the aspect ratio. An empty split gives [].
    InputError (naming the file) for an unreadable, wrongly shaped or out-of-range PNG, or an unknown split.
    """
    samples: list[Sample] = []
    for row in track(folder.rows_of(split), f"Loading {folder.site} {split}"):
        image = read_image(folder.image_path(row.image), folder.channels, folder.path)
        mask = read_mask(folder.mask_path(row.image), len(folder.classes), folder.path)
        same_size(folder.image_path(row.image), image, mask)
        maps = network_mask(mask, folder, size)
        samples.append(
            {"image": network_input(image, size, normalise), "mask": maps, "stem": row.image, "patient": row.patient}
        )
    return samples


def network_mask(mask: np.ndarray, folder: SiteFolder, size: int) -> torch.Tensor:
    """Returns the maps of a mask (H, W) of 0 to C, resized by nearest neighbour: float32 (C, size, size) of 0 and 1."""
    from monai.transforms import Resize  # imported here, as everywhere: admitting a job does not need MONAI

    # "nearest-exact" samples at pixel centres, as bilinear does; torch's "nearest" would shift masks by half a pixel
    # against their images
    values = _plain(Resize((size, size), mode="nearest-exact"))(mask[None].astype(np.float32))[0]
    return class_maps(values, len(folder.classes), folder.labels)


def network_input(image: np.ndarray, size: int, normalise: str = "zscore") -> torch.Tensor:
    """Returns the network's input for an image (H, W, channels) or (H, W) of 0 to 255: float32 (channels, size, size).

    Args:
        normalise: "zscore", zero mean and unit variance per image and channel (a channel without contrast becomes 0); or
            "scale", values divided by 255, as in FedDP's released code.
    """
    from monai.transforms import NormalizeIntensity, Resize, ScaleIntensityRange

    values = {
        "zscore": NormalizeIntensity(channel_wise=True),
        "scale": ScaleIntensityRange(a_min=0, a_max=255, b_min=0, b_max=1),
    }[normalise]
    channels_first = np.moveaxis(np.atleast_3d(image), -1, 0).astype(np.float32)
    return _plain(Resize((size, size), mode="bilinear"), values)(channels_first)


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


def batches(
    samples: Sequence[Sample], batch: int, seed: int | None, augment: bool, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Yields the collated batches of one epoch on `device`: tensor entries are (B, ...), other entries are lists.

    With a seed, the order (and, with `augment`, each sample's symmetry of the square) depend only on the seed; no global
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
        return _collated(samples, range(len(samples)), batch, None, device)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(samples)).tolist()[: in_an_epoch(len(samples), batch)]
    # on the device before the first batch: a copy during the epoch would wait for what the GPU has still to do
    symmetries = torch.from_numpy(rng.integers(2, size=(len(order), 3)).astype(bool)).to(device) if augment else None
    return _collated(samples, order, batch, symmetries, device)


def in_an_epoch(count: int, batch: int) -> int:
    """Returns how many of `count` samples an epoch with a seed uses: all, or all except one (see `batches`)."""
    return count - 1 if batch > 1 and count > 1 and count % batch == 1 else count


def steps_in_an_epoch(count: int, batch: int) -> int:
    """Returns how many batches an epoch with a seed makes of `count` samples."""
    return -(-in_an_epoch(count, batch) // batch)


def _collated(
    samples: Sequence[Sample], order: Sequence[int], batch: int, symmetries: torch.Tensor | None, device: torch.device | str
) -> Iterator[Batch]:
    for start in range(0, len(order), batch):
        collated: Batch = to(default_collate([samples[i] for i in order[start : start + batch]]), device)
        yield collated if symmetries is None else _warped(collated, symmetries[start : start + batch])


def to(batch: Batch, device: torch.device | str) -> Batch:
    """Returns the batch with its tensors on `device`, as `moved`."""
    return mapped(batch, lambda value: moved(value, device))


def moved(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Returns the tensor on `device`. From the CPU to a GPU it is copied while this process goes on."""
    copied = torch.device(device).type == "cuda" and value.device.type == "cpu"  # what lies on a GPU cannot be pinned
    return (value.pin_memory() if copied else value).to(device, non_blocking=True)


def _warped(batch: Batch, symmetries: torch.Tensor) -> Batch:
    """Applies to each sample one of the eight symmetries of the square: each of the two flips and the transposition, or not.

    Three fair coins give each of the eight with probability 1/8, as flips along both axes and a random quarter turn do.

    Args:
        symmetries: bool (B, 3).
    """
    across, down, transposed = symmetries.T[:, :, None, None, None]  # (B, 1, 1, 1) each

    def warp(value: torch.Tensor) -> torch.Tensor:
        value = torch.where(across, value.flip(-1), value)
        value = torch.where(down, value.flip(-2), value)
        return torch.where(transposed, value.mT, value)

    return mapped(batch, warp)


def mapped(batch: Mapping[str, object], change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Returns a batch, or a sample, with each of its tensors changed; its other entries stay."""
    return cast(Batch, {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()})
