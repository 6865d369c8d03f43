"""A site's answer that the server of a job cannot read: FLARE ends the job's process, ours goes on and counts it."""

import threading
from types import SimpleNamespace

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedTopic, ServerCommandNames
from nvflare.fuel.f3.cellnet import cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC
from nvflare.fuel.f3.streaming.stream_const import StreamDataType, StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import BlobSizeError, StreamError
from nvflare.fuel.f3.streaming.stream_utils import gen_stream_id

from feddp.flare.persistor import SharedTensorPersistor
from feddp.flare.unread import outlive_unread_answers, unread

SERVER = SimpleNamespace(fqcn="server.job")


class Ended(BaseException):
    """The process would be gone."""


@pytest.fixture
def flares(monkeypatch):
    """FLARE as it is, in a process in which a test before may have changed it, and which does not end."""

    def end(code):
        raise Ended(code)

    for place, name in ((cell, "_is_server_job_cell"), (cell.Adapter, "call")):
        now = getattr(place, name)
        monkeypatch.setattr(place, name, getattr(now, "__wrapped__", now))
    monkeypatch.setattr(cell.os, "_exit", end)


@pytest.fixture
def arrives(flares, monkeypatch):
    """An answer comes to the server's process of a job, and reading it raises an error."""

    def arrive(error, topic=ServerCommandNames.SUBMIT_UPDATE, broken=None):
        def unreadable(*arguments, **more):
            raise error

        monkeypatch.setattr(cell, "decode_payload", unreadable)
        headers = {StreamHeaderKey.CHANNEL: CellChannel.SERVER_COMMAND, StreamHeaderKey.TOPIC: topic}
        headers[MessageHeaderKey.ORIGIN] = "site-2.job"
        own = SimpleNamespace(decode_pass_through_channels=(), decode_pass_through_topics=(), get_fobs_context=lambda props: {})
        future = SimpleNamespace(headers=headers, result=lambda: b"", error=broken)
        cell.Adapter(lambda request: Message(), SERVER, own).call(future)

    return arrive


def test_the_job_goes_on_and_the_answer_is_counted(arrives):
    """What `call` raises, FLARE tells the sender (BlobHandler._run_blob_cb). Another request's or a broken stream's error is
    no answer that could not be read."""
    error = RuntimeError("failed to download from site-2")
    with pytest.raises(Ended):
        arrives(error)  # the control
    outlive_unread_answers()
    before = unread()
    with pytest.raises(RuntimeError, match="failed to download from site-2"):
        arrives(error)
    assert unread() - before == {"site-2": 1}
    for more in ({"topic": ServerCommandNames.GET_TASK}, {"broken": BlobSizeError("cut")}):
        with pytest.raises(RuntimeError, match="failed to download"):
            arrives(error, **more)
    assert unread() - before == {"site-2": 1}


def test_a_message_of_the_servers_that_is_too_large_ends_the_job_as_before(arrives):
    """Whether FLARE learns it from what it calls, or from a future or a message with no error being handled."""
    outlive_unread_answers()
    with pytest.raises(Ended):
        arrives(BlobSizeError("too large"))
    refused = SimpleNamespace(exception=lambda: BlobSizeError("too large"))
    with pytest.raises(Ended):
        cell.Adapter(None, SERVER, None)._handle_reply_stream_done(refused)
    own = SimpleNamespace(requests_dict={}, core_cell=SimpleNamespace(my_info=SERVER), logger=SimpleNamespace(critical=print))
    said = Message({StreamHeaderKey.ERROR_TYPE: BlobSizeError.__name__}, None)
    with pytest.raises(Ended):
        cell.Cell._process_stream_error(own, said)


def test_a_jobs_server_goes_on_and_counts_once(arrives, plan_for):
    """Its persistor sees to it, also the second one in a process."""
    for _ in range(2):
        SharedTensorPersistor(plan_for().to_json())
    before = unread()
    with pytest.raises(RuntimeError, match="unreadable"):
        arrives(RuntimeError("unreadable"))
    assert unread() - before == {"site-2": 1}


@pytest.mark.parametrize(
    ("channel", "topic", "dropped"),
    [
        (CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE, True),
        (OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC, True),
        (CellChannel.AUX_COMMUNICATION, ReservedTopic.END_RUN, False),
    ],
)
def test_a_runs_end_does_not_wait_for_the_rest_of_a_killed_sites_answer(channel, topic, dropped, plan_for):
    """One chunk of two comes. Whoever reads the second waits for FLARE's 300 s, which the process cannot end before."""
    told, ended = [], []
    own = SimpleNamespace(fire_and_forget=lambda _channel, topic, origin, message, **more: told.append(message))
    headers = {StreamHeaderKey.STREAM_ID: gen_stream_id(), StreamHeaderKey.SEQUENCE: 0, MessageHeaderKey.ORIGIN: "site-2.job"}
    headers |= {StreamHeaderKey.CHANNEL: channel, StreamHeaderKey.TOPIC: topic, StreamHeaderKey.DATA_TYPE: StreamDataType.CHUNK}
    first = Message(headers, b"first")
    task = RxTask.find_or_create_task(first, own)
    assert task.process_chunk(first)
    assert task.read(10) == b"first"

    def rest():
        try:
            task.read(10)
        except StreamError as error:
            ended.append(str(error))

    reading = threading.Thread(target=rest, daemon=True)
    reading.start()
    reading.join(0.3)
    assert reading.is_alive(), "the control: it waits"
    SharedTensorPersistor(plan_for().to_json()).handle_event(EventType.END_RUN, None)
    reading.join(5 if dropped else 0.3)
    assert reading.is_alive() is not dropped
    assert [message.get_header(StreamHeaderKey.ERROR_MSG) for message in told] == ended * 2, "both topics tell the sender"
    if not dropped:
        task.stop(StreamError("the test's end"))
        reading.join(5)
    assert len(ended) == 1
    assert dropped is ("the run has ended before the answer of site-2.job was complete" in ended[0])


def test_a_complete_answer_is_left_alone_at_a_runs_end(plan_for):
    """One chunk of one comes and is read. FLARE keeps the stream a while, to acknowledge a chunk that the site sends again;
    stopped, it would tell the site that its answer was lost."""
    told = []
    own = SimpleNamespace(fire_and_forget=lambda _channel, topic, origin, message, **more: told.append(message))
    headers = {StreamHeaderKey.STREAM_ID: gen_stream_id(), StreamHeaderKey.SEQUENCE: 0, MessageHeaderKey.ORIGIN: "site-2.job"}
    headers |= {StreamHeaderKey.CHANNEL: CellChannel.SERVER_COMMAND, StreamHeaderKey.TOPIC: ServerCommandNames.SUBMIT_UPDATE}
    whole = Message(headers | {StreamHeaderKey.DATA_TYPE: StreamDataType.FINAL, StreamHeaderKey.RELIABLE: True}, b"whole")
    task = RxTask.find_or_create_task(whole, own)
    try:
        assert task.process_chunk(whole)
        assert (task.read(10), task.read(10)) == (b"whole", b"")
        task.stop()  # as FLARE's reader does at the end
        assert task.completed
        assert (task.origin, task.sid) in RxTask.rx_task_map, "the control: it is looked at"
        SharedTensorPersistor(plan_for().to_json()).handle_event(EventType.END_RUN, None)
        assert (task.failed, task.error) == (False, None)
        assert [message for message in told if message.get_header(StreamHeaderKey.ERROR_MSG)] == []
    finally:
        task.cleanup_timer.cancel()
        RxTask.rx_task_map.pop((task.origin, task.sid))
