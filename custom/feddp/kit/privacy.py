"""Checks a site's privacy.json: the guard is last on all results, and the other filters are reviewed and can be built."""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

from feddp.data.check import check as data_problems
from feddp.errors import BadFile, FedDPError, Problem
from feddp.flare.configuration import SCOPE
from feddp.flare.filters import PrivateTensorGuard
from feddp.flare.policy import SitePolicy
from feddp.flare.scopes import CHAINS, entries, filters_of, form_problems, ignored, scope_problems
from feddp.flare.update_privacy import UpdatePrivacy
from feddp.kit.components import unreviewed
from feddp.kit.containers import Containers
from feddp.kit.files import open_to_all
from feddp.provision import GUARD, MINIMUM
from feddp.reading import shown
from feddp.sealing.kit import Kit, read_json

UPDATE = "feddp.flare.update_privacy.UpdatePrivacy"
MECHANISMS: dict[str, type[FLComponent]] = {
    "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy": PercentilePrivacy,
    "nvflare.app_common.filters.svt_privacy.SVTPrivacy": SVTPrivacy,
}
# the filters that FLARE may build; the check builds no others
FILTERS: dict[str, type[FLComponent]] = {GUARD: PrivateTensorGuard, UPDATE: UpdatePrivacy, **MECHANISMS}
SEE = "See the documentation, 'A site's policy'"


def privacy_file(kit: Kit) -> Path:
    return kit.folder / "local" / "privacy.json"


def privacy_problems(kit: Kit) -> list[Problem]:
    """Returns the problems of the scopes, their filters and properties, and of the named data folders."""
    path = privacy_file(kit)
    if not path.exists():
        what = "is missing: FLARE would accept every scope, without filters"
        return [Problem(path, what, f"Restore the kit's file ({SEE})")]
    content = read_json(path)
    problems = [*form_problems(path, content), *ignored(path, content), *_default(path, content)]
    scopes = entries(content)
    if SCOPE not in [scope.get("name") for scope in scopes]:
        problems.append(Problem(path, f"has no scope {SCOPE}, which FedDP's jobs use", f"Add a scope with the name {SCOPE}"))
    for scope in scopes:
        if any(scope_problems(path, scope)):
            continue
        unreviewed = [*_unreviewed(path, scope)]
        problems += unreviewed or [*_guard(path, scope), *_unbuilt(path, scope)]
        problems += _site(kit, path, scope)
    return problems


def _default(path: Path, content: Mapping[str, Any]) -> Iterator[Problem]:
    """A kit has no default scope. Jobs of FedDP name theirs, so whoever wrote one expects another job."""
    default = content.get("default_scope")
    if default and default in [scope.get("name") for scope in entries(content)]:
        what = f"has the default_scope {shown(default)}: a job that names no scope would run under it"
        yield Problem(path, what, "Remove default_scope")


def _unreviewed(path: Path, scope: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields the filters of both chains that are not in FILTERS, under any of FLARE's keys for a class."""
    for chain in CHAINS:
        for why in (why for entry in filters_of(scope, chain) for why in unreviewed(entry, FILTERS, f"a filter in {chain}")):
            remedy = f"Remove it; allowed are {', '.join(FILTERS)}"
            yield Problem(path, f"scope {scope.get('name')} {why}", remedy)


def _guard(path: Path, scope: Mapping[str, Any]) -> Iterator[Problem]:
    """Checks that the guard is the last filter on results, and that `UpdatePrivacy` contains FLARE's mechanisms."""
    name = scope.get("name")
    outgoing = [entry["path"] for entry in filters_of(scope, CHAINS[0]) if _leaves(entry)]
    if GUARD not in outgoing:
        remedy = f'Add {{"path": "{GUARD}"}} to its task_result_filters'
        yield Problem(path, f"scope {name} does not apply the guard to results", remedy)
    elif outgoing[-1] != GUARD:
        what = f"scope {name} has {outgoing[-1]} after the guard, which cannot check its output"
        yield Problem(path, what, "Put the guard last in task_result_filters")
    for entry in outgoing:
        if entry in MECHANISMS:
            what = f"scope {name} applies {entry} to results directly; it would treat weights as differences"
            yield Problem(path, what, f"Put it into {UPDATE}; see the documentation, 'Add noise to what training changed'")


def _leaves(entry: Mapping[str, Any]) -> bool:
    """Whether FLARE applies the filter to outgoing results, the default direction, and does not skip it as disabled."""
    return entry.get("disabled") is not True and str(entry.get("direction") or "out").lower() in ("out", "inout")


def _unbuilt(path: Path, scope: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields the filters that refuse their arguments. A site with such a filter would end every job for all sites."""
    for entry in (entry for chain in CHAINS for entry in filters_of(scope, chain)):
        try:
            _build(entry)
        except (TypeError, ValueError, FedDPError) as error:
            why = " ".join(str(error).split())
            yield Problem(path, f"names a filter that FLARE cannot build ({why})", "Correct its `args`")


def _build(entry: Mapping[str, Any]) -> FLComponent:
    """Builds a filter, of which all classes are reviewed."""
    args = entry.get("args", {})
    nested = {name: _build(value) for name, value in args.items() if isinstance(value, Mapping) and "path" in value}
    return FILTERS[entry["path"]](**{**args, **nested})


def _site(kit: Kit, path: Path, scope: Mapping[str, Any]) -> list[Problem]:
    """Returns the problems of a scope's properties and of the data that they name."""
    name = scope.get("name")
    try:
        policy = SitePolicy.of(kit.name, scope.get("properties"), simulated=False)
    except FedDPError as error:
        return [Problem(path, f"scope {name}: {error}", SEE)]
    values = {word: attrgetter(word)(policy) for word in MINIMUM}
    below = [
        Problem(path, f"scope {name} is below the consortium's minimum: {word} is {values[word]}", f"Write at least {least}")
        for word, least in MINIMUM.items()
        if values[word] < least
    ]
    return below + _data(kit, path, policy)


def _data(kit: Kit, path: Path, policy: SitePolicy) -> list[Problem]:
    if not policy.data.is_absolute():
        return [Problem(path, f"names the data folder {policy.data}, which is not an absolute path", "Write an absolute path")]
    containers = Containers.of(kit)
    try:
        data = containers.here(policy.data) if containers else policy.data
    except BadFile as bad:
        return [bad.problem]
    if data is None:  # in the cluster; `feddp kit check` says that the data were not checked
        return []
    if not (data / "dataset.json").exists():
        named = f"`data` in {path}" if containers is None else f"a dataset's `source` in {containers.file}"
        return [Problem(data, "is not a site's folder: it has no dataset.json", f"Name the folder as {named}")]
    return open_to_all(data) + data_problems(data, named=False)
