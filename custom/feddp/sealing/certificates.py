"""What a certificate says, and whether to believe it."""

from datetime import datetime, timezone

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID


def name_of(certificate: x509.Certificate) -> str:
    """The common name: in FLARE, the participant's."""
    return _said(certificate, NameOID.COMMON_NAME)


def role_of(certificate: x509.Certificate) -> str:
    """What FLARE writes as unstructured name: a person's role; `nvflare cert approve` also writes client or server there."""
    return _said(certificate, NameOID.UNSTRUCTURED_NAME)


def issued_by(certificate: x509.Certificate, root: x509.Certificate) -> bool:
    """Whether the root's key signed it, and it names the root as its issuer."""
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def not_yet_valid(certificate: x509.Certificate) -> str | None:
    """What is wrong with its first date, if anything is."""
    since = certificate.not_valid_before_utc
    return f"is not valid before {since:%Y-%m-%d %H:%M} UTC" if _now() < since else None


def expired(certificate: x509.Certificate) -> str | None:
    """What is wrong with its last date, if anything is."""
    until = certificate.not_valid_after_utc
    return f"expired on {until:%Y-%m-%d %H:%M} UTC" if _now() > until else None


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _said(certificate: x509.Certificate, what: x509.ObjectIdentifier) -> str:
    return " ".join(str(part.value) for part in certificate.subject.get_attributes_for_oid(what))
