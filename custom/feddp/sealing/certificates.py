"""Reads the fields of a certificate, checks issuer and dates, and says when it ends."""

from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509.oid import NameOID


def name_of(certificate: x509.Certificate) -> str:
    """Returns the common name, which is the participant's name in FLARE."""
    return _field(certificate, NameOID.COMMON_NAME)


def role_of(certificate: x509.Certificate) -> str:
    """Returns the unstructured name, in which FLARE writes a person's role; `nvflare cert approve` also client or server."""
    return _field(certificate, NameOID.UNSTRUCTURED_NAME)


def issued_by(certificate: x509.Certificate, root: x509.Certificate) -> bool:
    """Returns whether the root's key signed the certificate and the certificate names the root as its issuer."""
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def not_yet_valid(certificate: x509.Certificate) -> str | None:
    """Returns the fault of a certificate that is not valid yet, or None."""
    since = certificate.not_valid_before_utc
    return f"is not valid before {since:%Y-%m-%d %H:%M} UTC" if _now() < since else None


def expired(certificate: x509.Certificate) -> str | None:
    """Returns the fault of an expired certificate, or None."""
    until = certificate.not_valid_after_utc
    return f"expired on {until:%Y-%m-%d %H:%M} UTC" if _now() > until else None


def days_left(certificate: x509.Certificate) -> float:
    """Returns the days until a certificate ends, below 0 if it has ended."""
    return (certificate.not_valid_after_utc - _now()) / timedelta(days=1)


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _field(certificate: x509.Certificate, oid: x509.ObjectIdentifier) -> str:
    return " ".join(str(part.value) for part in certificate.subject.get_attributes_for_oid(oid))
