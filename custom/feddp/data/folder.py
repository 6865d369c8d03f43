"""A site's folder: the only data format anything in feddp reads.

    <root>/<site>/dataset.json    what the data are: name, channels, classes, labels, and any further facts
    <root>/<site>/split.csv       image,patient,split
    <root>/<site>/images/<stem>.png    8-bit, one or three channels
    <root>/<site>/masks/<stem>.png     8-bit, one channel, 0 (background) to C

labels "nested": class c's map is mask >= c (the optic disc includes the cup). "exclusive": mask == c.
"""

import csv
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from feddp.data.description import HEADER, SPLITS, Row, read_dataset, read_split
from feddp.data.pixels import write_png
from feddp.errors import InputError
from feddp.files import write_json

# stem, patient, split, image, mask
RawSample = tuple[str, str, str, np.ndarray, np.ndarray]


class Described(Protocol):
    """A site's folder, a plan, a network: it says of which data it is."""

    @property
    def channels(self) -> int: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def labels(self) -> str: ...


@dataclass(frozen=True)
class SiteFolder:
    """A site's folder whose dataset.json and split.csv are in order; the PNGs are read by `feddp.data.loading`."""

    path: Path
    site: str
    dataset: str
    channels: int
    classes: tuple[str, ...]
    labels: str
    rows: tuple[Row, ...]
    volumes: bool = False  # whether a patient's images are the slices of one volume

    @classmethod
    def open(cls, path: Path) -> "SiteFolder":
        """Read the two description files. InputError names the first problem, and counts the others."""
        path = Path(path)
        if not path.is_dir():
            raise InputError(f"{path}: there is no such folder. Give a site's folder, one with a dataset.json in it.")
        facts, problems = read_dataset(path / "dataset.json")
        rows, more = read_split(path / "split.csv")
        problems += more
        if problems:
            rest = f" ({len(problems) - 1} more: feddp data check {path})" if len(problems) > 1 else ""
            raise InputError(f"{problems[0]}{rest}")
        return cls(
            path=path,
            site=path.resolve().name,
            dataset=facts["name"],
            channels=facts["channels"],
            classes=tuple(facts["classes"]),
            labels=facts["labels"],
            rows=rows,
            volumes="volumes" in facts,
        )

    def image_path(self, stem: str) -> Path:
        return self.path / "images" / f"{stem}.png"

    def mask_path(self, stem: str) -> Path:
        return self.path / "masks" / f"{stem}.png"

    def rows_of(self, split: str) -> tuple[Row, ...]:
        """The rows of train, val or test, in the order of split.csv. InputError for any other word."""
        if split not in SPLITS:
            raise InputError(f"{self.path}: there is no split {split!r}. Use train, val or test.")
        return tuple(row for row in self.rows if row.split == split)


def facts_of(described: Described) -> dict[str, Any]:
    """What data and whatever is made for them have in common, by name."""
    return {"channels": described.channels, "classes": described.classes, "labels": described.labels}


def misfit(folder: SiteFolder, wanted: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """(what the folder's data are, what is wanted) where the two differ; None where the data fit.

    `wanted` are the facts of a plan or of a network (`facts_of`), or those of them that matter.
    """
    found, values = tuple(getattr(folder, name) for name in wanted), tuple(wanted.values())
    return None if found == values else (found, values)


def find_sites(root: Path) -> list[Path]:
    """The sites' folders directly under `root`, sorted by name. InputError if there is none."""
    root = Path(root)
    # A folder that begins with a dot is a site half written by `write_site`.
    sites = sorted(file.parent for file in root.glob("*/dataset.json") if not file.parent.name.startswith("."))
    if not sites:
        raise InputError(
            f"{root}: no site's folder found (none of its folders has a dataset.json). "
            "Give the folder that holds the sites' folders."
        )
    return sites


def refuse_occupied(paths: Iterable[Path]) -> None:
    """InputError naming every path that exists and is not an empty folder: nothing is ever overwritten."""
    occupied = [path for path in paths if path.exists() and not (path.is_dir() and not any(path.iterdir()))]
    if occupied:
        listed = ", ".join(map(str, occupied))
        raise InputError(f"{listed}: not empty. Remove it, or write to another folder.")


def write_site(path: Path, dataset: dict[str, Any], samples: Iterable[RawSample]) -> None:
    """Write a whole site's folder, or nothing.

    `dataset` becomes dataset.json; samples are (stem, patient, split, image uint8 (H, W, 3) or (H, W), mask uint8
    (H, W)). All is written to a hidden sibling and renamed at the end, so an interrupted run leaves no site behind.
    InputError if the target is not empty, or if what was written would not open again as a site's folder.
    """
    path = Path(path)
    refuse_occupied([path])
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for name in ("images", "masks"):
            (partial / name).mkdir(parents=True)
        write_json(partial / "dataset.json", dataset)
        with (partial / "split.csv").open("w", newline="", encoding="utf-8") as stream:
            table = csv.writer(stream, lineterminator="\n")
            table.writerow(HEADER)
            for stem, patient, split, image, mask in samples:
                _demand_pixels(f"{path.name}/{stem}", dataset, image, mask)
                table.writerow([stem, patient, split])
                write_png(partial / "images" / f"{stem}.png", image)
                write_png(partial / "masks" / f"{stem}.png", mask)
        SiteFolder.open(partial)
        if path.exists():
            path.rmdir()
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _demand_pixels(name: str, dataset: dict[str, Any], image: np.ndarray, mask: np.ndarray) -> None:
    channels, top = dataset["channels"], len(dataset["classes"])
    if image.dtype != np.uint8 or mask.dtype != np.uint8:
        raise InputError(f"{name}: image is {image.dtype}, mask {mask.dtype}. Give both as uint8.")
    if image.shape != (*mask.shape, *([channels] if channels > 1 else [])):
        raise InputError(f"{name}: image {image.shape} and mask {mask.shape} do not fit {channels} channel(s).")
    if mask.max(initial=0) > top:
        raise InputError(f"{name}: the mask holds the value {mask.max()}. Use 0 to {top}.")
