"""Checks a kit's certificate: participant, project, dates and key."""

import re
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from feddp.errors import BadFile, InputError, Problem
from feddp.limits import PEM_BYTES
from feddp.reading import read
from feddp.sealing.certificates import expired, issued_by, name_of, not_yet_valid
from feddp.sealing.kit import ADMIN, AGAIN, Kit

T = TypeVar("T")

# what a certificate's parser raises
UNREADABLE = (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, UnsupportedAlgorithm)
ROOTS = "A new root is a new project: ask the consortium for new kits for all"
USES = {"serverAuth": ExtendedKeyUsageOID.SERVER_AUTH, "clientAuth": ExtendedKeyUsageOID.CLIENT_AUTH}
RENEW = "Have it renewed (docs/how-to/provision.md, 'Renewal')"


def certificate_problems(kit: Kit, fingerprint: str | None = None) -> list[Problem]:
    """Returns all problems of certificate, key and root.

    Args:
        fingerprint: SHA-256 of the consortium's root certificate, as FLARE and OpenSSL print it, received over another channel
            than the kit. Without it, a kit of another consortium with the same name passes.

    Raises:
        InputError: the fingerprint is not a SHA-256.
    """
    if fingerprint is not None and not re.fullmatch("[0-9a-f]{64}", _plain(fingerprint)):
        raise InputError(f"--fingerprint {fingerprint} is not a SHA-256, which has 64 hexadecimal digits; copy all of them")
    problems: list[Problem] = []
    certificate = _read(kit.certificate, _certificate, problems)
    root = _read(kit.root, _certificate, problems)
    key = _read(kit.key, lambda pem: load_pem_private_key(pem, password=None), problems)
    if root is not None:
        problems += _of_the_root(kit, root, fingerprint)
    if certificate is not None:
        if (name := name_of(certificate)) != kit.name:
            problems.append(Problem(kit.certificate, f"belongs to {name}, but the kit to {kit.name}", AGAIN))
        problems += _dates(kit.certificate, certificate, RENEW) + _uses(kit, certificate)
        if root is not None and not issued_by(certificate, root):
            problems.append(Problem(kit.certificate, f"was not issued by {kit.root.name}", AGAIN))
        if key is not None and key.public_key() != certificate.public_key():
            problems.append(Problem(kit.key, f"is not the key of {kit.certificate.name}", "Restore the certificate's key"))
    return problems


def require_certificates(kit: Kit) -> None:
    """Raises BadFile with the first problem of certificate, key and root."""
    if problems := certificate_problems(kit):
        raise BadFile(problems[0])


def _of_the_root(kit: Kit, root: x509.Certificate, fingerprint: str | None) -> list[Problem]:
    problems = _dates(kit.root, root, ROOTS)
    if (name := name_of(root)) != kit.project:
        problems.append(Problem(kit.root, f"is the root of project {name}, but the kit is of {kit.project}", AGAIN))
    own = root.fingerprint(SHA256()).hex()
    if fingerprint is not None and _plain(fingerprint) != own:
        shown = ":".join(own[i : i + 2] for i in range(0, len(own), 2)).upper()
        problems.append(Problem(kit.root, f"is not the consortium's root: its fingerprint is SHA256:{shown}", AGAIN))
    return problems


def _read(path: Path, parse: Callable[[bytes], T], problems: list[Problem]) -> T | None:
    """Returns the parsed file; on failure returns None and appends a problem."""
    try:
        return parse(read(path, PEM_BYTES))
    except FileNotFoundError:
        problems.append(Problem(path, "is missing", AGAIN))
    except BadFile as bad:
        problems.append(Problem(path, bad.problem.what, AGAIN))
    except (*UNREADABLE, TypeError) as error:  # TypeError: a key with a password, which FLARE cannot open either
        problems.append(Problem(path, f"cannot be read ({error})", AGAIN))
    return None


def _certificate(pem: bytes) -> x509.Certificate:
    """Returns a certificate whose fields can be read: the parser reads each of them only when it is asked for."""
    certificate = x509.load_pem_x509_certificate(pem)
    name_of(certificate), not_yet_valid(certificate), expired(certificate), certificate.public_key(), certificate.extensions
    return certificate


def _dates(path: Path, certificate: x509.Certificate, renew: str) -> list[Problem]:
    if early := not_yet_valid(certificate):
        return [Problem(path, early, "Set this machine's clock, or wait")]
    if late := expired(certificate):
        return [Problem(path, f"{late}; this machine's clock says {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC", renew)]
    return []


def _uses(kit: Kit, certificate: x509.Certificate) -> list[Problem]:
    """A participant's processes prove themselves to each other with its one certificate: who listens, and who connects."""
    try:
        uses = set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:  # for every use
        return []
    lacking = [name for name, use in USES.items() if use not in uses]
    if kit.kind == ADMIN or not lacking:  # a console only connects
        return []
    what = f"may not be used for {' and '.join(lacking)}, so that the participant's jobs could not connect to it"
    return [Problem(kit.certificate, what, RENEW)]


def _plain(fingerprint: str) -> str:
    """Returns only the hexadecimal digits of `SHA256:AA:BB...` or OpenSSL's `sha256 Fingerprint=AA:BB...`."""
    return fingerprint.rsplit("=", 1)[-1].strip().lower().removeprefix("sha256").replace(":", "")
