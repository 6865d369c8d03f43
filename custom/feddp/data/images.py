"""Images for prediction, from a site's folder (split test) or any folder of PNGs, and predictions as masks."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from feddp.data.folder import SiteFolder
from feddp.data.loading import network_input
from feddp.data.pixels import read_image, scaled
from feddp.data.progress import track
from feddp.errors import InputError

SPLIT = "test"


@dataclass(frozen=True)
class Images:
    """The image files of a folder; `site` is set if it is a site's folder."""

    files: list[Path]
    folder: Path
    site: SiteFolder | None

    @classmethod
    def of(cls, folder: Path) -> "Images":
        """Returns the images of split test of a site's folder, or all PNGs of another folder. No mask is read.

        Raises:
            InputError: there is no image, or the site's folder is not valid.
        """
        if os.path.exists(folder / "dataset.json"):  # unlike Path.exists, no error for a name that is too long
            site = SiteFolder.open(folder)
            files = [site.image_path(row.image) for row in site.rows_of(SPLIT)]
            if not files:
                raise InputError(f"{folder} has no image in split {SPLIT}; add some to split.csv, or name its folder images/")
            return cls(files, folder, site)
        files = pngs(folder)
        if not files:
            raise InputError(f"{folder} has no PNG and is not a site's folder; name a folder of images, or a site's folder")
        return cls(files, folder, None)

    def read(
        self, channels: int, size: int, normalise: str, prepared: int | None = None
    ) -> tuple[list[Tensor], list[tuple[int, int]]]:
        """Returns the network's inputs, (channels, size, size) each, and the original heights and widths of the images.

        Args:
            prepared: height and width to which the images are resized first, as the training images were before the run.

        Raises:
            InputError: an image is missing, unreadable or has another number of channels.
        """
        inputs, shapes = [], []
        for file in track(self.files, f"Loading {len(self.files)} images"):
            image = read_image(file, channels, self.folder, network=self.site is None)
            sized = scaled(image, prepared) if prepared else image
            inputs.append(network_input(sized, size, normalise))
            shapes.append(image.shape[:2])
        return inputs, shapes


def pngs(folder: Path) -> list[Path]:
    """Returns the PNGs of a folder, sorted by name; raises InputError if there is no such folder."""
    if not os.path.exists(folder):  # unlike Path.exists, also of a name that is too long
        raise InputError(f"{folder} does not exist; name a folder of PNG images")
    if not os.path.isdir(folder):
        raise InputError(f"{folder} is a file; name its folder")
    return sorted(folder.glob("*.png"))


def label_mask(probabilities: Tensor, labels: str, threshold: float) -> Tensor:
    """Decodes probabilities (..., C, H, W) to masks of 0 to C, uint8 (..., H, W); a class is where it is above `threshold`.

    With nested labels a class counts only inside the classes before it; a mask of nested classes cannot express anything else.
    With exclusive labels, of several classes at a pixel, the most probable one counts; of equal ones, the first.

    All operations exist in ONNX, which has no cumulative minimum (`feddp.export.graph`).
    """
    if labels == "exclusive":
        found = probabilities.amax(dim=-3) > threshold
        return ((probabilities.argmax(dim=-3) + 1) * found).to(torch.uint8)
    maps = probabilities > threshold
    inside = maps.select(-3, 0)
    mask = inside.int()
    for c in range(1, maps.shape[-3]):
        inside = inside & maps.select(-3, c)
        mask = mask + inside.int()
    return mask.to(torch.uint8)
