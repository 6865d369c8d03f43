"""Files that somebody else made: opened only where they are plain, of a bearable size, and inside the folder they belong to."""

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

from feddp.errors import BadFile, Problem
from feddp.limits import JSON_BYTES, JSON_DEPTH, MIB, NAME

_REASONS = {errno.ELOOP: "is a loop of links", errno.ENAMETOOLONG: "has too long a name"}


def real(file: Path, within: Path | None = None) -> Path:
    """Where `file` lies once every link is followed; `within` is the folder that it must not leave, itself a link or not.

    Raises:
        FileNotFoundError: there is no such file.
        BadFile: it is outside `within`, its links are a loop, or its name is too long.
    """
    try:
        found = os.path.realpath(file, strict=True)
        inside = within is None or Path(found).is_relative_to(os.path.realpath(within, strict=True))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise BadFile(Problem(_shown(file), _reason(error), "Correct or remove it")) from None
    if not inside:
        raise BadFile(Problem(file, f"is a link that leads out of {within}", "Put the file itself there"))
    return Path(found)


def opened(file: Path, most: int, within: Path | None = None) -> io.BufferedReader:
    """The plain file `file`, of at most `most` bytes, open for reading.

    Raises:
        FileNotFoundError: there is no such file.
        BadFile: as `real`; or it is larger, is no plain file, or may not be read.
    """
    found = real(file, within)
    try:
        # without O_NONBLOCK, opening a pipe waits for somebody to write into it
        handle = os.open(found, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadFile(Problem(file, _reason(error), "Correct or remove it")) from None
    status, wrong = os.fstat(handle), None
    if not stat.S_ISREG(status.st_mode):
        wrong = Problem(file, "is no plain file", "Put the file itself there")
    elif status.st_size > most:
        wrong = Problem(file, f"has {status.st_size} bytes, and {amount(most)} is the most that is read", "Make it smaller")
    if wrong:
        os.close(handle)
        raise BadFile(wrong)
    return os.fdopen(handle, "rb")


def read(file: Path, most: int, within: Path | None = None) -> bytes:
    """The bytes of `file`, at most `most`. Raises as `opened`."""
    with opened(file, most, within) as stream:
        content = stream.read(most + 1)
    if len(content) > most:  # it has grown since
        raise BadFile(Problem(file, f"has more than {amount(most)}, the most that is read", "Make it smaller"))
    return content


def read_json(file: Path, most: int = JSON_BYTES, within: Path | None = None) -> Any:
    """What a JSON file holds. Raises as `opened` and `parse`."""
    return parse(read(file, most, within), file)


def parse(content: bytes | str, file: Path, what: str = "") -> Any:
    """The value of a JSON text; `what` names the part of `file` that it is.

    Raises:
        BadFile: it is no JSON, or nested too deep: what walks through it later would fail.
    """
    name = f"{what} is" if what else "is"
    try:
        value = json.loads(content.decode("utf-8-sig") if isinstance(content, bytes) else content)
    except (ValueError, RecursionError) as error:
        raise BadFile(Problem(file, f"{name} not readable JSON ({short(str(error))})", "Correct it")) from None
    level, deep = [value], 0
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        deep += 1
        if deep > JSON_DEPTH:
            raise BadFile(Problem(file, f"{name} nested more than {JSON_DEPTH} deep", "Correct it"))
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return value


def short(text: str, most: int = 100) -> str:
    """`text`, or its beginning where it is long."""
    return text if len(text) <= most else f"{text[:most]}..."


def is_name(value: Any, most: int = NAME) -> bool:
    """Whether it is a text of 1 to `most` characters that can be printed and written to a file on one line."""
    if not isinstance(value, str) or not 0 < len(value) <= most:
        return False
    # half of a pair of surrogates, which JSON may hold, cannot be encoded
    return not any(letter < " " or letter == "\x7f" or "\ud800" <= letter <= "\udfff" for letter in value)


def amount(count: int) -> str:
    """Bytes in words."""
    return f"{count // MIB} MiB" if count >= MIB else f"{count} bytes"


def _reason(error: Exception) -> str:
    number: int | None = getattr(error, "errno", None)
    return _REASONS.get(number or 0, f"cannot be read ({getattr(error, 'strerror', None) or error})")


def _shown(file: Path) -> Path:
    return Path(short(str(file), 300))
