"""Connects to the server of a kit as FLARE's client does, and looks at the certificate that it shows."""

import socket
import ssl

from cryptography import x509

from feddp.errors import Problem
from feddp.sealing.certificates import expired, name_of, not_yet_valid
from feddp.sealing.ends import SERVERS, of_kit, of_server
from feddp.sealing.kit import Kit

ADDRESS = "Correct the address, or ask for a new kit"
# of a certificate that seems right here: the server looks at its own root, and by its own clock
REFUSED = "Ask the consortium whether this kit is its newest, and compare the clocks of both machines"
PATIENCE = 5  # seconds for the server to accept a connection and to refuse a certificate
# OpenSSL's numbers for a certificate of the right root that is out of its time (X509_V_ERR_CERT_...)
OUT_OF_TIME = {9: "is not valid yet", 10: "has expired"}


def reach(kit: Kit) -> tuple[Problem | None, x509.Certificate | None]:
    """Returns what is wrong with the server's answer to this kit's certificate, and the certificate that it showed, if any.

    Args:
        kit: of a site or a person, whose certificates are valid.
    """
    host, port = kit.server
    wrong, remedy = "", "Start the server, or open the firewall"
    shown: x509.Certificate | None = None
    try:
        with _connected(kit, _context(kit)) as secured:
            secured.settimeout(1)
            shown = _shown(secured)
            if (name := name_of(shown) or "nobody") != kit.server_identity:
                wrong, remedy = f"shows the certificate of {name}, but the kit names {kit.server_identity}", ADDRESS
                shown = None  # another's
            elif _hangs_up(secured):
                wrong, remedy = "refuses this kit's certificate", REFUSED
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in OUT_OF_TIME:
            wrong, remedy = _out_of_time(kit, error.verify_code), f"{SERVERS}, or set this machine's clock"
        else:
            wrong, remedy = f"is not of this project ({error.verify_message})", ADDRESS
    except ssl.SSLEOFError:
        wrong = "closes the connection before it shows a certificate"
    except ssl.SSLError as error:
        reason = str(error.reason)
        if "_ALERT_" in reason and (
            "CERTIFICATE" in reason or reason.endswith(("UNKNOWN_CA", "ACCESS_DENIED", "DECRYPT_ERROR"))
        ):
            wrong, remedy = (
                f"refuses this kit's certificate ({reason.rpartition('_ALERT_')[2].lower().replace('_', ' ')})",
                REFUSED,
            )
        else:
            wrong, remedy = f"makes no TLS connection with this kit's certificate ({reason})", ADDRESS
    except TimeoutError:
        wrong = f"does not answer within {PATIENCE} s"
    except UnicodeError:  # from Python's look at the name
        wrong, remedy = "has an address that is none", ADDRESS
    except OSError as error:
        wrong = f"does not answer ({error.strerror or error})"
    return Problem(kit.configuration, f"the server {host}:{port} {wrong}", remedy) if wrong else None, shown


def ends(kit: Kit) -> list[str]:
    """Returns when the certificates end on which a kit depends: its own, the root's, and the one that the server shows.

    A warning says why the server's was not seen. What needs the server fails by itself: a look of some seconds decides nothing.

    Args:
        kit: as in `reach`.
    """
    problem, server = reach(kit)
    seen = of_kit(kit) + ([of_server(server)] if server else [])
    return [*map(str, seen), *([f"warning: {problem.what}. {problem.remedy}."] if problem else [])]


def _context(kit: Kit) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=kit.root)
    context.check_hostname = False  # FLARE's clients check the root and the common name, not the host
    context.load_cert_chain(kit.certificate, kit.key)
    return context


def _connected(kit: Kit, context: ssl.SSLContext) -> ssl.SSLSocket:
    with socket.create_connection(kit.server, timeout=PATIENCE) as plain:
        return context.wrap_socket(plain)  # takes the connection over; if it raises, the plain one is closed


def _shown(secured: ssl.SSLSocket) -> x509.Certificate:
    return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")


def _out_of_time(kit: Kit, code: int) -> str:
    """Returns what is wrong with the dates of the server's certificate. Only a second look, which trusts nobody and sends
    nothing of the kit, gets it: Python shows no certificate that failed."""
    blank = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    blank.check_hostname, blank.verify_mode = False, ssl.CERT_NONE
    try:
        with _connected(kit, blank) as secured:
            dates = _shown(secured)
        when = expired(dates) or not_yet_valid(dates) or OUT_OF_TIME[code]
    except (OSError, ValueError):  # an older TLS ends the handshake without this kit's certificate
        when = OUT_OF_TIME[code]
    return f"is of this project, but its certificate {when}"


def _hangs_up(secured: ssl.SSLSocket) -> bool:
    """Whether the server closes the connection. If it accepts the certificate, it waits for our first message."""
    try:
        return not secured.recv(1)
    except TimeoutError:
        return False
