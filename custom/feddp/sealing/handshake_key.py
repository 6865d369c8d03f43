"""The key of one handshake: peers encrypt for it, and once its site has dropped it, nobody opens what was encrypted.

HPKE in base mode (RFC 9180): X25519, HKDF-SHA256, AES-256-GCM. The sender's half is new for every call, too. No key of a
certificate takes part, so who steals one later opens nothing that was recorded.
"""

import re

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_WRITTEN = re.compile("[0-9a-f]{64}")


def written(public: X25519PublicKey) -> str:
    """Returns the key's 32 bytes as 64 hexadecimal digits."""
    return public.public_bytes_raw().hex()


def read(text: object) -> X25519PublicKey:
    """Inverts `written`.

    Raises:
        ValueError: `text` is not 64 hexadecimal digits, or a point of low order: the secret shared with it is known to all.
    """
    if not isinstance(text, str) or not _WRITTEN.fullmatch(text):
        raise ValueError("not 64 hexadecimal digits")
    public = X25519PublicKey.from_public_bytes(bytes.fromhex(text))
    X25519PrivateKey.generate().exchange(public)  # raises ValueError for a point of low order, which `wrap` would do later
    return public


def wrap(public: X25519PublicKey, key: bytes, about: bytes) -> bytes:
    """Returns `key` encrypted for a handshake's key: 48 bytes more. `about` is not in it, but opens it."""
    return _SUITE.encrypt(key, public, info=about)


def unwrap(private: X25519PrivateKey, wrapped: bytes, about: bytes) -> bytes:
    """Inverts `wrap`; raises InvalidTag if the key was wrapped for another handshake, or about something else."""
    return _SUITE.decrypt(wrapped, private, info=about)
