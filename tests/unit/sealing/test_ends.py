"""When certificates end: said with the date, warned of below 30 days, and a server's that has ended is named as that."""

import json
import logging
import socket
import ssl
import threading
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.drivers.aio_conn import AioConnection
from nvflare.fuel.f3.drivers.aio_http_driver import WsConnection
from nvflare.fuel.f3.drivers.socket_conn import SocketConnection
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.sec.audit import AuditService
from nvflare.lighter.utils import Identity, generate_cert, serialize_cert

from feddp.errors import BadFile
from feddp.flare.cells import SERVER as FLARES_SERVER
from feddp.flare.ends import at_server, tell_at_site
from feddp.run.watch_job import certificates
from feddp.sealing import reach as reaching
from feddp.sealing.ends import SOON, of_kit, of_server, warnings
from feddp.sealing.kit import Kit
from feddp.sealing.kit_certificates import ROOTS, certificate_problems
from feddp.sealing.reach import ends, reach
from support.certificates import PROJECT, SERVER, Office, kit_of
from support.tls import listening, mutual


@pytest.fixture(scope="module")
def office():
    return Office()


@pytest.fixture
def site(office, tmp_path):
    """A site's kit, whose certificate is valid until so many days from now."""
    return lambda days=360: kit_of(tmp_path / "kit", "A", office, *office.issue("A", until=days))


@pytest.fixture
def server(office, tmp_path):
    """The server's certificate and key, in a folder from which `mutual` takes them."""

    def make(since=0, until=360, by=office):
        return kit_of(tmp_path / "server", SERVER, by, *by.issue(SERVER, since=since, until=until))

    return make


def day(days: int) -> str:
    return f"{datetime.now(timezone.utc) + timedelta(days=days):%Y-%m-%d}"


@pytest.mark.parametrize(("days", "warned"), [(360, False), (SOON + 1, False), (SOON, True), (5, True), (1, True)])
def test_the_end_of_a_kit_is_said_and_warned_of(site, days, warned):
    """Issued some milliseconds ago, a certificate of N days has N − 1 whole days left."""
    own, root = of_kit(Kit.open(site(days)))
    assert ("is valid until " + day(days)) in str(own)
    assert f"({days - 1} day{'' if days == 2 else 's'} left)" in str(own)
    assert str(own).startswith("warning: the certificate of A is") is warned
    assert warnings([own, root]) == ([str(own)] if warned else [])
    assert str(root).startswith(f"the certificate of the root of project {PROJECT} is valid until {day(3650)}")


def test_the_roots_own_end(site, office):
    """A new certificate for the participant would not help: the remedy is another one."""
    kit = site()
    own, now = Identity(PROJECT), datetime.now(timezone.utc)

    def root(until):
        dates = {"not_valid_before": now - timedelta(days=9), "not_valid_after": now + timedelta(days=until)}
        made = generate_cert(own, own, office.key, office.key.public_key(), ca=True, **dates)
        (kit / "startup/rootCA.pem").write_bytes(serialize_cert(made))

    root(7)
    (line,) = warnings(of_kit(Kit.open(kit)))
    assert line.startswith(f"warning: the certificate of the root of project {PROJECT} is valid until {day(7)}")
    assert line.endswith(f"{ROOTS}.")
    root(-1)
    (problem,) = certificate_problems(Kit.open(kit))
    assert str(problem).startswith(f"{kit}/startup/rootCA.pem: expired on {day(-1)}")
    assert problem.remedy == ROOTS


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
@pytest.mark.parametrize(("since", "until", "words"), [(-9, -2, "expired on"), (3, 9, "is not valid before")])
def test_a_server_whose_certificate_is_out_of_its_time(site, server, since, until, words, newest):
    """It is the project's, and another address would be the wrong remedy. An older TLS keeps the date to itself."""
    kit = site()
    context = mutual(kit, server(since, until))
    context.maximum_version = newest
    with listening(context, kit):
        problem, shown = reach(Kit.open(kit))
    assert shown is None
    dated = f"{words} {day(until if until < 0 else since)}" if newest is ssl.TLSVersion.TLSv1_3 else "has expired"
    if newest is ssl.TLSVersion.TLSv1_2 and until > 0:
        dated = "is not valid yet"
    assert f" is of this project, but its certificate {dated}" in problem.what
    assert problem.remedy == "Ask the consortium to have the server's certificate renewed, or set this machine's clock"


def test_another_projects_expired_certificate_is_another_projects(site, server):
    kit = site()
    with listening(mutual(kit, server(-9, -2, Office())), kit):
        problem, _ = reach(Kit.open(kit))
    assert "is not of this project (" in problem.what


def test_a_server_that_is_another_has_no_end_to_tell(site, server, office):
    """A participant's certificate is of the project too: its date would be taken for the server's."""
    kit = site()
    other = kit_of(kit.parent / "other", "B", office, *office.issue("B", until=12))
    with listening(mutual(kit, other), kit):
        *seen, line = ends(Kit.open(kit))
    assert len(seen) == 2
    assert f" shows the certificate of B, but the kit names {SERVER}. Correct the address, or ask for a new kit." in line


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
def test_a_server_that_refuses_a_certificate_which_is_right_here(site, server, tmp_path, newest):
    """It trusts another root, as after a new provisioning: neither is it down, nor the firewall closed."""
    kit, another = site(), Office()
    context = mutual(kit_of(tmp_path / "another", "A", another, *another.issue("A")), server())
    context.maximum_version = newest
    with listening(context, kit):
        problem, _ = reach(Kit.open(kit))
    assert problem.what.endswith(" refuses this kit's certificate (unknown ca)")
    assert problem.remedy.startswith("Ask the consortium whether this kit is its newest, and compare the clocks")


@pytest.mark.parametrize(
    ("alert", "refused"), [(40, False), (70, False), (80, False), (42, True), (46, True), (48, True), (49, True)]
)
def test_an_alert_that_is_not_about_a_certificate_refuses_none(site, alert, refused):
    """handshake_failure, protocol_version or internal_error may be a firewall's, before it has seen a certificate; the others
    are bad_certificate, certificate_unknown, unknown_ca and access_denied."""
    kit = site()

    def say(server):
        connection, _ = server.accept()
        connection.recv(1)
        connection.sendall(bytes([21, 3, 3, 0, 2, 2, alert]))  # a record of TLS: an alert, fatal

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=say, args=(server,), daemon=True).start()
        path = kit / "startup/fed_client.json"
        path.write_text(path.read_text().replace(f"{SERVER}:8002", f"127.0.0.1:{server.getsockname()[1]}"))
        problem, _ = reach(Kit.open(kit))
    assert ("refuses this kit's certificate" in problem.what) == refused
    assert ("makes no TLS connection" in problem.what) != refused


@pytest.mark.parametrize("host", ["a..b", ".", f"{'x' * 64}.org"])
def test_an_address_that_is_none(site, host):
    kit = site()
    path = kit / "startup/fed_client.json"
    path.write_text(path.read_text().replace(f"{SERVER}:8002", f"{host}:8002"))
    problem, _ = reach(Kit.open(kit))
    assert problem.what == f"the server {host}:8002 has an address that is none"


def test_a_server_whose_certificate_ends_soon_is_reached_and_warned_of(site, server):
    kit = site()
    with listening(mutual(kit, server(until=12)), kit):
        problem, shown = reach(Kit.open(kit))
    assert problem is None
    assert str(of_server(shown)).startswith(f"warning: the certificate of the server {SERVER} is valid until {day(12)}")


# the start of a job


@pytest.fixture
def audit(tmp_path):
    AuditService.close()
    AuditService.initialize(str(tmp_path / "audit.txt"))
    yield tmp_path / "audit.txt"
    AuditService.close()


@pytest.fixture
def linked(monkeypatch):
    """Puts a connection of FLARE's over a TLS socket into this process's network, to the endpoint of that name."""

    def link(kind, tls, name=FLARES_SERVER):
        conn = object.__new__(kind)
        conn.sock = tls
        conn.websocket = conn.writer = SimpleNamespace(get_extra_info={"ssl_object": tls}.get)
        end = SimpleNamespace(conn=conn, sfm_endpoint=SimpleNamespace(endpoint=Endpoint(name)))
        # an earlier test's gate may have started the thread that looks after the connections of all cells
        manager = SimpleNamespace(sfm_conns={"CN1": end}, heartbeat_monitor=SimpleNamespace(interval=20))
        cell = SimpleNamespace(communicator=SimpleNamespace(conn_manager=manager))
        monkeypatch.setattr(CoreCell, "ALL_CELLS", {"A": cell})

    return link


@pytest.mark.parametrize(("own", "servers", "warned"), [(360, 360, []), (5, 20, ["A", f"the server {SERVER}"])])
@pytest.mark.parametrize("kind", [WsConnection, SocketConnection, AioConnection])
def test_a_site_says_at_a_jobs_start_what_ends(site, server, linked, audit, caplog, kind, own, servers, warned):
    """The server's certificate is that of the connection which the site has: nothing listens where a new one would go."""
    kit = site(own)
    with (
        listening(mutual(kit, server(until=servers)), None) as port,
        mutual(kit, kit, ssl.Purpose.SERVER_AUTH).wrap_socket(socket.create_connection(("127.0.0.1", port))) as tls,
        caplog.at_level(logging.INFO),
    ):
        linked(kind, tls)
        tell_at_site(logging.getLogger("x"), FLContext(), kit)
    said = [record.message for record in caplog.records]
    assert len([line for line in said if " is valid until " in line]) == 3
    lines = audit.read_text().splitlines()
    assert len(lines) == len(warned)
    assert all(f"[warning: the certificate of {whose} is valid until " in "".join(lines) for whose in warned)


@pytest.mark.parametrize("name", [None, "A.job", FLARES_SERVER, "closed"])
def test_a_server_that_shows_no_certificate_is_no_fault(site, server, linked, audit, caplog, name):
    """No connection, one with another, one without TLS, and one that was closed: the site's own and the root's are told, and
    nothing is audited."""
    kit = site()
    with (
        listening(mutual(kit, server(until=5)), None) as port,
        mutual(kit, kit, ssl.Purpose.SERVER_AUTH).wrap_socket(socket.create_connection(("127.0.0.1", port))) as tls,
        socket.socket() as plain,
        caplog.at_level(logging.INFO),
    ):
        if name == "closed":
            tls.close()
            linked(SocketConnection, tls)
        elif name:
            linked(SocketConnection, plain if name == FLARES_SERVER else tls, name)
        tell_at_site(logging.getLogger("x"), FLContext(), kit)
    assert len(caplog.records) == 2
    assert audit.read_text() == ""


def test_the_servers_own_end_at_a_jobs_start(office, tmp_path):
    """Nothing where the process has no kit, or the certificate is good for long."""
    assert at_server(tmp_path) == []
    startup = tmp_path / "startup"
    startup.mkdir()
    target = {"name": PROJECT, "service": {"target": f"{SERVER}:8002"}, "admin_server": SERVER}
    (startup / "fed_server.json").write_text(json.dumps({"servers": [target]}))
    (startup / "rootCA.pem").write_bytes(serialize_cert(office.root))
    for days, count in ((360, 0), (12, 1)):
        (startup / "server.crt").write_bytes(serialize_cert(office.issue(SERVER, until=days, host=SERVER)[0]))
        lines = at_server(tmp_path)
        assert len(lines) == count
    assert lines[0].startswith(f"warning: the certificate of the server {SERVER} is valid until {day(12)}")


# a person's kit


@pytest.fixture
def person(office, tmp_path):
    def make(days, port=8002):
        kit = kit_of(tmp_path / "lead", "lead@x.org", office, *office.issue("lead@x.org", "lead", since=-9, until=days))
        (kit / "startup/fed_client.json").unlink()
        admin = {"username": "lead@x.org", "project_name": PROJECT, "host": "127.0.0.1", "port": port}
        (kit / "startup/fed_admin.json").write_text(json.dumps({"admin": admin | {"server_identity": SERVER}}))
        return Kit.open(kit)

    return make


def test_who_watches_is_told_what_ends(person, server, site):
    with listening(mutual(site(), server(until=12)), None) as port:
        own, root, servers = certificates(person(5, port))
    assert own.startswith("warning: the certificate of lead@x.org is valid until ")
    assert root.startswith(f"the certificate of the root of project {PROJECT} is valid until ")
    assert servers.startswith(f"warning: the certificate of the server {SERVER} is valid until {day(12)}")


def test_who_watches_with_an_expired_certificate_is_told_that(person):
    with pytest.raises(BadFile, match="client.crt: expired on"):
        certificates(person(-2))


def test_who_watches_a_server_with_an_expired_certificate_is_told_that(person, server, site):
    with listening(mutual(site(), server(-9, -2)), None) as port:
        *_, line = certificates(person(360, port))
    assert line.startswith(f"warning: the server 127.0.0.1:{port} is of this project, but its certificate expired on {day(-2)}")


def test_a_look_at_the_server_that_fails_decides_nothing(person, monkeypatch):
    """A busy line: the server takes the connection and says nothing in time. FLARE's own session waits for longer."""
    monkeypatch.setattr(reaching, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        *seen, line = certificates(person(360, port))
    assert len(seen) == 2
    assert line == f"warning: the server 127.0.0.1:{port} does not answer within 0.2 s. Start the server, or open the firewall."
