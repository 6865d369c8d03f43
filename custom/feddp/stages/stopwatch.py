"""Measures where the time of a round goes."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Stopwatch:
    """Runs from its creation.

    Args:
        parts: names of parts that are 0 if nothing of theirs happens.
    """

    def __init__(self, parts: Sequence[str] = ()):
        self._started = time.monotonic()
        self.parts = dict.fromkeys(parts, 0.0)  # seconds per part

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
