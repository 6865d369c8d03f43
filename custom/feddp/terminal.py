"""The only writer to a terminal. A terminal obeys nothing of what is shown: the names of files, sites and jobs, a site's
reasons and a library's messages come from elsewhere, and each goes through `feddp.reading.plain` here.

The rest of the package has no `print` and no console of its own (pyproject.toml; tests/unit/test_house.py).
"""

import io
import logging
import sys
import traceback
import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from feddp.reading import plain, plain_line

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.status import Status


def say(text: object = "") -> None:
    """Writes one line of a command's result to stdout, at once; a line break in `text` becomes a blank."""
    print(plain_line(text), flush=True)


def note(text: object) -> None:
    """Writes one line beside the result, such as a warning or an error, to stderr; as `say`."""
    print(plain_line(text), file=sys.stderr, flush=True)


class Screen(Console):
    """rich's console for tables, bars and coloured lines: rich writes its own commands to the terminal, the texts are plain.

    Brackets in a text are brackets, no styles or links of rich's markup.

    Args:
        err: write to stderr.
        more: as of `Console`.
    """

    def __init__(self, err: bool = False, **more: Any):
        super().__init__(stderr=err, markup=False, emoji=False, highlight=False, **more)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of whatever is shown; each renderable, also one within another, comes through here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


def progress(*columns: "ProgressColumn | str", **more: Any) -> "Progress":
    """Returns rich's bars on stderr.

    Args:
        columns: as of `Progress`; a text is a format, such as "{task.description}".
        more: as of `Progress`.
    """
    from rich.progress import Progress, TextColumn

    shown = (TextColumn(column, markup=False) if isinstance(column, str) else column for column in columns)
    return Progress(*shown, console=Screen(err=True), **more)


def working(text: str) -> "Status":
    """Shows on a terminal, until the end of a block, that something is being done."""
    return Screen(err=True).status(Text(text))


def guard_streams() -> None:
    """Prepares this process's streams, for the command line. What libraries write to stderr becomes plain too: warnings, and
    log records that have no handler."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without Greek letters; standard error does so already
    warnings.showwarning = _warn
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PlainFormatter("%(message)s"))


def note_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Writes the traceback of an error that nobody caught; for `sys.excepthook`."""
    for line in "".join(traceback.format_exception(kind, error, trace)).split("\n"):
        note(line)


class PlainFormatter(logging.Formatter):
    """Formats a log record as text that no terminal obeys."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def _warn(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
    for part in warnings.formatwarning(message, category, filename, lineno, line).split("\n"):
        note(part)
