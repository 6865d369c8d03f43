"""`feddp predict`: applies a finished network to a folder of images."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from feddp.adaptation.models import described
from feddp.data.folder import refuse_occupied
from feddp.data.formats.find import FoundImage, find
from feddp.data.formats.scan import AXES, Window, eight_bits, in_channels
from feddp.data.formats.write import WRITERS, write_overlays
from feddp.data.images import label_mask
from feddp.data.loading import network_input
from feddp.data.prepare.source import Source
from feddp.data.progress import track
from feddp.errors import BadFile, InputError, Problem
from feddp.networks.metadata import Metadata
from feddp.networks.weights import load_personal
from feddp.training.device import asked_for
from feddp.training.metrics import THRESHOLD

OVERLAYS = "overlays"  # the folder of the overlays, in that of the masks
FORMATS = tuple(WRITERS)


@dataclass(frozen=True)
class PredictOptions:
    """How images are read and masks are written.

    Args:
        format: one of FORMATS.
        overlay: whether the images are written too, with the masks over them.
        axis: along which NIfTI volumes are sliced, as the training images were.
        window: the values that become 0 and 255; by default as in `feddp.data.formats.scan.eight_bits`.
        convert: whether grey images become RGB for a network of three channels, and colour images grey for one of one.
    """

    format: str = "png"
    overlay: bool = False
    axis: str = "axial"
    window: Window | None = None
    convert: bool = False

    def __post_init__(self) -> None:
        for option, value, allowed in (("format", self.format, FORMATS), ("axis", self.axis, tuple(AXES))):
            if value not in allowed:
                raise InputError(f"--{option} {value}: use {' or '.join(allowed)}.")


@dataclass(frozen=True)
class Written:
    """How many masks were written, and what is wrong with the files that could not be read, one line each."""

    masks: int
    refused: tuple[str, ...] = ()


def predict(network: Path, images: Path, out: Path, device: str = "cpu", options: PredictOptions = PredictOptions()) -> Written:
    """Writes a mask for every image below `images` to `out`, under its name, with the values of a site's masks.

    Resizes an image to the network's training size, and the predicted map back to the image's size. Files that cannot be
    read do not stop it, unless none can.

    Raises:
        InputError: there is no folder or no image, no image can be read or has the network's channels, the file does not hold
            a network of FedDP, `out` is not empty, the images cannot have this format, or the device does not exist.
    """
    tree = Source(_folder(images))
    found = find(tree, images.resolve().name)
    refused = [str(error) for error in found.refused]
    if not found.entries and not refused:
        raise InputError(f"{images} holds no image; name a folder with images, such as a site's images/")
    write, kinds = WRITERS[options.format]
    if odd := [entry for entry in found.entries if entry.kind not in kinds]:
        name = tree.shown(odd[0].files[0])
        raise InputError(f"--format {options.format}: {name} is no {kinds[0]} image and cannot have it. Use --format png.")
    refuse_occupied([out])
    metadata = described(network)
    model = load_personal(network).to(asked_for(device))
    folders = [out, *([out / OVERLAYS] if options.overlay else [])]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    masks = 0
    for entry in track(found.entries, f"Predicting {len(found.entries)} images"):
        try:
            scan = entry.read(tree, options.axis)
            pixels = _fitting(tree, entry, eight_bits(scan.pixels, options.window), metadata.channels, options.convert)
            mask = np.stack([_mask(model, metadata, image, device) for image in pixels])
            masks += len(write(out, entry, scan, mask, metadata.classes, metadata.labels))
        except InputError as error:
            refused.append(str(error))
            continue
        if options.overlay:
            write_overlays(out / OVERLAYS, entry, pixels, mask)
    if not masks:
        for folder in reversed(folders):
            folder.rmdir()
        raise InputError(refused[0] + (f" ({len(refused) - 1} more files cannot be read)" if len(refused) > 1 else ""))
    return Written(masks, tuple(refused))


def _folder(images: Path) -> Path:
    if not os.path.exists(images):  # unlike Path.exists, also of a name that is too long
        raise InputError(f"{images} does not exist; name a folder of images")
    if not os.path.isdir(images):
        raise InputError(f"{images} is a file; name its folder")
    if os.path.exists(images / "dataset.json"):
        raise InputError(f"{images} is a site's folder, with masks; name its images: {images / 'images'}")
    return images


def _fitting(tree: Source, entry: FoundImage, pixels: np.ndarray, channels: int, convert: bool) -> np.ndarray:
    fitting = in_channels(pixels, channels, convert)
    if fitting is None:
        what = f"has {3 if pixels.ndim == 4 else 1} channel(s), but the network expects {channels}"
        kind = "RGB" if channels == 3 else "grey"
        raise BadFile(Problem(tree.shown(entry.files[0]), what, f"Save it as 8-bit {kind}, or convert all with --convert"))
    return fitting


def _mask(model: torch.nn.Module, metadata: Metadata, image: np.ndarray, device: str) -> np.ndarray:
    """Returns the mask of one slice, uint8 (H, W) of 0 to C, at the slice's own size."""
    with torch.no_grad():
        logits = model(network_input(image, metadata.size, metadata.normalise)[None].to(device))
        maps = torch.nn.functional.interpolate(logits, image.shape[:2], mode="bilinear")[0].sigmoid().cpu()
    return label_mask(maps > THRESHOLD, metadata.labels)
