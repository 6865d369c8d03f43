"""Reads and compares a job's JSON. Nothing in it is expanded or fetched; every difference is reported with its path.

FLARE itself also accepts HOCON, whose `include` fetches URLs and files, YAML with resolvers, and in plain JSON `{$NAME}` for an
environment variable.
"""

import json
from typing import Any

from nvflare.fuel.utils.config import Config, ConfigFormat, ConfigLoader
from nvflare.fuel.utils.config_factory import ConfigFactory

from feddp.errors import InputError
from feddp.reading import unique

LARGEST = 256 * 1024  # bytes of a document
MOST_PARTS = 500  # objects and lists in it; this also bounds its depth
EXPANDED = "${}"


def parsed(what: str, data: bytes) -> dict[str, Any]:
    """Returns a document's JSON object.

    Raises:
        InputError: it is too large or too deep, or not a JSON object; a key occurs twice; it holds NaN, an infinity or a
            character that one of FLARE's parsers expands.
    """
    if len(data) > LARGEST:
        raise InputError(f"{what} has {len(data)} bytes; the limit is {LARGEST}; export the job with `feddp job`")
    if data.count(b"{") + data.count(b"[") > MOST_PARTS:
        raise InputError(f"{what} has more than {MOST_PARTS} objects and lists, the limit; export the job with `feddp job`")
    try:
        document = json.loads(data.decode("ascii"), object_pairs_hook=unique, parse_constant=_constant)
    except ValueError as error:  # also UnicodeDecodeError, its child
        raise InputError(f"{what} is not plain JSON ({error}); export the job with `feddp job`") from None
    if not isinstance(document, dict):
        raise InputError(f"{what} is not a JSON object; export the job with `feddp job`")
    if place := expanded(document):
        raise InputError(f"{what}: {place} contains one of {', '.join(EXPANDED)}, which FLARE expands; write the value itself")
    return document


def require_document(what: str, value: Any) -> None:
    """Raises InputError if a value that came in a message is not JSON within the limits of a document."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{what} is not plain JSON ({type(error).__name__}); export the job with `feddp job`") from None
    parts = text.count("{") + text.count("[")
    if len(text) > LARGEST or parts > MOST_PARTS:
        found = f"{len(text)} characters, {parts} objects and lists"
        raise InputError(f"{what} has {found}; the limits are {LARGEST} and {MOST_PARTS}; export the job with `feddp job`")


def require_equal(what: str, expected: Any, actual: Any, place: str = "") -> None:
    """Raises InputError at the first place where `actual` differs from `expected` in value or type."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in (*expected, *(key for key in actual if key not in expected)):
            inner = f"{place}.{key}" if place else str(key)
            if key not in expected:
                raise InputError(f"{what}: {inner} is {_short(actual[key])}, but the export writes no such key")
            if key not in actual:
                raise InputError(f"{what}: {inner} is missing, but the export writes {_short(expected[key])}")
            require_equal(what, expected[key], actual[key], inner)
    elif isinstance(expected, list) and isinstance(actual, list):
        for index in range(max(len(expected), len(actual))):
            inner = f"{place}[{index}]"
            if index >= len(expected):
                raise InputError(f"{what}: {inner} is {_short(actual[index])}, but the export writes {len(expected)} items")
            if index >= len(actual):
                raise InputError(f"{what}: {inner} is missing, but the export writes {_short(expected[index])}")
            require_equal(what, expected[index], actual[index], inner)
    elif type(expected) is not type(actual) or expected != actual:  # true, 1 and 1.0 differ
        raise InputError(f"{what}: {place} is {_short(actual)}, but the export writes {_short(expected)}")


def at(what: str, document: Any, *path: str | int) -> Any:
    """Returns the value at a path; raises InputError if there is none."""
    place = ""
    for step in path:
        place += f"[{step}]" if isinstance(step, int) else f".{step}"
        try:
            document = document[step]
        except (KeyError, IndexError, TypeError):
            raise InputError(f"{what}: {place[1:]} is missing; export the job with `feddp job`") from None
    return document


def only_json() -> None:
    """Makes FLARE read only JSON configurations in this process, independent of the file's name."""
    for other in ConfigFormat:
        if other is not ConfigFormat.JSON:
            ConfigFactory._fmt2Loader[other] = _Refused(other)


class _Refused(ConfigLoader):
    """Replaces FLARE's loader of another format. FLARE shows a ValueError to the person who submitted the job."""

    def load_config(self, file_path: str) -> Config:
        raise ValueError(f"{file_path}: {self.format.value} is not accepted; write JSON")

    def load_config_from_str(self, config_str: str) -> Config:
        raise ValueError(f"{self.format.value} is not accepted; write JSON")

    def load_config_from_dict(self, config_dict: dict[str, Any]) -> Config:
        raise ValueError(f"{self.format.value} is not accepted; write JSON")


def expanded(value: Any, place: str = "") -> str:
    """Returns the first place whose text or key contains a character of EXPANDED; "" if there is none."""
    if isinstance(value, str):
        return place if set(EXPANDED) & set(value) else ""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        here = f"{place}[{key}]" if isinstance(value, list) else f"{place}.{key}".lstrip(".")
        if isinstance(key, str) and set(EXPANDED) & set(key):
            return here
        if first := expanded(item, here):
            return first
    return ""


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
