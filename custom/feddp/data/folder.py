"""A site's folder: the only data format that feddp reads.

    <root>/<site>/dataset.json    metadata of the data: name, channels, classes, labels, and any more
    <root>/<site>/split.csv       image,patient,split and, where known, where each image lies (`feddp.data.description`)
    <root>/<site>/images/<stem>.png    8-bit, one or three channels
    <root>/<site>/masks/<stem>.png     8-bit, one channel, 0 (background) to C

labels "nested": the map of class c is mask >= c (the optic disc includes the cup). "exclusive": mask == c.
"""

import csv
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from feddp.data.description import LISTED, RENAME, SPLITS, Position, Row, read_dataset, read_split, tabled, unfit
from feddp.data.names import site_name
from feddp.data.pixels import write_png
from feddp.data.preparation import KEY, Preparation
from feddp.errors import InputError
from feddp.files import write_json

# stem, patient, split, image, mask and, where known, the image's place
RawSample = tuple[str, str, str, np.ndarray, np.ndarray] | tuple[str, str, str, np.ndarray, np.ndarray, Position]


class Described(Protocol):
    """The kind of data of a site's folder, a plan or a network."""

    @property
    def channels(self) -> int: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def labels(self) -> str: ...


@dataclass(frozen=True)
class SiteFolder:
    """A site's folder with a valid dataset.json and split.csv; `feddp.data.loading` reads the PNGs."""

    path: Path
    site: str
    dataset: str
    channels: int
    classes: tuple[str, ...]
    labels: str
    rows: tuple[Row, ...]
    volumes: str = ""  # the column of split.csv whose equal values are one volume; "": every image is a separate picture
    prepared: Preparation | None = None  # None: unknown

    @classmethod
    def open(cls, path: Path) -> "SiteFolder":
        """Reads dataset.json and split.csv; raises InputError with the first problem and the number of others."""
        path = Path(path)
        if not os.path.isdir(path):  # unlike Path.is_dir, no error for a name that is too long
            raise InputError(f"{path}: there is no such folder. Give a site's folder, which has a dataset.json.")
        metadata, problems = read_dataset(path / "dataset.json")
        rows, more = read_split(path / "split.csv")
        problems += more
        if problems:
            rest = f" ({len(problems) - 1} more: feddp data check {path})" if len(problems) > 1 else ""
            raise InputError(f"{problems[0]}{rest}")
        return cls(
            path=path,
            site=site_name(path),
            dataset=metadata["name"],
            channels=metadata["channels"],
            classes=tuple(metadata["classes"]),
            labels=metadata["labels"],
            rows=rows,
            volumes=metadata.get("volumes", ""),
            prepared=None if metadata.get(KEY) is None else Preparation.of(metadata[KEY]),
        )

    @property
    def metadata(self) -> dict[str, str]:
        """What a network's file says of the site's images, beside the plan's metadata."""
        return {} if self.prepared is None else {KEY: self.prepared.text}

    def image_path(self, stem: str) -> Path:
        return self.path / "images" / f"{stem}.png"

    def mask_path(self, stem: str) -> Path:
        return self.path / "masks" / f"{stem}.png"

    def case_of(self, row: Row) -> str:
        """Returns the volume to which an image belongs: the patient's only one, unless split.csv lists volumes."""
        return (row.place.volume if self.volumes == LISTED else "") or row.patient

    def rows_of(self, *splits: str) -> tuple[Row, ...]:
        """Returns the rows of some of train, val and test, in the order of split.csv; raises InputError for any other word."""
        for split in splits:
            if split not in SPLITS:
                raise InputError(f"{self.path}: there is no split {split!r}. Use train, val or test.")
        return tuple(row for row in self.rows if row.split in splits)

    def lacking(self, *splits: str) -> str:
        """Returns what to tell the user if none of these splits has an image, else ""."""
        if self.rows_of(*splits):
            return ""
        also = ", or select rounds on the test images, as the papers do: --set selection=test" if splits == ("val",) else ""
        return f"{self.path / 'split.csv'} has no image in split {' or '.join(splits)}; add some{also}"


def metadata_of(described: Described) -> dict[str, Any]:
    """Returns the metadata that a folder and a plan or network for it must share, by name."""
    return {"channels": described.channels, "classes": described.classes, "labels": described.labels}


def misfit(folder: SiteFolder, wanted: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Returns (the folder's values, the wanted values) if they differ, else None.

    `wanted` is the metadata of a plan or a network (`metadata_of`), or a part of it.
    """
    actual, values = tuple(getattr(folder, name) for name in wanted), tuple(wanted.values())
    return None if actual == values else (actual, values)


def find_sites(root: Path) -> list[Path]:
    """Returns the sites' folders directly under `root`, sorted by name; raises InputError if there is none."""
    root = Path(root)
    # hidden folders are left by an interrupted `write_site`
    found = root.glob("*/dataset.json") if os.path.isdir(root) else ()
    sites = sorted(file.parent for file in found if not file.parent.name.startswith("."))
    if not sites:
        raise InputError(
            f"{root} contains no site's folder (none of its folders has a dataset.json). "
            "Give the folder that holds the sites' folders."
        )
    return sites


def refuse_occupied(paths: Iterable[Path]) -> None:
    """Raises InputError with every path that exists and is not an empty folder; feddp never overwrites."""
    occupied = [path for path in paths if path.exists() and not (path.is_dir() and not any(path.iterdir()))]
    if occupied:
        listed = ", ".join(map(str, occupied))
        raise InputError(f"{listed}: not empty. Remove it, or write to another folder.")


def write_site(path: Path, dataset: dict[str, Any], samples: Iterable[RawSample]) -> None:
    """Writes a whole site's folder, or nothing.

    `dataset` becomes dataset.json; it is written last, so that it may say what making the samples has shown. Samples are
    (stem, patient, split, image uint8 (H, W, 3) or (H, W), mask uint8 (H, W)) and, where it is known, the image's `Position`.
    Files are written to a hidden folder beside the target, which is renamed at the end, so an interrupted run leaves no
    incomplete site.

    Raises:
        InputError: the target is not empty, a name cannot be in a table, or the written folder is not a valid site's folder.
    """
    refuse_occupied([Path(path)])
    path = Path(os.path.realpath(path))  # an empty folder of another disk may be linked
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for name in ("images", "masks"):
            (partial / name).mkdir(parents=True)
        rows = []
        for stem, patient, split, image, mask, *place in samples:
            _demand_pixels(f"{path.name}/{stem}", dataset, image, mask)
            row = Row(stem, patient, split, *place)
            if wrong := unfit(row):  # perhaps a name that UTF-8 cannot hold
                raise InputError(f"{path.name}: {wrong}. {RENAME}.")
            rows.append(row)
            write_png(partial / "images" / f"{stem}.png", image)
            write_png(partial / "masks" / f"{stem}.png", mask)
        with (partial / "split.csv").open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, lineterminator="\n").writerows(tabled(rows))
        write_json(partial / "dataset.json", dataset)
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
        raise InputError(f"{name}: image {image.shape} and mask {mask.shape} do not fit {channels} channel(s). Correct them.")
    if mask.max(initial=0) > top:
        raise InputError(f"{name}: the mask has the value {mask.max()}. Use 0 to {top}.")
