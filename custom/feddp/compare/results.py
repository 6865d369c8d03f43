"""What the finished runs of a variant left: where it lies, and the values of every test image."""

import csv
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from feddp.errors import FedDPError
from feddp.methods.site import SLOT_OF
from feddp.training.metrics import METRICS, Row

BEFORE, FINAL = "before", "final"  # a site's network before its last stage at home, and the one it ends with
Images = dict[str, Row]  # by the image's name


@dataclass(frozen=True)
class Result:
    """A variant's runs by seed: the folders of those that finished, the reasons of those that failed."""

    folders: dict[int, Path]
    failed: dict[int, str]

    @property
    def competes(self) -> bool:
        """For the best value and the test: a federation's, under every seed."""
        return not self.failed and all(read_results(folder)["federated"] for folder in self.folders.values())

    @cached_property
    def selections(self) -> set[str]:
        """The splits whose IoU chose rounds and epochs: val or test."""
        return {read_results(folder)["selection"] for folder in self.folders.values()}

    def images(self, when: str) -> list[dict[str, Images]]:
        """{site: {image: METRICS}} under every finished seed, as `read_images`."""
        return [read_images(folder, when) for folder in self.folders.values()]


def read_results(folder: Path) -> dict[str, Any]:
    """A finished run's results.json."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def read_images(folder: Path, when: str) -> dict[str, Images]:
    """{site: {image: METRICS}} of a finished run. FedDPError where a site's images.csv is not there or cannot be read."""
    results = read_results(folder)
    last = SLOT_OF[results["stages"][-1]]
    return {site: _read(folder / "sites" / site / "images.csv", when, last) for site in results["sites"]}


def _read(path: Path, when: str, last: str) -> Images:
    """`last` is the network of the run's last stage, which a site that failed it does not have."""
    slots: dict[str, Images] = {}  # in the order of the stages, as a site writes them
    try:
        with open(path, newline="", encoding="utf-8") as handle:
            for row in csv.DictReader(handle):
                slots.setdefault(row["network"], {})[row["image"]] = {m: float(row[m]) for m in METRICS}
    except (OSError, KeyError, ValueError) as error:
        raise FedDPError(f"{path} is no table of images ({error!r}); remove its run, it will be run again") from None
    if not slots:
        raise FedDPError(f"{path} has no image; remove its run, it will be run again")
    earlier = [slot for slot in slots if slot != last]
    return slots[earlier[-1] if when == BEFORE and earlier else list(slots)[-1]]
