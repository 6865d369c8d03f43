"""A task on its way to a site, and the site's answer on its way back: what has moved, how fast, and since when nothing has.

FLARE hands over references to tensors, and the receiver asks for the tensors in parts. So the server sees a slow transfer only
in the bytes of its streams (`feddp.flare.streams.moved`), which also hold messages without tensors.
"""

import threading
import time
from typing import Any

from feddp.flare.streams import STEP, moved
from feddp.reading import lasting, transferred
from feddp.stages.events import BACK, TO

SLOW, REPORT = 15.0, 30.0  # seconds until a transfer is reported, and between two reports


class Transfer:
    """Of one task and one site, from the request on.

    Args:
        to, back: bytes of the task's tensors, and of those that the answer may hold.

    Attributes:
        way: TO or BACK; empty while the site has the task and works.
    """

    def __init__(self, site: str, to: int, back: int):
        self.site, self._sizes = site, {TO: to, BACK: back}
        self._one = threading.RLock()  # FLARE's threads tell of the site while the controller looks
        self._begin(TO)

    def _begin(self, way: str) -> None:
        self.way = way if self._sizes[way] else ""
        self._began = self._reported_at = self._moved_at = time.monotonic()
        self._start = self._seen = self._reported = self._count()
        self._slow = False

    def _count(self) -> int:
        found = moved(self.site)
        return found.back if self.way == BACK else found.to

    def again(self) -> None:
        """The site was given the task again: after a restart, or because nothing of it has come, which goes on then."""
        with self._one:
            self._looked()
            still = self._moved_at if self.way == TO else None
            self._begin(TO)
            self._moved_at = still or self._moved_at

    def computed(self) -> None:
        """The site has its answer."""
        with self._one:
            if self.way != BACK:
                self._begin(BACK)

    def look(self) -> dict[str, Any] | None:
        """Notes what has moved; returns what is to be reported now of a transfer that takes long, if anything."""
        with self._one:
            return self._looked()

    def _looked(self) -> dict[str, Any] | None:
        if not self.way:
            return None
        now, count, size = time.monotonic(), self._count(), self._sizes[self.way]
        if count - self._seen >= min(STEP, size):
            self._seen, self._moved_at = count, now
        arrived = self.way == TO and count - self._start >= size
        report = None
        if now - self._reported_at >= (REPORT if self._slow else SLOW) or (arrived and self._slow):
            rate = (count - self._reported) / max(now - self._reported_at, 1e-3)
            done = min(count - self._start, size)
            left = round((size - done) / rate) if rate else None
            report = {"way": self.way, "moved": done, "size": size, "rate": round(rate), "seconds_left": left}
            self._slow, self._reported, self._reported_at = True, count, now
        if arrived:
            self.way = ""
        return report

    def still(self) -> float:
        """Returns the seconds since tensors moved; 0 while none should."""
        with self._one:
            return time.monotonic() - self._moved_at if self.way else 0.0

    def told(self, limit: float = 0.0) -> str:
        """Returns how far a transfer is, and what its line needs, for a site that is waited for no more.

        Args:
            limit: seconds that the site had for its task, if that is why; otherwise only what has taken long is told.
        """
        with self._one:
            seconds, size = time.monotonic() - self._began, self._sizes.get(self.way, 0)
            done = min(self._count() - self._start, size)
            if done == size or (seconds < SLOW and not limit):
                return ""
            what = "answer arrived from it" if self.way == BACK else "task reached it"
            need = "its line must let messages of this size through"
            if limit:
                rate = sum(self._sizes.values()) * 8 / 1e6 / limit
                need = f"for task_timeout={limit:g} its line needs more than {rate:.2g} Mbit/s; raise one of the two"
            return (
                f"{transferred(done, size, done / max(seconds, 1e-3))} of the {what} in {lasting(seconds)}, nothing in the last"
                f" {lasting(self.still())}; {need}"
            )
