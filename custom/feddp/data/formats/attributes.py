"""Attributes of a DICOM data set that may be missing, empty, or of another type than the standard's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset

from feddp.errors import BadFile, Problem
from feddp.reading import short

AGAIN = "Export it again"


def value_of(dataset: Dataset, keyword: str) -> Any:
    """Returns a value; None if it is missing, empty, or a text that is not of the attribute's type."""
    try:
        value = dataset.get(keyword)
    except Exception:  # pydicom decodes a value when it is asked for, and a file may hold any bytes
        return None
    return None if value is None or (isinstance(value, str | bytes | Sequence) and len(value) == 0) else value


def given(dataset: Dataset, keyword: str) -> bool:
    """Whether an attribute is there and not empty, though perhaps not readable."""
    if keyword not in dataset:
        return False
    raw = dataset.get_item(keyword)
    value = getattr(raw, "value", None)
    return value is not None and not (isinstance(value, str | bytes | Sequence) and len(value) == 0)


def text_of(dataset: Dataset, keyword: str) -> str:
    """Returns a text without blanks at its ends; "" if it is missing."""
    value = value_of(dataset, keyword)
    return "" if value is None else str(value).strip()


def items_of(dataset: Dataset, keyword: str) -> Sequence[Dataset]:
    """Returns the items of a sequence; none if it is missing or no sequence."""
    value = value_of(dataset, keyword)
    return [each for each in value if isinstance(each, Dataset)] if isinstance(value, Sequence) else []


def numbers_of(file: Path, dataset: Dataset, keyword: str, count: int) -> np.ndarray:
    """Returns the numbers of an attribute: (count,), or any multiple of three for count 0.

    Raises:
        BadFile: it is missing, or holds anything else. Names `file` and the attribute.
    """
    value = value_of(dataset, keyword)
    try:
        found = np.array(value if isinstance(value, Sequence) and not isinstance(value, str) else [value], float)
    except (TypeError, ValueError, OverflowError):
        found = np.zeros(0)
    if found.ndim != 1 or not len(found) or value is None or (len(found) != count if count else len(found) % 3):
        raise lacking(file, dataset, keyword)
    return found


def number_of(file: Path, dataset: Dataset, keyword: str) -> float:
    """Returns the number of an attribute; raises BadFile as `numbers_of`."""
    return float(numbers_of(file, dataset, keyword, 1)[0])


def named(file: Path, items: Sequence[Dataset], number: str, name: str) -> dict[int, str]:
    """Returns {number: name} of items, which have these two attributes.

    Raises:
        BadFile: a number is missing, or is that of two names. Names `file`.
    """
    found: dict[int, str] = {}
    for item in items:
        key, text = int(number_of(file, item, number)), text_of(item, name)
        if found.setdefault(key, text) != text:
            what = f"has two structures of the {number} {key}, {short(found[key], 64)} and {short(text, 64)}"
            raise BadFile(Problem(file, what, AGAIN))
    return found


def lacking(file: Path, dataset: Dataset, keyword: str) -> BadFile:
    """Returns the error of an attribute that is missing, empty or unreadable."""
    if not given(dataset, keyword):
        return BadFile(Problem(file, f"has no {keyword}", AGAIN))
    return BadFile(
        Problem(file, f"has another {keyword} than DICOM allows: {short(text_of(dataset, keyword) or '?', 40)}", AGAIN)
    )
