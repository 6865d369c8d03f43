"""The form of a site's privacy.json. FLARE reads all its scopes for every job; if it cannot, the job ends for all sites.

So it does at a filter that cannot be built; `feddp kit check` alone builds them, because that takes torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feddp.errors import BadFile, Problem
from feddp.flare.documents import EXPANDED, expanded
from feddp.flare.policy import KEYS
from feddp.reading import is_name, shown
from feddp.sealing.kit import read_json

CHAINS = ("task_result_filters", "task_data_filters")
# FLARE ignores every other key of the file and of a scope; a word of the policy there would not be in force
_FILE = ("scopes", "default_scope", "components")
_SCOPE = ("name", "properties", *CHAINS)
_DIRECTIONS = ("in", "out", "inout")


def scopes_of(privacy: Path) -> dict[str, dict[str, Any]]:
    """Returns {name: scope} of a privacy.json.

    Raises:
        BadFile: the file cannot be read, or its form is wrong, in whichever scope.
    """
    content = read_json(privacy)
    for problem in form_problems(privacy, content):
        raise BadFile(problem)
    return {scope["name"]: scope for scope in content["scopes"]}


def form_problems(privacy: Path, content: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields everything in the file that FLARE cannot load, or that it ignores although it is a word of the policy."""
    yield from _misplaced(privacy, "the file", content)
    if place := expanded(content):
        yield Problem(privacy, f"{place} contains one of {', '.join(EXPANDED)}, which FLARE expands", "Write the value itself")
    if built := content.get("components"):
        for component in built if isinstance(built, list) else [built]:
            yield Problem(privacy, f"makes FLARE build {component!r}", "Remove it: no scope uses components")
    scopes = content.get("scopes")
    if not isinstance(scopes, list):
        yield Problem(privacy, "has no list of scopes", "Restore the provisioned file")
        return
    for scope in scopes:
        yield from scope_problems(privacy, scope)
    names = [scope.get("name") for scope in entries(content)]
    for name in dict.fromkeys(name for name in names if isinstance(name, str) and names.count(name) > 1):
        yield Problem(privacy, f"has the scope {name} twice", "Remove one")
    default = content.get("default_scope")
    if default and default not in names:
        yield Problem(privacy, f"has the default_scope {shown(default)}, but no scope of that name", "Remove default_scope")


def entries(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the scopes that have the form of one."""
    listed = content.get("scopes")
    return [scope for scope in listed if isinstance(scope, Mapping)] if isinstance(listed, list) else []


def filters_of(scope: Mapping[str, Any], chain: str) -> Any:
    """Returns the filters of one of CHAINS; FLARE takes null for none."""
    return scope.get(chain) or []


def scope_problems(privacy: Path, scope: Any) -> Iterator[Problem]:
    """Yields the problems of one entry of `scopes`."""
    if not isinstance(scope, Mapping):
        yield Problem(privacy, f"has {shown(scope)} among its scopes", "Write an object with name and properties, or remove it")
        return
    name = scope.get("name")
    if not isinstance(name, str) or not name:
        yield Problem(privacy, f"has a scope whose name is {shown(name)}", "Write a name")
    where = f"scope {name if is_name(name) else shown(name)}"
    yield from _misplaced(privacy, where, scope)
    properties = scope.get("properties", {})
    if not isinstance(properties, Mapping):
        what = f"{where}: privacy.json's properties are {shown(properties)}"
        yield Problem(privacy, what, "Write an object of names and values")
    for chain in CHAINS:
        filters = filters_of(scope, chain)
        if not isinstance(filters, list) or not all(isinstance(entry, Mapping) for entry in filters):
            yield Problem(privacy, f"{where}: its {chain} are not a list of objects", "Correct them")
            continue
        for direction in (entry.get("direction") for entry in filters):
            if direction and (not isinstance(direction, str) or direction.lower() not in _DIRECTIONS):
                what = f"{where}: a filter in {chain} has the direction {shown(direction)}"
                yield Problem(privacy, what, f"Write one of {', '.join(_DIRECTIONS)}, or remove it")


def _misplaced(privacy: Path, where: str, content: Mapping[str, Any]) -> Iterator[Problem]:
    for key in sorted(content.keys() & KEYS):
        what = f"{where} has the key {shown(key)}, which FLARE ignores"
        yield Problem(privacy, what, "Write it into the `properties` of a scope")


def ignored(privacy: Path, content: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields the other keys that FLARE ignores: remarks, or misspelt words."""
    scopes = entries(content)
    named = [("the file", content, _FILE), *((f"scope {shown(scope.get('name'))}", scope, _SCOPE) for scope in scopes)]
    for where, entry, known in named:
        for key in sorted(entry.keys() - {*known, *KEYS}):
            yield Problem(privacy, f"{where} has the key {shown(key)}, which FLARE ignores", "Remove it")
