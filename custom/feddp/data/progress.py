"""A progress bar on stderr; stdout is for results."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track as rich_track

T = TypeVar("T")


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yields `items` and shows a bar with the text `what` meanwhile; silent if stderr is not a terminal."""
    # a separate console: rich allows one live display per console, and the caller may already show one
    console = Console(stderr=True)
    yield from rich_track(
        items, description=what, total=total, console=console, transient=True, disable=not console.is_terminal
    )
