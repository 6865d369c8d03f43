"""Certificates that no consortium issued."""

from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


def self_signed(name: str):
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key, signed(name, name, key, key)


def signed(name: str, issuer: str, key, by, days: tuple[int, int] = (-1, 1)):
    """A certificate for `key`, valid between two numbers of days from now."""
    now = datetime.now(timezone.utc)
    subject, of = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, issuer))
    builder = x509.CertificateBuilder(of, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now + timedelta(days[0])).not_valid_after(now + timedelta(days[1]))
    return builder.sign(by, hashes.SHA256())


def put(path: Path, certificate=None, key=None) -> None:
    if certificate is not None:
        path.write_bytes(certificate.public_bytes(Encoding.PEM))
    else:
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
