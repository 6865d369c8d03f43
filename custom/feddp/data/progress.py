"""A progress bar on stderr, so that stdout stays for results."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track as rich_track

T = TypeVar("T")


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """`items`, with a bar that names `what` while they are consumed; silent where stderr is no terminal."""
    # A console of its own: rich allows one live display a console, and a caller may be showing one already.
    console = Console(stderr=True)
    yield from rich_track(
        items, description=what, total=total, console=console, transient=True, disable=not console.is_terminal
    )
