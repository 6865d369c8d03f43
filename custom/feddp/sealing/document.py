"""What a site signs for its peers: a statement as JSON, with the site's certificate and signature.

Each kind of statement has a purpose, which is signed with it: a signature for one is none for another.
"""

import json
from collections.abc import Mapping
from typing import Any

from cryptography import x509

from feddp.sealing.identity import Identity, signed

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what a document that is none raises


def write(identity: Identity, purpose: bytes, statement: Mapping[str, Any]) -> bytes:
    """Returns the signed document."""
    signature = identity.sign(_signed_part(purpose, statement)).hex()
    return json.dumps({"statement": statement, "certificate": identity.pem, "signature": signature}).encode()


def read(document: str | bytes) -> tuple[dict[str, Any], str, bytes]:
    """Returns the statement, the certificate (PEM) and the signature, which nobody has checked; raises as UNREADABLE says."""
    content = json.loads(document)
    return content["statement"], str(content["certificate"]), bytes.fromhex(content["signature"])


def is_signed(certificate: x509.Certificate, signature: bytes, purpose: bytes, statement: Mapping[str, Any]) -> bool:
    """Whether the certificate's owner signed the statement. The certificate is one that `Authority.accept` returned."""
    return signed(certificate, signature, _signed_part(purpose, statement))


def _signed_part(purpose: bytes, statement: Mapping[str, Any]) -> bytes:
    return purpose + b"\n" + json.dumps(statement, sort_keys=True).encode()
