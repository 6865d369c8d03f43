"""Lists all problems of a site's folder, or of all sites' folders under a root, and what their images and masks show."""

import json
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feddp.data.contents import Contents
from feddp.data.description import SPLITS, Row, read_dataset, read_rows
from feddp.data.names import alike, composed, site_name, site_problem
from feddp.data.pixels import read_image, read_mask, same_size
from feddp.data.preparation import KEY, Preparation
from feddp.data.prepare.split import needed
from feddp.data.progress import track
from feddp.errors import BadFile, Problem
from feddp.reading import real, short

FOLDERS, FILES = ("images", "masks"), ("dataset.json", "split.csv")
PARTS = (*FILES, *FOLDERS)
MANY = 3  # more problems of one kind in one folder are one line
CONVERT = "`feddp data prepare folder` converts other formats and masks"


@dataclass
class Examined:
    """What a check has found: problems, repeated ones as one, and what the readable sites' images and masks show."""

    problems: list[Problem] = field(default_factory=list)
    sites: list[Contents] = field(default_factory=list)

    def warnings(self, least: int) -> Iterator[Problem]:
        """Yields what a run takes and can hardly be meant; `least` as in `Contents.warnings`."""
        for site in self.sites:
            yield from site.warnings(least)
        trained = [site for site in self.sites if not site.unseen]
        if len(trained) > 1 and all(site.scored[1] < least for site in trained):
            what = f"no site has {least} images by which a round is selected, so a job that needs the best one is refused"
            yield Problem(trained[0].site.parent, what, "Give a site so many, or export the job with --set start=last")


def check(path: Path, named: bool = True) -> list[Problem]:
    """Returns all problems of a site's folder, or of every site's folder under a root; arguments as in `examined`."""
    return examined(path, named).problems


def examined(path: Path, named: bool = True) -> Examined:
    """Checks a site's folder, or every site's folder under a root; repeated problems are one problem.

    An unreadable file does not stop the check; it is one of the problems. A site with "unseen": true in its dataset.json is
    only tested on, so its splits train and val may be empty; val may be, too, where dataset.json names a split of the papers
    that has none.

    Args:
        named: whether a folder's name is the site's, as in a run on this machine. At a real site, the kit has the name.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        return Examined([Problem(path, what, "Give a site's folder, or the folder that holds them")])
    found = Examined()
    if _looks_like_site(path):
        found.problems += grouped(_check_site(path, named, found.sites))
        return found
    hidden = "."  # hidden folders are left by an interrupted `write_site` and are not sites
    children = [child for child in sorted(path.iterdir()) if not child.name.startswith(hidden) and child.is_dir()]
    sites = [child for child in children if _looks_like_site(child)]
    if not sites:
        return Examined([Problem(path, "holds no site's folder", "Give a site's folder, or the folder that holds them")])
    strays = [Problem(child, "is no site's folder", "Move it elsewhere") for child in children if child not in sites]
    own = [problem for site in sites for problem in _check_site(site, named, found.sites)]
    found.problems += grouped([*own, *strays, *_named_alike(sites), *_of_another_kind(sites), *_prepared_otherwise(sites)])
    return found


def _of_another_kind(sites: Iterable[Path]) -> Iterator[Problem]:
    """Yields the sites whose channels, classes or labels differ from those of the first site: a run refuses them together."""
    first: dict[str, tuple[Path, Any]] = {}
    for site in sites:
        metadata, problems = read_dataset(site / "dataset.json")
        for name in () if problems else ("channels", "classes", "labels"):
            other, theirs = first.setdefault(name, (site, metadata[name]))
            if metadata[name] != theirs:
                here, there = (json.dumps(value) for value in (metadata[name], theirs))
                what = f"{name} is {short(here)}, and {short(there)} at {other.name}: no run takes both"
                yield Problem(site / "dataset.json", what, "Prepare all sites alike, or check and run them apart")


def _named_alike(sites: Iterable[Path]) -> Iterator[Problem]:
    """Yields a site whose folder would be another's on the disks of Windows and macOS."""
    paths = {site_name(site): site for site in sites}
    if twice := alike(paths):
        other, name = twice
        yield Problem(paths[name], f"differs from site {other} in case only", "Give one of them another name")


def _prepared_otherwise(sites: Iterable[Path]) -> Iterator[Problem]:
    """Yields the sites whose images lie in another plane than those of a site before them, or were made with another window."""
    first: dict[str, tuple[Path, str]] = {}
    for site in sites:
        metadata, problems = read_dataset(site / "dataset.json")
        if problems or metadata.get(KEY) is None:
            continue
        prepared = Preparation.of(metadata[KEY])
        window = "{:.10g},{:.10g}".format(*prepared.window) if prepared.window else ""
        for what, value in (("axis", prepared.axis), ("window", window)):
            other, theirs = first.setdefault(what, (site, value)) if value else (site, value)
            if value != theirs:
                told = f"was prepared with the {what} {value}, and {other.name} with {theirs}"
                yield Problem(site / "dataset.json", told, "Prepare all sites alike")


def grouped(problems: Iterable[Problem]) -> list[Problem]:
    """Returns the problems; more than MANY that differ only in their file and in numbers are one, with an example."""
    alike: dict[tuple[Path, str, str], list[Problem]] = defaultdict(list)
    for problem in problems:
        kind = re.sub(r"\d+(, (\d+|\.\.\.))*", "#", problem.what)
        alike[problem.file.parent, kind, problem.remedy].append(problem)
    return [problem for found in alike.values() for problem in (found if len(found) <= MANY else [_one_of(found)])]


def _one_of(found: list[Problem]) -> Problem:
    first, others = found[0], len(found) - 1
    return Problem(first.file, f"{first.what} (and {others} more in {first.file.parent.name}/ alike)", first.remedy)


def _looks_like_site(path: Path) -> bool:
    return any((path / part).exists() for part in PARTS)


def _check_site(site: Path, named: bool, sites: list[Contents]) -> list[Problem]:
    """Returns the problems of a site; adds what its images and masks show to `sites`, if its dataset.json is valid."""
    metadata, problems = read_dataset(site / "dataset.json")
    # pixels are checked only with a valid dataset.json, which gives the rules, and only inside the folder
    sound = not problems
    if named and (wrong := site_problem(site, site_name(site))):
        problems.append(wrong)
    listed, more = read_rows(site / "split.csv")
    rows = tuple(row for row in listed if row.split in SPLITS)
    problems += more
    problems += [_unreadable(site / part) for part in PARTS if (site / part).exists() and _closed(site / part)]
    problems += [*_alike_but_for_case(site, listed), *_strays(site)]
    readable = bool(listed) or not more
    if readable:
        problems += _empty_splits(site, metadata, rows)
    stems = {row.image for row in listed}
    strangers: dict[str, dict[str, Problem]] = {}
    for part in FOLDERS:
        try:
            wrong_files, strangers[part] = _strangers(site / part, stems if readable else None)
            problems += wrong_files
        except BadFile as bad:
            problems.append(bad.problem)
            sound = False  # the files outside are not read
        except PermissionError:
            rows = ()  # `_closed` names the folder
    problems += _once(*(strangers.get(part, {}) for part in FOLDERS))
    unseen = metadata.get("unseen") is True
    shown = Contents(site, tuple(metadata["classes"]), metadata["labels"], unseen) if sound else None
    for row in track(rows, f"Checking {site.name}"):
        lost = [file for part in FOLDERS if not os.path.lexists(file := site / part / f"{row.image}.png")]
        if len(lost) == len(FOLDERS):
            remedy = "Add them, or correct or remove the line in split.csv"
            problems.append(Problem(lost[0], "and its mask are missing", remedy))
        elif shown:
            problems += _check_pixels(site, row, metadata["channels"], shown)
        else:
            problems += [Problem(file, "is missing", "Add it, or remove its line from split.csv") for file in lost]
    if shown:
        sites.append(shown)
    return problems


def _empty_splits(site: Path, metadata: dict[str, Any], rows: tuple[Row, ...]) -> list[Problem]:
    wanted = ("test",) if metadata.get("unseen") is True else needed(metadata.get("split"))
    filled = {row.split for row in rows}
    remedy = "Give every split at least one patient"
    return [Problem(site / "split.csv", f"split {s} is empty", remedy) for s in wanted if s not in filled]


def _alike_but_for_case(site: Path, rows: Iterable[Row]) -> Iterator[Problem]:
    """Yields the images that are one file on the disks of Windows and macOS."""
    seen: dict[str, str] = {}
    for row in rows:
        if (other := seen.setdefault(row.image.casefold(), row.image)) != row.image:
            what = f"images {other} and {row.image} differ in case only"
            yield Problem(site / "split.csv", what, "Rename one: some systems take them for one file")


def _strays(site: Path) -> Iterator[Problem]:
    for child in sorted(site.iterdir()):
        if child.is_dir() and child.name not in FOLDERS and not child.name.startswith("."):
            yield Problem(child, "is neither images nor masks, and is not read", "Move it elsewhere, or rename it")


def _strangers(folder: Path, stems: set[str] | None) -> tuple[list[Problem], dict[str, Problem]]:
    """Returns the problems of files that are no PNG, and, by stem, those of PNGs that split.csv does not list.

    `stems` is None if split.csv could not be read.

    Raises:
        BadFile: `folder` is a link that leads out of the site's folder, or a loop.
        PermissionError: the folder cannot be listed.
    """
    try:
        there = real(folder, folder.parent).is_dir()
    except FileNotFoundError:
        there = False
    if not there:
        return [Problem(folder, "is missing", "Make the folder and put the PNGs there")], {}
    problems, unlisted = [], {}
    for file in sorted(file for file in folder.iterdir() if not file.name.startswith(".")):
        if file.is_dir():
            problems.append(Problem(file, "is a folder", "Put its PNGs beside the others, or move it elsewhere"))
        elif file.suffix != ".png":
            problems.append(Problem(file, "is not a .png file", f"Convert it to PNG, or remove it; {CONVERT}"))
        elif stems is not None and file.stem not in stems:
            unlisted[file.stem] = Problem(file, "is not in split.csv", "Add a line for it, or remove the file")
            if composed(file.stem) in map(composed, stems):
                what = "is in split.csv with its accents written in another way (Unicode NFC and NFD)"
                unlisted[file.stem] = Problem(file, what, "Rename the file as split.csv has it")
    return problems, unlisted


def _once(images: dict[str, Problem], masks: dict[str, Problem]) -> Iterator[Problem]:
    """Yields one problem for an image and a mask that are both not in split.csv."""
    for stem, problem in images.items():
        if stem in masks:
            yield Problem(problem.file, "and its mask are not in split.csv", "Add a line for them, or remove both")
        else:
            yield problem
    yield from (problem for stem, problem in masks.items() if stem not in images)


def _check_pixels(site: Path, row: Row, channels: int, shown: Contents) -> list[Problem]:
    """Returns the problems of an image and its mask; without any, adds what they show."""
    image_file, mask_file = (site / part / f"{row.image}.png" for part in FOLDERS)
    problems, pixels = [], []
    for read, file, rule in ((read_image, image_file, channels), (read_mask, mask_file, len(shown.classes))):
        try:
            pixels.append(read(file, rule, site))
        except BadFile as error:
            problems.append(error.problem)
            continue
        if _closed(file):
            problems.append(_unreadable(file))
    if len(pixels) == 2:
        try:
            same_size(image_file, *pixels)
        except BadFile as error:
            problems.append(error.problem)
        else:
            shown.add(row, *pixels)
    return problems


def _closed(path: Path) -> bool:
    """Whether only root can read a file or list a folder. Root does so without an error, and no site runs as root."""
    return not stat.S_IMODE(os.stat(path).st_mode) & (stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)


def _unreadable(file: Path) -> Problem:
    return Problem(file, "may be read by nobody but root", f"Permit it: chmod u+r {file.name}")
