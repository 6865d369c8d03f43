"""A finished network at home: masks for plain images."""

from pathlib import Path

import torch

from feddp.adaptation.models import described
from feddp.data.folder import refuse_occupied
from feddp.data.images import label_mask
from feddp.data.loading import network_input
from feddp.data.pixels import read_image, write_png
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.networks.weights import load_personal
from feddp.training.device import asked_for
from feddp.training.metrics import THRESHOLD


def predict(network: Path, images: Path, out: Path, device: str = "cpu") -> int:
    """Writes a mask for every PNG in `images` to `out`, under the same name, with the values of a site's masks.

    The image is resized to what the network was trained at, the map back to the image's own size. Returns how many.

    Raises:
        InputError: there is no PNG, an image has other channels than the network, the file is no network of ours, `out` is not
            empty, or the device is not there.
    """
    files = sorted(images.glob("*.png"))
    if not files:
        raise InputError(f"{images} holds no PNG; name a folder of images, such as a site's images/")
    refuse_occupied([out])
    said = described(network)
    model = load_personal(network).to(asked_for(device))
    out.mkdir(parents=True, exist_ok=True)
    for file in track(files, f"Predicting {len(files)} images"):
        image = read_image(file, said.channels, images)
        with torch.no_grad():
            logits = model(network_input(image, said.size)[None].to(device))
            maps = torch.nn.functional.interpolate(logits, image.shape[:2], mode="bilinear")[0].sigmoid().cpu()
        write_png(out / file.name, label_mask(maps > THRESHOLD, said.labels))
    return len(files)
