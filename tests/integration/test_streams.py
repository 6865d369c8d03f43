"""Streams by progress, by hand: FLARE's own classes with a cell that only notes what it is given to send."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming import byte_streamer
from nvflare.fuel.f3.streaming.blob_streamer import BlobStream
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.byte_streamer import TxTask
from nvflare.fuel.f3.streaming.stream_const import StreamDataType, StreamHeaderKey
from nvflare.fuel.utils.config_service import ConfigService

from feddp.flare import streams
from feddp.flare.configuration import AGAIN, CHUNK, COMMUNICATION, STALLED
from feddp.flare.streams import LEAST, STEP, WINDOW, by_progress, moved
from feddp.flare.transfers import REPORT, SLOW, Transfer
from feddp.stages.events import BACK, TO

SITE = "hospital-a.4f0c"  # a cell's name: a job's process


class Clock:
    """The time of FLARE's streams, of ours and of transfers."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


class Noting:
    """A cell that sends nothing."""

    def __init__(self):
        self.sent = []  # the number of each chunk

    def fire_and_forget(self, channel, topic, target, message, **_):
        self.sent.append(message.get_header(StreamHeaderKey.SEQUENCE))
        return {}


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    for module in ("feddp.flare.streams.time", "feddp.flare.transfers.time", "nvflare.fuel.f3.streaming.byte_streamer.time"):
        monkeypatch.setattr(module, found)
    return found


@pytest.fixture
def ours(monkeypatch):
    """This process's streams are by progress, with the settings of a kit, and nothing has moved yet."""
    changed = [(TxTask, "__init__"), (TxTask, "handle_ack"), (TxTask, "_retry_task")]
    for owner, name in (*changed, (RxTask, "_append"), (RxTask, "_schedule_remove_task")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as they are again after the test
    monkeypatch.setattr(Cell, "_send_one_request", Cell._send_one_request)
    monkeypatch.setattr(CommConfigurator, "_config_loaded", True)
    monkeypatch.setattr(CommConfigurator, "_configuration", COMMUNICATION)
    monkeypatch.setattr(ConfigService, "_var_values", {})  # FLARE keeps what an earlier test's streams have read
    monkeypatch.setattr(byte_streamer.reliable_retry_scheduler, "register", lambda task: None)
    monkeypatch.setattr(streams, "_MOVED", {})
    by_progress()


def sending(chunks: int, channel="tensors", optional=False, reliable=None) -> tuple[TxTask, Noting]:
    cell = Noting()
    stream = BlobStream(bytes(chunks * CHUNK), {})
    return TxTask(cell, CHUNK, channel, "part", SITE, {}, stream, reliable, False, optional), cell


def put(task: TxTask, chunks: int) -> None:
    """So many chunks on the line."""
    for _ in range(chunks):
        task.direct_buf, task.buffer_size = bytes(CHUNK), CHUNK
        assert task.send_pending_buffer()


def acknowledge(task: TxTask, chunks: int) -> None:
    """The first so many chunks have arrived."""
    headers = {StreamHeaderKey.SEQUENCE: chunks - 1, StreamHeaderKey.OFFSET: chunks * CHUNK, MessageHeaderKey.ORIGIN: SITE}
    task.handle_ack(Message(headers, None))


def test_a_chunk_that_waits_its_turn_on_a_moving_stream_is_not_sent_again(ours, clock):
    """Four chunks on a line that carries one in 15 s: the last one waits 60 s, thrice as long as a lost one would. FLARE alone
    sends it again every AGAIN seconds."""
    task, cell = sending(4)
    put(task, 4)
    for number in (1, 2, 3, 4):
        clock.now += 0.75 * AGAIN
        task.retry_task()
        acknowledge(task, number)
    assert cell.sent == [0, 1, 2, 3]


def test_what_lacks_an_acknowledgement_is_sent_again_once_the_stream_stands_still(ours, clock):
    """The first of three chunks arrived, the connection of the others was lost: AGAIN seconds later they are sent again, and
    the first one is not."""
    task, cell = sending(3)
    put(task, 3)
    clock.now += 5
    acknowledge(task, 1)
    clock.now += AGAIN - 1
    task.retry_task()
    assert cell.sent == [0, 1, 2]
    clock.now += 1
    task.retry_task()
    assert cell.sent == [0, 1, 2, 1, 2]


def test_only_a_stream_that_stands_still_is_given_up(ours, clock):
    """Ten chunks, one in each STALLED/2 seconds, are sent; then nothing is acknowledged for STALLED seconds."""
    task, _ = sending(20)
    put(task, 11)
    for number in range(1, 11):
        for _ in range(2):
            clock.now += STALLED / 4
            task.retry_task()
        acknowledge(task, number)
    assert not task.stopped
    clock.now += AGAIN
    task.retry_task()  # repeats
    clock.now += STALLED - AGAIN + 1
    task.retry_task()
    assert task.stopped
    assert "retry failed" in str(task.stream_future.error)


def test_the_bytes_under_way_are_those_of_two_seconds(ours, clock):
    """LEAST until the first acknowledgement. A chunk in 0.1 s is 2.6 MB/s, so 5.2 MB; ten in 10 s are as slow as LEAST."""
    task, _ = sending(10)
    put(task, 10)
    assert task.window_size == LEAST
    clock.now += 0.1
    acknowledge(task, 1)
    assert task.window_size == pytest.approx(WINDOW * CHUNK / 0.1, rel=1e-6)
    clock.now += 9.9
    acknowledge(task, 10)
    assert task.window_size == max(LEAST, int(WINDOW * CHUNK))


def test_the_bytes_under_way_have_flares_limit(ours, clock):
    task, _ = sending(1000)
    largest = task.largest_window
    put(task, 300)
    clock.now += 1e-4
    acknowledge(task, 300)
    assert task.window_size == largest == 64 * 1024 * 1024


def test_a_reply_is_kept_for_a_site_whose_line_is_down(ours):
    """FLARE marks it optional, so that any process on its way drops it; other optional messages stay so."""
    assert not sending(1, CellChannel.RETURN_ONLY, optional=True, reliable=True)[0].optional
    assert sending(1, "tensors", optional=True)[0].optional


def test_settings_apply_to_every_stream(ours):
    """A request is repeated, too; FLARE's default repeats replies alone."""
    task, _ = sending(1)
    assert (task.reliable, task.ack_interval, task.retry_wait) == (True, CHUNK, AGAIN)
    assert task.retry_wait + task.retry_timeout == task.ack_progress_timeout == STALLED
    assert RxTask(1, SITE, None).timeout == STALLED


def test_what_moved_is_counted_once(ours, clock):
    """Three chunks to the site, two of them acknowledged, the second twice; and 5 bytes from it."""
    task, _ = sending(3)
    put(task, 3)
    acknowledge(task, 1)
    acknowledge(task, 2)
    clock.now += 7
    acknowledge(task, 2)
    assert moved("hospital-a").to == 2 * CHUNK
    assert moved("hospital-a").last == clock.now - 7
    RxTask(2, SITE, None)._append(0, (True, b"12345"))
    assert (moved("hospital-a").back, moved("hospital-a").last) == (5, clock.now)
    assert moved("hospital-b").to == 0


@pytest.mark.parametrize("offset", [float("inf"), float("nan"), 2**63, 3 * CHUNK + 1, -2, 1.5, True, "1", [1], None])
def test_nobody_has_received_more_than_was_sent(ours, clock, offset):
    """A site could make its line seem endlessly fast, and a task arrived; inf in `progress.jsonl` would end the job."""
    task, _ = sending(3)
    put(task, 2)
    sequence = 3 if offset is None else 1
    headers = {StreamHeaderKey.SEQUENCE: sequence, StreamHeaderKey.OFFSET: offset, MessageHeaderKey.ORIGIN: SITE}
    task.handle_ack(Message(headers, None))
    assert moved("hospital-a").to == 0
    assert len(task.pending_messages) == 2
    acknowledge(task, 2)
    assert moved("hospital-a").to == 2 * CHUNK, "the control"


def test_acknowledgements_in_two_threads_are_counted_once(ours):
    """FLARE reads what was acknowledged, and sets it, in threads: here both have done so before either is counted."""
    task, _ = sending(3)
    put(task, 2)
    both = threading.Barrier(2, timeout=10)
    task.ack_waiter = SimpleNamespace(is_set=lambda: both.wait() >= 0)  # FLARE's last look
    threads = [threading.Thread(target=acknowledge, args=(task, number)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert moved("hospital-a").to == 2 * CHUNK


def received(sid: int, content: bytes, told: list) -> RxTask:
    """A stream of one chunk, which has arrived and was read."""
    cell = SimpleNamespace(fire_and_forget=lambda channel, topic, origin, message, **more: told.append(message))
    headers = {StreamHeaderKey.STREAM_ID: sid, StreamHeaderKey.SEQUENCE: 0, MessageHeaderKey.ORIGIN: SITE}
    headers |= {StreamHeaderKey.DATA_TYPE: StreamDataType.FINAL, StreamHeaderKey.RELIABLE: True}
    whole = Message(headers | {StreamHeaderKey.RETRY_WAIT: 20, StreamHeaderKey.RETRY_TIMEOUT: 10**6}, content)
    task = RxTask.find_or_create_task(whole, cell)
    assert task.process_chunk(whole)
    assert task.read(CHUNK) == content
    again = RxTask.find_or_create_task(whole, cell)
    told.clear()
    assert again.process_chunk(whole) is False
    return again


def test_what_is_repeated_of_a_stream_that_has_arrived_is_acknowledged_and_no_more(ours, monkeypatch):
    """FLARE keeps all of it, 7 kB without its content, ten times a second and waiting site."""
    monkeypatch.setattr(RxTask, "rx_task_map", {})
    told = []
    kept = received(7, b"12345", told)
    (message,) = told
    found = {
        key: message.get_header(key) for key in (StreamHeaderKey.DATA_TYPE, StreamHeaderKey.OFFSET, StreamHeaderKey.SEQUENCE)
    }
    assert found == {StreamHeaderKey.DATA_TYPE: StreamDataType.ACK, StreamHeaderKey.OFFSET: 5, StreamHeaderKey.SEQUENCE: 0}
    assert RxTask.rx_task_map == {(SITE, 7): kept}
    assert not isinstance(kept, RxTask)
    assert not hasattr(kept, "__dict__")


def test_streams_that_arrived_are_remembered_by_one_thread(ours, monkeypatch):
    """FLARE has a thread for each, for 300 s with our settings: 300 requests of a site that waits left 600. A sender may ask
    for a longer time than STALLED, and does not get it."""
    monkeypatch.setattr(RxTask, "rx_task_map", {})
    before = set(threading.enumerate())
    for sid in range(50):
        received(sid, b"1", [])
    new = set(threading.enumerate()) - before
    assert len(new) < 10, "one, and what earlier tests' threads may start; FLARE has 50"
    monkeypatch.setattr(streams, "STALLED", 0.1)
    for sid in range(50, 100):
        received(sid, b"1", [])
    until = time.monotonic() + 10
    while len(RxTask.rx_task_map) > 50 and time.monotonic() < until:
        time.sleep(0.05)
    assert sorted(sid for _, sid in RxTask.rx_task_map) == list(range(50))


def test_a_stream_that_failed_keeps_nothing_of_what_came(ours, monkeypatch):
    monkeypatch.setattr(RxTask, "rx_task_map", {})
    task = RxTask(3, SITE, SimpleNamespace(fire_and_forget=lambda *args, **more: None), reliable=True)
    task._append(0, (False, b"12345"))
    task.out_seq_chunks[2] = (True, b"6")
    task.stop(byte_streamer.StreamError("a test"))
    assert (list(task.chunks), task.out_seq_chunks) == ([], {})


def test_a_transfer_may_be_looked_at_while_the_site_answers(ours):
    """FLARE's threads tell of an answer while the controller looks; of one without tensors, it looked for its way."""
    transfer, over = Transfer("hospital-a", 100, 0), threading.Event()

    def answering():
        while not over.is_set():
            transfer.again()
            transfer.computed()

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=answering) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        until = time.monotonic() + 1
        while time.monotonic() < until:
            transfer.look()
            transfer.still()
            transfer.told()
    finally:
        over.set()
        sys.setswitchinterval(switching)
        for thread in threads:
            thread.join()


def test_a_site_waits_for_the_servers_reply_while_its_tensors_move(ours, monkeypatch):
    """0.1 s without a reply are FLARE's limit here; tensors move for 0.5 s, and then none do. Heartbeats do not count."""
    cell = Cell("hospital-a.4f0c", root_url="tcp://localhost:1", secure=False, credentials={}, parent_url="tcp://localhost:2")
    sent = byte_streamer.StreamFuture(1)
    sent.set_result(0)
    monkeypatch.setattr(cell, "send_blob", lambda **_: sent)
    until = time.monotonic() + 0.5

    def move():
        while time.monotonic() < until:
            streams._count("server.4f0c", to=STEP)
            time.sleep(0.02)

    def asked(topic):
        threading.Thread(target=move).start()
        began = time.monotonic()
        cell.send_request(channel="server_command", target="server.4f0c", topic=topic, request=Message({}, b""), timeout=0.1)
        return time.monotonic() - began

    assert asked(ServerCommandNames.SUBMIT_UPDATE) >= 0.5
    assert asked(ServerCommandNames.GET_TASK) < 0.5


def test_a_transfer_by_hand(ours, clock):
    """10 MB to a site: 3 MB in 15 s are told, at 0.2 MB/s; 6 MB more 30 s later, at the same rate; its end is told, too. Then
    the site works, and nothing moves, which is as it should be; its answer of 1 MB takes 5 s and is not told."""
    transfer = Transfer("hospital-a", 10_000_000, 1_000_000)
    clock.now += SLOW
    streams._count(SITE, to=3_000_000)
    assert transfer.look() == {"way": TO, "moved": 3_000_000, "size": 10_000_000, "rate": 200_000, "seconds_left": 35}
    assert transfer.look() is None
    clock.now += REPORT
    streams._count(SITE, to=6_000_000)
    assert transfer.look() == {"way": TO, "moved": 9_000_000, "size": 10_000_000, "rate": 200_000, "seconds_left": 5}
    clock.now += 10
    streams._count(SITE, to=1_000_400)  # with the headers
    assert transfer.look() == {"way": TO, "moved": 10_000_000, "size": 10_000_000, "rate": 100_040, "seconds_left": 0}
    clock.now += 5000
    assert (transfer.look(), transfer.still(), transfer.told()) == (None, 0.0, "")
    transfer.computed()
    clock.now += 5
    streams._count(SITE, back=500_000)
    assert (transfer.look(), transfer.still()) == (None, 0.0)
    clock.now += SLOW
    transfer.computed()  # FLARE's client asks again: the transfer goes on
    assert transfer.look()["way"] == BACK
    assert transfer.told() == (
        "0.5 MB of 1.0 MB at 0.20 Mbit/s of the answer arrived from it in 20 seconds, nothing in the last 15 seconds; its"
        " line must let messages of this size through"
    )


def test_a_task_that_is_given_again_begins_anew(ours, clock):
    transfer = Transfer("hospital-a", 10_000_000, 0)
    streams._count(SITE, to=10_000_000)
    transfer.look()
    assert transfer.way == ""
    transfer.again()
    clock.now += SLOW
    assert transfer.look() == {"way": TO, "moved": 0, "size": 10_000_000, "rate": 0, "seconds_left": None}


def test_a_task_of_which_nothing_comes_is_given_up_though_it_is_asked_for_again(ours, clock):
    """FLARE's client asks anew after 494 s, four tries of a part. What moves begins a new wait, and so
    does a new process at the site."""
    transfer = Transfer("hospital-a", 10_000_000, 0)
    for _ in range(3):
        clock.now += 494
        transfer.again()
    assert transfer.still() == 3 * 494
    streams._count(SITE, to=STEP)
    transfer.again()
    assert transfer.still() == 0
    streams._count(SITE, to=10_000_000)
    transfer.look()
    clock.now += 5000  # the site computes, and is started anew
    transfer.again()
    assert (transfer.way, transfer.still()) == (TO, 0)


def test_heartbeats_are_no_transfer(ours, clock):
    """A line that passes small messages alone: 300 bytes every 10 s for ten minutes."""
    transfer = Transfer("hospital-a", 10_000_000, 0)
    for _ in range(60):
        clock.now += 10
        streams._count(SITE, to=300, back=300)
        transfer.look()
    assert transfer.still() == 600
