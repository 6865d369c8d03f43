"""Reads files of unknown origin: only regular files, within a size limit, inside the folder to which they belong."""

import errno
import io
import json
import os
import re
import stat
import struct
from pathlib import Path
from typing import Any

from feddp.errors import BadFile, FedDPError, Problem
from feddp.limits import JSON_BYTES, JSON_DEPTH, MIB, NAME, RESULTS_BYTES, TEXT

_PATH = re.compile(r"(?<![\w./])/(?!/)(?:[^\s:;,'\"()]*/)+(?=[^\s:;,'\"()])")
# what a terminal obeys (also in Unicode's second block of such letters, its ends of lines, and what turns the direction of
# writing), and single surrogates, which JSON may hold and no file can
_UNPRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# no characters that a FLARE parser expands ($, braces), and no similar letters of other scripts
_PLAIN = re.compile(r"\w[\w .+-]{0,63}", re.ASCII)
PLAIN_NAME = "at most 64 letters A to Z, digits, spaces and '_', '.', '+', '-', a letter, a digit or '_' first"
_LARGEST = 2**53  # of a number that leaves a site (`feddp.protocol`)
_BLANKS = re.compile("[\t\n\r]+")
# what a damaged file makes of a reader's own variables: no words of these help whoever gave the file
_INNER = (
    *(AttributeError, TypeError, LookupError, NameError, AssertionError, ArithmeticError),
    *(RecursionError, NotImplementedError, struct.error),
)
_OF_PYTHON = re.compile(
    r"object|None|=(True|False)\b|<[A-Za-z_]|__|\w\(\)|\w=|\bb['\"]|'b'|numpy|dtype|tuple|ufunc|operand|literal|float:"
    r"|argument|array|unpack|buffer|attribute|reshape|decoder error|returned [A-Z]"
)
_REASONS = {errno.ELOOP: "is a loop of links", errno.ENAMETOOLONG: "has too long a name"}


def real(file: Path, within: Path | None = None) -> Path:
    """Returns the path of `file` with all links resolved; it must lie inside the folder `within`, which may be a link too.

    Raises:
        FileNotFoundError: the file does not exist.
        BadFile: it is outside `within`, its links form a loop, or its name is too long.
    """
    try:
        path = os.path.realpath(file, strict=True)
        inside = within is None or Path(path).is_relative_to(os.path.realpath(within, strict=True))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise BadFile(Problem(_shown(file), _reason(error), "Correct or remove it")) from None
    if not inside:
        raise BadFile(Problem(file, f"is a link that leads out of {within}", "Put the file itself there"))
    return Path(path)


def opened(file: Path, most: int, within: Path | None = None) -> io.BufferedReader:
    """Opens the regular file `file`, of at most `most` bytes, for reading.

    Raises:
        FileNotFoundError: the file does not exist.
        BadFile: as `real`, or the file is larger, is not a regular file, or cannot be read.
    """
    path = real(file, within)
    try:
        # without O_NONBLOCK, opening a pipe waits for a writer
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadFile(Problem(file, _reason(error), "Correct or remove it")) from None
    status, wrong = os.fstat(handle), None
    if not stat.S_ISREG(status.st_mode):
        wrong = Problem(file, "is not a regular file", "Put the file itself there")
    elif status.st_size > most:
        wrong = Problem(file, f"has {status.st_size} bytes; the limit is {amount(most)}", "Make it smaller")
    if wrong:
        os.close(handle)
        raise BadFile(wrong)
    return os.fdopen(handle, "rb")


def read(file: Path, most: int, within: Path | None = None) -> bytes:
    """Returns the bytes of `file`, at most `most`. Raises as `opened`."""
    with opened(file, most, within) as stream:
        content = stream.read(most + 1)
    if len(content) > most:  # the file has grown since it was opened
        raise BadFile(Problem(file, f"has more than {amount(most)}, which is the limit", "Make it smaller"))
    return content


def read_json(file: Path, most: int = JSON_BYTES, within: Path | None = None) -> Any:
    """Returns the content of a JSON file. Raises as `opened` and `parse`."""
    return parse(read(file, most, within), file)


def read_own(file: Path, refusal: type[FedDPError], remedy: str) -> dict[str, Any]:
    """Returns the JSON object in a file that this package wrote, of at most RESULTS_BYTES.

    Raises:
        FileNotFoundError: the file does not exist.
        FedDPError: of the type `refusal`, with the remedy: it is a link out of its folder, cannot be read, or holds something
            else, so it is damaged.
    """
    try:
        content = read_json(file, RESULTS_BYTES, file.parent)
    except BadFile as bad:
        raise refusal(f"{file} {bad.problem.what}; {remedy}") from None
    if not isinstance(content, dict):
        raise refusal(f"{file} holds no JSON object; {remedy}")
    return content


def parse(content: bytes | str, file: Path, what: str = "") -> Any:
    """Returns the value of a JSON text from `file`; `what` names the part of the file in errors.

    Raises:
        BadFile: the text is not JSON, has a key twice, or is nested so deep that later recursion would fail.
    """
    name = f"{what} is" if what else "is"
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise BadFile(Problem(file, f"{name} not readable JSON ({short(str(error))})", "Correct it")) from None
    level, deep = [value], 0
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        deep += 1
        if deep > JSON_DEPTH:
            raise BadFile(Problem(file, f"{name} nested more than {JSON_DEPTH} deep", "Correct it"))
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; raises ValueError if a key occurs twice, of which Python would ignore all but the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def short(text: str, most: int = 100) -> str:
    """Returns `text`, cut after `most` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def one_line(text: str, most: int = 500) -> str:
    """Returns at most `most` characters of a text, `plain` and in one line."""
    return " ".join(plain(text).split())[:most]


def told(error: Exception) -> str:
    """Returns what a library says of a file, in one line; its content is damaged where it speaks of Python alone."""
    text = " ".join(str(error).split())
    if type(error).__name__ == "InvalidDicomError":
        return "it does not begin as DICOM files do"
    if isinstance(error, UnicodeError):
        return "it is no text in UTF-8"
    if not text or isinstance(error, _INNER) or _OF_PYTHON.search(text):
        return "its content is damaged"
    return short(text, 200)


def without_paths(text: str) -> str:
    """Returns a message without the folders of the machine that wrote it, for a page or a card that is shown elsewhere."""
    return _PATH.sub("…/", text)


def shown(value: Any) -> str:
    """Returns any value as a text for an error, cut; Python prints no integer of more than 4300 digits."""
    try:
        return short(repr(value))
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too large to print"


def is_name(value: Any, most: int = NAME) -> bool:
    """Returns whether `value` is a text of 1 to `most` characters that can be printed and written to a file on one line."""
    if not isinstance(value, str) or not 0 < len(value) <= most:
        return False
    return not _UNPRINTED.search(value)


def is_plain_name(value: Any) -> bool:
    """Returns whether `value` is a name that a plan may hold, of a site, a class or a part of a network: PLAIN_NAME."""
    return isinstance(value, str) and _PLAIN.fullmatch(value) is not None


def is_text(value: Any, most: int = TEXT) -> bool:
    """Returns whether `value` is a text of at most `most` characters, of several lines perhaps, that a file can hold."""
    return isinstance(value, str) and len(value) <= most and not _UNPRINTED.search(_BLANKS.sub("", value))


def is_number(value: Any) -> bool:
    """Returns whether `value` is a number of a usual size."""
    return isinstance(value, int | float) and abs(value) <= _LARGEST  # NaN is not


def is_count(value: Any) -> bool:
    """Returns whether `value` is a whole number of a usual size, 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def plain(text: object) -> str:
    """Returns a text for a terminal that holds nothing which a terminal obeys: names and reasons come from elsewhere."""
    kept = {"\n": "\n", "\t": "\t", "\r": " "}
    return _UNPRINTED.sub(lambda found: kept.get(found[0], "\N{REPLACEMENT CHARACTER}"), str(text))


def plain_line(text: object) -> str:
    """As `plain`, in one line with all its blanks: no name in a text begins a line that its author could forge."""
    return plain(text).replace("\n", " ")


def amount(count: int) -> str:
    """Returns a number of bytes as text."""
    return f"{count // MIB} MiB" if count >= MIB else f"{count} bytes"


def counted(count: int, what: str) -> str:
    """Returns a number of things as text: "1 epoch", "2 epochs"."""
    return f"{count} {what}" + ("" if count == 1 else "s")


def lasting(seconds: float) -> str:
    """Returns a duration as text: "90 seconds", "2.5 minutes", "30.0 hours"."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return counted(round(seconds), "second")


def megabytes(count: int) -> str:
    """Returns a number of bytes as text: "19.9 MB", "120 bytes"."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else counted(count, "byte")


def transferred(moved: int, size: int, rate: float) -> str:
    """Returns how far a transfer is as text: "3.1 MB of 19.9 MB at 0.90 Mbit/s".

    Args:
        rate: bytes a second.
    """
    return f"{megabytes(moved)} of {megabytes(size)} at {rate * 8 / 1e6:.2f} Mbit/s"


def _reason(error: Exception) -> str:
    number: int | None = getattr(error, "errno", None)
    return _REASONS.get(number or 0, f"cannot be read ({getattr(error, 'strerror', None) or error})")


def _shown(file: Path) -> Path:
    return Path(short(str(file), 300))
