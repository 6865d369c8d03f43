"""A progress bar on stderr; stdout is for results."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.progress import BarColumn, TaskProgressColumn, TimeRemainingColumn

from feddp.terminal import Screen, progress

T = TypeVar("T")


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yields `items` and shows a bar with the text `what` meanwhile; silent if stderr is not a terminal."""
    # a separate console: rich allows one live display per console, and the caller may already show one
    silent = not Screen(err=True).is_terminal
    columns = "{task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn(elapsed_when_finished=True)
    with progress(*columns, transient=True, disable=silent) as bar:
        yield from bar.track(items, total=total, description=what)
