"""A site's introduction to those who may seal for it: a signed statement that it takes part, and its certificate."""

import json
import secrets
from dataclasses import dataclass

from cryptography import x509

from feddp.errors import SealingError
from feddp.sealing.identity import Identity, signed

CHALLENGE = 32  # bytes, drawn anew for every introduction: an envelope that answers it was made after it
LIMIT = 16 * 1024  # bytes: a certificate of ours takes 1.5 KiB


@dataclass(frozen=True)
class Peer:
    """A site that said it takes part, and whose certificate is its own."""

    name: str
    certificate: x509.Certificate
    challenge: str


def introduce(identity: Identity, job: str, exchange: str) -> tuple[bytes, str]:
    """The introduction, and the challenge in it.

    The statement is signed: the server knows every site's certificate, and could else introduce one that does not consent.
    """
    challenge = secrets.token_hex(CHALLENGE)
    statement = {"site": identity.name, "job": job, "exchange": exchange, "challenge": challenge}
    signature = identity.sign(_signed_part(statement)).hex()
    return json.dumps({"statement": statement, "certificate": identity.pem, "signature": signature}).encode(), challenge


def meet(identity: Identity, name: str, handshake: bytes, job: str, exchange: str) -> Peer:
    """The peer that an introduction is of.

    Raises:
        SealingError: it is not the introduction of `name` to this exchange of this job, or its certificate is no good.
    """
    try:
        said = json.loads(handshake)
        statement, pem, signature = said["statement"], str(said["certificate"]), bytes.fromhex(said["signature"])
        challenge = str(statement["challenge"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SealingError(f"what was shown for site {name} is not a handshake; nothing is sealed for it") from None
    certificate = identity.accept(name, pem)
    wanted = {"site": name, "job": job, "exchange": exchange, "challenge": challenge}
    if statement != wanted or not signed(certificate, signature, _signed_part(statement)):
        raise SealingError(f"site {name} did not sign the handshake to this exchange that was shown for it")
    return Peer(name, certificate, challenge)


def _signed_part(statement: dict[str, str]) -> bytes:
    return b"feddp introduction 1\n" + json.dumps(statement, sort_keys=True).encode()
