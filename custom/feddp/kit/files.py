"""Which files lie in a kit, and who may read or change them. FLARE finds files by name: one that no kit has may be code."""

import os
import stat
from collections.abc import Iterator
from importlib.machinery import all_suffixes
from pathlib import Path

from nvflare.fuel.utils.config import ConfigFormat

from feddp.errors import Problem
from feddp.sealing.kit import ADMIN, CLIENT, SERVER, Kit

_OWN = ("resources.json", "authorization.json", "log_config.json")
_SITES = {name + end for name in _OWN for end in ("", ".default")}
_SITES |= {"comm_config.json", "study_runtime.yaml", "privacy.json.sample"}
LOCAL = {
    SERVER: _SITES,
    CLIENT: _SITES | {"privacy.json", "relay__resources.json"},
    ADMIN: {"resources.json", "resources.json.default"},
}
# FLARE looks for these in the kit's folder and in all folders below, in any order, under each of its extensions
_STEMS = ("fed_client", "fed_server", "resources", "comm_config")
SOUGHT = {stem + extension for stem in _STEMS for extension in ConfigFormat.extensions()}
KEPT = "feddp"  # the folder of the site's own tensors and metrics of single images
FOLDERS = ("startup", "local", "transfer", "helm_chart", KEPT)  # of a kit, prepared and used; a job's has an id for its name


def links(kit: Kit) -> list[Problem]:
    """Links in a kit's two folders, which lead out of it: nothing of theirs is read."""
    found = [path for part in _parts(kit) for path in (part, *sorted(part.iterdir())) if path.is_symlink()]
    return [Problem(path, "is a link", "Put the file itself in its place") for path in found]


def file_problems(kit: Kit) -> list[Problem]:
    """Files that no kit has, and modes that let others than the owner read or change what is in one."""
    return [*_strangers(kit), *_shadows(kit), *_importable(kit.folder), *_modes(kit)]


def _strangers(kit: Kit) -> Iterator[Problem]:
    for path in sorted((kit.folder / "local").iterdir()):
        if path.name == "custom":
            yield Problem(path, "holds code of its own, which FLARE loads when it starts", "Remove it")
        elif path.name not in LOCAL[kit.kind]:
            yield Problem(path, "is no file of a kit; FLARE may read it as configuration", "Take it out of local/")


def _shadows(kit: Kit) -> Iterator[Problem]:
    """FLARE takes the first file of a name that it comes upon, for the settings that its processes ask for by name."""
    own = {str(part) for part in _parts(kit)}
    for folder, _, names in os.walk(kit.folder):
        if folder not in own:
            for name in sorted(SOUGHT.intersection(names)):
                what = "may be read by FLARE in place of the kit's own file"
                yield Problem(Path(folder, name), what, "Take it out of the kit")


def _importable(folder: Path) -> Iterator[Problem]:
    """Jobs are started as `python -m` in the kit's folder: Python looks there first for each module."""
    suffixes = tuple(all_suffixes())
    beside = sorted(folder.iterdir())
    # Python imports from any folder beside the process, with or without an __init__.py; but for those of a kit, which hold none
    found = [path for path in beside if path.is_dir() and path.name.isidentifier() and path.name not in FOLDERS]
    within = [path for name in FOLDERS if (folder / name).is_dir() for path in sorted((folder / name).iterdir())]
    for path in [*found, *(path for path in (*beside, *within) if path.name.endswith(suffixes))]:
        yield Problem(path, "holds code, which jobs would load in place of what is installed", "Take it out of the kit")


def _modes(kit: Kit) -> Iterator[Problem]:
    """The key is its owner's; so are the server's and a site's kit as a whole, and what a site keeps."""
    private = [*(kit.folder / "startup").glob("*.key")]
    if kit.kind != ADMIN:  # a person's holds no more than a key that is private
        private += [path for path in (kit.folder, kit.folder / KEPT) if path.exists()]
    for path in private:
        if _mode(path) & 0o077:
            mode = "700" if path.is_dir() else "600"
            yield Problem(path, f"is open to others than its owner (mode {_mode(path):04o})", f"chmod {mode} {path}")
    for part in _parts(kit):
        for path in (part, *sorted(part.iterdir())):
            if _mode(path) & 0o022:
                yield Problem(path, f"can be changed by others than its owner (mode {_mode(path):04o})", f"chmod go-w {path}")


def open_to_all(data: Path) -> list[Problem]:
    """A data folder, or something in it, that everybody on the machine may change: images, masks, and who is to test."""
    for folder, folders, names in os.walk(data):
        for path in (Path(folder), *(Path(folder, name) for name in sorted([*folders, *names]))):
            if not path.is_symlink() and _mode(path) & 0o002:
                what = f"can be changed by everybody on this machine (mode {_mode(path):04o})"
                return [Problem(path, what, f"chmod -R o-w {data}")]
    return []


def _parts(kit: Kit) -> tuple[Path, Path]:
    return kit.folder / "startup", kit.folder / "local"


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)
