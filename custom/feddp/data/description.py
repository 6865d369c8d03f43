"""Reads a site's dataset.json and split.csv and lists their problems.

dataset.json   {"name": str, "channels": 1|3, "classes": [str, ...], "labels": "nested"|"exclusive", ...more metadata}
split.csv      header `image,patient,split`; image is the stem of the file, split is train, val or test

The optional entry "volumes": "patient" means that the images of one patient are the slices of one volume; results are then also
reported per case. Without it, every image is a separate picture.

The readers collect problems instead of raising at the first one, so opening a folder and checking it use the same rules.
"""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddp.errors import BadFile, Problem
from feddp.limits import CLASSES, FILE_NAME, NAME, TABLE_BYTES, TABLE_LINE, TABLE_ROWS
from feddp.reading import is_name, read, read_json, short

SPLITS = ("train", "val", "test")
LABELS = ("nested", "exclusive")
HEADER = ["image", "patient", "split"]
VOLUMES = "patient"  # rows with the same value in this column are one volume


@dataclass(frozen=True)
class Row:
    """A line of split.csv."""

    image: str
    patient: str
    split: str


def read_dataset(file: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the metadata in dataset.json and its problems; the metadata are complete only if there is no problem."""
    try:
        metadata = read_json(file, within=file.parent)
    except FileNotFoundError:
        return {}, [Problem(file, "is missing", "Write it: name, channels, classes and labels")]
    except BadFile as bad:
        return {}, [bad.problem]
    if not isinstance(metadata, dict):
        return {}, [Problem(file, f"holds a {type(metadata).__name__}, not an object", "Correct it")]
    listed = metadata.get("classes")
    classes = listed if isinstance(listed, list) else []
    named = 0 < len(classes) <= CLASSES and all(map(is_name, classes))
    rules = {
        "name": (is_name(metadata.get("name")), f"a line of 1 to {NAME} characters"),
        "channels": (type(metadata.get("channels")) is int and metadata["channels"] in (1, 3), "1 or 3"),
        "classes": (
            named and len(set(classes)) == len(classes),
            f"a non-empty list of distinct names, at most {CLASSES}, each a line of at most {NAME} characters",
        ),
        "labels": (metadata.get("labels") in LABELS, '"nested" or "exclusive"'),
        "volumes": (metadata.get("volumes", VOLUMES) == VOLUMES, f'"{VOLUMES}", or leave it out'),
        "unseen": (isinstance(metadata.get("unseen", False), bool), "true or false"),
    }
    return metadata, [
        Problem(file, f"{key} is {short(json.dumps(metadata.get(key)))}", f"Make it {rule}")
        for key, (good, rule) in rules.items()
        if not good
    ]


def read_split(file: Path) -> tuple[tuple[Row, ...], list[Problem]]:
    """Returns the well-formed lines of split.csv, and the problems of the file.

    Of a repeated stem, the first line is kept; lines with an unknown split or an empty field are left out.
    """
    try:
        lines = read_lines(read(file, TABLE_BYTES, within=file.parent), file)
    except FileNotFoundError:
        return (), [Problem(file, "is missing", "Write it, with the header image,patient,split")]
    except BadFile as bad:
        return (), [bad.problem]
    if not lines or lines[0] != HEADER:
        header = ",".join(lines[0]) if lines else ""
        return (), [Problem(file, f"has the header {short(header)!r}", "Make it image,patient,split, comma separated")]

    problems: list[Problem] = []
    rows: dict[str, Row] = {}
    splits = defaultdict(set)
    for line in lines[1:]:
        if len(line) != 3 or not all(line):
            problems.append(Problem(file, f"line {short(','.join(line))!r} does not have three fields", "Complete it"))
            continue
        row = Row(*line)
        if "/" in row.image or "\\" in row.image:
            problems.append(Problem(file, f"image {short(row.image)!r} is a path", "Give the stem of the file only"))
            continue
        if wrong := _unfit(row):
            problems.append(Problem(file, wrong, "Give it a shorter, plain name"))
            continue
        if row.split not in SPLITS:
            problems.append(Problem(file, f"image {row.image} has split {short(row.split)!r}", "Use train, val or test"))
            continue
        splits[row.patient].add(row.split)
        if row.image in rows:
            problems.append(Problem(file, f"image {row.image} is listed more than once", "Keep one line"))
            continue
        rows[row.image] = row
    for patient, words in splits.items():
        if len(words) > 1:
            listed = " and ".join(word for word in SPLITS if word in words)
            problems.append(Problem(file, f"patient {patient} is in {listed}", "Keep a patient in one split"))
    return tuple(rows.values()), problems


def read_lines(content: bytes, file: Path) -> list[list[str]]:
    """Returns the fields of every non-empty line of a CSV table; raises BadFile if it is not text or is too large."""
    try:
        # utf-8-sig: spreadsheets write byte-order marks
        return list(_fields(content.decode("utf-8-sig")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadFile(Problem(file, f"is not readable ({error})", "Write it as UTF-8, comma separated")) from None


def _fields(text: str) -> Iterator[list[str]]:
    for number, line in enumerate(io.StringIO(text, newline=""), 1):
        if number > TABLE_ROWS:
            raise csv.Error(f"it has more than {TABLE_ROWS} lines")
        if len(line) > TABLE_LINE:
            raise csv.Error(f"line {number} has more than {TABLE_LINE} characters")
        # line by line, because a quoted field may contain line ends and grow as long as the file.
        # skipinitialspace: people write blanks after commas
        for fields in csv.reader([line], skipinitialspace=True):
            if any(fields):
                yield fields


def _unfit(row: Row) -> str:
    """Returns the fault of a row's names, or ""."""
    if len(f"{row.image}.png".encode()) > FILE_NAME:
        return f"image {short(row.image)!r} has a name too long for a file ({FILE_NAME} bytes with .png)"
    for kind, name in (("image", row.image), ("patient", row.patient)):
        if not is_name(name):
            return f"the name of {kind} {short(name)!r} is not a line of at most {NAME} characters"
    return ""
