"""At the start of a job, a site and the server say when the certificates end on which the job depends."""

import logging
import ssl
from pathlib import Path

from cryptography import x509
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.connection import Connection

from feddp.errors import FedDPError, SealingError
from feddp.flare.audit import audit_if_possible
from feddp.flare.cells import SERVER
from feddp.flare.dead_connections import transport
from feddp.sealing.ends import of_kit, of_server, warnings
from feddp.sealing.kit import Kit
from feddp.sealing.kit_certificates import certificate_problems


def tell_at_site(logger: logging.Logger, fl_ctx: FLContext, folder: Path) -> None:
    """Writes to a site's log when its own, the root's and the server's certificates end; what ends soon, or is wrong, also to
    its audit file.

    Args:
        folder: of the site's kit.
    """
    try:
        kit = Kit.open(folder)
        if problems := certificate_problems(kit):
            raise SealingError(str(problems[0]))
        seen = of_kit(kit) + [of_server(shown) for shown in shown_by_server()]
        wrong, right = warnings(seen), [str(each) for each in seen if not each.soon]
    except FedDPError as error:
        wrong, right = [str(error)], []
    for line in right:
        logger.info(line)
    for line in wrong:
        logger.warning(audit_if_possible(fl_ctx, line))


def shown_by_server() -> list[x509.Certificate]:
    """Returns the certificate that the server showed on this process's connection to it, which FLARE's client has checked.

    A second connection might fail on a busy line, which would say nothing about the certificate. None with gRPC, which shows
    nobody its connections, or while there is no connection.
    """
    cells = list(CoreCell.ALL_CELLS.values())
    links = [link for cell in cells for link in list(cell.communicator.conn_manager.sfm_conns.values())]
    ends = [link.conn for link in links if link.sfm_endpoint and link.sfm_endpoint.endpoint.name == SERVER]
    return [x509.load_der_x509_certificate(shown) for shown in map(_shown, ends) if shown][:1]


def _shown(connection: Connection) -> bytes | None:
    """Returns the certificate (DER) of a connection's other end; None without TLS, or if the driver does not show it."""
    tls = transport(connection, "ssl_object")
    try:
        return tls.getpeercert(binary_form=True) if isinstance(tls, ssl.SSLSocket | ssl.SSLObject) else None
    except (AttributeError, ValueError, OSError):  # it was closed in the meantime, or its handshake is not over
        return None


def at_server(folder: Path) -> list[str]:
    """Returns a line for each certificate of the server's kit that ends soon; none where this process has no kit: in FLARE's
    simulator, and in a container of a job alone."""
    if not (folder / "startup" / "fed_server.json").exists():
        return []
    return warnings(of_kit(Kit.open(folder)))
