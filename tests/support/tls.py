"""A server that a kit reaches, which speaks TLS and nothing else."""

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def listening(context: ssl.SSLContext | None, kit: Path | None) -> Iterator[int]:
    """A server for a site's kit to reach, which waits to be spoken to; its port. Without a context it speaks no TLS."""

    def serve():
        with suppress(OSError):  # the test is over, or the client is turned away
            while True:
                plain, _ = server.accept()
                with suppress(OSError), context.wrap_socket(plain, server_side=True) if context else plain as connection:
                    connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if kit:
            path = kit / "startup/fed_client.json"
            said = json.loads(path.read_text())
            said["servers"][0]["service"]["target"] = f"127.0.0.1:{port}"
            path.write_text(json.dumps(said))
        threading.Thread(target=serve, daemon=True).start()
        yield port
        server.shutdown(socket.SHUT_RDWR)


def mutual(kit: Path, own: Path, purpose: ssl.Purpose = ssl.Purpose.CLIENT_AUTH) -> ssl.SSLContext:
    """FLARE's server, or with SERVER_AUTH its client: it shows `own`'s certificate, and takes those of the kit's root alone."""
    context = ssl.create_default_context(purpose, cafile=kit / "startup/rootCA.pem")
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    name = "server" if (own / "startup/server.crt").exists() else "client"
    context.load_cert_chain(own / f"startup/{name}.crt", own / f"startup/{name}.key")
    return context
