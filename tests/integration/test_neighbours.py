"""Who gets the name of a cell, on FLARE's own connections over loopback with certificates as provisioning makes them.

A stranger is a user of the same machine who connects to where a process of a kit listens. Every attack is also made where no
gate stands and the processes connect without TLS, as FLARE has them by default, and succeeds there.
"""

import asyncio
import socket
import ssl
import threading
import time
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace

import msgpack
import pytest
from aiohttp import ClientSession, WSMsgType
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import encode_payload
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.fuel.f3.drivers.connector_info import Mode
from nvflare.fuel.f3.drivers.socket_conn import SocketConnection
from nvflare.fuel.f3.endpoint import Endpoint, EndpointState
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.sfm.constants import Types
from nvflare.fuel.f3.sfm.prefix import PREFIX_LEN, Prefix
from nvflare.lighter.utils import serialize_cert, serialize_pri_key
from nvflare.private.admin_defs import Message as AdminMessage

from feddp.errors import PolicyError
from feddp.flare import handshakes, second_machine, unnamed
from feddp.flare.cell_gate import require_gate
from feddp.flare.configuration import INTERNAL
from feddp.flare.gate import ServerGate, SiteGate
from feddp.flare.neighbours import Neighbours
from support.certificates import Office
from support.claimant import Claimant
from support.gated import CONSOLE, JOB, OTHER, PERSON, SERVER, A, B, in_process

A_JOB, SERVER_JOB = f"{A}.{JOB}", f"{SERVER}.{JOB}"
NAMES = (SERVER, A, SERVER_JOB, A_JOB)
SOON = 10.0  # seconds for what comes at once


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    """The certificates of a server and of two hospitals, and the credentials that FLARE reads from such kits."""
    office, made = Office(), {}
    for name, kind in ((PERSON, "server"), (A, "client"), (B, "client")):
        folder = tmp_path_factory.mktemp(kind)
        certificate, key = office.issue(name, kind, host="localhost" if kind == "server" else None)
        files = {"rootCA.pem": serialize_cert(office.root), f"{kind}.crt": serialize_cert(certificate)}
        for file, content in (files | {f"{kind}.key": serialize_pri_key(key)}).items():
            (folder / file).write_bytes(content)
        own = {f"{kind}_cert": str(folder / f"{kind}.crt"), f"{kind}_key": str(folder / f"{kind}.key")}
        made[name] = {"ca_cert": str(folder / "rootCA.pem"), **own}
    return made


class Parent:
    """A participant's parent process, which listens to its own jobs and, at the server, to sites."""

    def __init__(self, name: str, kits, federation, stack: ExitStack, internal: dict, scheme: str):
        self.federation, self.kits, self.stack = federation, kits, stack
        self.own = kits[PERSON if name == SERVER else name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CommConfigurator, "_config_loaded", True)
            patch.setattr(CommConfigurator, "_configuration", {"internal": internal})
            self.port = _free_port()
            self.cell = Cell(
                fqcn=name,
                root_url=f"{scheme}://localhost:{self.port}",
                secure=True,
                credentials=dict(self.own),
                create_internal_listener=True,
                auth_identity_map={A: A, SERVER: PERSON} if name == A else None,
            ).core_cell
        self.cell.start()
        stack.callback(self.cell.stop)
        self.url = self.cell.get_internal_listener_url()
        self.manager = self.cell.communicator.conn_manager

    def genuine(self, name: str) -> Claimant | None:
        """Who bears the name, connected: a job, or at the server a site and its job, which come from another machine."""
        me = self.cell.get_fqcn()
        if not name.startswith(f"{me}.") and me != SERVER:
            return None
        root = name.split(".")[0]
        own, url = self.kits[PERSON if root == SERVER else root], self.url if root == me else f"tcp://localhost:{self.port}"
        made = Claimant(name, url, own, self.stack, secure=root != me)
        until(lambda: self.holds(name))
        return made

    def stranger(self, name: str, person: str | None = None) -> Claimant:
        """Claims a name, with a participant's certificate, or without TLS."""
        url = self.url if person else self.url.replace("stcp", "tcp")
        return Claimant(name, url, self.kits[person] if person else {}, self.stack)

    def holds(self, name: str) -> bool:
        return name in self.cell.agents

    def send(self, to: str) -> str:
        """Sends a secret; returns FLARE's error, if any."""
        headers = {MessageHeaderKey.DESTINATION: to, MessageHeaderKey.ORIGIN: self.cell.get_fqcn()}
        return self.cell._send_to_endpoint(Endpoint(to), Message(headers, b"secret"))

    def lines(self) -> list[str]:
        return self.federation.lines()

    def connection(self, person: str | None = None) -> socket.socket:
        """A plain connection to where it listens to its jobs; with a participant's certificate, one of TLS."""
        host, port = self.url.removeprefix("stcp://").split(":")
        made = socket.create_connection((host, int(port)), timeout=SOON)
        return credentials(self.kits[person]).wrap_socket(made) if person else made

    def open(self) -> int:
        """The number of connections to it."""
        return len(self.manager.sfm_conns)

    def listens(self) -> bool:
        """Whether it listens to sites."""
        with closing(socket.socket()) as tried:
            return tried.connect_ex(("localhost", self.port)) == 0


def credentials(own: dict) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=own["ca_cert"])
    made.check_hostname = False
    made.load_cert_chain(own.get("client_cert") or own["server_cert"], own.get("client_key") or own["server_key"])
    return made


def frame(kind: int, payload: bytes = b"", length: int = 0) -> bytes:
    """A frame of FLARE's, which announces its length or another one."""
    prefix = Prefix(length or PREFIX_LEN + len(payload), 0, kind, app_id=CoreCell.APP_ID)
    buffer = bytearray(PREFIX_LEN)
    prefix.to_buffer(buffer, 0)
    return bytes(buffer) + payload


def of_connections() -> list[str]:
    """The threads of connections to where a process listens."""
    return [thread.name for thread in threading.enumerate() if "process_request_thread" in thread.name]


def until(holds) -> None:
    deadline = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def parent(monkeypatch, tmp_path, kits):
    """Makes a parent process; `internal` is its setting of comm_config.json."""
    with in_process(monkeypatch, tmp_path) as federation, ExitStack() as stack:

        def made(name: str, gated: bool = True, internal: dict = INTERNAL, scheme: str = "tcp") -> Parent:
            if gated:
                (ServerGate if name == SERVER else SiteGate)()
            return Parent(name, kits, federation, stack, internal, scheme)

        yield made


CLEAR = {"scheme": "tcp", "resources": {"host": "localhost"}}  # FLARE's default
PARENTS = pytest.mark.parametrize("me", [A, SERVER])
# FLARE itself takes nobody who says what the process is called
CLAIMS = pytest.mark.parametrize(("me", "name"), [(me, name) for me in (A, SERVER) for name in NAMES if name != me])


@CLAIMS
@pytest.mark.parametrize("person", [None, B])
def test_a_stranger_on_the_machine_gets_no_name(parent, me, name, person):
    at = parent(me)
    first = at.genuine(name)
    held = list(at.manager.sfm_endpoints[name].connections) if first else []
    stranger = at.stranger(name, person)
    until(at.lines)
    assert at.holds(name) is bool(first)
    assert (at.manager.sfm_endpoints[name].connections if first else []) == held, "nobody is evicted"
    at.send(name)
    if first:
        until(lambda: first.got == [b"secret"])
    assert stranger.got == []
    line = at.lines()[0]
    if person:
        assert f"a connection that says it is {name} from 127.0.0.1:" in line
        assert f" {B}: " in line
    else:
        assert "a connection from 127.0.0.1:" in line
        assert "without a valid certificate: " in line


def test_a_stranger_with_tls_and_no_certificate_gets_none(parent, kits):
    """The root's certificate is no secret."""
    at = parent(A)
    known = {"ca_cert": kits[A]["ca_cert"], "connection_security": "tls"}
    stranger = Claimant(A_JOB, at.url, known, at.stack)
    until(at.lines)
    assert "without a valid certificate: PEER_DID_NOT_RETURN_A_CERTIFICATE]" in at.lines()[0]
    assert stranger.got == []
    assert not at.holds(A_JOB)


@CLAIMS
def test_without_it_a_stranger_takes_the_place(parent, me, name):
    """The control: FLARE without the gate and with its default. Whoever comes last has the name, and gets what is for it."""
    at = parent(me, gated=False, internal=CLEAR)
    first = at.genuine(name)
    stranger = at.stranger(name)
    until(lambda: EndpointState.READY in stranger.states)
    until(lambda: at.holds(name))
    if first:
        until(lambda: EndpointState.DISCONNECTED in first.states)
    assert at.send(name) == ""
    until(lambda: stranger.got == [b"secret"])


@PARENTS
def test_the_gate_takes_no_name_without_tls_either(parent, me):
    """A kit that lacks the setting: a job does not connect, and the reason names the remedy. A stranger gets no further."""
    at = parent(me, internal=CLEAR)
    for name in (f"{me}.{JOB}", f"{me}.{OTHER}"):
        at.stranger(name)
        until(lambda name=name: any(f"it is {name} " in line for line in at.lines()))
        assert not at.holds(name)
    assert "the connection has no mutual TLS: `internal` of local/comm_config.json is not what" in at.lines()[0]


@pytest.mark.parametrize(("name", "person"), [(B, B), (f"{B}.{JOB}", B), (SERVER, PERSON)])
def test_nobody_but_its_own_jobs_connects_to_a_site(parent, name, person):
    """With the right certificate: the server never connects to a site, which connects to it."""
    at = parent(A)
    at.stranger(name, person)
    until(at.lines)
    assert f"no cell of this name connects to {A} so]" in at.lines()[0]
    assert not at.holds(name)


@pytest.mark.parametrize(("me", "name"), [(SERVER, CONSOLE), (A, CONSOLE), (SERVER, SERVER), (A, A)])
def test_where_jobs_connect_there_is_no_console_and_no_namesake(parent, me, name):
    at = parent(me)
    at.stranger(name, B if name == CONSOLE else PERSON if me == SERVER else A)
    until(at.lines)
    said = "can only connect through an admin listener" if (me, name) == (SERVER, CONSOLE) else "connects to"
    assert f"a connection that says it is {name} from 127.0.0.1:" in at.lines()[0]
    assert said in at.lines()[0]
    assert not at.holds(name)


@pytest.mark.parametrize(("gated", "person"), [(True, A), (True, B), (True, None), (False, None)])
def test_a_job_connects_to_its_own_parent(monkeypatch, tmp_path, kits, gated, person):
    """A stranger may listen where the parent did that has ended; without the gate, which is the control, it is the parent."""
    url = f"{'stcp' if person else 'tcp'}://127.0.0.1:{_free_port()}"
    with in_process(monkeypatch, tmp_path) as federation, ExitStack() as stack:
        gated and SiteGate()
        Claimant(A, url, kits[person] if person else {}, stack, mode=Mode.PASSIVE)
        names = {A: A, SERVER: PERSON}
        own = {"secure": True, "credentials": dict(kits[A]), "auth_identity_map": names}
        cell = Cell(A_JOB, root_url=None, parent_url=url, **own).core_cell
        cell.start()
        stack.callback(cell.stop)
        if not gated or person == A:
            until(lambda: A in cell.agents)
            return
        until(federation.lines)
        assert cell.agents == {}
        said = "the name belongs to the certificate of hospital-a]" if person else "the connection has no mutual TLS: "
        assert f"[J:{JOB}][gate refused a connection that says it is {A} from 127.0.0.1:" in federation.lines()[0]
        assert said in federation.lines()[0]


def test_a_connection_keeps_the_name_that_it_said_first(parent):
    at = parent(A)
    job = at.genuine(A_JOB)
    (connection,) = job.communicator.conn_manager.sfm_conns.values()
    connection.local_endpoint = Endpoint(f"{A}.{OTHER}")
    connection.send_handshake(Types.HELLO)
    until(at.lines)
    assert "the connection has said another name before]" in at.lines()[0]
    assert not at.holds(f"{A}.{OTHER}")


@PARENTS
def test_the_second_of_a_name_is_refused_while_the_first_lives(parent, me, monkeypatch):
    """Also with the certificate: a second process of the job. A dead connection makes way."""
    at = parent(me)
    first = at.genuine(f"{me}.{JOB}")
    at.stranger(f"{me}.{JOB}", PERSON if me == SERVER else A)
    until(at.lines)
    assert "it is connected from 127.0.0.1:" in at.lines()[0]
    assert first.states == [EndpointState.READY]
    monkeypatch.setattr(second_machine, "LIVES", 0.0)
    until(lambda: EndpointState.DISCONNECTED in first.states)


# what leaves


@pytest.mark.parametrize("judged", [False, True], ids=["without it", "with it"])
def test_what_leaves_goes_to_whom_the_certificate_names(parent, judged, monkeypatch):
    """Should a stranger's connection have got the name: nobody judges that here, and FLARE judges no clear one."""
    monkeypatch.setattr(Neighbours, "_named", lambda self, *said: self._name(*said))
    if not judged:
        monkeypatch.setattr(Neighbours, "_require_way", lambda self, *said: None)
    at = parent(A, internal=CLEAR)
    stranger = at.stranger(A_JOB)
    until(lambda: at.holds(A_JOB))
    assert at.send(A_JOB) == (ReturnCode.COMM_ERROR if judged else "")
    if judged:
        assert "the connection has no mutual TLS" in at.lines()[0]
        assert stranger.got == []
    else:
        until(lambda: stranger.got == [b"secret"])


def test_a_connection_is_judged_when_it_says_its_name_and_not_for_each_message(parent, monkeypatch):
    judged, judge = [], Neighbours._require_certificate

    def counted(self, name, connection):
        if self.cell is at.cell:
            judged.append(name)
        judge(self, name, connection)

    at = parent(A)
    monkeypatch.setattr(Neighbours, "_require_certificate", counted)
    job = at.genuine(A_JOB)
    for _ in range(3):
        at.send(A_JOB)
    until(lambda: job.got == [b"secret"] * 3)
    assert judged == [A_JOB]


@pytest.mark.parametrize(
    ("me", "hop", "to", "passes"),
    [
        (A, SERVER, SERVER, True),
        (A, SERVER, SERVER_JOB, True),
        (A, A_JOB, A_JOB, True),
        (A, SERVER, A_JOB, False),  # what is said within the hospital does not leave it
        (A, A_JOB, SERVER, False),
        (A, f"{A}.{OTHER}", A_JOB, False),
        (A_JOB, A, A, True),
        (A_JOB, A, SERVER_JOB, True),
        (A_JOB, SERVER, SERVER_JOB, True),
        (A_JOB, SERVER, A, False),
        (SERVER, A, A_JOB, True),
        (SERVER, A_JOB, A_JOB, True),
        (SERVER, B, A_JOB, False),
        (SERVER, f"{B}.{JOB}", A_JOB, False),
        (SERVER, SERVER_JOB, A_JOB, False),
        (SERVER_JOB, SERVER, A_JOB, True),
    ],
)
def test_the_next_hop_is_on_the_way(monkeypatch, tmp_path, me, hop, to, passes):
    with in_process(monkeypatch, tmp_path) as federation:
        (ServerGate if me.startswith(SERVER) else SiteGate)()
        cell, sent = federation.cell(me).core_cell, []
        monkeypatch.setattr(cell.communicator, "send", lambda endpoint, *_: sent.append(endpoint.name))
        refused = cell._send_to_endpoint(Endpoint(hop), Message({MessageHeaderKey.DESTINATION: to}, b"x"))
    assert sent == [hop] * passes
    assert refused == ("" if passes else ReturnCode.COMM_ERROR)
    assert [f"{hop} is not on the way from {me} to {to}]" in line for line in federation.lines()] == [True] * (not passes)


# the handshake


def test_who_connects_and_says_nothing_keeps_nobody_from_connecting(parent):
    """FLARE's tcp driver would wait for it, for ever, before it takes the next connection."""
    at = parent(A)
    host, port = at.url.removeprefix("stcp://").split(":")
    with closing(socket.create_connection((host, int(port)))):
        at.genuine(A_JOB)


def test_without_it_nobody_else_connects(parent):
    """The control."""
    at = parent(A, gated=False)
    host, port = at.url.removeprefix("stcp://").split(":")
    with closing(socket.create_connection((host, int(port)))):
        Claimant(A_JOB, at.url, at.own, at.stack)
        time.sleep(2)
        assert not at.holds(A_JOB)
    until(lambda: at.holds(A_JOB))


def test_who_says_nothing_is_closed(parent, monkeypatch):
    monkeypatch.setattr(handshakes, "SECONDS", 0.2)
    at = parent(A)
    host, port = at.url.removeprefix("stcp://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=SOON)) as silent:
        assert silent.recv(1) == b""
    until(at.lines)
    assert "without a valid certificate: " in at.lines()[0]


def test_many_who_say_nothing_keep_nobody_from_connecting(parent, monkeypatch):
    """Each of them would have a thread for ten seconds. The oldest makes way, and the audit file has their number."""
    monkeypatch.setattr(handshakes, "MOST", 8)
    at = parent(A)
    with ExitStack() as silent:
        first, *_ = [silent.enter_context(at.connection()) for _ in range(40)]
        until(lambda: len(of_connections()) == 8)
        assert first.recv(1) == b"", "the oldest was closed"
        at.genuine(A_JOB)
    until(lambda: any(": more than 8 handshakes at once, of which it was the oldest" in line for line in at.lines()))
    until(lambda: len(of_connections()) == 1)  # the job's, which is connected


def test_without_a_bound_each_has_a_thread(parent, monkeypatch):
    """The control."""
    monkeypatch.setattr(handshakes, "MOST", 10**6)
    at = parent(A)
    with ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(at.connection())
        until(lambda: len(of_connections()) == 40)
    until(lambda: of_connections() == [])


def test_a_handshake_has_its_time_however_slowly_it_comes(parent, monkeypatch):
    """The limit is not for each byte: the beginning of a record of TLS, and then a byte whenever the last one is old."""
    monkeypatch.setattr(handshakes, "SECONDS", 1.0)
    at = parent(A)
    with at.connection() as slow:
        begun = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - begun < SOON:
                slow.sendall(b"\x16" if time.monotonic() == begun else b"\x03")
                time.sleep(0.4)
        assert time.monotonic() - begun < SOON / 2
    until(at.lines)


# a connection without a name


@pytest.mark.parametrize("bounded", [True, False], ids=["with it", "without it"])
def test_many_with_a_certificate_and_no_name_keep_nobody_from_connecting(parent, monkeypatch, bounded):
    """FLARE would keep all of them for ever, with a thread each."""
    monkeypatch.setattr(unnamed, "MOST", 8 if bounded else 10**6)
    at = parent(A)
    with ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(at.connection(B))
        until(lambda: at.open() == (8 if bounded else 20))
        at.genuine(A_JOB)
        until(lambda: at.open() == (8 if bounded else 21))
        for _ in range(10):
            silent.enter_context(at.connection(B))
        until(lambda: at.open() == (9 if bounded else 31))
        assert at.holds(A_JOB), "who has a name makes way for nobody"
        said = f" {B}: more than 8 connections at once have said no name, of which it was the oldest]"
        assert any(said in line for line in at.lines()) is bounded


def test_a_name_is_all_that_a_connection_can_say_first(parent, caplog):
    """FLARE would queue each frame before those of others, and log it."""
    at = parent(A)
    with at.connection(B) as eager, suppress(OSError):
        for _ in range(100):
            eager.sendall(frame(Types.DATA, b"x" * 100) * 10)
    until(at.lines)
    assert f" {B}: it sent more than {unnamed.FRAMES} frames and no name]" in at.lines()[0]
    until(lambda: at.open() == 0)
    assert caplog.text.count("Error processing frame") <= unnamed.FRAMES


@pytest.mark.parametrize("said", [[1, 2], "server", 5, {"endpoint_name": [SERVER]}])
def test_a_name_that_is_none_ends_the_connection(parent, said):
    at = parent(A)
    with at.connection(B) as connection:
        connection.sendall(frame(Types.HELLO, msgpack.packb(said)))
        until(at.lines)
    assert f"no cell of this name connects to {A} so]" in at.lines()[0]
    until(lambda: at.open() == 0)


def test_who_is_refused_is_cut_and_its_own_thread_closes(parent, monkeypatch):
    """FLARE's `close` frees the socket's number; the connection's thread then reads what comes to the next one of that number,
    whose handshake fails."""
    closed = []
    close = SocketConnection.close
    monkeypatch.setattr(SocketConnection, "close", lambda self: (closed.append(self.connector.mode), close(self)))
    at = parent(A)
    with at.connection(B) as connection:
        connection.sendall(frame(Types.HELLO, msgpack.packb({"endpoint_name": SERVER})))
        until(at.lines)
        until(lambda: at.open() == 0)
        assert Mode.PASSIVE not in closed


@pytest.mark.parametrize("gated", [True, False], ids=["with it", "without it"])
def test_memory_is_not_given_for_an_announced_length(parent, gated):
    """FLARE gives 2 GiB for these 16 bytes."""
    at = parent(A, gated=gated, internal=INTERNAL)
    with at.connection(B) as connection:
        connection.sendall(frame(Types.HELLO, length=unnamed.LARGEST + 1))
        if gated:
            assert connection.recv(1) == b""
        else:
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.recv(1)


@pytest.mark.parametrize("gated", [True, False], ids=["with it", "without it"])
def test_a_server_on_the_web_takes_no_larger_frame(parent, kits, gated):
    """Nor one that is small until it is unpacked: zeros, compressed to a thousandth."""
    at = parent(SERVER, gated=gated, scheme="http")

    async def sent() -> WSMsgType:
        async with ClientSession() as session:
            where = f"https://localhost:{at.port}/f3"
            async with session.ws_connect(where, ssl=credentials(kits[B]), compress=15) as web:
                await web.send_bytes(bytes(unnamed.LARGEST + 1))
                return (await web.receive(timeout=1)).type

    until(at.listens)
    if gated:
        assert asyncio.run(sent()) in (WSMsgType.CLOSE, WSMsgType.CLOSED)
    else:
        with pytest.raises(TimeoutError):
            asyncio.run(sent())


# gRPC, which shows nobody the certificate of who listens


@pytest.fixture
def grpc(monkeypatch, tmp_path, kits):
    """A site's cell that connects with gRPC to who listens with a name and a certificate; returns the cell."""
    with in_process(monkeypatch, tmp_path) as federation, ExitStack() as stack:

        def made(name: str, person: str):
            SiteGate()
            url = f"grpc://localhost:{_free_port()}"
            other = Claimant(name, url, kits[person], stack, secure=True, mode=Mode.PASSIVE)
            cell = Cell(A, url, secure=True, credentials=dict(kits[A]), auth_identity_map={A: A, SERVER: PERSON}).core_cell
            cell.start()
            stack.callback(cell.stop)
            return federation, cell, other

        yield made


def test_over_grpc_a_site_knows_the_server_by_its_address(grpc):
    """The driver shows FLARE no certificate. It has compared it with the root and with the address in the kit itself."""
    federation, cell, server = grpc(SERVER, PERSON)
    until(lambda: SERVER in cell.agents)
    heard = []
    cell.register_request_cb("admin", "admin", lambda message: heard.append(message.payload))
    request = Message({MessageHeaderKey.MSG_TYPE: "req", MessageHeaderKey.CHANNEL: "admin", MessageHeaderKey.TOPIC: "admin"})
    request.add_headers({MessageHeaderKey.ORIGIN: SERVER, MessageHeaderKey.DESTINATION: A})
    request.payload = AdminMessage("train.check_status", "")
    encode_payload(request)
    until(lambda: server.communicator.find_endpoint(A))
    server.communicator.send(server.communicator.find_endpoint(A), CoreCell.APP_ID, request)
    until(lambda: heard)
    assert federation.lines() == []


def test_over_grpc_a_hospital_is_not_the_server(grpc):
    _, cell, _ = grpc(SERVER, B)
    time.sleep(3)
    assert cell.agents == {}


def test_over_grpc_the_server_is_not_a_job_of_the_sites(grpc):
    """FLARE alone takes any name from it."""
    federation, cell, _ = grpc(A_JOB, PERSON)
    until(federation.lines)
    assert f"no cell of this name connects to {A} so]" in federation.lines()[0]
    assert cell.agents == {}


def test_a_cell_without_this_judge_stops_its_jobs(monkeypatch, tmp_path):
    with in_process(monkeypatch, tmp_path) as federation:
        SiteGate()
        cell = federation.cell(A).core_cell
        require_gate(A)
        cell.communicator.conn_manager.update_endpoint = SimpleNamespace()
        with pytest.raises(PolicyError, match="no gate protects hospital-a"):
            require_gate(A)
