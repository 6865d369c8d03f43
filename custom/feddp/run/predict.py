"""`feddp predict`: applies a finished network to a folder of images."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from feddp.adaptation.models import described
from feddp.data.folder import refuse_occupied
from feddp.data.formats.stack import room
from feddp.data.formats.write import WRITERS, write_overlays
from feddp.data.images import label_mask
from feddp.data.loading import network_input
from feddp.errors import InputError
from feddp.networks.weights import load_personal
from feddp.run.images import InputImages, Reading
from feddp.training.device import asked_for
from feddp.training.metrics import THRESHOLD, require_finite

OVERLAYS = "overlays"  # the folder of the overlays, in that of the masks
FORMATS = tuple(WRITERS)


@dataclass(frozen=True)
class PredictOptions:
    """How images are read and masks are written.

    Args:
        reading: how the images are read.
        format: one of FORMATS.
        overlay: whether the images are written too, with the masks over them.
        threshold: foreground is what is above it.
    """

    reading: Reading = field(default_factory=Reading)
    format: str = "png"
    overlay: bool = False
    threshold: float = THRESHOLD

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InputError(f"--format {self.format}: use {' or '.join(FORMATS)}.")


@dataclass(frozen=True)
class Written:
    """How many masks were written, what is wrong with the files that could not be read, and what speaks against the others.

    One line each (`InputImages`).
    """

    masks: int
    refused: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def predict(network: Path, images: Path, out: Path, device: str = "cpu", options: PredictOptions = PredictOptions()) -> Written:
    """Writes a mask for every image below `images` to `out`, under its name, with the values of a site's masks.

    Resizes an image as those of the training were, and the predicted map back to the image's size. Files that cannot be
    read, or are of another format, do not stop it, unless none can be read.

    Raises:
        InputError: there is no folder or no image, no image can be read or has the network's channels, the file does not hold
            a network of FedDP, `out` is not empty, the images cannot have this format, two would have one mask, a prediction is
            not finite, or the device does not exist.
    """
    metadata = described(network)
    found = InputImages(images, metadata.channels, options.reading)
    write, kinds = WRITERS[options.format]
    found.require(options.format, kinds)
    refuse_occupied([out])
    model = load_personal(network).to(asked_for(device))
    folders = [out, *([out / OVERLAYS] if options.overlay else [])]
    masks = 0
    for entry, scan, pixels in found.read("Predicting"):
        mask = room(pixels.shape[:3], np.uint8)
        for number, image in enumerate(pixels):
            each = network_input(options.reading.sized(image), metadata.size, metadata.normalise).to(device)
            mask[number] = _mask(model, metadata.labels, each, mask.shape[1:], options.threshold)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            masks += len(write(out, entry, scan, mask, metadata.classes, metadata.labels))
        except InputError as error:  # a series that cannot have a SEG
            found.refused.append(str(error))
            continue
        if options.overlay:
            write_overlays(out / OVERLAYS, entry, pixels, mask)
    if not masks:
        for folder in filter(Path.exists, reversed(folders)):
            folder.rmdir()
        others = len(found.refused) - 1
        raise InputError(found.refused[0] + (f" ({others} more files cannot be read)" if others else ""))
    return Written(masks, tuple(found.refused), found.warnings)


def _mask(model: torch.nn.Module, labels: str, image: torch.Tensor, shape: tuple[int, ...], threshold: float) -> np.ndarray:
    """Returns the mask of one slice, uint8 (H, W) of 0 to C, at the slice's own size.

    Args:
        image: the network's input, (channels, size, size).
        shape: of the slice: H, W.
    """
    with torch.no_grad():
        maps = torch.nn.functional.interpolate(model(image[None]), shape, mode="bilinear")[0].sigmoid().cpu()
    return label_mask(require_finite(maps), labels, threshold).numpy()
