"""Reads the server's events from a file that may come from elsewhere: each has what an event of its kind has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from feddp import protocol
from feddp.errors import BadFile, Problem
from feddp.files import Event, events_after
from feddp.plan.schema import LARGEST
from feddp.reading import is_count, is_name, is_number, is_text

OF_SITES = ("again", "certificate", "refused", "returned", "transfer")  # events that a site can cause at will
TO, BACK = "to", "back"  # the ways of a transfer: of a task to a site, of its answer to the server


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_name, value))


def _sizes(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_name, value)) and all(map(is_count, value.values()))


def _round(value: Any) -> bool:
    return is_count(value) and value <= LARGEST["rounds"]  # the accounting has a number for each


def _scalars(value: Any) -> bool:
    """Numbers by name, and tables of them, as `feddp.protocol` has them."""
    if not isinstance(value, dict):
        return False
    tables = {name for name in value if not isinstance(protocol.SCALARS.get(name), protocol.Number)}
    return all(is_number(each) or name in tables and _scalars(each) for name, each in value.items())


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "time": is_number,
    "site": is_name,
    "task": is_name,
    "reason": is_text,
    "message": is_text,
    "sites": _names,
    "way": lambda value: value in (TO, BACK),
    "seconds_left": lambda value: value is None or is_number(value),
    **dict.fromkeys(("bytes", "moved", "size", "rate"), is_count),
    "scalars": _scalars,
    **dict.fromkeys(("round", "of", "phase", "epoch"), _round),
    **dict.fromkeys(("seconds", "beyond_compute", "combining", "saving"), is_number),
}
_NEEDED = {
    "ask": ("task", "sites", "bytes"),
    "computed": ("site",),
    "answer": ("site", "task", "bytes", "scalars"),
    "refused": ("site", "task", "reason"),
    "empty": ("site", "message"),
    "versions": ("message",),
    "certificate": ("message",),
    "round": ("round", "of", "seconds"),
    "resumed": ("round", "of"),
    "returned": ("site",),
    "again": ("site", "task"),
    "transfer": ("site", "task", "way", "moved", "size", "rate", "seconds_left"),
}


def read_progress(path: Path) -> list[Event]:
    """Returns all events of a progress.jsonl, in order; none if there is no file. Raises as `progress_after`."""
    return progress_after(path, 0)[0]


def progress_after(path: Path, start: int) -> tuple[list[Event], int]:
    """Returns the events of a progress.jsonl from byte `start` on, and the byte where the next read starts.

    Raises:
        BadFile: as `events_after`, or an event lacks something, or holds something else than the server writes.
    """
    events, end = events_after(path, start)
    for event in events:
        kind: Any = event.get("event")
        if not is_name(kind):
            raise BadFile(
                Problem(path, "has an event without a name", "Take it from where the run was again, or remove the run's folder")
            )
        checks = _CHECKS | ({"bytes": _sizes} if kind == "ask" else {})
        wrong = [name for name, fits in checks.items() if name in event and not fits(event[name])]
        trained = kind == "answer" and event.get("task") == protocol.TRAIN
        missing = [name for name in ("time", *_NEEDED.get(kind, ())) if name not in event]
        if lacking := wrong or missing or (["seconds"] if trained and "seconds" not in event["scalars"] else []):
            what = f"has an event whose {lacking[0]} is missing or is none"
            raise BadFile(Problem(path, what, "Take it from where the run was again, or remove the run's folder"))
    return events, end
