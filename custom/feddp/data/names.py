"""The names of sites: those of their folders, which FLARE takes for participants; and what makes two names one."""

import re
import unicodedata
from pathlib import Path

from feddp.errors import BadFile, InputError, Problem

LONGEST = 64  # characters: the limit of a certificate's common name
_TAKEN = ("server", "mean", "Average")  # FLARE's name of the server; those of the sites' mean in curves and in tables
RULE = f"1 to {LONGEST} of A-Z a-z 0-9 - _, and not {', '.join(_TAKEN[:-1])} or {_TAKEN[-1]}"
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{LONGEST}}}")


def site_name(path: Path) -> str:
    """Returns the site's name: its folder's. A linked folder has the link's name, as below a root that holds links."""
    return path.resolve().name if path.name in ("", "..") else path.name


def site_problem(where: Path, name: str) -> Problem | None:
    """Returns what is wrong with a site's name, with a name that would be right; None if nothing is."""
    if _NAME.fullmatch(name) and name not in _TAKEN:
        return None
    return Problem(where, f"{name!r} is no name of a site ({RULE})", f"Rename the folder, for example to {suggested(name)}")


def require_site(where: Path, name: str) -> None:
    """Raises BadFile if `name` is no name of a site."""
    if problem := site_problem(where, name):
        raise BadFile(problem)


def require_name_of_site(name: str) -> None:
    """Raises InputError if a name that somebody typed is no name of a site."""
    if problem := site_problem(Path(), name):
        raise InputError(f"{problem.what}; call the site, for example, {suggested(name)}")


def composed(name: str) -> str:
    """Returns a name with each accent in its letter (NFC): macOS writes them apart (NFD), and the same name is other bytes."""
    return unicodedata.normalize("NFC", name)


def suggested(name: str) -> str:
    """Returns a similar name of a site: letters without accents, - instead of anything else."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", plain.replace("'", "")).strip("-")[:LONGEST]
    return f"{plain or 'site'}-1" if plain in ("", *_TAKEN) else plain
