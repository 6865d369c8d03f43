"""The TLS handshake of a connection, made in the connection's own thread and within a time limit.

FLARE's tcp driver makes it in the one thread that accepts connections, and waits for ever: whoever connects and says nothing
would keep all others from connecting, a participant's own jobs too.
"""

from collections.abc import Callable
from socketserver import ThreadingTCPServer
from typing import Any

from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer

SECONDS = 10.0  # for a handshake


def handshake_apart(failed: Callable[[str, str], None]) -> None:
    """Changes FLARE's tcp driver in this process.

    Args:
        failed: called with the address and the reason of a connection whose handshake fails, which is then closed.
    """

    def activate(server: Any) -> None:
        if server.ssl_context:
            server.socket.do_handshake_on_connect = False
        ThreadingTCPServer.server_activate(server)

    def finish(server: Any, connection: Any, address: tuple[str, int]) -> None:
        if server.ssl_context:
            connection.settimeout(SECONDS)
            try:
                connection.do_handshake()
            except OSError as error:  # TLS's own errors and the time limit's too
                failed("{}:{}".format(*address), str(getattr(error, "reason", None) or error))
                return
            connection.settimeout(None)
        ThreadingTCPServer.finish_request(server, connection, address)

    TcpStreamServer.server_activate, TcpStreamServer.finish_request = activate, finish
