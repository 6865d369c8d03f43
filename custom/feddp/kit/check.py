"""`feddp kit check`: all checks of a kit before a participant starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from feddp.data.names import fault, suggested
from feddp.errors import Problem
from feddp.kit.containers import KUBERNETES, runtime
from feddp.kit.files import file_problems, links
from feddp.kit.here import here_problems, proxies
from feddp.kit.minimum import policy_problems
from feddp.kit.processes import stale_problems
from feddp.kit.startup import startup_problems
from feddp.sealing.ends import Seen, of_kit, of_server
from feddp.sealing.kit import AGAIN, CLIENT, SERVER, Kit
from feddp.sealing.kit_certificates import certificate_problems


class Checked(NamedTuple):
    """A kit, its problems, and the certificates that the check saw; these only where the kit's own are valid."""

    kit: Kit
    problems: list[Problem]
    certificates: list[Seen]


def check(folder: Path, offline: bool = False, fingerprint: str | None = None) -> Checked:
    """Returns a kit and the problems of its files, certificate, policy, data and connection to the server.

    The check builds only the filters of `feddp.kit.privacy.FILTERS`, and nothing else that the kit names.

    Args:
        offline: omits the checks of the machine on which the kit will run (`feddp.kit.here`).
        fingerprint: of the consortium's root (see `certificate_problems`).

    Raises:
        InputError: the folder holds no kit.
    """
    kit = Kit.open(folder)
    if outside := links(kit):
        return Checked(kit, outside, [])
    problems = certificate_problems(kit, fingerprint)
    certificates = [] if problems else of_kit(kit)
    problems = problems or startup_problems(kit)  # this one needs a valid certificate
    problems += _name(kit) + file_problems(kit) + stale_problems(kit) + policy_problems(kit)
    if not problems and not offline:
        problems, server = here_problems(kit)
        certificates += [of_server(server)] if server else []
    return Checked(kit, list(dict.fromkeys(problems)), certificates)  # two checks report the same unreadable file


def _name(kit: Kit) -> list[Problem]:
    """Returns what is wrong with a site's name, under which it could take part in no run."""
    wrong = fault(kit.name) if kit.kind == CLIENT else None
    return [Problem(kit.configuration, wrong, f"{AGAIN}, for example as {suggested(kit.name)}")] if wrong else []


def notes(checked: Checked) -> Iterator[str]:
    """Yields what the check of a kit that may start has seen: when certificates end, and proxies that have no effect."""
    yield from map(str, checked.certificates)
    if checked.kit.kind != SERVER and (unused := proxies()):
        yield f"{unused}."


def unseen(kit: Kit) -> str:
    """Returns the part of a kit without problems that the check could not see, as a text."""
    in_the_cluster = kit.kind == CLIENT and runtime(kit) == KUBERNETES
    return "; its data, in a volume of the cluster, were not checked" if in_the_cluster else ""
