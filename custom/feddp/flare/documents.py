"""A job's JSON as it is read and compared here: nothing in it is expanded or fetched, and every difference has a path.

FLARE itself would take other formats too: HOCON, whose `include` fetches URLs and files, YAML with resolvers, and in plain JSON
`{$NAME}` for an environment variable.
"""

import json
from typing import Any

from nvflare.fuel.utils.config import Config, ConfigFormat, ConfigLoader
from nvflare.fuel.utils.config_factory import ConfigFactory

from feddp.errors import InputError

LARGEST = 256 * 1024  # bytes of a document
MOST_PARTS = 500  # objects and lists in it, so that none is deeper
EXPANDED = "${}"


def parsed(what: str, data: bytes) -> dict[str, Any]:
    """A document's JSON object.

    Raises:
        InputError: it is too large or too deep, or no JSON object; it names a key twice, holds a number that is none, or a
            character that a parser of FLARE's expands.
    """
    if len(data) > LARGEST:
        raise InputError(f"{what} has {len(data)} bytes, and at most {LARGEST} are read; export the job with `feddp job`")
    if data.count(b"{") + data.count(b"[") > MOST_PARTS:
        raise InputError(f"{what} has more than {MOST_PARTS} objects and lists; export the job with `feddp job`")
    try:
        document = json.loads(data.decode("ascii"), object_pairs_hook=_unique, parse_constant=_constant)
    except ValueError as error:  # UnicodeDecodeError is one
        raise InputError(f"{what} is no plain JSON ({error}); export the job with `feddp job`") from None
    if not isinstance(document, dict):
        raise InputError(f"{what} holds no JSON object; export the job with `feddp job`")
    if place := _expanded(document, ""):
        raise InputError(f"{what}: {place} holds one of {', '.join(EXPANDED)}, which FLARE would expand; write the value")
    return document


def require_equal(what: str, wanted: Any, found: Any, place: str = "") -> None:
    """InputError that names the first place at which `found` is not what is wanted, to the type."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in (*wanted, *(key for key in found if key not in wanted)):
            inner = f"{place}.{key}" if place else str(key)
            if key not in wanted:
                raise InputError(f"{what}: {inner} is {_short(found[key])}, and the export writes no such key")
            if key not in found:
                raise InputError(f"{what}: {inner} is missing, and the export writes {_short(wanted[key])}")
            require_equal(what, wanted[key], found[key], inner)
    elif isinstance(wanted, list) and isinstance(found, list):
        for index in range(max(len(wanted), len(found))):
            inner = f"{place}[{index}]"
            if index >= len(wanted):
                raise InputError(f"{what}: {inner} is {_short(found[index])}, and the export writes no more than {len(wanted)}")
            if index >= len(found):
                raise InputError(f"{what}: {inner} is missing, and the export writes {_short(wanted[index])}")
            require_equal(what, wanted[index], found[index], inner)
    elif type(wanted) is not type(found) or wanted != found:  # true is no 1, and 1.0 neither
        raise InputError(f"{what}: {place} is {_short(found)}, and the export writes {_short(wanted)}")


def at(what: str, document: Any, *path: str | int) -> Any:
    """What stands at a path. InputError where nothing does."""
    place = ""
    for step in path:
        place += f"[{step}]" if isinstance(step, int) else f".{step}"
        try:
            document = document[step]
        except (KeyError, IndexError, TypeError):
            raise InputError(f"{what}: {place[1:]} is missing; export the job with `feddp job`") from None
    return document


def only_json() -> None:
    """From now on FLARE reads no configuration in this process but JSON, whatever its file is called."""
    for other in ConfigFormat:
        if other is not ConfigFormat.JSON:
            ConfigFactory._fmt2Loader[other] = _Refused(other)


class _Refused(ConfigLoader):
    """In place of FLARE's loader of another format. ValueError is what its validator of jobs hands to whoever submits one."""

    def load_config(self, file_path: str) -> Config:
        raise ValueError(f"{file_path}: no {self.format.value} is read here; write JSON")

    def load_config_from_str(self, config_str: str) -> Config:
        raise ValueError(f"no {self.format.value} is read here; write JSON")

    def load_config_from_dict(self, config_dict: dict) -> Config:
        raise ValueError(f"no {self.format.value} is read here; write JSON")


def _expanded(value: Any, place: str) -> str:
    """The first place of a text or a key with such a character; "" where there is none."""
    if isinstance(value, str):
        return place if set(EXPANDED) & set(value) else ""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        here = f"{place}[{key}]" if isinstance(value, list) else f"{place}.{key}".lstrip(".")
        if isinstance(key, str) and set(EXPANDED) & set(key):
            return here
        if found := _expanded(item, here):
            return found
    return ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
