"""`feddp predict`: applies a finished network to a folder of images."""

from pathlib import Path

import torch

from feddp.adaptation.models import described
from feddp.data.folder import refuse_occupied
from feddp.data.images import label_mask, pngs
from feddp.data.loading import network_input
from feddp.data.pixels import read_image, write_png
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.networks.weights import load_personal
from feddp.training.device import asked_for
from feddp.training.metrics import THRESHOLD


def predict(network: Path, images: Path, out: Path, device: str = "cpu", threshold: float = THRESHOLD) -> int:
    """Writes a mask for every PNG in `images` to `out`, with the same name and the values of a site's masks.

    Resizes the image to the network's training size and the predicted map back to the image's size. Foreground is what is
    above `threshold`.

    Returns:
        The number of masks.

    Raises:
        InputError: there is no folder or no PNG, the channels of an image and the network differ, the file does not hold a
            network of FedDP, `out` is not empty, or the device does not exist.
    """
    files = pngs(images)
    if not files:
        raise InputError(f"{images} holds no PNG; name a folder with PNG images, such as a site's images/")
    refuse_occupied([out])
    metadata = described(network)
    model = load_personal(network).to(asked_for(device))
    out.mkdir(parents=True, exist_ok=True)
    for file in track(files, f"Predicting {len(files)} images"):
        image = read_image(file, metadata.channels, images, network=True)
        with torch.no_grad():
            logits = model(network_input(image, metadata.size, metadata.normalise)[None].to(device))
            maps = torch.nn.functional.interpolate(logits, image.shape[:2], mode="bilinear")[0].sigmoid().cpu()
        write_png(out / file.name, label_mask(maps > threshold, metadata.labels))
    return len(files)
