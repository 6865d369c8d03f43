"""Everything that is to be in order before a participant starts."""

from pathlib import Path

from feddp.errors import Problem
from feddp.kit.containers import KUBERNETES, runtime
from feddp.kit.files import file_problems, links
from feddp.kit.here import here_problems
from feddp.kit.minimum import policy_problems
from feddp.kit.startup import startup_problems
from feddp.sealing.kit import CLIENT, Kit
from feddp.sealing.kit_certificates import certificate_problems


def check(folder: Path, offline: bool = False, fingerprint: str | None = None) -> tuple[Kit, list[Problem]]:
    """A kit, and all that is wrong with its files, its certificate, its policy, its data and its way to the server.

    Nothing that the kit names is loaded or built, but for the filters of `feddp.kit.privacy.FILTERS`.

    Args:
        offline: leave out what only the machine can tell that the kit will run on (`feddp.kit.here`).
        fingerprint: of the consortium's root (see `certificate_problems`).

    Raises:
        InputError: the folder holds no kit.
    """
    kit = Kit.open(folder)
    if outside := links(kit):
        return kit, outside
    problems = certificate_problems(kit, fingerprint) or startup_problems(kit)  # which goes by what the certificate says
    problems += file_problems(kit) + policy_problems(kit)
    if not problems and not offline:
        problems += here_problems(kit)
    return kit, problems


def unseen(kit: Kit) -> str:
    """What the check could not see of a kit that it found nothing wrong with."""
    in_the_cluster = kit.kind == CLIENT and runtime(kit) == KUBERNETES
    return "; its data, in a volume of the cluster, were not looked at" if in_the_cluster else ""
