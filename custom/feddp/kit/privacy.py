"""A site's privacy.json: the guard stands on all that leaves, and what else stands there is on the list and can be built."""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

from feddp.data.check import check as data_problems
from feddp.errors import BadFile, FedDPError, Problem
from feddp.flare.filters import PrivateTensorGuard
from feddp.flare.policy import SitePolicy
from feddp.flare.update_privacy import UpdatePrivacy
from feddp.jobs.folder import SCOPE
from feddp.kit.components import strangers
from feddp.kit.containers import Containers
from feddp.kit.files import open_to_all
from feddp.provision import GUARD, MINIMUM
from feddp.sealing.kit import Kit, read_json

UPDATE = "feddp.flare.update_privacy.UpdatePrivacy"
MECHANISMS: dict[str, type[FLComponent]] = {
    "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy": PercentilePrivacy,
    "nvflare.app_common.filters.svt_privacy.SVTPrivacy": SVTPrivacy,
}
# the filters of which FLARE may build any; the check builds these and no other
FILTERS: dict[str, type[FLComponent]] = {GUARD: PrivateTensorGuard, UPDATE: UpdatePrivacy, **MECHANISMS}
CHAINS = ("task_result_filters", "task_data_filters")
SEE = "See the README, 'A hospital's policy'"


def privacy_file(kit: Kit) -> Path:
    return kit.folder / "local" / "privacy.json"


def scopes(path: Path) -> list[Mapping[str, Any]]:
    """BadFile where the file cannot be read."""
    listed = read_json(path).get("scopes")
    return [scope for scope in listed if isinstance(scope, Mapping)] if isinstance(listed, list) else []


def privacy_problems(kit: Kit) -> list[Problem]:
    """What is wrong with the scopes, their filters and properties, and with the data that these name."""
    path = privacy_file(kit)
    if not path.exists():
        what = "is missing: FLARE would accept every scope, with no filter"
        return [Problem(path, what, f"Put back the kit's file ({SEE})")]
    problems = []
    listed = read_json(path).get("components") or []
    for component in listed if isinstance(listed, list) else [listed]:
        problems.append(Problem(path, f"has FLARE build {component!r}", "Remove it: no scope uses components"))
    if SCOPE not in [scope.get("name") for scope in scopes(path)]:
        problems.append(Problem(path, f"has no scope {SCOPE}, under which our jobs run", f"Add a scope of the name {SCOPE}"))
    for scope in scopes(path):
        strange = [*_strangers(path, scope)]
        problems += strange or [*_guard(path, scope), *_unbuilt(path, scope)]
        problems += _site(kit, path, scope)
    return problems


def _chain(scope: Mapping[str, Any], name: str) -> list[Any]:
    listed = scope.get(name)
    return listed if isinstance(listed, list) else []


def _strangers(path: Path, scope: Mapping[str, Any]) -> Iterator[Problem]:
    """Filters that are not on the list, by whichever of FLARE's words they are named, in whichever chain."""
    for chain in CHAINS:
        for why in (why for entry in _chain(scope, chain) for why in strangers(entry, FILTERS, f"a filter in {chain}")):
            remedy = f"Take it out; there may be {', '.join(FILTERS)}"
            yield Problem(path, f"scope {scope.get('name')} {why}", remedy)


def _guard(path: Path, scope: Mapping[str, Any]) -> Iterator[Problem]:
    """The guard is the last on what leaves, and FLARE's mechanisms are in `UpdatePrivacy`."""
    name = scope.get("name")
    outgoing = [entry["path"] for entry in _chain(scope, CHAINS[0]) if _leaves(entry)]
    if GUARD not in outgoing:
        remedy = f'Add {{"path": "{GUARD}"}} to its task_result_filters'
        yield Problem(path, f"scope {name} does not put the guard on what leaves", remedy)
    elif outgoing[-1] != GUARD:
        what = f"scope {name} has {outgoing[-1]} after the guard, which does not see what it sends"
        yield Problem(path, what, "Put the guard last in task_result_filters")
    for entry in outgoing:
        if entry in MECHANISMS:
            what = f"scope {name} has {entry} on what leaves, which takes weights for differences"
            yield Problem(path, what, f"Put it into {UPDATE} (the README, 'Noise on what training changed')")


def _leaves(entry: Mapping[str, Any]) -> bool:
    """A filter on outgoing results, which is where FLARE puts one that names no direction, and not one that it leaves out."""
    return entry.get("disabled") is not True and str(entry.get("direction") or "out").lower() in ("out", "inout")


def _unbuilt(path: Path, scope: Mapping[str, Any]) -> Iterator[Problem]:
    """What a filter says of its arguments: started, the site would end every job for everybody."""
    for entry in (entry for chain in CHAINS for entry in _chain(scope, chain)):
        try:
            _build(entry)
        except (TypeError, ValueError, FedDPError) as error:
            why = " ".join(str(error).split())
            yield Problem(path, f"names a filter that FLARE cannot build ({why})", "Correct its `args`")


def _build(entry: Mapping[str, Any]) -> FLComponent:
    """A filter, all of whose classes are on the list."""
    args = entry.get("args", {})
    nested = {name: _build(value) for name, value in args.items() if isinstance(value, Mapping) and "path" in value}
    return FILTERS[entry["path"]](**{**args, **nested})


def _site(kit: Kit, path: Path, scope: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with a scope's properties, or with the data that they name."""
    name = scope.get("name")
    try:
        policy = SitePolicy.of(kit.name, scope.get("properties"), simulated=False)
    except FedDPError as error:
        return [Problem(path, f"scope {name}: {error}", SEE)]
    said = {word: attrgetter(word)(policy) for word in MINIMUM}
    below = [
        Problem(path, f"scope {name} is below the consortium's minimum: {word} is {said[word]}", f"Write at least {least}")
        for word, least in MINIMUM.items()
        if said[word] < least
    ]
    return below + _data(kit, path, policy)


def _data(kit: Kit, path: Path, policy: SitePolicy) -> list[Problem]:
    if not policy.data.is_absolute():
        return [Problem(path, f"names the data by {policy.data}, which is no whole path", "Write it from the root on")]
    containers = Containers.of(kit)
    try:
        data = containers.here(policy.data) if containers else policy.data
    except BadFile as bad:
        return [bad.problem]
    if data is None:  # in the cluster; `feddp kit check` says that nobody looked
        return []
    if not (data / "dataset.json").exists():
        named = f"`data` in {path}" if containers is None else f"a dataset's `source` in {containers.file}"
        return [Problem(data, "is not a site's folder: it has no dataset.json", f"Name the folder as {named}")]
    return open_to_all(data) + data_problems(data)
