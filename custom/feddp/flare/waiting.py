"""A room in which so many may wait at once, each only for a moment: the oldest makes way for the newest.

Whoever would fill the room must fill it again within that moment, each time. If newcomers had to wait or go, one who fills it
once would keep all others out.
"""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Guest = TypeVar("_Guest", bound=Hashable)


class Waiting(Generic[_Guest]):
    """Those who wait, the oldest first.

    Args:
        most: how many may wait.
        ended: called with each that makes way, in the thread of the one that enters.
    """

    def __init__(self, most: int, ended: Callable[[_Guest], None]):
        self._most, self._ended = most, ended
        self._inside: dict[_Guest, None] = {}
        self._lock = threading.Lock()

    def enter(self, guest: _Guest) -> None:
        """Lets one in; the oldest makes way if there are too many."""
        with self._lock:
            self._inside[guest] = None
            oldest = next(iter(self._inside)) if len(self._inside) > self._most else None
            if oldest is not None:
                del self._inside[oldest]
        if oldest is not None:
            self._ended(oldest)

    def leave(self, guest: _Guest) -> bool:
        """Lets one out whose waiting is over; returns whether it was inside."""
        with self._lock:
            inside = guest in self._inside
            self._inside.pop(guest, None)
            return inside
