"""A site's handshake with its peers: a signed statement that it takes part in an exchange, and its certificate."""

import json
import secrets
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from feddp.errors import SealingError
from feddp.sealing.identity import Identity, signed

CHALLENGE = 32  # bytes, drawn for every handshake: an envelope with this challenge is newer than the handshake
LIMIT = 16 * 1024  # bytes; a certificate takes 1.5 KiB


@dataclass(frozen=True)
class Peer:
    """A site that signed its handshake, and its accepted certificate."""

    name: str
    certificate: x509.Certificate
    challenge: str


def introduce(identity: Identity, job: str, exchange: str) -> tuple[bytes, str]:
    """Returns this site's handshake and the challenge in it.

    The statement is signed. The server has every site's certificate, so it could otherwise add a site that does not consent.
    """
    challenge = secrets.token_hex(CHALLENGE)
    statement = {"site": identity.name, "job": job, "exchange": exchange, "challenge": challenge}
    signature = identity.sign(_signed_part(statement)).hex()
    return json.dumps({"statement": statement, "certificate": identity.pem, "signature": signature}).encode(), challenge


def meet(identity: Identity, name: str, handshake: bytes, job: str, exchange: str) -> Peer:
    """Returns the peer of a handshake.

    Raises:
        SealingError: `name` did not sign it for this exchange of this job, or its certificate is not accepted.
    """
    try:
        content = json.loads(handshake)
        statement, pem, signature = content["statement"], str(content["certificate"]), bytes.fromhex(content["signature"])
        challenge = str(statement["challenge"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SealingError(f"the server relayed no valid handshake of site {name}; nothing is sealed for it") from None
    certificate = identity.accept(name, pem)
    wanted = {"site": name, "job": job, "exchange": exchange, "challenge": challenge}
    if statement != wanted or not signed(certificate, signature, _signed_part(statement)):
        raise SealingError(f"site {name} did not sign the handshake that the server relayed for this exchange")
    return Peer(name, certificate, challenge)


def certificate_in(handshake: bytes) -> x509.Certificate | None:
    """Returns the certificate in a handshake that nobody has checked, for a look at its dates; None if there is none."""
    try:
        return x509.load_pem_x509_certificate(str(json.loads(handshake)["certificate"]).encode())
    except (ValueError, KeyError, TypeError, RecursionError, x509.InvalidVersion, UnsupportedAlgorithm):
        return None


def _signed_part(statement: dict[str, str]) -> bytes:
    return b"feddp introduction 1\n" + json.dumps(statement, sort_keys=True).encode()
