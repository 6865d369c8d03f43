"""The TLS handshakes at a server's http port: a time limit, and so many of them at once.

FLARE's driver leaves them to asyncio, which gives each 60 s and a third of a megabyte, and takes any number: whoever reaches
the port could use up the server's memory and open files without a certificate. For tcp, see `handshakes`.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from feddp.flare.handshakes import BACKLOG, SECONDS
from feddp.flare.waiting import Waiting

# at once at a listening port: 0.2 GB, and less than the 1024 open files that systemd gives a service. More than
# `handshakes.MOST`: over a slow line a genuine handshake takes a tenth of a second, and the oldest makes way
MOST = 512


def bound_web_handshakes(failed: Callable[[str, str], None]) -> None:
    """Changes where aiohttp listens in this process.

    Args:
        failed: called with the address and the reason of a connection that is closed for a limit or its certificate.
    """
    plain = web.TCPSite.start

    async def start(site: Any) -> None:
        context = site._ssl_context
        if context is None:
            await plain(site)
            return
        await web.BaseSite.start(site)
        handshakes: Waiting[asyncio.Transport] = Waiting(MOST, lambda oldest: oldest.abort())
        loop = asyncio.get_running_loop()
        site._server = await loop.create_server(
            lambda: _Handshake(site._runner.server, context, handshakes, failed), site._host, site._port, backlog=BACKLOG
        )

    web.TCPSite.start = start  # type: ignore[assignment, method-assign]


class _Handshake(asyncio.Protocol):
    """A connection until its handshake is made; then aiohttp's own protocol, which `make` gives, has it."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        handshakes: Waiting[asyncio.Transport],
        failed: Callable[[str, str], None],
    ):
        self._make, self._context, self._handshakes, self._failed = make, context, handshakes, failed
        self._early, self._lost = b"", False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast(asyncio.Transport, transport)
        made.pause_reading()  # the first bytes are TLS's
        self._handshakes.enter(made)
        self._task = asyncio.get_running_loop().create_task(self._finish(made))  # the loop itself would not keep it

    def data_received(self, data: bytes) -> None:
        self._early += data  # came with the end of the handshake

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True

    async def _finish(self, transport: asyncio.Transport) -> None:
        loop, address, secured, why = asyncio.get_running_loop(), transport.get_extra_info("peername"), None, ""
        try:
            if not transport.is_closing():
                secured = await loop.start_tls(transport, self, self._context, server_side=True, ssl_handshake_timeout=SECONDS)
        except ssl.SSLError as error:
            why = str(error.reason or error)
        except ConnectionAbortedError as error:  # the time limit
            why = str(error)
        except OSError:  # its other end has closed it
            pass
        if not self._handshakes.leave(transport):
            why = f"more than {MOST} handshakes at once, of which it was the oldest"
        if why:
            self._failed("{}:{}".format(*address), why)
        elif secured and not self._lost:  # no transport: it was closed meanwhile
            protocol = self._make()
            secured.set_protocol(protocol)
            protocol.connection_made(secured)
            if self._early:
                protocol.data_received(self._early)
