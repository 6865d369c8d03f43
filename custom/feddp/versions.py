"""The packages of which a run is made: with which differences between participants a job does not run, and why.

A difference is refused if it is known to break a run or to change its results. Any other one is only shown: it changes the last
bits, as another processor does. A version that a site does not tell differs in all its parts.
"""

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

PARTS = ("major", "minor", "patch")
ABSENT = "not installed"  # under its name: used from its sources
UNKNOWN = "unknown or not installed"  # of a site that did not tell it
SERVER = "server"  # among the participants; no site has this name
_SHOWN = "not known to change results"


@dataclass(frozen=True)
class Package:
    """A package, or Python itself.

    Args:
        equal: how many of PARTS must be equal at all participants.
        why: why these must, and the others need not.
    """

    equal: int
    why: str


PACKAGES: Mapping[str, Package] = {
    "python": Package(0, f"{_SHOWN}: no draw and no sum of a run is Python's own"),
    "feddp": Package(2, "another minor version may have other tasks, other numbers in them, or another training loop"),
    "nvflare": Package(
        2, "this package replaces parts of FLARE (streams, cells, the start of jobs), which a minor version changes"
    ),
    "torch": Package(
        1,
        "a major version may change defaults and the streams of random numbers; a minor version rounds sums in another"
        " order, as another processor does: the tests of numbers passed with 2.11 and 2.15",
    ),
    "timm": Package(2, "encoders are timm's: a minor version may change their layers, and with them the names of tensors"),
    "segmentation-models-pytorch": Package(2, "decoders are its own: a minor version may change their layers"),
    "monai": Package(2, "losses, metrics and augmentation are MONAI's, which changes defaults with minor versions"),
    "numpy": Package(1, "numpy 2 computes mixed types in other precisions than numpy 1 (NEP 50); minor versions do not"),
}


def installed() -> dict[str, str]:
    """Returns the versions of PACKAGES here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = platform.python_version() if name == "python" else version(name) or ABSENT
        except PackageNotFoundError:
            found[name] = ABSENT
    return found


def as_numbers(versions: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Returns {package: {part: number}}, as versions leave a site; without packages that are not installed.

    What follows the third number, as of a release candidate or of a build for a GPU, is left out.
    """
    found = {name: re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", text) for name, text in versions.items()}
    return {
        name: {part: int(number or 0) for part, number in zip(PARTS, match.groups(), strict=True)}
        for name, match in found.items()
        if match
    }


def as_texts(numbers: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Returns the versions that a site has sent; UNKNOWN is one of which it has not sent every part."""
    whole = {name: [numbers.get(name, {}).get(part) for part in PARTS] for name in PACKAGES}
    return {name: UNKNOWN if None in parts else ".".join(map(str, parts)) for name, parts in whole.items()}


def differences(versions: Mapping[str, Mapping[str, str]], refused: bool) -> dict[str, str]:
    """Returns {package: its versions that differ from the server's, in words}.

    Args:
        versions: {SERVER or site: {package: version}}.
        refused: whether to return the differences with which a job does not run, or the others.
    """
    numbers = {who: as_numbers(found) for who, found in versions.items()}
    found = {}
    for name, package in PACKAGES.items():
        here, others = _parts(numbers[SERVER], name), dict[str, list[str]]()
        for who in sorted(versions.keys() - {SERVER}):
            there = _parts(numbers[who], name)
            if here != there and (here[: package.equal] != there[: package.equal]) == refused:
                others.setdefault(versions[who].get(name) or UNKNOWN, []).append(who)
        if others:
            theirs = ", ".join(f"{text} at {' and '.join(sites)}" for text, sites in others.items())
            found[name] = f"{name} is {versions[SERVER][name]} at the server, {theirs}"
    return found


def refusal(versions: Mapping[str, Mapping[str, str]]) -> str:
    """Returns why a job does not run with these versions, and the remedy; "" if it does. Arguments as in `differences`."""
    found = differences(versions, refused=True)
    if not found:
        return ""
    here = {SERVER: versions[SERVER]}
    reasons = "; ".join(f"{text} ({PACKAGES[name].why})" for name, text in found.items())
    sites = sorted(site for site in versions.keys() - {SERVER} if differences({**here, site: versions[site]}, refused=True))
    named = " and ".join(sites)
    remedy = f"Install the server's versions, by the lock of the same release, at {named}, or export the job without {named}"
    return f"versions differ: {reasons}. {remedy}"


def _parts(numbers: Mapping[str, Mapping[str, int]], name: str) -> list[int]:
    return list(numbers.get(name, {}).values())
