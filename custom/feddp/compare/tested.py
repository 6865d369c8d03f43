"""The test images of a comparison's sites: whose they are, and which of them show no structure."""

from collections.abc import Mapping

from feddp.compare.patients import Names
from feddp.data.folder import SiteFolder
from feddp.data.images import SPLIT
from feddp.data.loading import network_mask
from feddp.data.pixels import read_mask
from feddp.data.progress import track


def patients(folder: SiteFolder) -> dict[str, str]:
    """Returns {test image: its patient}."""
    return {row.image: row.patient for row in folder.rows_of(SPLIT)}


def numbered(images: Mapping[str, str]) -> dict[str, int]:
    """Returns {test image: number of its patient}: which images are of one patient, not of whom."""
    numbers = {patient: number for number, patient in enumerate(dict.fromkeys(images.values()))}
    return {image: numbers[patient] for image, patient in images.items()}


def empty_masks(folder: SiteFolder, size: int) -> set[str]:
    """Returns the test images whose masks have no foreground of any class at `size`. The masks are read from disk."""
    return {
        row.image
        for row in track(folder.rows_of(SPLIT), f"Looking for empty masks: {folder.site}")
        if not network_mask(read_mask(folder.mask_path(row.image), len(folder.classes), folder.path), folder, size).any()
    }


def with_structures(names: Names, empty: Mapping[str, set[str]]) -> Names | None:
    """Returns the images whose masks are not empty; None if a site would have none left."""
    kept = {site: {image: p for image, p in images.items() if image not in empty[site]} for site, images in names.items()}
    return kept if all(kept.values()) else None
