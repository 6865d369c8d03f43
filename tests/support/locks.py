"""What requirements.txt and the lock files say."""

import re
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support import ROOT

ENTRY = re.compile(r"([a-z0-9.-]+)==(\S+)(?: ; ([^\\]+))? \\")
HASH = re.compile(r"    --hash=sha256:([0-9a-f]{64})( \\)?")


def entries(lock: Path) -> list[tuple[str, set[str]]]:
    """Of a lock, every requirement with its hashes; a line that is neither is an error."""
    found: list[tuple[str, set[str]]] = []
    open_entry = False
    for number, line in enumerate(lock.read_text(encoding="utf-8").splitlines(), 1):
        if not open_entry:
            assert ENTRY.fullmatch(line), f"{lock.name}:{number}: {line}"
            found.append((line.removesuffix(" \\"), set()))
            open_entry = True
        else:
            match = HASH.fullmatch(line)
            assert match, f"{lock.name}:{number}: {line}"
            found[-1][1].add(match[1])
            open_entry = bool(match[2])
    assert not open_entry, "the last entry goes on"
    return found


def versions(lines: list[str], python: str) -> dict[str, str]:
    """What pip would install on this platform's Python: name -> version; no name twice."""
    environment = default_environment() | {"python_version": python, "python_full_version": f"{python}.9"}
    found: dict[str, str] = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", requirement
            assert name not in found, f"{name} twice for Python {python}"
            found[name] = specifier.version
    return found


def pinned(python: str) -> dict[str, str]:
    """What requirements.txt says."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return versions([line for line in lines if line and line[0] != "#"], python)
