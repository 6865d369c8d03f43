"""Measures where the time of a round goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Runs from its creation."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.parts: dict[str, float] = {}  # seconds per part

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        return time.monotonic() - self._started

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the seconds of the block to a part."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - started
