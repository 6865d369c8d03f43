"""Reads a site's dataset.json and split.csv and lists their problems.

dataset.json   {"name": str, "channels": 1|3, "classes": [str, ...], "labels": "nested"|"exclusive", ...more metadata}
split.csv      header `image,patient,split`; image is the stem of the file, split is train, val or test. Five more columns,
               `volume,slice,row_mm,column_mm,slice_mm`, may say where an image lies (`Position`); a field may be empty

The optional entry "volumes" names the column whose equal values are one volume, "patient" or "volume"; results are then also
reported per case. Without it, every image is a separate picture. The optional entry "prepared" says how the images were made
(`feddp.data.preparation`).

The readers collect problems instead of raising at the first one, so opening a folder and checking it use the same rules.
"""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from feddp.data.preparation import KEY, Preparation
from feddp.errors import BadFile, Problem
from feddp.limits import CLASSES, FILE_NAME, NAME, TABLE_BYTES, TABLE_LINE, TABLE_ROWS
from feddp.reading import PLAIN_NAME, is_name, is_plain_name, read, read_json, short, told

SPLITS = ("train", "val", "test")
LABELS = ("nested", "exclusive")
HEADER = ["image", "patient", "split"]
PLACED = [*HEADER, "volume", "slice", "row_mm", "column_mm", "slice_mm"]
RENAME = "Give it a shorter, plain name"
# of the entry "volumes": rows with the same value in this column are one volume
VOLUMES, LISTED = "patient", "volume"
MM = (1e-4, 1e4)  # bounds of a distance: from a microscope's pixel to more than a patient


@dataclass(frozen=True)
class Position:
    """Where an image lies: the volume of which it is slice number `slice`, and distances in millimetres; None: unknown.

    Args:
        mm: from one row of pixels to the next, and from one column to the next.
        apart: from this slice to the next.
    """

    volume: str = ""
    slice: int | None = None
    mm: tuple[float, float] | None = None
    apart: float | None = None

    def fields(self) -> list[str]:
        """Returns the fields after those of HEADER; they are empty where nothing is known."""
        known = (self.slice, *(self.mm or (None, None)), self.apart)
        return [self.volume, *("" if value is None else f"{value:.10g}" for value in known)]


@dataclass(frozen=True)
class Row:
    """A line of split.csv."""

    image: str
    patient: str
    split: str
    place: Position = Position()


def tabled(rows: Iterable[Row]) -> list[list[str]]:
    """Returns the lines of a split.csv, with the columns of `Position` if one of the rows has any."""
    rows = list(rows)
    header = HEADER if all(row.place == Position() for row in rows) else PLACED
    lines = ([row.image, row.patient, row.split, *row.place.fields()] for row in rows)
    return [header, *(line[: len(header)] for line in lines)]


def read_dataset(file: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the metadata in dataset.json and its problems; the metadata are complete only if there is no problem."""
    try:
        metadata = read_json(file, within=file.parent)
    except FileNotFoundError:
        return {}, [Problem(file, "is missing", "Write it: name, channels, classes and labels")]
    except BadFile as bad:
        return {}, [bad.problem]
    if not isinstance(metadata, dict):
        held = "a list" if isinstance(metadata, list) else "a text" if isinstance(metadata, str) else "a single value"
        return {}, [Problem(file, f"holds {held}, not an object", "Correct it")]
    listed = metadata.get("classes")
    classes = listed if isinstance(listed, list) else []
    named = 0 < len(classes) <= CLASSES and all(map(is_plain_name, classes))
    rules = {
        "name": (is_name(metadata.get("name")), f"a line of 1 to {NAME} characters"),
        "channels": (type(metadata.get("channels")) is int and metadata["channels"] in (1, 3), "1 or 3"),
        "classes": (
            named and len(set(classes)) == len(classes),
            f"a non-empty list of distinct names, at most {CLASSES}, each of {PLAIN_NAME}",
        ),
        "labels": (metadata.get("labels") in LABELS, '"nested" or "exclusive"'),
        "volumes": (metadata.get("volumes", VOLUMES) in (VOLUMES, LISTED), f'"{VOLUMES}" or "{LISTED}", or leave it out'),
        KEY: (_is_preparation(metadata.get(KEY)), "as `feddp data prepare` writes it, or leave it out"),
        "unseen": (isinstance(metadata.get("unseen", False), bool), "true or false"),
    }
    return metadata, [
        Problem(file, f"{key} is {short(json.dumps(metadata.get(key)))}", f"Make it {rule}")
        for key, (good, rule) in rules.items()
        if not good
    ]


def _is_preparation(entry: Any) -> bool:
    try:
        return entry is None or bool(Preparation.of(entry))
    except ValueError:
        return False


def read_split(file: Path) -> tuple[tuple[Row, ...], list[Problem]]:
    """Returns the well-formed lines of split.csv, and the problems of the file.

    Of a repeated stem, the first line is kept; lines with an unknown split or an empty field are left out.
    """
    rows, problems = read_rows(file)
    return tuple(row for row in rows if row.split in SPLITS), problems


def read_rows(file: Path) -> tuple[tuple[Row, ...], list[Problem]]:
    """Returns the same as `read_split`, and the lines with an unknown split too."""
    try:
        lines = read_lines(read(file, TABLE_BYTES, within=file.parent), file)
    except FileNotFoundError:
        return (), [Problem(file, "is missing", "Write it, with the header image,patient,split")]
    except BadFile as bad:
        return (), [bad.problem]
    if not lines or lines[0] not in (HEADER, PLACED):
        header = ",".join(lines[0]) if lines else ""
        return (), [Problem(file, f"has the header {short(header)!r}", "Make it image,patient,split, comma separated")]

    problems: list[Problem] = []
    rows: dict[str, Row] = {}
    splits = defaultdict(set)
    volumes: dict[str, str] = {}  # the patient of each
    slices: set[tuple[str, int]] = set()
    for line in lines[1:]:
        row = _row(file, line, lines[0])
        if isinstance(row, Problem):
            problems.append(row)
            continue
        splits[row.patient].add(row.split)
        if row.image in rows:
            problems.append(Problem(file, f"image {row.image} is listed more than once", "Keep one line"))
            continue
        rows[row.image] = row
        if (volume := row.place.volume) and volumes.setdefault(volume, row.patient) != row.patient:
            what = f"volume {volume} is of the patients {volumes[volume]} and {row.patient}"
            problems.append(Problem(file, what, "Give every volume a name of its own"))
        if row.place.slice is not None and (key := (volume, row.place.slice)) in slices:
            problems.append(Problem(file, f"slice {row.place.slice} of volume {volume} is listed more than once", "Keep one"))
        elif row.place.slice is not None:
            slices.add(key)
    for patient, words in splits.items():
        known = [word for word in SPLITS if word in words]
        if len(known) > 1:
            problems.append(Problem(file, f"patient {patient} is in {' and '.join(known)}", "Keep a patient in one split"))
    return tuple(rows.values()), [*problems, *_unknown(file, rows.values())]


def _row(file: Path, line: list[str], header: list[str]) -> Row | Problem:
    if len(line) != len(header) or not all(line[: len(HEADER)]):
        fields = {len(HEADER): "three"}.get(len(header), "eight")
        return Problem(file, f"line {short(','.join(line))!r} does not have {fields} fields", "Complete it")
    row = Row(line[0], line[1], line[2])
    if "/" in row.image or "\\" in row.image:
        return Problem(file, f"image {short(row.image)!r} is a path", "Give the stem of the file only")
    if wrong := unfit(row):
        return Problem(file, wrong, RENAME)
    try:
        return row if header == HEADER else replace(row, place=_place(line[len(HEADER) :]))
    except ValueError:
        what = f"image {row.image} has {short(','.join(line[len(HEADER) :]))!r} as {','.join(PLACED[len(HEADER) :])}"
        return Problem(file, what, "Give a volume's name, a whole number and distances in millimetres, or leave fields empty")


def _place(fields: list[str]) -> Position:
    """Returns the place in the last five fields of a line; raises ValueError if one of them is wrong."""
    volume, number, *distances = fields
    row, column, apart = (float(text) if text else None for text in distances)
    within = all(MM[0] <= value <= MM[1] for value in (row, column, apart) if value is not None)
    if not within or (row is None) != (column is None) or (volume and not is_name(volume)) or (number and not volume):
        raise ValueError
    where = int(number) if number else None
    if where is not None and not 0 <= where <= TABLE_ROWS:
        raise ValueError
    return Position(volume, where, None if row is None or column is None else (row, column), apart)


def _unknown(file: Path, rows: Iterable[Row]) -> Iterator[Problem]:
    """Yields a problem for each word that is no split, with the number of its images."""
    wrong: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.split not in SPLITS:
            wrong[row.split].append(row.image)
    for word, images in wrong.items():
        rest = f" (and {len(images) - 1} more)" if len(images) > 1 else ""
        yield Problem(file, f"image {images[0]}{rest} has split {short(word)!r}", "Use train, val or test")


def read_lines(content: bytes, file: Path) -> list[list[str]]:
    """Returns the fields of every non-empty line of a CSV table; raises BadFile if it is not text or is too large."""
    return list(numbered_lines(content, file).values())


def numbered_lines(content: bytes, file: Path) -> dict[int, list[str]]:
    """Returns {number of the line, from 1: its fields}, and raises, as `read_lines`."""
    try:
        # utf-8-sig: spreadsheets write byte-order marks
        return dict(_fields(content.decode("utf-8-sig")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadFile(Problem(file, f"is not readable ({told(error)})", "Write it as UTF-8, comma separated")) from None


def _fields(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(io.StringIO(text, newline=""), 1):
        if number > TABLE_ROWS:
            raise csv.Error(f"it has more than {TABLE_ROWS} lines")
        if len(line) > TABLE_LINE:
            raise csv.Error(f"line {number} has more than {TABLE_LINE} characters")
        # line by line, because a quoted field may contain line ends and grow as long as the file.
        # skipinitialspace: people write blanks after commas, before a quote too
        for fields in csv.reader([line], skipinitialspace=True):
            if any(plain := [field.strip() for field in fields]):  # "P1 " and "P1" are one patient
                yield number, plain


def unfit(row: Row) -> str:
    """Returns the fault of a row's names, or ""."""
    if len(f"{row.image}.png".encode(errors="surrogatepass")) > FILE_NAME:
        return f"image {short(row.image)!r} has a name too long for a file ({FILE_NAME} bytes with .png)"
    for kind, name in (("image", row.image), ("patient", row.patient)):
        if not is_name(name):
            return f"the name of {kind} {short(name)!r} is not a line of at most {NAME} characters"
    return ""
