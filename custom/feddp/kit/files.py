"""Checks the files of a kit and their modes. FLARE finds files by name: a file that no kit has may be code."""

import os
import stat
from collections.abc import Iterator
from importlib.machinery import all_suffixes
from pathlib import Path

from nvflare.fuel.utils.config import ConfigFormat

from feddp.errors import BadFile, InputError, Problem
from feddp.flare.service import units
from feddp.flare.tracking import TRACKING
from feddp.limits import PEM_BYTES
from feddp.reading import read
from feddp.sealing.kit import ADMIN, CLIENT, SERVER, Kit

_OWN = ("resources.json", "authorization.json", "log_config.json")
_SITES = {name + end for name in _OWN for end in ("", ".default")}
_SITES |= {"comm_config.json", "study_runtime.yaml", "privacy.json.sample"}
LOCAL = {
    SERVER: _SITES | {TRACKING, *units(SERVER, "")},
    CLIENT: _SITES | {"privacy.json", "relay__resources.json", *units(CLIENT, "")},
    ADMIN: {"resources.json", "resources.json.default"},
}
# FLARE searches these, with each of its extensions, in the kit's folder and all folders below it, in no fixed order
_STEMS = ("fed_client", "fed_server", "resources", "comm_config")
SOUGHT = {stem + extension for stem in _STEMS for extension in ConfigFormat.extensions()}
KEPT = "feddp"  # the folder with the site's tensors and its metrics per image
FOLDERS = ("startup", "local", "transfer", "helm_chart", KEPT)  # of a prepared or used kit; a job's folder is named by its id


def links(kit: Kit) -> list[Problem]:
    """Returns the links in a kit's two folders, or the folders if they are links; the check does not follow them."""
    linked = [path for part in _parts(kit) for path in (part, *sorted(part.iterdir())) if path.is_symlink()]
    return [Problem(path, "is a link", "Replace it by the file itself") for path in linked]


def require_owner(kit: Kit) -> None:
    """Raises InputError if the kit belongs to another user, whose processes could not read what this one writes into it."""
    owner = kit.folder.stat().st_uid
    if owner != os.geteuid():
        raise InputError(
            f"{kit.folder} belongs to user {owner}, who could not read what you write there; type this as that user"
        )


def file_problems(kit: Kit) -> list[Problem]:
    """Returns files that no kit has, and modes that let other users read or change a kit's files."""
    return [*_unknown(kit), *_units(kit), *_shadows(kit), *_importable(kit.folder), *_modes(kit)]


def _unknown(kit: Kit) -> Iterator[Problem]:
    for path in sorted((kit.folder / "local").iterdir()):
        if path.name == "custom":
            yield Problem(path, "holds code, which FLARE loads when it starts", "Remove it")
        elif path.name not in LOCAL[kit.kind]:
            yield Problem(path, "is not a file of a kit; FLARE may read it as configuration", "Remove it from local/")


def _units(kit: Kit) -> Iterator[Problem]:
    """Yields the units that provisioning did not write so: an administrator copies them to where systemd reads them."""
    for name, unit in units(kit.kind, kit.name).items() if kit.kind != ADMIN else ():
        path = kit.folder / "local" / name
        try:
            if os.path.lexists(path) and read(path, PEM_BYTES) != unit.encode():
                what = "differs from the unit that provisioning writes"
                yield Problem(path, what, "Restore or remove it, and change the copy that systemd reads")
        except BadFile as bad:
            yield bad.problem


def _shadows(kit: Kit) -> Iterator[Problem]:
    """Yields files that FLARE may read in place of the kit's: it takes the first file with a name that it finds."""
    own = {str(part) for part in _parts(kit)}
    for folder, _, names in os.walk(kit.folder):
        if folder not in own:
            for name in sorted(SOUGHT.intersection(names)):
                what = "may be read by FLARE in place of the kit's own file"
                yield Problem(Path(folder, name), what, "Remove it from the kit")


def _importable(folder: Path) -> Iterator[Problem]:
    """Yields code that jobs would load: they start as `python -m` in the kit's folder, where Python looks first for modules."""
    suffixes = tuple(all_suffixes())
    beside = sorted(folder.iterdir())
    # Python imports from any folder there, with or without an __init__.py; the folders of a kit hold no modules
    packages = [path for path in beside if path.is_dir() and path.name.isidentifier() and path.name not in FOLDERS]
    within = [path for name in FOLDERS if (folder / name).is_dir() for path in sorted((folder / name).iterdir())]
    for path in [*packages, *(path for path in (*beside, *within) if path.name.endswith(suffixes))]:
        yield Problem(path, "holds code, which jobs would load in place of installed code", "Remove it from the kit")


def _modes(kit: Kit) -> Iterator[Problem]:
    """Checks that only the owner can read the key, the kit of a server or a site, and a site's kept files."""
    private = [*(kit.folder / "startup").glob("*.key")]
    if kit.kind != ADMIN:  # in a person's kit only the key is private
        private += [path for path in (kit.folder, kit.folder / KEPT) if path.exists()]
    for path in private:
        if _mode(path) & 0o077:
            mode = "700" if path.is_dir() else "600"
            yield Problem(path, f"is open to other users (mode {_mode(path):04o})", f"Run `chmod {mode} {path}`")
    for part in _parts(kit):
        for path in (part, *sorted(part.iterdir())):
            if _mode(path) & 0o022:
                yield Problem(path, f"can be changed by other users (mode {_mode(path):04o})", f"Run `chmod go-w {path}`")


def open_to_all(root: Path) -> list[Problem]:
    """Returns the first file or folder of a folder, itself included, that all users of the machine may change."""
    for folder, folders, names in os.walk(root):
        for path in (Path(folder), *(Path(folder, name) for name in sorted([*folders, *names]))):
            if not path.is_symlink() and _mode(path) & 0o002:
                what = f"can be changed by all users of this machine (mode {_mode(path):04o})"
                return [Problem(path, what, f"Run `chmod -R o-w {root}`")]
    return []


def _parts(kit: Kit) -> tuple[Path, Path]:
    return kit.folder / "startup", kit.folder / "local"


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)
