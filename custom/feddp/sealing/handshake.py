"""A site's handshake with its peers: a signed statement that it takes part in an exchange, and its certificate.

The statement holds the public half of a key that the site makes for this handshake alone. Peers encrypt for it, so an envelope
for it is newer than the handshake, and can be opened only while the site keeps the private half.
"""

import json
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from feddp.errors import SealingError
from feddp.sealing.document import UNREADABLE, is_signed, read, write
from feddp.sealing.handshake_key import read as read_key
from feddp.sealing.handshake_key import written
from feddp.sealing.identity import Identity

VERSION = 2  # of handshakes and envelopes; 1 encrypted for the key of the certificate
_PURPOSE = b"feddp introduction"
LIMIT = 16 * 1024  # bytes; a certificate takes 1.5 KiB


@dataclass(frozen=True)
class Peer:
    """A site that signed its handshake, its accepted certificate, and the handshake's key."""

    name: str
    certificate: x509.Certificate
    key: X25519PublicKey


def introduce(identity: Identity, job: str, exchange: str) -> tuple[bytes, X25519PrivateKey]:
    """Returns this site's handshake and its key, which nobody else has and which must not be written anywhere.

    The statement is signed. The server has every site's certificate, so it could otherwise add a site that does not consent.
    """
    key = X25519PrivateKey.generate()
    statement = _statement(identity.name, job, exchange, written(key.public_key()))
    return write(identity, _PURPOSE, statement), key


def meet(identity: Identity, name: str, handshake: bytes, job: str, exchange: str) -> Peer:
    """Returns the peer of a handshake.

    Raises:
        SealingError: `name` did not sign it for this exchange of this job, or has another version of feddp; its certificate is
            not accepted; or its key is none.
    """
    try:
        statement, pem, signature = read(handshake)
        version, key = statement.get("version"), statement.get("key")
    except UNREADABLE:
        raise SealingError(f"the server relayed no valid handshake of site {name}; nothing is sealed for it") from None
    if version != VERSION:
        raise SealingError(
            f"the handshake of site {name} is of another version of feddp, so nothing is sealed for it;"
            f" install the same feddp at {identity.name} and {name}"
        )
    certificate = identity.accept(name, pem)
    if statement != _statement(name, job, exchange, key) or not is_signed(certificate, signature, _PURPOSE, statement):
        raise SealingError(f"site {name} did not sign the handshake that the server relayed for this exchange")
    try:
        return Peer(name, certificate, read_key(key))
    except ValueError as error:
        raise SealingError(
            f"the key in the handshake of site {name} is of no use ({error}); nothing is sealed for it"
        ) from None


def certificate_in(handshake: bytes) -> x509.Certificate | None:
    """Returns the certificate in a handshake that nobody has checked, for a look at its dates; None if there is none."""
    try:
        return x509.load_pem_x509_certificate(str(json.loads(handshake)["certificate"]).encode())
    except (ValueError, KeyError, TypeError, RecursionError, x509.InvalidVersion, UnsupportedAlgorithm):
        return None


def _statement(site: str, job: str, exchange: str, key: object) -> dict[str, Any]:
    return {"version": VERSION, "site": site, "job": job, "exchange": exchange, "key": key}
