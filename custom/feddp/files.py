"""A run's files: their names, their readers, and the functions with which the package writes JSON and event lines.

<run>/run.json                       what was asked for, from which an unfinished run is continued
<run>/weights.safetensors            the tensors from which `centralized` starts, if some were given; else they are in job/
<run>/run.yaml                       the options as they were typed, from which `feddp run --config` repeats the run
<run>/results.json                   the results; written last, so a run that has this file is complete
<run>/results.md                     the results as a table
<run>/shared.safetensors             γ of the round that stage 1 selected
<run>/progress.jsonl                 the server's events
<run>/tb_events/                     TensorBoard's event files (`feddp.tracking`)
<run>/metrics/metrics_summary.json, round_metrics.jsonl
                                     the same in the format of FLARE's metrics artifacts; not of a run without FLARE
<run>/report.html                    the results as a page for a browser (`feddp report`)
<run>/time.json                      where the time went, by round, stage and site (`feddp.stages.accounting`)
<run>/sites/<site>/network.safetensors, images.csv, cases.csv, record.jsonl
                                     the site's final network, its metrics per image and per case, and of each
                                     class if there are several, its events
"""

import errno
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from feddp.errors import BadFile, InputError, Problem, StorageError
from feddp.limits import EVENT_BYTES, RESULTS_BYTES, SITES
from feddp.reading import is_name, opened, parse, read_json, short

RUN = "run.json"
CONFIG = "run.yaml"
RESULTS = "results.json"
RESULTS_TABLE = "results.md"
REPORT = "report.html"
COMPARISON = "comparison.json"  # in the folder of a comparison: what its report is made from
SHARED = "shared.safetensors"
PROGRESS = "progress.jsonl"
TIME = "time.json"
TENSORBOARD = "tb_events"
ARTIFACTS = "metrics"
NETWORK = "network.safetensors"
IMAGES = "images.csv"
CASES = "cases.csv"
RECORD = "record.jsonl"
ADAPTED = "adapt.json"  # beside the masks of an adaptation: its description
WEIGHTS = "weights.safetensors"  # initial tensors: of a pooled run beside run.json; of a job in the server's app, in config
SCORES = "scores.json"  # beside the masks of an adaptation: the metrics per image

Event = dict[str, Any]

_FULL, _CLOSED = "free space on its disk", "make the folder writable for the user of this process"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit of a file's size (`ulimit -f`)",
    errno.EIO: "check its disk",
    errno.EISDIR: "remove the folder of this name",
    errno.EROFS: _CLOSED,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
}
_LOCKLESS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_appending = threading.Lock()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """For a block that writes the file `path`.

    Raises:
        StorageError: in place of an OSError of the disk or the folder, which is full or read-only, say; names the remedy.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        remedy = _REMEDIES[error.errno]
        raise StorageError(f"{path.parent}: {path.name} was not written ({os.strerror(error.errno)}); {remedy}") from error


def lock(handle: int, how: int, path: Path) -> None:
    """Locks the open file `path` as `fcntl.flock` does with `how`.

    Raises:
        BlockingIOError: another process has the lock, and `how` says not to wait.
        StorageError: the file system, as some network drives, has no locks.
    """
    try:
        fcntl.flock(handle, how)
    except OSError as error:
        if error.errno not in _LOCKLESS:
            raise
        raise StorageError(
            f"{path.parent}: its file system has no locks ({os.strerror(error.errno)}), so two processes could write there at"
            " once; put the kit, the workspace, or the run's folder, on a local disk"
        ) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks the file `path`, which it makes, for a block; waits for other processes and threads that have the lock.

    Raises:
        StorageError: as `lock` and `writing`.
    """
    with writing(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock(handle, fcntl.LOCK_EX, path)
        yield
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a new file in the folder of `path`; the new file replaces `path` after the block.

    `path` always holds either its whole old content or its whole new content, even if the process is killed or the power
    fails. If the block raises, `path` is unchanged and the new file is removed. A killed process leaves a hidden file behind.

    Raises:
        StorageError: as `writing`.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    with writing(path):
        part.unlink(missing_ok=True)  # left behind by a killed process with the same ids
        try:
            yield part
            _to_disk(part)
            os.replace(part, path)
            _to_disk(path.parent)
        finally:
            part.unlink(missing_ok=True)


def half_written(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder that `replacing` is still writing, or that a killed process left."""
    yield from folder.glob(".*.part")


def _to_disk(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Writes a UTF-8 file, whole or not at all, with the permissions `mode` minus the process's umask."""
    with (
        replacing(path) as part,
        open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as handle,
    ):
        handle.write(text)


def write_json(path: Path, content: Mapping[str, Any], mode: int = 0o666) -> None:
    """Writes indented JSON with `write_text`."""
    write_text(path, json.dumps(content, indent=2) + "\n", mode)


def copy_file(source: Path, path: Path) -> None:
    """Copies a file with its permissions to `path`, whole or not at all, with `replacing`."""
    with replacing(path) as part:
        copy_anew(source, part)


def copy_anew(source: Path, part: Path) -> None:
    """Copies a file with its permissions to a new file, which is at no time open to more users than `source`."""
    part.touch(mode=0o600, exist_ok=False)
    shutil.copy(source, part)


def event_now(event: str, **values: Any) -> Event:
    """Returns an event with the time in seconds since 1970."""
    return {"event": event, "time": time.time(), **values}


def append_event(path: Path, event: str, **values: Any) -> None:
    """Appends an event to a file of JSON lines, with the time if it has none, whole or not at all.

    Raises:
        StorageError: as `writing`.
    """
    line = (json.dumps(event_now(event, **values)) + "\n").encode()
    with _appending, writing(path), open(path, "ab+", buffering=0) as file:
        end = _whole_lines(file)
        try:
            while line:  # a disk that fills up takes a part first
                line = line[file.write(line) :]
        except OSError:
            file.truncate(end)
            raise


def _whole_lines(file: FileIO) -> int:
    """Cuts off an incomplete last line, which a killed process left; returns the file's size then."""
    size = end = file.seek(0, os.SEEK_END)
    while end and os.pread(file.fileno(), 1, end - 1) != b"\n":
        end -= 1
    if end < size:
        file.truncate(end)
    return end


def read_events(path: Path) -> list[Event]:
    """Returns all events of a file of JSON lines, in order; none if there is no file (see `events_after`)."""
    return events_after(path, 0)[0]


def events_after(path: Path, start: int) -> tuple[list[Event], int]:
    """Returns the events of a file of JSON lines from byte `start` on, and the byte where the next read starts.

    An incomplete last line is not read: it is being written, or its writer was killed.

    Raises:
        BadFile: a line is no JSON object, it is no regular file, a link out of its folder or of its run's, or more than
            EVENT_BYTES follow.
    """
    if not path.exists():
        return [], start
    with opened(path, start + EVENT_BYTES, folder_of(path) or path.parent) as handle:
        handle.seek(start)
        content = handle.read(EVENT_BYTES)
    end = content.rfind(b"\n") + 1
    return [_event(path, line) for line in content[:end].splitlines()], start + end


def _event(path: Path, line: bytes) -> Event:
    event = parse(line, path)
    if not isinstance(event, dict):
        raise BadFile(Problem(path, "has a line that is no JSON object", "Remove that line"))
    return event


def read_results(run: Path) -> dict[str, Any]:
    """Returns results.json of a finished run.

    Raises:
        InputError: the file is missing or unreadable, a link out of the run's folder, or one of its entries is not valid.
    """
    try:
        results = read_json(run / RESULTS, RESULTS_BYTES, run)
    except (FileNotFoundError, BadFile) as error:
        missing = f"it has no {RESULTS}" if run.exists() else "it does not exist"
        why = missing if isinstance(error, FileNotFoundError) else short(str(error), 300)
        begun = isinstance(error, FileNotFoundError) and (run / RUN).exists()
        remedy = (
            f"wait for its end, or continue it: feddp run --resume {run}" if begun else "name the --out folder of a `feddp run`"
        )
        raise InputError(f"{run} is not a finished run ({why}); {remedy}") from None
    sites = results.get("sites") if isinstance(results, dict) else None
    if (
        not isinstance(results, dict)
        or not isinstance(sites, dict)
        or not 0 < len(sites) <= SITES
        or not all(map(_is_site, sites))
    ):
        raise InputError(f"{run / RESULTS} has no sites with valid folder names; name the --out folder of a `feddp run`")
    if not isinstance(results.get("missing", {}), dict):
        raise InputError(f"{run / RESULTS}: missing must be {{site: reason}}; name the --out folder of a `feddp run`")
    if not all(round is None or type(round) is int for round in map(results.get, ("start_round", "best_round"))):
        raise InputError(f"{run / RESULTS}: start_round or best_round is not a number; name the --out folder of a `feddp run`")
    return results


def folder_of(file: Path) -> Path | None:
    """Returns the folder to which a file belongs, and out of which it may not lead if it is a link: that of the run, or a
    site's own of a job; None if the file stands for itself.

    Whatever reads a file that may be a run's asks for it: whoever made the run's folder may have made links of its files, of
    sites/<site> or of job/<name>/app_server/config. Links that nobody reads do no harm.
    """
    parents = file.absolute().parents
    runs = [folder for folder in parents[:5:2] if any((folder / name).exists() for name in (RUN, RESULTS))]
    return runs[-1] if runs else parents[0] if (parents[0] / RECORD).exists() else None


def site_folder(run: Path, site: str) -> Path:
    """Returns the folder of a site's files in a run's folder."""
    return run / "sites" / site


def _is_site(name: str) -> bool:
    """Returns whether `name` can be a site's name, which is also the name of its folder in the run's folder."""
    return is_name(name) and "/" not in name and name not in (".", "..")
