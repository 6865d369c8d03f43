"""The same kit on two machines: the first one's connection stays, and the second one's log says why it gets none."""

import logging
import re
import socket
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest
from nvflare.fuel.f3.connection import ConnState
from nvflare.fuel.f3.drivers.connector_info import Mode
from nvflare.fuel.f3.drivers.socket_conn import SocketConnection
from nvflare.fuel.f3.endpoint import Endpoint, EndpointState
from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection
from nvflare.fuel.f3.sfm.sfm_endpoint import SfmEndpoint

from feddp.flare import second_machine
from feddp.flare.arrival import Refused
from feddp.flare.gate import SiteGate
from feddp.flare.second_machine import OFTEN, SHORT, SecondMachine, require_first
from support.gated import SERVER, A, B, in_process


@pytest.fixture
def server():
    """FLARE's endpoint of a site at a server's process."""
    return SfmEndpoint(Endpoint(A))


@pytest.fixture
def connected():
    """Connects over loopback; returns the two ends, the server's as FLARE's connection."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect(mode=Mode.PASSIVE):
            site = stack.enter_context(socket.create_connection(listening.getsockname()))
            end = SocketConnection(listening.accept()[0], SimpleNamespace(mode=mode))
            end.state = ConnState.CONNECTED
            stack.enter_context(closing(end))
            return SfmConnection(end, Endpoint(SERVER)), site

        yield connect


def test_a_second_machine_is_refused_while_the_first_one_lives(server, connected):
    """Over connections of FLARE's, closed and audited too: test_neighbours.py."""
    (first, former_end), (second, _) = connected(), connected()
    require_first(None, first.conn)
    server.add_connection(first)
    held = re.escape("{}:{}".format(*former_end.getsockname()))
    with pytest.raises(Refused, match=f"it is connected from {held}. .* two machines"):
        require_first(server, second.conn)


def test_a_dead_connection_makes_way(server, connected, monkeypatch):
    """As one does that a firewall has forgotten, when its site has noticed that first."""
    monkeypatch.setattr(second_machine, "LIVES", 0.0)
    (first, _), (second, _) = connected(), connected()
    server.add_connection(first)
    require_first(server, second.conn)


def test_a_closed_connection_makes_way(server, connected):
    """A site that is started again, before the server has seen that its former process is gone."""
    (first, its_end), (second, _) = connected(), connected()
    server.add_connection(first)
    its_end.close()
    require_first(server, second.conn)


def test_who_connects_replaces_its_own_connection(server, connected):
    first, second = (connected(Mode.ACTIVE)[0] for _ in range(2))
    server.add_connection(first)
    require_first(server, second.conn)


class Site:
    """What a site sees of its connections: how long each lasts."""

    def __init__(self):
        self.time = 100.0
        self.monitor = SecondMachine(lambda: self.time)

    def connection(self, seconds: float, other: str = SERVER) -> None:
        endpoint = Endpoint(other)
        for state, after in ((EndpointState.READY, seconds), (EndpointState.DISCONNECTED, 1.0)):
            endpoint.state = state
            self.monitor.state_change(endpoint)
            self.time += after


def test_the_second_machine_says_why(caplog):
    site = Site()
    with caplog.at_level(logging.ERROR):
        for _ in range(OFTEN - 1):
            site.connection(0.1)
        assert caplog.messages == []
        site.connection(0.1)
    (line,) = caplog.messages
    assert "another machine or process runs with the same kit. Stop one of the two" in line


@pytest.mark.parametrize(("seconds", "other"), [(SHORT + 1, SERVER), (0.1, B)])
def test_it_says_nothing_of_other_connections(caplog, seconds, other):
    """Of those that lasted, and of a job's process that has ended."""
    site = Site()
    for _ in range(2 * OFTEN):
        site.connection(seconds, other)
    assert caplog.messages == []


def test_a_sites_cell_watches_for_it(monkeypatch, tmp_path):
    with in_process(monkeypatch, tmp_path) as federation:
        SiteGate()
        cell = federation.cell(A).core_cell
        monitors = cell.communicator.conn_manager.monitors
    assert [type(monitor) for monitor in monitors if isinstance(monitor, SecondMachine)] == [SecondMachine]
