"""What the finished runs of a variant left: where it lies, and the values of every test image."""

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from feddp.errors import InputError
from feddp.files import read_results, site_folder
from feddp.methods.base import STAGES
from feddp.protocol import VOLUMES
from feddp.training.metrics import METRICS, Row
from feddp.training.volumes import VOLUME_METRICS

BEFORE, FINAL = "before", "final"  # a site's network before its last stage at home, and the one it ends with
Images = dict[str, Row]  # by the image's name, or the case's


@dataclass(frozen=True)
class Kind:
    """What is measured: a row of the sites' table `<name>s.csv`, in whose column `name` its name stands."""

    name: str
    metrics: tuple[str, ...]


IMAGE, CASE = Kind("image", METRICS), Kind("case", VOLUME_METRICS)


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

    def rows(self, when: str, kind: Kind) -> list[dict[str, Images]]:
        """{site: {image, or case: metrics}} under every finished seed, as `read_rows`."""
        return [read_rows(folder, when, kind) for folder in self.folders.values()]


def has_cases(result: Result) -> bool:
    """Whether a site of one of its runs has volumes; runs made before there were any have none."""
    return any(VOLUMES in site for folder in result.folders.values() for site in read_results(folder)["sites"].values())


def read_rows(folder: Path, when: str, kind: Kind) -> dict[str, Images]:
    """{site: {image, or case: metrics}} of a finished run. InputError where a site's table is not there or cannot be read."""
    results = read_results(folder)
    last = STAGES[results["stages"][-1]]
    sites = [site for site, found in results["sites"].items() if kind is IMAGE or VOLUMES in found]
    return {site: _read(site_folder(folder, site) / f"{kind.name}s.csv", kind, when, last) for site in sites}


def _read(path: Path, kind: Kind, when: str, last: str) -> Images:
    """`last` is the network of the run's last stage, which a site that failed it does not have."""
    slots: dict[str, Images] = {}  # in the order of the stages, as a site writes them
    try:
        with open(path, newline="", encoding="utf-8") as handle:
            for row in csv.DictReader(handle):
                slots.setdefault(row["network"], {})[row[kind.name]] = {m: float(row[m]) for m in kind.metrics}
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise InputError(f"{path} is no table of {kind.name}s ({error!r}); remove its run, it will be run again") from None
    if not slots:
        raise InputError(f"{path} has no {kind.name}; remove its run, it will be run again")
    earlier = [slot for slot in slots if slot != last]
    return slots[earlier[-1] if when == BEFORE and earlier else list(slots)[-1]]
