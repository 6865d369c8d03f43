"""A site's folder dealt anew for cross-validation: its own images and masks, under other splits."""

import csv
import os
import shutil
from pathlib import Path

from feddp.data.description import HEADER
from feddp.data.folder import SiteFolder
from feddp.data.prepare.split import deal_patients
from feddp.errors import InputError
from feddp.reading import real

Lines = list[list[str]]  # of a split.csv


def deal(site: SiteFolder, folds: int, seed: int) -> list[Lines]:
    """The site's split.csv of every fold, its images in the same order. InputError where it has too few patients."""
    splits = deal_patients((row.patient for row in site.rows), folds, seed)
    if not splits:
        patients = len({row.patient for row in site.rows})
        raise InputError(f"{site.path} has {patients} patients, too few for {folds} folds; choose fewer folds, or leave it out")
    return [[HEADER, *([row.image, row.patient, split[row.patient]] for row in site.rows)] for split in splits]


def write_fold(site: SiteFolder, target: Path, lines: Lines) -> None:
    """Writes dataset.json as it is, split.csv, and the images and masks; leaves a folder that is there already.

    They are hard links, or copies on another file system: a link that leads out of a site's folder is not read.

    Raises:
        InputError: the folder that is there holds anything else.
    """
    facts = (site.path / "dataset.json").read_bytes()
    if not target.exists():
        _write(site, target, facts, lines)
    elif not _holds(target, facts, lines):
        raise InputError(f"{target} holds other folds, or the folds of other data; choose another --out, or remove it")


def _write(site: SiteFolder, target: Path, facts: bytes, lines: Lines) -> None:
    """All in a hidden sibling, renamed at the end: an interrupted run leaves no half a site behind."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "dataset.json").write_bytes(facts)
    with open(partial / "split.csv", "w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator="\n").writerows(lines)
    for file in (path for row in site.rows for path in (site.image_path(row.image), site.mask_path(row.image))):
        (target_file := partial / file.relative_to(site.path)).parent.mkdir(exist_ok=True)
        _place(real(file, site.path), target_file)
    partial.rename(target)


def _place(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # another file system, or one without links, or somebody else's file
        shutil.copyfile(file, target)


def _holds(target: Path, facts: bytes, lines: Lines) -> bool:
    try:
        with open(target / "split.csv", newline="", encoding="utf-8") as stream:
            return (target / "dataset.json").read_bytes() == facts and list(csv.reader(stream)) == lines
    except OSError:
        return False
