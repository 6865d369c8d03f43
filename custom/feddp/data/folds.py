"""Folds of a site's folder for cross-validation: the same images and masks with other splits."""

import csv
import filecmp
import os
import shutil
from dataclasses import replace
from pathlib import Path

from feddp.data.description import tabled
from feddp.data.folder import SiteFolder
from feddp.data.prepare.split import deal_patients
from feddp.errors import InputError
from feddp.reading import real

Lines = list[list[str]]  # of a split.csv


def deal(site: SiteFolder, folds: int, seed: int) -> list[Lines]:
    """Returns the site's split.csv per fold, with images in the same order; raises InputError if patients are too few."""
    splits = deal_patients((row.patient for row in site.rows), folds, seed)
    if not splits:
        patients = len({row.patient for row in site.rows})
        raise InputError(f"{site.path} has {patients} patients, too few for {folds} folds; choose fewer folds, or leave it out")
    return [tabled(replace(row, split=split[row.patient]) for row in site.rows) for split in splits]


def write_fold(site: SiteFolder, target: Path, lines: Lines) -> None:
    """Writes an unchanged dataset.json, split.csv, the images and the masks; an existing equal folder is kept.

    Images and masks are hard links, or copies on another file system. Symbolic links would lead out of the site's folder and
    would not be read.

    Raises:
        InputError: `target` exists with other content.
    """
    metadata = (site.path / "dataset.json").read_bytes()
    if not target.exists():
        _write(site, target, metadata, lines)
    elif not _holds(target, metadata, lines) or not all(_is_same(file, target / name) for name, file in _files(site).items()):
        raise InputError(f"{target} holds other folds, or the folds of other data; choose another --out, or remove it")


def _write(site: SiteFolder, target: Path, metadata: bytes, lines: Lines) -> None:
    """Writes to a hidden folder beside the target and renames it, so an interrupted run leaves no incomplete site."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "dataset.json").write_bytes(metadata)
    with open(partial / "split.csv", "w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator="\n").writerows(lines)
    for name, file in _files(site).items():
        (partial / name).parent.mkdir(exist_ok=True)
        _place(file, partial / name)
    partial.rename(target)


def _files(site: SiteFolder) -> dict[Path, Path]:
    """Returns {the path of an image or a mask in the site's folder: the file}."""
    named = (path for row in site.rows for path in (site.image_path(row.image), site.mask_path(row.image)))
    return {path.relative_to(site.path): real(path, site.path) for path in named}


def _place(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # another file system, a file system without links, or another user's file
        shutil.copyfile(file, target)


def _is_same(file: Path, kept: Path) -> bool:
    try:
        return os.path.samefile(file, kept) or filecmp.cmp(file, kept, shallow=False)
    except OSError:
        return False


def _holds(target: Path, metadata: bytes, lines: Lines) -> bool:
    try:
        with open(target / "split.csv", newline="", encoding="utf-8") as stream:
            return (target / "dataset.json").read_bytes() == metadata and list(csv.reader(stream)) == lines
    except (OSError, UnicodeDecodeError, csv.Error):
        return False
