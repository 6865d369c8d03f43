"""The TLS handshake of a connection, made in the connection's own thread, within a time limit, and so many of them at once.

FLARE's tcp driver makes it in the one thread that accepts connections, and waits for ever: whoever connects and says nothing
would keep all others from connecting, a participant's own jobs too. Whoever connects often would get a thread each time.
"""

import socket
from collections.abc import Callable
from socketserver import ThreadingTCPServer
from typing import Any

from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer

from feddp.flare.waiting import Waiting

SECONDS = 10.0  # for a handshake, however slowly its bytes come
MOST = 64  # at once at a listening port; a genuine handshake takes milliseconds
BACKLOG = 128  # connections that wait to be accepted; beyond FLARE's 5, one tries again after 1 s, 3 s, ...


def handshake_apart(failed: Callable[[str, str], None]) -> None:
    """Changes FLARE's tcp driver in this process.

    Args:
        failed: called with the address and the reason of a connection whose handshake fails, which is then closed.
    """

    def activate(server: Any) -> None:
        if server.ssl_context:
            server.socket.do_handshake_on_connect = False
        server.handshakes = Waiting(MOST, _end)
        ThreadingTCPServer.server_activate(server)

    def begin(server: Any, connection: Any, address: tuple[str, int]) -> None:
        server.handshakes.enter(connection)  # before its thread starts, so that there are never more threads
        ThreadingTCPServer.process_request(server, connection, address)

    def finish(server: Any, connection: Any, address: tuple[str, int]) -> None:
        why = _handshake(connection) if server.ssl_context else ""
        if not server.handshakes.leave(connection):
            why = f"more than {MOST} handshakes at once, of which it was the oldest"
        if why:
            failed("{}:{}".format(*address), why)
        else:
            ThreadingTCPServer.finish_request(server, connection, address)

    TcpStreamServer.request_queue_size = BACKLOG
    TcpStreamServer.server_activate, TcpStreamServer.process_request, TcpStreamServer.finish_request = activate, begin, finish


def _handshake(connection: Any) -> str:
    """Makes the handshake; returns why it fails, or an empty text."""
    connection.settimeout(SECONDS)
    try:
        connection.do_handshake()
    except OSError as error:  # TLS's own errors and the time limit's too
        return str(getattr(error, "reason", None) or error)
    connection.settimeout(None)
    return ""


def _end(connection: socket.socket) -> None:
    """Ends the handshake of another thread, which closes the connection. TLS's own `shutdown` would take its state from it."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:  # its other end has closed it
        return
