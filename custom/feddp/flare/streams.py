"""FLARE's streams on the lines of hospitals: progress decides, not size.

FLARE sends every large message as a stream of chunks. It is set for 25 Gbit/s: as shipped it puts 64 MiB on the line before it
waits, the receiver acknowledges every 16 MiB, and each chunk without an acknowledgement is sent again after 5 s. A line of 5
Mbit/s then carries the same 20 MB again and again and delivers none. Here

- a sender has at most WINDOW seconds of the stream's own rate under way, so what is behind it on the line waits little;
- a chunk is sent again if nothing of its stream was acknowledged for AGAIN seconds, as when its connection was lost; chunks
  that were acknowledged are not;
- a stream of which nothing is acknowledged for STALLED seconds is given up, and no other;
- a reply is repeated as long as a request is. FLARE drops it if the line is down when it is ready, and who asked waits in vain;
- a site waits for the server's reply to its answer as long as the answer's tensors move;
- of a stream that has arrived, what acknowledges a repetition is kept until nobody repeats it, by one thread. FLARE keeps all
  of it and starts a thread for each, which would be thousands: a site that waits asks for its task several times a second;
- an acknowledgement of more than was sent is none. A site could end the job with it.

The settings are `feddp.flare.configuration.COMMUNICATION`. FLARE has none for the other rules, for which
`by_progress` changes its classes. It also counts the bytes that move, which are signs of life of a site.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.byte_streamer import TxTask
from nvflare.fuel.f3.streaming.stream_const import STREAM_ACK_TOPIC, STREAM_CHANNEL, StreamDataType, StreamHeaderKey

from feddp.flare.configuration import CHUNK, STALLED
from feddp.reading import is_count

WINDOW = 2.0  # seconds
# bytes under way at any rate, and until the rate is known. Several streams may share a line, each with so many: 4 s at 1 Mbit/s
LEAST = 2 * CHUNK
NOTHING_YET = -1  # the number of the last chunk, before there is one
STEP = 64 * 1024  # bytes that messages without tensors, of a few hundred bytes each, do not come to between two looks


@dataclass(frozen=True)
class Moved:
    """Bytes of streams between this process and a participant, of messages of any kind; when there were some last.

    `to` counts what the participant has acknowledged. `last` is a time of `time.monotonic`.
    """

    to: int = 0
    back: int = 0
    last: float = float("-inf")


_MOVED: dict[str, Moved] = {}
_ONE = threading.Lock()  # FLARE sends and receives in threads


def moved(participant: str) -> Moved:
    """Returns what has moved between this process and all processes of a participant since this one began."""
    with _ONE:
        return _MOVED.get(participant, Moved())


def _count(cell: str, to: int = 0, back: int = 0) -> None:
    participant = FQCN.get_root(cell)
    with _ONE:
        before = _MOVED.get(participant, Moved())
        _MOVED[participant] = Moved(before.to + to, before.back + back, time.monotonic())


class Arrived:
    """What is left of a stream that has arrived, in its place in FLARE's table of streams."""

    __slots__ = "cell", "offset", "origin", "seq", "sid"
    completed = True

    def __init__(self, task: RxTask):
        self.cell, self.origin, self.sid = task.cell, task.origin, task.sid
        self.seq, self.offset = task.seq, task.received_offset

    def process_chunk(self, message: Message) -> bool:
        """Acknowledges what its sender repeats."""
        headers = {StreamHeaderKey.OFFSET: self.offset, StreamHeaderKey.SEQUENCE: self.seq}
        headers |= {StreamHeaderKey.STREAM_ID: self.sid, StreamHeaderKey.DATA_TYPE: StreamDataType.ACK}
        self.cell.fire_and_forget(STREAM_CHANNEL, STREAM_ACK_TOPIC, self.origin, Message(headers), optional=True)
        return False

    def stop(self, error: Exception, notify: bool) -> None:
        """Its sender has failed, but not with this stream."""


class Remembered(threading.Thread):
    """Has streams that are over forgotten, each at its time."""

    def __init__(self) -> None:
        super().__init__(name="remembered_streams", daemon=True)
        self._due: list[tuple[float, int, tuple[str, int]]] = []
        self._changed, self._number = threading.Condition(), itertools.count()

    def add(self, task: RxTask, seconds: float) -> None:
        key = task.origin, task.sid
        if not task.failed:
            with RxTask.map_lock:
                RxTask.rx_task_map[key] = Arrived(task)
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._number), key))
            self._changed.notify()
            if not self.is_alive():
                self.start()

    def run(self) -> None:
        while True:
            with self._changed:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                key = heapq.heappop(self._due)[2]
            with RxTask.map_lock:
                RxTask.rx_task_map.pop(key, None)

    def cancel(self) -> None:
        """FLARE cancels the timer of a stream that it forgets; ours then finds nothing to forget."""


def _moving(cell: str) -> Callable[[], bool]:
    """Returns a function that tells whether tensors have moved to a cell's participant since the last call."""
    participant = FQCN.get_root(cell)
    last = moved(participant).to

    def moving() -> bool:
        nonlocal last
        before, last = last, moved(participant).to
        return last - before >= STEP

    return moving


def by_progress() -> None:
    """Makes the streams of this process keep to the rules above."""
    ask, remembered = Cell._send_one_request, Remembered()
    make, ack, retry, append = TxTask.__init__, TxTask.handle_ack, TxTask._retry_task, RxTask._append
    if hasattr(make, "__wrapped__"):  # it is done
        return

    @wraps(make)
    def made(task: TxTask, *args: Any, **kwargs: Any) -> None:
        make(task, *args, **kwargs)
        task.began, task.largest_window, task.counted = time.monotonic(), task.window_size, 0
        task.window_size = min(LEAST, task.largest_window)
        task.optional = task.optional and not (task.reliable and task.channel == CellChannel.RETURN_ONLY)

    @wraps(ack)
    def acknowledged(task: TxTask, message: Message) -> None:
        # the last chunk is added to what was sent a moment after it was
        for key, most in ((StreamHeaderKey.OFFSET, task.offset + task.chunk_size), (StreamHeaderKey.SEQUENCE, task.seq)):
            value = message.get_header(key)
            if value is not None and not (is_count(value) and value <= most) and value != NOTHING_YET:
                return
        ack(task, message)
        with _ONE:  # FLARE's threads bring acknowledgements in any order
            gained, task.counted = task.offset_ack - task.counted, task.offset_ack
        if gained > 0:
            _count(task.target, to=gained)
            rate = task.offset_ack / max(time.monotonic() - task.began, 1e-3)
            task.window_size = min(max(LEAST, int(WINDOW * rate)), task.largest_window)

    @wraps(retry)
    def retried(task: TxTask) -> float | None:
        with task.retry_lock:
            last = task.last_ack_progress_ts
            for sequence, (_, sent, message) in task.pending_messages.items():
                if sent <= last:  # the stream moves: this chunk waits its turn on the line
                    task.pending_messages[sequence] = None, last, message
        wait: float | None = retry(task)
        return wait

    @wraps(append)
    def arrived(task: RxTask, sequence: int, chunk: tuple[bool, Any]) -> None:
        append(task, sequence, chunk)
        _count(task.origin, back=len(chunk[1] or b""))

    def forgotten_later(task: RxTask, seconds: float | None = None) -> None:
        with task.stop_lock:
            if task.cleanup_timer is not None:
                return
            task.cleanup_timer = remembered
            if task.failed:
                with task.lock:
                    task.chunks.clear(), task.out_seq_chunks.clear()
            remembered.add(task, min(task.completed_task_ttl if seconds is None else seconds, STALLED))

    @wraps(ask)
    def asked(cell: Cell, channel: str, target: str, topic: str, request: Any, *args: Any, **kwargs: Any) -> Any:
        if topic == ServerCommandNames.SUBMIT_UPDATE:
            args = args[:4]  # the fifth is that of nobody
            kwargs["progress_wait_cb"] = _moving(target)
        return ask(cell, channel, target, topic, request, *args, **kwargs)

    Cell._send_one_request, RxTask._schedule_remove_task = asked, forgotten_later
    TxTask.__init__, TxTask.handle_ack, TxTask._retry_task, RxTask._append = made, acknowledged, retried, arrived
