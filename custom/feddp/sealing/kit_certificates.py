"""Whether a kit's certificate is this participant's, of this project, in date, and the key its own."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from feddp.errors import Problem
from feddp.sealing.certificates import expired, issued_by, name_of, not_yet_valid
from feddp.sealing.kit import AGAIN, Kit

T = TypeVar("T")

RENEW = "Have it renewed (provisioning/README.md, 'Renewal')"


def certificate_problems(kit: Kit, fingerprint: str | None = None) -> list[Problem]:
    """Everything wrong with certificate, key and root; nothing where all is well.

    Args:
        fingerprint: of the consortium's root certificate, SHA-256 as FLARE and OpenSSL print it, learnt by another way than
            the kit came. Without it a kit whose every file is another consortium's of the same name passes.
    """
    problems: list[Problem] = []
    certificate = _read(kit.certificate, x509.load_pem_x509_certificate, problems)
    root = _read(kit.root, x509.load_pem_x509_certificate, problems)
    key = _read(kit.key, lambda pem: load_pem_private_key(pem, password=None), problems)
    if root is not None:
        problems += _of_the_root(kit, root, fingerprint)
    if certificate is not None:
        if (name := name_of(certificate)) != kit.name:
            problems.append(Problem(kit.certificate, f"is {name}'s, and the kit is {kit.name}'s", AGAIN))
        problems += _dates(kit.certificate, certificate)
        if root is not None and not issued_by(certificate, root):
            problems.append(Problem(kit.certificate, f"was not issued by {kit.root.name}", AGAIN))
        if key is not None and key.public_key() != certificate.public_key():
            problems.append(Problem(kit.key, f"is not the key of {kit.certificate.name}", "Put back the key it was issued for"))
    return problems


def _of_the_root(kit: Kit, root: x509.Certificate, fingerprint: str | None) -> list[Problem]:
    problems = _dates(kit.root, root)
    if (name := name_of(root)) != kit.project:
        problems.append(Problem(kit.root, f"is the root of project {name}, and the kit is of {kit.project}", AGAIN))
    own = root.fingerprint(SHA256()).hex()
    if fingerprint is not None and _plain(fingerprint) != own:
        shown = ":".join(own[i : i + 2] for i in range(0, len(own), 2)).upper()
        problems.append(Problem(kit.root, f"is another root than the consortium's: its fingerprint is SHA256:{shown}", AGAIN))
    return problems


def _read(path: Path, parse: Callable[[bytes], T], problems: list[Problem]) -> T | None:
    """The file, parsed; None and a problem more where that fails."""
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        problems.append(Problem(path, "is missing", AGAIN))
    except (OSError, ValueError, TypeError) as error:  # TypeError: a key behind a password, which FLARE could not open either
        problems.append(Problem(path, f"cannot be read ({error})", AGAIN))
    return None


def _dates(path: Path, certificate: x509.Certificate) -> list[Problem]:
    if early := not_yet_valid(certificate):
        return [Problem(path, early, "Set this machine's clock, or wait")]
    if late := expired(certificate):
        return [Problem(path, late, RENEW)]
    return []


def _plain(fingerprint: str) -> str:
    """Hexadecimal digits alone, from `SHA256:AA:BB...` or OpenSSL's `sha256 Fingerprint=AA:BB...`."""
    return fingerprint.rsplit("=", 1)[-1].strip().lower().removeprefix("sha256").replace(":", "")
