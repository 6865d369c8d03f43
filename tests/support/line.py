"""A TCP proxy on loopback: the line between a site and its server, which a test cuts."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOST = "127.0.0.1"
UP, DOWN = "up", "down"  # from the site to the server, and back


class Line:
    """Carries bytes between a port of its own and `server`, the port behind it.

    Attributes:
        port: where it listens.
        cuts: how often it was cut.
    """

    def __init__(self, server: int):
        self.server, self.port, self.cuts = server, 0, 0
        self._open: set[asyncio.StreamWriter] = set()
        self._left = {UP: float("inf"), DOWN: float("inf")}  # bytes until the next cut
        self._pause = {UP: 0.0, DOWN: 0.0}  # seconds that it lasts
        self._ready = threading.Event()

    def cut(self, seconds: float) -> None:
        """Ends all connections, and refuses new ones for so long."""
        self._loop.call_soon_threadsafe(self._cut, seconds)

    def cut_after(self, nbytes: int, direction: str, seconds: float) -> None:
        """The same, once so many bytes more have passed."""
        self._pause[direction], self._left[direction] = seconds, nbytes

    @contextmanager
    def laid(self) -> Iterator[None]:
        """It carries bytes within this context."""
        thread = threading.Thread(target=asyncio.run, args=(self._run(),))
        thread.start()
        try:
            assert self._ready.wait(10)
            yield
        finally:
            self._loop.call_soon_threadsafe(self._over.set)
            thread.join()

    async def _run(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        await self._listen(0)
        self._ready.set()
        await self._over.wait()

    async def _listen(self, after: float) -> None:
        await asyncio.sleep(after)
        self._listening = await asyncio.start_server(self._connected, HOST, self.port)
        self.port = self._listening.sockets[0].getsockname()[1]

    def _cut(self, seconds: float) -> None:
        self.cuts += 1
        self._listening.close()
        for end in self._open:
            end.transport.abort()
        self._again = self._loop.create_task(self._listen(seconds))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        try:
            back, on = await asyncio.open_connection(HOST, self.server)
            ends.add(on)
            self._open |= ends
            await asyncio.gather(self._carry(reader, on, UP), self._carry(back, writer, DOWN))
        except OSError:  # the server does not listen yet, or an end has gone
            pass
        finally:
            self._open -= ends
            for end in ends:
                end.close()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, direction: str) -> None:
        while content := await source.read(1 << 16):
            self._left[direction] -= len(content)
            if self._left[direction] <= 0:
                self._left[direction] = float("inf")
                self._cut(self._pause[direction])
            target.write(content)
            await target.drain()
        target.close()


@contextmanager
def line_of(kit: Path) -> Iterator[Line]:
    """Lays a line between a site and its server: writes its port into the site's kit, whose processes are not started yet."""
    path = kit / "startup/fed_client.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    service = content["servers"][0]["service"]
    host, _, port = service["target"].rpartition(":")
    line = Line(int(port))
    with line.laid():
        service["target"] = f"{host}:{line.port}"
        path.write_text(json.dumps(content), encoding="utf-8")
        yield line
