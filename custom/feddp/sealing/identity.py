"""A site's identity towards its peers, from the certificate of its startup kit, and the check of a site's certificate.

The certificates' keys sign; nothing is encrypted for them (`handshake_key`).
"""

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from feddp.errors import SealingError
from feddp.sealing.certificates import expired, issued_by, name_of, not_yet_valid, role_of

SMALLEST = 2048  # bits of an RSA key, as FLARE makes them; NIST SP 800-131A allows no shorter one for signatures
CLIENT = "client"  # the role in a site's certificate, if `nvflare cert approve` wrote one
_PSS = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)


@dataclass(frozen=True)
class Authority:
    """The root certificate of a project, and the name of the project's server: by them a site's certificate is known."""

    root: x509.Certificate
    server: str

    def accept(self, name: str, pem: str) -> x509.Certificate:
        """Returns the certificate in `pem` if it belongs to the site `name`.

        Raises:
            SealingError: the root did not issue it, it is out of date, has another name, or is not a site's. The same root
                issues certificates of the server and of people; their keys must not pass as a site's.
        """
        try:
            certificate = x509.load_pem_x509_certificate(pem.encode())
            wrong = self._wrong(name, certificate)
        except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
            wrong = f"cannot be read ({error})"
        if wrong:
            raise SealingError(f"the certificate for site {name} {wrong}; have {name} check its kit (feddp kit check)")
        return certificate

    def _wrong(self, name: str, certificate: x509.Certificate) -> str | None:
        if not issued_by(certificate, self.root):
            return "was not issued by this project's root"
        if wrong := not_yet_valid(certificate) or expired(certificate):
            return wrong
        if (owner := name_of(certificate)) != name:
            return f"belongs to {owner}"
        if certificate.public_key() == self.root.public_key():
            return "is the root's certificate"
        if name == self.server:
            return "is the server's certificate"
        if (role := role_of(certificate)) not in ("", CLIENT):
            return f"is not a site's certificate: its role is {role}"
        key = certificate.public_key()
        if not isinstance(key, rsa.RSAPublicKey):
            return "has no RSA key"
        if key.key_size < SMALLEST:
            return f"has an RSA key of {key.key_size} bits; at least {SMALLEST} are needed"
        return None


@dataclass(frozen=True)
class Identity:
    """A site's certificate and key, the root certificate of its project, and the name of the project's server."""

    name: str
    certificate: x509.Certificate
    key: rsa.RSAPrivateKey
    root: x509.Certificate
    server: str

    @classmethod
    def read(cls, name: str, certificate: Path, key: Path, root: Path, server: str) -> "Identity":
        """Reads the identity from the files of a startup kit that `feddp.kit` has checked.

        Raises:
            SealingError: the key is not an RSA key, the kind that FLARE makes.
        """
        own = load_pem_private_key(key.read_bytes(), password=None)
        if not isinstance(own, rsa.RSAPrivateKey):
            raise SealingError(
                f"{key} is not an RSA key; have the kit made anew by `nvflare provision` or `nvflare cert request`"
            )
        certificates = [x509.load_pem_x509_certificate(path.read_bytes()) for path in (certificate, root)]
        return cls(name, certificates[0], own, certificates[1], server)

    @property
    def pem(self) -> str:
        """This site's certificate, as sent to peers."""
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def accept(self, name: str, pem: str) -> x509.Certificate:
        """As `Authority.accept`."""
        return Authority(self.root, self.server).accept(name, pem)

    def sign(self, content: bytes) -> bytes:
        """Returns the signature of `content`: RSA-PSS with SHA-256."""
        return self.key.sign(content, _PSS, SHA256())


def fingerprint(certificate: x509.Certificate) -> str:
    """Returns the SHA-256 of the certificate, in hexadecimal digits."""
    return certificate.fingerprint(SHA256()).hex()


def signed(certificate: x509.Certificate, signature: bytes, content: bytes) -> bool:
    """Whether the certificate's owner signed the content. The certificate is one that `Authority.accept` returned."""
    try:
        _public(certificate).verify(signature, content, _PSS, SHA256())
    except InvalidSignature:
        return False
    return True


def _public(certificate: x509.Certificate) -> rsa.RSAPublicKey:
    """Returns the certificate's RSA key; `accept` has checked the kind of the key before."""
    key = certificate.public_key()
    if not isinstance(key, rsa.RSAPublicKey):
        raise TypeError(f"the certificate of {name_of(certificate)} has no RSA key")
    return key
