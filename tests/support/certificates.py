"""Certificates: a project's, as FLARE makes them, with sites' kits; and such as no consortium issued."""

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from nvflare.lighter.utils import Identity, generate_cert, generate_keys, serialize_cert, serialize_pri_key

from feddp.sealing.identity import Identity as SiteIdentity

PROJECT, SERVER = "feddp", "server.example.org"


class Office:
    """A project's root and what it signs; a key of its own for every certificate."""

    def __init__(self):
        self.key, public = generate_keys()
        own = Identity(PROJECT)
        self.root = generate_cert(own, own, self.key, public, valid_days=3650, ca=True)

    def issue(self, name: str, role: str | None = None, since: int = 0, until: int = 360, host: str | None = None):
        """(certificate, key): valid from `since` to `until` days from now; `host` makes it a server's."""
        key, public = generate_keys()
        now = datetime.now(timezone.utc)
        certificate = generate_cert(
            Identity(name, "org", role),
            Identity(PROJECT),
            self.key,
            public,
            server_default_host=host,
            not_valid_before=now + timedelta(days=since),
            not_valid_after=now + timedelta(days=until),
        )
        return certificate, key

    def identities(self, names) -> dict[str, SiteIdentity]:
        """What sites of these names know of themselves."""
        return {name: SiteIdentity(name, *self.issue(name), self.root, SERVER) for name in names}


def kit_of(folder: Path, name: str, office: Office, certificate, key) -> Path:
    """What of a site's startup kit its process reads."""
    startup = folder / "startup"
    startup.mkdir(parents=True)
    (startup / "client.crt").write_bytes(serialize_cert(certificate))
    (startup / "client.key").write_bytes(serialize_pri_key(key))
    (startup / "rootCA.pem").write_bytes(serialize_cert(office.root))
    server = {"name": PROJECT, "service": {"target": f"{SERVER}:8002"}, "identity": SERVER}
    (startup / "fed_client.json").write_text(json.dumps({"servers": [server], "client": {"fqsn": name}}))
    return folder


def server_kit(folder: Path, office: Office, certificate, key) -> Path:
    """The same of the server's."""
    startup = kit_of(folder, SERVER, office, certificate, key) / "startup"
    (startup / "fed_client.json").unlink()
    for end in ("crt", "key"):
        (startup / f"client.{end}").rename(startup / f"server.{end}")
    server = {"name": PROJECT, "service": {"target": f"{SERVER}:8002"}, "admin_server": SERVER}
    (startup / "fed_server.json").write_text(json.dumps({"servers": [server]}))
    return folder


def self_signed(name: str):
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key, signed(name, name, key, key)


def signed(name: str, issuer: str, key, by, days: tuple[int, int] = (-1, 1), uses=()):
    """A certificate for `key`, valid between two numbers of days from now, for all uses or those named."""
    now = datetime.now(timezone.utc)
    subject, of = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, issuer))
    builder = x509.CertificateBuilder(of, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now + timedelta(days[0])).not_valid_after(now + timedelta(days[1]))
    if uses:
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return builder.sign(by, hashes.SHA256())


def put(path: Path, certificate=None, key=None) -> None:
    if certificate is not None:
        path.write_bytes(certificate.public_bytes(Encoding.PEM))
    else:
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
