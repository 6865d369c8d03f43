"""Kits and handshakes drawn at random: each is refused in words, or holds names, a port and a valid signature."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddp.errors import InputError, SealingError
from feddp.sealing.envelope import recipients_of
from feddp.sealing.handshake import introduce, meet
from feddp.sealing.kit import Kit, components
from support.certificates import Office
from support.fuzz import ANY, cases, changed, tried

SERVERS = [{"name": "feddp", "service": {"target": "server.example.org:8002"}, "identity": "server", "admin_server": "server"}]
GOOD = {
    "client": {"servers": SERVERS, "client": {"fqsn": "relay.site-1"}},
    "server": {"servers": SERVERS},
    "admin": {
        "admin": {
            "username": "lead@example.org",
            "project_name": "feddp",
            "host": "server.example.org",
            "port": 8003,
            "server_identity": "server",
        }
    },
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "startup").mkdir()
    return tmp_path


def write(folder, kind, content):
    for name in GOOD:
        (folder / "startup" / f"fed_{name}.json").unlink(missing_ok=True)
    (folder / "startup" / f"fed_{kind}.json").write_bytes(content)


def opened(folder):
    """The kit, or None if it is refused."""
    kit, error = tried(InputError, Kit.open, folder)
    assert len(error.splitlines()) <= 1
    if kit is None:
        return None
    for text in (kit.name, kit.project, kit.server[0]):
        assert isinstance(text, str)
        assert text
    assert type(kit.server[1]) is int
    assert 0 < kit.server[1] < 2**16
    identity, error = tried(InputError, lambda: kit.server_identity)
    assert isinstance(identity, str) or error
    return kit


@pytest.mark.parametrize("kind", GOOD)
def test_a_kit_as_flare_writes_it(folder, kind):
    write(folder, kind, json.dumps(GOOD[kind]).encode())
    kit = opened(folder)
    assert (kit.kind, kit.project, kit.server[0]) == (kind, "feddp", "server.example.org")


@cases(200)
@given(data=st.data())
def test_a_kit_with_changed_entries(folder, data):
    kind = data.draw(st.sampled_from(sorted(GOOD)))
    write(folder, kind, json.dumps(data.draw(changed(GOOD[kind]))).encode())
    opened(folder)


@cases(60)
@given(content=st.binary(max_size=60) | st.integers(33, 50_000).map(lambda depth: b"[" * depth))
def test_a_kit_of_any_bytes(folder, content):
    write(folder, "client", content)
    assert opened(folder) is None


@cases(60)
@given(content=changed({"components": [{"id": "a", "path": "b", "args": {}}]}) | ANY)
def test_components_of_any_json(folder, content):
    (folder / "resources.json").write_text(json.dumps(content))
    found, error = tried(InputError, components, folder / "resources.json")
    assert error or all(isinstance(component, dict) for component in found)


@pytest.fixture(scope="module")
def met():
    """The identity of A, and a handshake of B as a dictionary."""
    office = Office()
    a, b = office.identities("AB").values()
    return a, json.loads(introduce(b, "job", "calibration")[0])


@cases(100)
@given(data=st.data())
def test_a_handshake_with_changed_entries(met, data):
    mine, good = met
    content = data.draw(changed(good))
    peer, error = tried(SealingError, meet, mine, "B", json.dumps(content).encode(), "job", "calibration")
    if error:
        return
    # more entries, or others of the signature's hexadecimal letters, change nothing that was signed
    assert content["statement"] == good["statement"]
    assert content["certificate"].strip() == good["certificate"].strip()
    assert peer.name == "B"


@cases(100)
@given(content=st.binary(max_size=200))
def test_a_handshake_or_an_envelope_of_any_bytes(met, content):
    with pytest.raises(SealingError):
        meet(met[0], "B", content, "job", "calibration")
    with pytest.raises(SealingError):
        recipients_of("B", content)


def test_the_handshake_itself_is_accepted(met):
    """The control of the tests above."""
    assert meet(met[0], "B", json.dumps(met[1]).encode(), "job", "calibration").name == "B"
