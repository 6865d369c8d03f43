"""When the certificates end that a participant depends on: a line for each, and a warning while there is time to renew it."""

from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509

from feddp.limits import PEM_BYTES
from feddp.reading import counted, read
from feddp.sealing.certificates import days_left, name_of
from feddp.sealing.kit import SERVER, Kit
from feddp.sealing.kit_certificates import RENEW, ROOTS

SOON = 30  # days before its end from which on a certificate is warned of
SERVERS = "Ask the consortium to have the server's certificate renewed"


@dataclass(frozen=True)
class Seen:
    """A certificate, whose it is, and what to do before it ends."""

    whose: str
    certificate: x509.Certificate
    remedy: str

    @property
    def soon(self) -> bool:
        return days_left(self.certificate) < SOON

    def __str__(self) -> str:
        until = f"{self.certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        days = max(0, int(days_left(self.certificate)))
        line = f"the certificate of {self.whose} is valid until {until} ({counted(days, 'day')} left)"
        return f"warning: {line}. {self.remedy}." if self.soon else line


def of_kit(kit: Kit) -> list[Seen]:
    """Returns the certificates of a kit that `certificate_problems` has checked: its participant's and the root's."""
    own, root = (x509.load_pem_x509_certificate(read(path, PEM_BYTES)) for path in (kit.certificate, kit.root))
    whose = f"the server {kit.name}" if kit.kind == SERVER else kit.name
    return [Seen(whose, own, RENEW), Seen(f"the root of project {kit.project}", root, ROOTS)]


def of_server(certificate: x509.Certificate) -> Seen:
    """Returns the certificate that the server showed (`sealing.reach`)."""
    return Seen(f"the server {name_of(certificate)}", certificate, SERVERS)


def of_peer(site: str, certificate: x509.Certificate) -> Seen:
    """Returns the certificate in a site's handshake."""
    return Seen(f"site {site}", certificate, f"Have {site} renew it")


def warnings(seen: Iterable[Seen]) -> list[str]:
    """Returns the lines of those that end soon."""
    return [str(each) for each in seen if each.soon]
