"""Who receives whose tensors, of sealed envelopes and of plain tensors; the server is a stand-in that asks nobody."""

from types import SimpleNamespace

import pytest
import torch

from feddp import protocol
from feddp.sealing.session import SEALED, as_tensor
from feddp.stages import exchange
from feddp.stages.message import Message

SITES = ["A", "B", "C", "D"]
NAMED = {"A": ["B", "C"], "B": ["A"], "C": ["A", "B", "Z"]}  # for whom each sealed; D gave nothing


@pytest.fixture
def read(monkeypatch):
    """The senders of the envelopes whose recipients were read, one entry each time."""
    found = []

    def recipients_of(sender, envelope):
        assert envelope == sender.encode()
        found.append(sender)
        return NAMED[sender]

    monkeypatch.setattr(exchange, "recipients_of", recipients_of)
    return found


def handed_out(sealed):
    """What every site is sent, and the peers that `hand_out` returns."""
    sent = {}

    def ask(task, parcels, numbers, **metadata):
        sent.update({site: sorted(parcel.tensors) for site, parcel in parcels.items()})
        return parcels.keys() - {"C"}  # C's answer is refused

    server = SimpleNamespace(sealed=sealed, sites=lambda: SITES, ask=ask)
    answers = {site: Message({SEALED: as_tensor(site.encode())}) for site in NAMED} | {"D": Message()}
    return sent, exchange.hand_out(server, protocol.CALIBRATE, answers, ())


def test_a_site_is_sent_what_was_sealed_for_it(read):
    sent, peers = handed_out(sealed=True)
    assert sent == {"A": ["B/sealed", "C/sealed"], "B": ["A/sealed", "C/sealed"], "C": ["A/sealed"], "D": []}
    assert peers == {"A": ["B", "C"], "B": ["A", "C"], "D": []}


def test_an_envelope_is_read_once_however_many_sites_there_are(read):
    """Each reading copies it, and it may have hundreds of MiB."""
    handed_out(sealed=True)
    assert read == ["A", "B", "C"]


def test_without_certificates_all_that_gave_receive_from_all_that_gave(read):
    sent, peers = handed_out(sealed=False)
    assert sent == {"A": ["B/sealed", "C/sealed"], "B": ["A/sealed", "C/sealed"], "C": ["A/sealed", "B/sealed"], "D": []}
    assert peers == {"A": ["B", "C"], "B": ["A", "C"], "D": []}
    assert read == []


def test_a_site_that_gives_nothing_may_be_asked_about_too(read):
    """The unseen site of an adaptation, Z, for which C alone sealed."""
    server = SimpleNamespace(sealed=True)
    answers = {site: Message({SEALED: as_tensor(site.encode())}) for site in NAMED} | {"Z": Message()}
    assert exchange.peers_of(server, answers, ["Z"]) == {"Z": ["C"]}
    assert torch.equal(exchange.of_peers(["C"], answers)["C/sealed"], as_tensor(b"C"))
