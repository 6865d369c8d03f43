"""Closes a connection whose other end has been silent for a minute, so that FLARE builds it anew.

A firewall or a VPN that starts anew drops the packets of the connections that it has forgotten, and tells neither end. TCP
sends for 17 minutes before it gives up; a FLARE process that only waits would wait for ever.

What tells a dead connection from a slow one is the other end's kernel. It acknowledges every packet that arrives, also in the
middle of a message that takes minutes, and it answers the probes of an idle connection (keepalive, RFC 9293, 3.8.4). So a
connection on which our kernel has received nothing at all for so long is dead, whatever is queued on it; Linux tells it in
`TCP_INFO` (tcp(7)). A PING of FLARE's cannot tell it: it waits behind the messages that were sent before it.

gRPC shows nobody its sockets, and has its own rule to the same effect: any byte that it receives is a sign of life.
"""

import logging
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.connection import Connection
from nvflare.fuel.f3.drivers.aio_conn import AioConnection
from nvflare.fuel.f3.drivers.aio_http_driver import WsConnection
from nvflare.fuel.f3.drivers.grpc_driver import GRPC_DEFAULT_OPTIONS
from nvflare.fuel.f3.drivers.socket_conn import SocketConnection

_INFO = struct.Struct("8B24I")  # Linux's struct tcp_info, of which only the end has ever grown
_STATE, _LAST_DATA, _LAST_ACK = 0, 8 + 11, 8 + 12  # of its fields: tcpi_state, tcpi_last_data_recv, tcpi_last_ack_recv
_ESTABLISHED = 1
_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS of Linux 6.15, which Python does not name


@dataclass(frozen=True)
class Limits:
    """Seconds. `silent`: without a packet from the other end, after which a connection is dead; longer than an outage of 40 s,
    from which TCP recovers by itself. `idle`: without a packet, after which a connection is probed, and then every `probe`.
    `ping`: without a message, after which FLARE sends a PING, for what forwards TCP's content and not its probes. `period`:
    between two looks."""

    silent: float = 55
    idle: int = 10
    probe: int = 5
    ping: int = 20
    period: float = 2


class DeadConnections(threading.Thread):
    """Looks after all connections of the cells in this process, those that exist and those to come."""

    def __init__(self, limits: Limits):
        super().__init__(name="dead_connections", daemon=True)
        self.limits = limits
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")

    def run(self) -> None:
        while True:
            time.sleep(self.limits.period)
            for cell in list(CoreCell.ALL_CELLS.values()):
                manager = cell.communicator.conn_manager
                heartbeat = manager.heartbeat_monitor
                heartbeat.interval = min(heartbeat.interval, self.limits.ping)
                for known in list(manager.sfm_conns.values()):
                    self.look_at(known.conn)

    def look_at(self, connection: Connection) -> None:
        """Closes the connection if it is dead: both ends' drivers see it as closed by the other one."""
        link = _socket_of(connection)
        if link is None:
            return
        try:
            if not link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                self._probe(link)
            silent = _silent(link)
            if silent < self.limits.silent:
                return
            name = f"connection {connection} has been silent for {silent:.0f} s"
            self.logger.warning(f"{name}: it is dead, and is closed so that a new one is built")
            link.shutdown(socket.SHUT_RDWR)  # a driver's own close would first wait for the other end
        except OSError as error:
            self.logger.debug(f"connection {connection} was closed in the meantime: {error}")

    def _probe(self, link: Any) -> None:
        """Has the kernel probe the connection while it is idle, which also keeps firewalls from forgetting it."""
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self.limits.idle)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self.limits.probe)
        # it is closed here and not by the kernel, which would count the probes alone
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 127)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:  # else the kernel waits 35 s, then 71 s, to send again what an outage has lost
            link.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000 * self.limits.probe)
        except OSError:  # an older kernel: after an outage of 40 s the connection is built anew
            self.logger.debug("this kernel has no TCP_RTO_MAX_MS")


_STARTED: list[DeadConnections] = []


def close_dead_connections(limits: Limits = Limits()) -> None:
    """Has this process close dead connections, with FLARE's drivers http, tcp and grpc; gRPC's are those built from now on."""
    if _STARTED or not sys.platform.startswith("linux"):  # a lead's console runs elsewhere, too, where no kernel tells it
        return
    _STARTED.append(DeadConnections(limits))
    GRPC_DEFAULT_OPTIONS.extend(
        [
            ("grpc.keepalive_time_ms", 1000 * limits.idle),
            ("grpc.keepalive_timeout_ms", int(1000 * (limits.silent - limits.idle))),
            ("grpc.http2.max_pings_without_data", 0),  # no maximum
            ("grpc.http2.min_ping_interval_without_data_ms", 1000 * limits.probe),  # else a server closes after three PINGs
            ("grpc.http2.max_ping_strikes", 0),
        ]
    )
    _STARTED[0].start()


def answers(connection: Connection, within: float) -> bool:
    """Whether a packet has come from the connection's other end within so many seconds; False if nobody can tell."""
    link = _socket_of(connection)
    if link is None or not sys.platform.startswith("linux"):
        return False
    try:
        return _silent(link) < within
    except OSError:  # it is closed
        return False


def cut(connection: Connection) -> None:
    """Ends a connection, which its own thread then closes.

    A driver's `close` frees the socket's number at once: that thread, about to read, would read what comes to the next
    connection that gets the number.
    """
    link = _socket_of(connection)
    if link is None:
        connection.close()
        return
    try:
        link.shutdown(socket.SHUT_RDWR)
    except OSError:  # its other end has closed it
        return


def _socket_of(connection: Connection) -> Any:
    """Returns the TCP socket of a connection, None if its driver has none or does not show it."""
    link = transport(connection, "socket")
    return link if link is not None and link.family in (socket.AF_INET, socket.AF_INET6) else None


def transport(connection: Connection, what: str) -> Any:
    """Returns a part of a connection, by asyncio's name: `socket`, or `ssl_object`, for which a driver of sockets has its one
    socket; None if the driver has no such part or does not show it."""
    if isinstance(connection, SocketConnection):
        return connection.sock
    if isinstance(connection, WsConnection):
        return connection.websocket.get_extra_info(what)
    if isinstance(connection, AioConnection):
        return connection.writer and connection.writer.get_extra_info(what)  # it has none before it is up
    return None


def _silent(link: Any) -> float:
    """Returns for how many seconds no packet has come from the other end; raises OSError for a connection that is closed."""
    info = _INFO.unpack(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    if info[_STATE] != _ESTABLISHED:
        raise ConnectionError("one end has closed it")
    return float(min(info[_LAST_DATA], info[_LAST_ACK])) / 1000
