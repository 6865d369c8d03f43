"""A site's answer that the server of a job cannot read: FLARE ends the job's process, ours goes on."""

from types import SimpleNamespace

import pytest
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.fuel.f3.cellnet import cell
from nvflare.fuel.f3.cellnet.defs import CellChannel
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import BlobSizeError

from feddp.flare.unread import outlive_unread_answers


class Ended(BaseException):
    """The process would be gone."""


@pytest.fixture
def job(monkeypatch):
    """The cell of a job's process of the server, and what it does with an answer whose reading raises an error."""
    asked = cell._is_server_job_cell  # of a process in which a test before may have changed it
    monkeypatch.setattr(cell, "_is_server_job_cell", getattr(asked, "__wrapped__", asked))

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(cell.os, "_exit", end)
    return SimpleNamespace(fqcn="server.job")


def arrives(monkeypatch, info, error):
    def unreadable(*arguments, **more):
        raise error

    monkeypatch.setattr(cell, "decode_payload", unreadable)
    headers = {StreamHeaderKey.CHANNEL: CellChannel.SERVER_COMMAND, StreamHeaderKey.TOPIC: ServerCommandNames.SUBMIT_UPDATE}
    own = SimpleNamespace(decode_pass_through_channels=(), decode_pass_through_topics=(), get_fobs_context=lambda props: {})
    future = SimpleNamespace(headers=headers, result=lambda: b"")
    cell.Adapter(lambda request: Message(), info, own).call(future)


def test_the_job_goes_on_and_the_sender_gets_the_error(job, monkeypatch):
    """FLARE hands what `call` raises to the sender (BlobHandler._run_blob_cb)."""
    with pytest.raises(Ended):
        arrives(monkeypatch, job, RuntimeError("failed to download from site-2"))  # the control
    outlive_unread_answers()
    with pytest.raises(RuntimeError, match="failed to download from site-2"):
        arrives(monkeypatch, job, RuntimeError("failed to download from site-2"))


def test_a_message_of_the_servers_that_is_too_large_ends_the_job_as_before(job, monkeypatch):
    """Whether FLARE learns it from what it calls, or from a future or a message with no error being handled."""
    for _ in range(2):  # and twice is once
        outlive_unread_answers()
    with pytest.raises(Ended):
        arrives(monkeypatch, job, BlobSizeError("too large"))
    refused = SimpleNamespace(exception=lambda: BlobSizeError("too large"))
    with pytest.raises(Ended):
        cell.Adapter(None, job, None)._handle_reply_stream_done(refused)
