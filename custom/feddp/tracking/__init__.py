"""Live tracking of a run at its server: scalars derived from the server's events, for TensorBoard and other trackers.

Nothing here is sent by a site: every number is in progress.jsonl already. A tracker that fails is given up with one line, and
the run goes on.
"""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from feddp.files import TENSORBOARD, Event
from feddp.tracking.board import Board
from feddp.tracking.curves import Curves, Scalar

_SECRET = re.compile(r"//[^/\s]*@")  # a name and password in an address: a job's log travels with its results
VARIABLE = "FEDDP_TRACKING"  # environment variable: the file that asks for further trackers (`feddp.flare.tracking`)


class Tracker(Protocol):
    """Takes the scalars of a run. It may raise any error; it is then given up."""

    def write(self, scalars: Sequence[Scalar]) -> None: ...

    def close(self) -> None:
        """Ends the tracking; called once, after the last scalar."""
        ...


class Tracking:
    """Gives the scalars of a run's events to trackers; may be called from several threads.

    Args:
        folder: the server's folder of the job, for the TensorBoard files.
        warn: takes the line about a tracker that is given up.
        more: further trackers, each made by a function that may fail too.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None], more: Mapping[str, Callable[[], Tracker]] | None = None):
        self._curves, self._warn, self._lock = Curves(), warn, threading.Lock()
        self._trackers: dict[str, Tracker] = {}
        for name, make in {"TensorBoard": lambda: Board(folder / TENSORBOARD), **(more or {})}.items():
            try:
                self._trackers[name] = make()
            except Exception as error:  # of any type: a library of another project, a disk, a network
                self._given_up(name, error)

    def __call__(self, event: Event) -> None:
        with self._lock:
            try:
                scalars = self._curves.of(event)
            except (KeyError, TypeError) as error:  # an event of an earlier version, in a run that is continued
                self._all(lambda tracker: tracker.close())
                for name in self._trackers:
                    self._given_up(name, error)
                self._trackers.clear()
                return
            if scalars:
                self._all(lambda tracker: tracker.write(scalars))

    def close(self) -> None:
        """Writes what is left. Events that come later are ignored."""
        with self._lock:
            if scalars := self._curves.rest():
                self._all(lambda tracker: tracker.write(scalars))
            self._all(lambda tracker: tracker.close())
            self._trackers.clear()

    def _all(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except Exception as error:  # as above
                del self._trackers[name]
                self._given_up(name, error)

    def _given_up(self, name: str, error: Exception) -> None:
        reason = " ".join(_SECRET.sub("//", f"{type(error).__name__}: {error}").split())[:300]
        self._warn(f"{name} tracks this run no longer ({reason}); the run goes on, and its curves are in progress.jsonl")
