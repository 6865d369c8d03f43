"""Images to predict: the test images of a site's folder, or any folder of PNGs; and predictions as masks."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from feddp.data.folder import SiteFolder
from feddp.data.loading import network_input
from feddp.data.pixels import read_image
from feddp.data.progress import track
from feddp.errors import InputError

SPLIT = "test"


@dataclass(frozen=True)
class Images:
    """Image files of a folder, and the site's folder that it is, if it is one."""

    files: list[Path]
    folder: Path
    site: SiteFolder | None

    @classmethod
    def of(cls, folder: Path) -> "Images":
        """The images of split test of a site's folder, or all PNGs of any other. No mask is looked at.

        Raises:
            InputError: there is no image, or the site's folder is not in order.
        """
        if (folder / "dataset.json").exists():
            site = SiteFolder.open(folder)
            files = [site.image_path(row.image) for row in site.rows_of(SPLIT)]
            if not files:
                raise InputError(f"{folder} has no image in split {SPLIT}; put some there in split.csv, or name its images/")
            return cls(files, folder, site)
        files = sorted(folder.glob("*.png"))
        if not files:
            raise InputError(f"{folder} holds no PNG and is no site's folder; name a folder of images, or a site's")
        return cls(files, folder, None)

    def read(self, channels: int, size: int) -> tuple[list[Tensor], list[tuple[int, int]]]:
        """What the network is given, (channels, size, size) each, and the images' own heights and widths.

        Raises:
            InputError: an image is missing, unreadable or of other channels.
        """
        inputs, shapes = [], []
        for file in track(self.files, f"Loading {len(self.files)} images"):
            image = read_image(file, channels, self.folder)
            inputs.append(network_input(image, size))
            shapes.append(image.shape[:2])
        return inputs, shapes


def label_mask(maps: torch.Tensor, labels: str) -> np.ndarray:
    """Class maps (C, H, W), boolean -> a mask (H, W) of 0 to C; the last class of several at a pixel counts.

    With nested labels a class counts only inside the ones before it, as a mask of nested classes can say nothing else.
    """
    if labels == "nested":
        return maps.int().cummin(dim=0).values.sum(dim=0).to(torch.uint8).numpy()
    values = torch.arange(1, len(maps) + 1).view(-1, 1, 1)
    return (maps * values).amax(dim=0).to(torch.uint8).numpy()
