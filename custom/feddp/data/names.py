"""The names of sites: those of their folders, which FLARE takes for participants; and what makes two names one."""

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from feddp.errors import BadFile, InputError, Problem

_PORTS = [f"{kind}{number}" for kind in ("com", "lpt") for number in range(1, 10)]
LONGEST = 64  # characters: the limit of a certificate's common name
# names that a folder, a command or a table takes for something else, whatever their case: some disks do not tell it apart
RESERVED = {
    "server": "FLARE's name of the server",
    "simulator_server": "the server's name in FLARE's simulator, where its files lie beside the sites'",
    "localhost": "the server's name in a federation on one machine (POC)",
    "local": "a folder that FLARE's simulator keeps beside the sites' own",
    "startup": "a folder that FLARE's simulator keeps beside the sites' own",
    "all": "FLARE's word for all sites in its commands (`nvflare system`, `nvflare job`)",
    "default": "FLARE's word for every site in a job's resources",
    "global": "the global model's name among the models of an adaptation",
    "mean": "the sites' mean in curves",
    "average": "the sites' mean in tables",
    **dict.fromkeys(("na", "nan", "none", "null"), "what programs that read tables take for no value"),
    **dict.fromkeys(("con", "prn", "aux", "nul", *_PORTS), "a device of Windows, where no folder has this name"),
}
RULE = f"1 to {LONGEST} of A-Z a-z 0-9 - _, a letter or a digit first"
# FLARE names a person's console `_admin_` and a number, a client of a site's own process `-client_api_` and a number; a
# command takes a name that begins with - for an option, and Docker starts no container of a name that begins with - or _
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{LONGEST - 1}}}")


def site_name(path: Path) -> str:
    """Returns the site's name: its folder's. A linked folder has the link's name, as below a root that holds links."""
    return path.resolve().name if path.name in ("", "..") else path.name


def fault(name: str) -> str | None:
    """Returns what is wrong with a name of a site, or None."""
    if not _NAME.fullmatch(name):
        return f"{name!r} is no name of a site ({RULE})"
    if taken := RESERVED.get(name.casefold()):
        return f"{name!r} is no name of a site: it is {taken}"
    return None


def site_problem(where: Path, name: str) -> Problem | None:
    """Returns what is wrong with a site's name, with a name that would be right; None if nothing is."""
    if wrong := fault(name):
        return Problem(where, wrong, f"Rename the folder, for example to {suggested(name)}")
    return None


def require_site(where: Path, name: str) -> None:
    """Raises BadFile if `name` is no name of a site."""
    if problem := site_problem(where, name):
        raise BadFile(problem)


def require_name_of_site(name: str) -> None:
    """Raises InputError if a name that somebody wrote is no name of a site."""
    if wrong := fault(name):
        raise InputError(f"{wrong}; call the site, for example, {suggested(name)}")


def alike(names: Iterable[str]) -> tuple[str, str] | None:
    """Returns two names that differ in case only: a disk of Windows or macOS gives them one folder."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(name.casefold(), name)) != name:
            return other, name
    return None


def require_sites(names: Iterable[str]) -> None:
    """Raises InputError if one of a run's sites has no name of a site, or two of them differ in case only."""
    listed = list(names)
    for name in listed:
        require_name_of_site(name)
    if twice := alike(listed):
        raise InputError(f"sites {twice[0]} and {twice[1]} differ in case only; give one of them another name")


def composed(name: str) -> str:
    """Returns a name with each accent in its letter (NFC): macOS writes them apart (NFD), and the same name is other bytes."""
    return unicodedata.normalize("NFC", name)


def suggested(name: str) -> str:
    """Returns a similar name of a site: letters without accents, - instead of anything else."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", plain.replace("'", "")).strip("-").lstrip("-_")[:LONGEST]
    return f"{plain or 'site'}-1" if plain.casefold() in ("", *RESERVED) else plain
