"""Files in which a hospital writes settings for FLARE: none of them names code, and none says what no kit says.

FLARE expands what stands in braces, from the file itself and from the process's environment, before it reads any of it, and
Python's logging calls what its configuration names. So both are told by their form, and nothing is expanded or called here.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.comm_config import VarName
from nvflare.fuel.utils.log_utils import default_log_dict

from feddp.errors import Problem
from feddp.kit.containers import runtime
from feddp.kit.templates import Section, deviations, shape
from feddp.sealing.kit import ADMIN, CLIENT, SERVER, Kit, read_json

RESOURCES = {
    SERVER: Section.LOCAL_SERVER_RESOURCES,
    CLIENT: Section.LOCAL_CLIENT_RESOURCES,
    ADMIN: Section.DEFAULT_ADMIN_RESOURCES,
}
POLICIES = ("class_list_enforcement_mode", "class_allow_list", "allow_log_streaming")  # `kit.minimum`'s
BUILT = ("components", "snapshot_persistor", "app_validator")  # what FLARE makes objects of: `kit.components`'s
SCHEMES = ("tcp", "grpc", "http")
HERE = ("localhost", "127.0.0.1")
_COMMUNICATION = {name for key, name in vars(VarName).items() if key.isupper()} - {VarName.COMM_DRIVER_PATH}


def resources(kit: Kit) -> list[Path]:
    """Those of the kit's files of resources that are there: FLARE reads the hospital's, or else the default."""
    names = ("resources.json", "resources.json.default", "relay__resources.json")
    return [path for name in names if (path := kit.folder / "local" / name).exists()]


def setting_problems(kit: Kit) -> list[Problem]:
    """What is wrong with the settings in local/. BadFile where one of the files cannot be read."""
    problems = []
    for path in resources(kit):
        said = {key: value for key, value in read_json(path).items() if key not in (*POLICIES, *BUILT)}
        section = Section.RELAY_RESOURCES_JSON if path.name.startswith("relay") else RESOURCES[kit.kind]
        form = {key: value for key, value in shape(section).items() if key not in (*POLICIES, *BUILT)}
        problems += [Problem(path, what, "Take it out") for what in deviations(said, form, exact=False)]
    logs = dict.fromkeys(("log_config.json", "log_config.json.default"), _logging)
    communication = partial(_communication, contained=runtime(kit) is not None)
    rules: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {"comm_config.json": communication, **logs}
    for name, rule in rules.items():
        path = kit.folder / "local" / name
        if path.exists():
            problems += [Problem(path, what, "Put back the kit's file") for what in rule(read_json(path))]
    return problems


def variable_problems(kit: Kit) -> list[Problem]:
    """What FLARE would expand. BadFile where one of the files cannot be read."""
    problems = []
    for path in (*resources(kit), kit.configuration, kit.folder / "local" / "privacy.json"):
        words = _expanded(read_json(path)) if path.exists() else ()
        problems += [Problem(path, f"has {word}, which FLARE would replace", "Write what is meant") for word in words]
    return problems


def _expanded(said: Any) -> Iterator[str]:
    """Every word in which FLARE's configurator would replace a variable."""
    if isinstance(said, dict):
        for key, value in said.items():
            yield from (repr(key) for _ in range(key.startswith("@")))
            yield from _expanded(value)
    elif isinstance(said, list):
        for value in said:
            yield from _expanded(value)
    elif isinstance(said, str) and ("{" in said or "}" in said):
        yield repr(said)


def _communication(said: dict[str, Any], contained: bool) -> Iterator[str]:
    """FLARE's communication: drivers of its own alone, and no connection that goes past the server."""
    form = dict.fromkeys(_COMMUNICATION, "any") | shape(Section.COMM_CONFIG)
    yield from deviations(said, form, exact=False)
    if said.get(VarName.ALLOW_ADHOC_CONNS, False) is not False:
        yield f"has {VarName.ALLOW_ADHOC_CONNS}: others could connect to this participant past the server"
    internal = said.get("internal")
    scheme = internal.get("scheme", SCHEMES[0]) if isinstance(internal, dict) else SCHEMES[0]
    if scheme not in SCHEMES:
        yield f"has the scheme {scheme!r}, which is none of {', '.join(SCHEMES)}"
    listening = internal.get("resources") if isinstance(internal, dict) else None
    host = listening.get("host", HERE[0]) if isinstance(listening, dict) else HERE[0]
    if host not in HERE and not contained:  # whoever connects there says by himself which of the site's processes he is
        yield f"has its jobs connect at {host!r}, where others than this machine's processes can"


def _logging(said: dict[str, Any]) -> Iterator[str]:
    """Classes and objects that FLARE's own log configuration does not name, and files outside the kit."""
    known = set(_pairs(default_log_dict))
    for key, value in _pairs(said):
        called = key in ("()", "class", ".") or "://" in value
        if called and (key, value) not in known:
            yield f"names {value!r}, which Python would load or call"
        if key == "filename" and (key, value) not in known:  # under another name it may be code, or a setting, to who reads it
            yield f"has the file {value!r}, which is no log of FLARE's"


def _pairs(said: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every word, with the key under which it stands, alone or in a list."""
    if isinstance(said, dict):
        for name, value in said.items():
            yield from _pairs(value, "." if key == "." else name)
    elif isinstance(said, list):
        for value in said:
            yield from _pairs(value, key)
    else:
        yield key, str(said)
