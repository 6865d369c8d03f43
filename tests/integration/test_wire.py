"""No file goes with a message or comes with one: FLARE's `Datum` names one, and whoever sends it back sends what is in it."""

import pytest
import torch
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs import lobs
from nvflare.fuel.utils.fobs.datum import Datum, DatumManager

from feddp.errors import FedDPError
from feddp.flare.cell_gate import require_gate
from feddp.flare.gate import SiteGate
from feddp.flare.messages import register_tensors
from support.gated import JOB, SERVER, A, as_bytes, in_process

KEY = b"-----BEGIN PRIVATE KEY-----"


@pytest.fixture
def federation(monkeypatch, tmp_path):
    register_tensors()
    with in_process(monkeypatch, tmp_path) as made:
        yield made


def hostile(path) -> bytes:
    """A message whose cookie is a datum that names a file of the receiver, as a changed FLARE writes it."""
    message = Shareable()
    message.add_cookie("x", Datum.file_datum(str(path)))
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(DatumManager, "externalize", lambda self, data: data)
        return as_bytes(fobs.dumps(message))


def echoed(data: bytes) -> bytes:
    """What FLARE's aux runner does with any request, of an unknown topic too: the cookies go back with the answer."""
    answer = Shareable()
    answer.set_cookie_jar(fobs.loads(data).get_cookie_jar())
    return as_bytes(fobs.dumps(answer))


@pytest.mark.parametrize("gated", [False, True], ids=["without the gate", "with it"])
def test_a_cookie_reads_no_file(federation, tmp_path, gated):
    (tmp_path / "client.key").write_bytes(KEY)
    data = hostile(tmp_path / "client.key")
    if not gated:
        assert KEY in echoed(data), "the control"
        return
    SiteGate()
    with pytest.raises(ValueError, match="a message may not contain a datum"):
        echoed(data)


def test_nothing_of_ours_sends_a_file(federation, tmp_path):
    """Whatever put the datum there: what goes over the wire is looked at last."""
    (tmp_path / "client.key").write_bytes(KEY)
    SiteGate()
    message = Shareable()
    message["x"] = Datum.file_datum(str(tmp_path / "client.key"))
    with pytest.raises(ValueError, match="a message may not send a file"):
        fobs.dumps(message)


@pytest.mark.parametrize("gated", [False, True], ids=["without the gate", "with it"])
def test_a_message_leaves_no_file(federation, tmp_path, monkeypatch, gated):
    """FLARE writes a message's file into a folder for all of the machine's users, under a name that the sender chooses."""
    folder = tmp_path / "datums"
    monkeypatch.setattr(lobs, "get_datum_dir", lambda: folder.mkdir(exist_ok=True) or str(folder))
    (tmp_path / "large").write_bytes(b"1" * 5_000_000)
    message = Shareable()
    message["x"] = Datum.file_datum(str(tmp_path / "large"))
    data = as_bytes(fobs.dumps(message))
    if not gated:
        fobs.loads(data)
        assert [path.stat().st_size for path in folder.iterdir()] == [5_000_000], "the control"
        return
    SiteGate()
    with pytest.raises(ValueError, match="a message may not bring a file"):
        fobs.loads(data)
    assert not folder.exists()


def test_large_texts_bytes_and_tensors_still_travel(federation):
    SiteGate()
    sent = Shareable()
    sent["bytes"], sent["text"], sent["tensor"] = b"1" * 20_000_000, "x" * 20_000_000, torch.ones(3)
    back = fobs.loads(fobs.dumps(sent))
    assert (back["bytes"], back["text"]) == (sent["bytes"], sent["text"])
    assert torch.equal(back["tensor"], sent["tensor"])


def test_a_job_is_refused_where_messages_may_hold_files(federation, monkeypatch):
    SiteGate()
    federation.cell(f"{A}.{JOB}"), federation.cell(SERVER)
    require_gate(A)
    monkeypatch.setattr(DatumManager, "add_datum", lambda manager, datum: None)
    with pytest.raises(FedDPError, match="no gate protects"):
        require_gate(A)
