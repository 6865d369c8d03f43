"""A run's files: their names, their readers, and the one way in which the package writes JSON and event lines.

<run>/results.json                   what the run measured; written last, so where it is, the run is whole
<run>/results.md                     the same as a table
<run>/shared.safetensors             γ of the round that stage 1 handed on
<run>/progress.jsonl                 the server's events
<run>/sites/<site>/network.safetensors, images.csv, cases.csv, record.jsonl
                                     the site's own network, its metrics by image and by case, its events
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from feddp.errors import BadFile, InputError
from feddp.limits import RESULTS_BYTES, SITES
from feddp.reading import is_name, read_json, short

RESULTS = "results.json"
RESULTS_TABLE = "results.md"
SHARED = "shared.safetensors"
PROGRESS = "progress.jsonl"
NETWORK = "network.safetensors"
IMAGES = "images.csv"
CASES = "cases.csv"
RECORD = "record.jsonl"
ADAPTED = "adapt.json"  # beside the masks of an adaptation: what was done
SCORES = "scores.json"  # and the metrics of each image

Event = dict[str, Any]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name of a new file, in the folder of `path`, for the block to write; afterwards it takes the place of `path`.

    `path` holds its old content or the new one, whole, also where the process is killed or the machine loses its power. Where
    the block raises, `path` is left alone and the new file is removed. A killed process leaves a hidden file behind.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    part.unlink(missing_ok=True)  # of a killed process with the same numbers
    try:
        yield part
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Writes a file in UTF-8, whole or not at all, with the permissions `mode` less the process's umask."""
    with (
        replacing(path) as part,
        open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as handle,
    ):
        handle.write(text)


def write_json(path: Path, content: Mapping[str, Any], mode: int = 0o666) -> None:
    """Writes indented JSON, as `write_text`."""
    write_text(path, json.dumps(content, indent=2) + "\n", mode)


def append_event(path: Path, event: str, **facts: Any) -> None:
    """Appends an event to a file of JSON lines, with the time in seconds since 1970."""
    with open(path, "a", encoding="utf-8") as handle:
        handle.write(json.dumps({"event": event, "time": time.time(), **facts}) + "\n")


def read_events(path: Path) -> list[Event]:
    """All events of a file of JSON lines, in their order; none where there is no file. As `events_after`."""
    return events_after(path, 0)[0]


def events_after(path: Path, start: int) -> tuple[list[Event], int]:
    """The events that a file of JSON lines holds from byte `start` on, and the byte from which to read the next ones.

    A last line without its end is not read: it is being written, or its writer was killed.
    """
    if not path.exists():
        return [], start
    with open(path, "rb") as handle:
        handle.seek(start)
        content = handle.read()
    end = content.rfind(b"\n") + 1
    return [json.loads(line) for line in content[:end].splitlines()], start + end


def read_results(run: Path) -> dict[str, Any]:
    """results.json of a finished run.

    Raises:
        InputError: there is none, or it names no sites.
    """
    try:
        results = read_json(run / RESULTS, RESULTS_BYTES)
    except (FileNotFoundError, BadFile) as error:
        why = short(str(error), 300)
        raise InputError(f"{run} is no finished run ({why}); name the --out folder of a `feddp run`") from None
    sites = results.get("sites") if isinstance(results, dict) else None
    if (
        not isinstance(results, dict)
        or not isinstance(sites, dict)
        or not 0 < len(sites) <= SITES
        or not all(map(_is_site, sites))
    ):
        raise InputError(f"{run / RESULTS} names no sites, or not as folders are named; name the --out folder of a `feddp run`")
    if not isinstance(results.get("missing", {}), dict):
        raise InputError(f"{run / RESULTS}: missing is no sites with reasons; name the --out folder of a `feddp run`")
    if not all(round is None or type(round) is int for round in map(results.get, ("start_round", "best_round"))):
        raise InputError(f"{run / RESULTS}: start_round or best_round is no round; name the --out folder of a `feddp run`")
    return results


def site_folder(run: Path, site: str) -> Path:
    """Where a run keeps what it brought home from a site."""
    return run / "sites" / site


def _is_site(name: str) -> bool:
    """A site's name is also its folder's, below the run's."""
    return is_name(name) and "/" not in name and name not in (".", "..")
