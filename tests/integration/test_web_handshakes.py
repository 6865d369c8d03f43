"""Who reaches the server's http port without a certificate gets little of its memory and open files, for a little while."""

import asyncio
import socket
import ssl
from contextlib import ExitStack

import pytest
from aiohttp import ClientError, ClientSession
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.lighter.utils import serialize_cert, serialize_pri_key

from feddp.flare import web_handshakes
from feddp.flare.gate import ServerGate
from feddp.run.poc import free_ports
from support.certificates import Office
from support.deployment import until
from support.gated import PERSON, SERVER, A, in_process

MANY = 40


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    """{name: (certificate, key)}: of the server, of a hospital, and of one of another project with the same name."""
    office, made = Office(), {}
    for name, kind, by in ((PERSON, "server", office), (A, "client", office), ("other", "client", Office())):
        folder = tmp_path_factory.mktemp(name)
        certificate, key = by.issue(A if name == "other" else name, kind, host="localhost" if kind == "server" else None)
        files = {"crt": serialize_cert(certificate), "key": serialize_pri_key(key), "root": serialize_cert(office.root)}
        for file, content in files.items():
            (folder / file).write_bytes(content)
        made[name] = folder
    return made


@pytest.fixture
def listening(monkeypatch, tmp_path, kits):
    """Starts a server's cell that listens with http and TLS; returns its port and its audit lines."""
    with in_process(monkeypatch, tmp_path) as federation, ExitStack() as stack:

        def made(gated: bool = True):
            if gated:
                ServerGate()
            monkeypatch.setattr(CommConfigurator, "_config_loaded", True)
            monkeypatch.setattr(CommConfigurator, "_configuration", {})
            port, own = free_ports()[0], kits[PERSON]
            credentials = {"ca_cert": str(own / "root"), "server_cert": str(own / "crt"), "server_key": str(own / "key")}
            url = f"http://localhost:{port}"
            cell = Cell(SERVER, root_url=url, secure=True, credentials=credentials, create_internal_listener=False).core_cell
            cell.start()
            stack.callback(cell.stop)
            until(lambda: _open(port), "it does not listen")
            return port, federation.lines

        yield made


def _open(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def silent(port: int, stack: ExitStack) -> list[socket.socket]:
    """Connections that say nothing."""
    made = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(MANY)]
    for one in made:
        one.setblocking(False)
    return made


def closed(connections: list[socket.socket]) -> int:
    """The number of those that the other end has closed."""
    return sum(_is_closed(one) for one in connections)


def _is_closed(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


async def connects(port: int, kit) -> bool:
    """Whether a participant gets a web socket."""
    context = ssl.create_default_context(cafile=kit / "root")
    context.load_cert_chain(kit / "crt", kit / "key")
    try:
        async with ClientSession() as session, session.ws_connect(f"https://localhost:{port}/f3", ssl=context):
            return True
    except ClientError:
        return False


@pytest.mark.parametrize("gated", [True, False], ids=["with it", "without it"])
def test_many_who_say_nothing(listening, kits, monkeypatch, gated):
    """FLARE keeps all of them for a minute, a third of a megabyte each. The oldest makes way, and a hospital connects."""
    monkeypatch.setattr(web_handshakes, "MOST", 8)
    port, lines = listening(gated)
    with ExitStack() as stack:
        those = silent(port, stack)
        assert asyncio.run(connects(port, kits[A]))
        if gated:
            until(lambda: closed(those) >= MANY - 8, "they were kept")
            until(
                lambda: any("more than 8 handshakes at once, of which it was the oldest" in line for line in lines()), "no line"
            )
        else:
            assert closed(those) == 0


def test_a_handshake_has_its_time(listening, kits, monkeypatch):
    monkeypatch.setattr(web_handshakes, "SECONDS", 0.3)
    port, lines = listening()
    with ExitStack() as stack:
        those = silent(port, stack)
        until(lambda: closed(those) == MANY, "they were kept")
    assert any("handshake is taking longer than" in line for line in lines())
    assert asyncio.run(connects(port, kits[A]))


def test_another_projects_certificate_is_refused_and_written_down(listening, kits):
    port, lines = listening()
    assert not asyncio.run(connects(port, kits["other"]))
    until(lines, "no line")
    assert "a connection from 127.0.0.1:" in lines()[0]
    assert "without a valid certificate: CERTIFICATE_VERIFY_FAILED]" in lines()[0]
    assert asyncio.run(connects(port, kits[A]))
