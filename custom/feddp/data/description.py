"""What a site's dataset.json and split.csv say, and everything that is wrong with them.

dataset.json   {"name": str, "channels": 1|3, "classes": [str, ...], "labels": "nested"|"exclusive", ...extra facts}
split.csv      header `image,patient,split`; image is the stem of the file, split is train, val or test

Among the extra facts, "volumes": "patient" says that the images of one patient are the slices of one volume, so that results
are reported by case as well. Where it is left out, every image is a picture of its own, whoever it is of.

Reading collects problems instead of raising at the first, so that opening a folder and checking one share every rule.
"""

import csv
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from feddp.errors import FedDPError

SPLITS = ("train", "val", "test")
LABELS = ("nested", "exclusive")
HEADER = ["image", "patient", "split"]
VOLUMES = "patient"  # the column whose equal values make one volume


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one file, and what to do about it; `str` gives the line a user reads."""

    file: Path
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}. {self.remedy}."


class BadFile(FedDPError):
    """A `Problem` met where there is no list to put it in."""

    def __init__(self, problem: Problem):
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True)
class Row:
    """A line of split.csv."""

    image: str
    patient: str
    split: str


def read_dataset(file: Path) -> tuple[dict, list[Problem]]:
    """The facts in dataset.json, and what is wrong with them. Facts are complete only where there is no problem."""
    try:
        facts = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}, [Problem(file, "is missing", "Write it: name, channels, classes and labels")]
    except (ValueError, OSError) as error:
        return {}, [Problem(file, f"is not readable JSON ({error})", "Correct it")]
    if not isinstance(facts, dict):
        return {}, [Problem(file, f"holds a {type(facts).__name__}, not an object", "Correct it")]
    classes = facts.get("classes")
    good_classes = isinstance(classes, list) and classes and all(isinstance(c, str) and c for c in classes)
    rules = {
        "name": (isinstance(facts.get("name"), str) and facts["name"] != "", "a non-empty string"),
        "channels": (type(facts.get("channels")) is int and facts["channels"] in (1, 3), "1 or 3"),
        "classes": (good_classes and len(set(classes)) == len(classes), "a non-empty list of distinct names"),
        "labels": (facts.get("labels") in LABELS, '"nested" or "exclusive"'),
        "volumes": (facts.get("volumes", VOLUMES) == VOLUMES, f'"{VOLUMES}", or leave it out'),
        "unseen": (isinstance(facts.get("unseen", False), bool), "true or false"),
    }
    return facts, [
        Problem(file, f"{key} is {json.dumps(facts.get(key))}", f"Make it {rule}")
        for key, (good, rule) in rules.items()
        if not good
    ]


def read_split(file: Path) -> tuple[tuple[Row, ...], list[Problem]]:
    """The well-formed lines of split.csv, and what is wrong with the file.

    A stem that comes twice is kept once; a line with an unknown split or an empty field is left out.
    """
    try:
        # utf-8-sig and skipinitialspace: spreadsheets write byte-order marks, people write blanks after commas.
        with file.open(newline="", encoding="utf-8-sig") as stream:
            lines = [line for line in csv.reader(stream, skipinitialspace=True) if any(line)]
    except FileNotFoundError:
        return (), [Problem(file, "is missing", "Write it, with the header image,patient,split")]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        return (), [Problem(file, f"is not readable ({error})", "Write it as UTF-8, comma separated")]
    if not lines or lines[0] != HEADER:
        found = ",".join(lines[0]) if lines else ""
        return (), [Problem(file, f"has the header {found!r}", "Make it image,patient,split, comma separated")]

    problems: list[Problem] = []
    rows: dict[str, Row] = {}
    splits = defaultdict(set)
    for line in lines[1:]:
        if len(line) != 3 or not all(line):
            problems.append(Problem(file, f"line {','.join(line)!r} has not three fields", "Complete it"))
            continue
        row = Row(*line)
        if "/" in row.image or "\\" in row.image:
            problems.append(Problem(file, f"image {row.image!r} is a path", "Give the stem of the file only"))
            continue
        if row.split not in SPLITS:
            problems.append(Problem(file, f"image {row.image} has split {row.split!r}", "Use train, val or test"))
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
