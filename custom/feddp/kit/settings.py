"""Checks the files with a hospital's settings for FLARE: they may not name code or settings that no kit has.

Before FLARE reads such a file it expands text in braces, from the file and from the process's environment. Python's logging
calls the names in its configuration. Therefore this check looks only at the form; it expands and calls nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.comm_config import VarName
from nvflare.fuel.utils.log_utils import default_log_dict

from feddp.errors import Problem
from feddp.kit.templates import Section, deviations, shape
from feddp.sealing.kit import ADMIN, CLIENT, SERVER, Kit, read_json

RESOURCES = {
    SERVER: Section.LOCAL_SERVER_RESOURCES,
    CLIENT: Section.LOCAL_CLIENT_RESOURCES,
    ADMIN: Section.DEFAULT_ADMIN_RESOURCES,
}
POLICIES = ("class_list_enforcement_mode", "class_allow_list", "allow_log_streaming")  # `kit.minimum` checks them
BUILT = ("components", "snapshot_persistor", "app_validator")  # FLARE builds objects from them; `kit.components` checks them
_COMMUNICATION = {name for key, name in vars(VarName).items() if key.isupper()} - {VarName.COMM_DRIVER_PATH}


def resources(kit: Kit) -> list[Path]:
    """Returns the kit's existing resources files. FLARE reads the hospital's; without it, the default."""
    names = ("resources.json", "resources.json.default", "relay__resources.json")
    return [path for name in names if (path := kit.folder / "local" / name).exists()]


def setting_problems(kit: Kit) -> list[Problem]:
    """Returns the problems of the settings in local/; raises BadFile if a file cannot be read."""
    problems = []
    for path in resources(kit):
        content = {key: value for key, value in read_json(path).items() if key not in (*POLICIES, *BUILT)}
        section = Section.RELAY_RESOURCES_JSON if path.name.startswith("relay") else RESOURCES[kit.kind]
        form = {key: value for key, value in shape(section).items() if key not in (*POLICIES, *BUILT)}
        problems += [Problem(path, what, "Remove it") for what in deviations(content, form, exact=False)]
    logs = dict.fromkeys(("log_config.json", "log_config.json.default"), _logging)
    rules: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {"comm_config.json": _communication, **logs}
    for name, rule in rules.items():
        path = kit.folder / "local" / name
        if path.exists():
            problems += [Problem(path, what, "Restore the kit's file") for what in rule(read_json(path))]
    return problems


def variable_problems(kit: Kit) -> list[Problem]:
    """Returns the texts that FLARE would expand; raises BadFile if a file cannot be read."""
    problems = []
    for path in (*resources(kit), kit.configuration, kit.folder / "local" / "privacy.json"):
        words = _expanded(read_json(path)) if path.exists() else ()
        problems += [Problem(path, f"has {word}, which FLARE would expand", "Write the value itself") for word in words]
    return problems


def _expanded(content: Any) -> Iterator[str]:
    """Yields every text in which FLARE's configurator would expand a variable."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from (repr(key) for _ in range(key.startswith("@")))
            yield from _expanded(value)
    elif isinstance(content, list):
        for value in content:
            yield from _expanded(value)
    elif isinstance(content, str) and ("{" in content or "}" in content):
        yield repr(content)


def _communication(content: dict[str, Any]) -> Iterator[str]:
    """Checks FLARE's communication: only its own drivers, and no connections that bypass the server. `kit.minimum` checks the
    values that every kit has."""
    form = dict.fromkeys(_COMMUNICATION, "any") | shape(Section.COMM_CONFIG)
    yield from deviations(content, form, exact=False)
    if content.get(VarName.ALLOW_ADHOC_CONNS, False) is not False:
        yield f"has {VarName.ALLOW_ADHOC_CONNS}: others could connect to this participant without the server"


def _logging(content: dict[str, Any]) -> Iterator[str]:
    """Yields classes and objects that FLARE's own log configuration does not name, and files outside the kit."""
    known = set(_pairs(default_log_dict))
    for key, value in _pairs(content):
        called = key in ("()", "class", ".") or "://" in value
        if called and (key, value) not in known:
            yield f"names {value!r}, which Python would load or call"
        if key == "filename" and (key, value) not in known:  # a program may read a log with another name as code or settings
            yield f"has the file {value!r}, which is not one of FLARE's logs"


def _pairs(content: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields (key, value) of every value, also of the values in a list."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield from _pairs(value, "." if key == "." else name)
    elif isinstance(content, list):
        for value in content:
            yield from _pairs(value, key)
    else:
        yield key, str(content)
