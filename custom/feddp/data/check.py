"""Lists all problems of a site's folder, or of all sites' folders under a root."""

from pathlib import Path
from typing import Any

from feddp.data.description import SPLITS, Row, read_dataset, read_split
from feddp.data.pixels import read_image, read_mask, same_size
from feddp.data.progress import track
from feddp.errors import BadFile, Problem
from feddp.reading import real

PARTS = ("dataset.json", "split.csv", "images", "masks")


def check(path: Path) -> list[Problem]:
    """Returns all problems of a site's folder, or of every site's folder under a root.

    An unreadable file does not stop the check; it is one of the problems. A site with "unseen": true in its dataset.json is
    only tested on, so its splits train and val may be empty.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        return [Problem(path, what, "Give a site's folder, or the folder that holds them")]
    if _looks_like_site(path):
        return _check_site(path)
    hidden = "."  # hidden folders are left by an interrupted `write_site` and are not sites
    children = sorted(path.iterdir())
    sites = [child for child in children if _looks_like_site(child) and not child.name.startswith(hidden)]
    if not sites:
        return [Problem(path, "holds no site's folder", "Give a site's folder, or the folder that holds them")]
    return [problem for site in sites for problem in _check_site(site)]


def _looks_like_site(path: Path) -> bool:
    return any((path / part).exists() for part in PARTS)


def _check_site(site: Path) -> list[Problem]:
    metadata, problems = read_dataset(site / "dataset.json")
    # pixels are checked only with a valid dataset.json, which gives the rules, and only inside the folder
    sound = not problems
    rows, more = read_split(site / "split.csv")
    problems += more
    readable = bool(rows) or not more
    if readable:
        problems += _empty_splits(site, metadata, rows)
    stems = {row.image for row in rows}
    for part in ("images", "masks"):
        try:
            problems += _strangers(site / part, stems if readable else None)
        except BadFile as bad:
            problems.append(bad.problem)
            sound = False  # the files outside are not read
    for row in track(rows, f"Checking {site.name}"):
        if sound:
            problems += _check_pixels(site, row, metadata["channels"], len(metadata["classes"]))
        else:
            problems += _missing(site, row)
    return problems


def _empty_splits(site: Path, metadata: dict[str, Any], rows: tuple[Row, ...]) -> list[Problem]:
    needed = ("test",) if metadata.get("unseen") is True else SPLITS
    filled = {row.split for row in rows}
    remedy = "Give every split at least one patient"
    return [Problem(site / "split.csv", f"split {s} is empty", remedy) for s in needed if s not in filled]


def _strangers(folder: Path, stems: set[str] | None) -> list[Problem]:
    """Returns the problems of files that split.csv does not list; `stems` is None if split.csv could not be read.

    Raises:
        BadFile: `folder` is a link that leads out of the site's folder, or a loop.
    """
    try:
        there = real(folder, folder.parent).is_dir()
    except FileNotFoundError:
        there = False
    if not there:
        return [Problem(folder, "is missing", "Make the folder and put the PNGs there")]
    problems = []
    for file in sorted(file for file in folder.iterdir() if not file.name.startswith(".")):
        if file.suffix != ".png":
            problems.append(Problem(file, "is not a .png file", "Convert it to PNG, or remove it"))
        elif stems is not None and file.stem not in stems:
            problems.append(Problem(file, "is not in split.csv", "Add a line for it, or remove the file"))
    return problems


def _missing(site: Path, row: Row) -> list[Problem]:
    files = [site / part / f"{row.image}.png" for part in ("images", "masks")]
    return [Problem(f, "is missing", "Add it, or remove its line from split.csv") for f in files if not f.exists()]


def _check_pixels(site: Path, row: Row, channels: int, classes: int) -> list[Problem]:
    image_file, mask_file = (site / part / f"{row.image}.png" for part in ("images", "masks"))
    problems, pixels = [], []
    for read, file, rule in ((read_image, image_file, channels), (read_mask, mask_file, classes)):
        try:
            pixels.append(read(file, rule, site))
        except BadFile as error:
            problems.append(error.problem)
    if len(pixels) == 2:
        try:
            same_size(image_file, *pixels)
        except BadFile as error:
            problems.append(error.problem)
    return problems
