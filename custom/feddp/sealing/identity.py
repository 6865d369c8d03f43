"""Who a site is to the other sites, and whom it believes to be one: the certificates of their startup kits."""

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from feddp.errors import SealingError
from feddp.sealing.certificates import expired, issued_by, name_of, not_yet_valid, role_of

CLIENT = "client"  # the role in a site's certificate, where `nvflare cert approve` wrote one
_OAEP = padding.OAEP(padding.MGF1(SHA256()), SHA256(), label=None)
_PSS = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)


@dataclass(frozen=True)
class Identity:
    """A site's own certificate and key, the root of its project, and the name of the project's server."""

    name: str
    certificate: x509.Certificate
    key: rsa.RSAPrivateKey
    root: x509.Certificate
    server: str

    @classmethod
    def read(cls, name: str, certificate: Path, key: Path, root: Path, server: str) -> "Identity":
        """From the files of a startup kit, in which `feddp.kit` has found nothing wrong.

        Raises:
            SealingError: the key is not an RSA key, which is what FLARE makes.
        """
        own = load_pem_private_key(key.read_bytes(), password=None)
        if not isinstance(own, rsa.RSAPrivateKey):
            raise SealingError(f"{key} is no RSA key; have the kit made anew by `nvflare provision` or `nvflare cert request`")
        certificates = [x509.load_pem_x509_certificate(path.read_bytes()) for path in (certificate, root)]
        return cls(name, certificates[0], own, certificates[1], server)

    @property
    def pem(self) -> str:
        """The own certificate, as it is shown to others."""
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def accept(self, name: str, pem: str) -> x509.Certificate:
        """The certificate that was shown for the site `name`, if it is that site's and no one else's.

        Raises:
            SealingError: it is not of this site's root, in date, of that name, and a site's: the server's own and people's
                are of the same root, and whoever holds one of those keys must not be taken for a hospital.
        """
        try:
            certificate = x509.load_pem_x509_certificate(pem.encode())
            wrong = self._wrong(name, certificate)
        except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
            wrong = f"cannot be read ({error})"
        if wrong:
            raise SealingError(f"the certificate shown for site {name} {wrong}; have {name} check its kit (feddp kit check)")
        return certificate

    def _wrong(self, name: str, certificate: x509.Certificate) -> str | None:
        if not issued_by(certificate, self.root):
            return "was not issued by this project's root"
        if wrong := not_yet_valid(certificate) or expired(certificate):
            return wrong
        if (said := name_of(certificate)) != name:
            return f"is {said}'s"
        if certificate.public_key() == self.root.public_key():
            return "is the root's own"
        if name == self.server:
            return "is the server's"
        if (role := role_of(certificate)) not in ("", CLIENT):
            return f"is no site's: its role is {role}"
        if not isinstance(certificate.public_key(), rsa.RSAPublicKey):
            return "is not of an RSA key"
        return None

    def sign(self, content: bytes) -> bytes:
        """RSA-PSS with SHA-256."""
        return self.key.sign(content, _PSS, SHA256())

    def unwrap(self, wrapped: bytes) -> bytes:
        """The inverse of `wrap` for this site's key; ValueError where it was wrapped for another."""
        return self.key.decrypt(wrapped, _OAEP)


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256, in hexadecimal digits."""
    return certificate.fingerprint(SHA256()).hex()


def signed(certificate: x509.Certificate, signature: bytes, content: bytes) -> bool:
    """Whether the certificate's owner signed the content. The certificate is one that `Identity.accept` returned."""
    try:
        _public(certificate).verify(signature, content, _PSS, SHA256())
    except InvalidSignature:
        return False
    return True


def wrap(certificate: x509.Certificate, key: bytes) -> bytes:
    """RSA-OAEP with SHA-256: `key`, for the certificate's owner alone."""
    return _public(certificate).encrypt(key, _OAEP)


def _public(certificate: x509.Certificate) -> rsa.RSAPublicKey:
    """InputError's place is `accept`: whatever comes here has been found to hold an RSA key."""
    key = certificate.public_key()
    if not isinstance(key, rsa.RSAPublicKey):
        raise TypeError(f"the certificate of {name_of(certificate)} is not of an RSA key")
    return key
