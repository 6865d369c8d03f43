"""Everything that is to be in order before a participant starts."""

import socket
from pathlib import Path

from feddp.data.description import Problem
from feddp.kit.certificates import certificate_problems
from feddp.kit.containers import KUBERNETES, runtime
from feddp.kit.kit import ADMIN, CLIENT, SERVER, Kit
from feddp.kit.minimum import policy_problems

PATIENCE = 5  # seconds for the server to take a connection


def check(folder: Path, offline: bool = False, fingerprint: str | None = None) -> tuple[Kit, list[Problem]]:
    """A kit, and all that is wrong with its certificate, its policy, its data and its way to the server.

    Args:
        offline: leave the server alone.
        fingerprint: of the consortium's root (see `certificate_problems`).

    Raises:
        FedDPError: the folder holds no kit.
    """
    kit = Kit.open(folder)
    problems = certificate_problems(kit, fingerprint)
    if kit.kind != ADMIN:  # FLARE reads no policy from a person's kit
        problems += policy_problems(kit)
    if kit.kind != SERVER and not offline:
        problems += _reach(kit)
    return kit, problems


def unseen(kit: Kit) -> str:
    """What the check could not see of a kit that it found nothing wrong with."""
    in_the_cluster = kit.kind == CLIENT and runtime(kit) == KUBERNETES
    return "; its data, in a volume of the cluster, were not looked at" if in_the_cluster else ""


def _reach(kit: Kit) -> list[Problem]:
    host, port = kit.server
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except OSError as error:
        remedy = "Start the server, open the firewall, or leave this out with --offline"
        return [Problem(kit.configuration, f"the server {host}:{port} does not answer ({error})", remedy)]
    return []
