"""Variables that name a proxy have no effect on FLARE, and the check says so where the connection is the matter."""

import pytest

from feddp.kit.check import Checked, notes
from feddp.kit.here import here_problems, proxies
from feddp.sealing.kit import Kit
from support.certificates import Office, kit_of

NAMES = (
    "http_proxy",
    "HTTP_PROXY",
    "https_proxy",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
    "wss_proxy",
)


@pytest.fixture(autouse=True)
def _none(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kit(tmp_path):
    """A site's kit, at whose server's address nothing listens."""
    office = Office()
    folder = kit_of(tmp_path / "kit", "A", office, *office.issue("A"))
    path = folder / "startup/fed_client.json"
    path.write_text(path.read_text().replace("server.example.org:8002", "127.0.0.1:1"))
    (folder / "local").mkdir()
    (folder / "local/resources.json.default").write_text('{"components": []}')
    (folder / "local/privacy.json").write_text('{"scopes": []}')
    return Kit.open(folder)


@pytest.mark.parametrize("name", NAMES)
def test_each_variable_is_named(monkeypatch, name):
    assert proxies() == ""
    monkeypatch.setenv(name, "")
    assert proxies() == "", "an empty one is none"
    monkeypatch.setenv(name, "http://user:secret@proxy.example.org:3128")
    assert proxies() == (
        f"{name} is set here, but is not used: FLARE connects to the server directly, so the firewall must let it"
    )


def test_where_the_server_does_not_answer_they_are_named_too(kit, monkeypatch):
    ((problem,), _) = here_problems(kit)
    assert "does not answer" in str(problem)
    assert "not used" not in str(problem)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    monkeypatch.setenv("no_proxy", "example.org")
    ((problem,), _) = here_problems(kit)
    assert "does not answer" in str(problem)
    assert "open the firewall. HTTPS_PROXY, no_proxy are set here, but are not used: FLARE connects" in str(problem)


def test_and_where_the_kit_may_start(kit, monkeypatch):
    assert list(notes(Checked(kit, [], []))) == []
    monkeypatch.setenv("ALL_PROXY", "socks5://proxy:1")
    (line,) = notes(Checked(kit, [], []))
    assert line.startswith("ALL_PROXY is set here, but is not used")
