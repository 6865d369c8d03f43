"""A kit's effective policy against the consortium's minimum. A hospital may edit its own files, and only ask for more."""

import logging
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from nvflare.apis.workspace import Workspace
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.security.security import COMMAND_CATEGORIES

from feddp.data.check import check as data_problems
from feddp.data.description import BadFile, Problem
from feddp.errors import FedDPError
from feddp.flare.configuration import SERVER_CLASSES, SITE_CLASSES
from feddp.flare.policy import SitePolicy
from feddp.jobs import SCOPE
from feddp.kit.containers import Containers
from feddp.kit.kit import CLIENT, SERVER, Kit, components, read_json
from feddp.provision import GATE, GUARD, LOGGING, NOBODY

FLARES_FILTERS = "nvflare.app_common.filters."
UPDATE = "feddp.flare.update_privacy.UpdatePrivacy (the README, 'Noise on what training changed')"
CARRIERS = {LOGGING: "logs", "nvflare.app_common.widgets.convert_to_fed_event.": "events"}
REVIEWED = {SERVER: frozenset(SERVER_CLASSES.values()), CLIENT: frozenset(SITE_CLASSES.values())}


def policy_problems(kit: Kit) -> list[Problem]:
    """Every deviation of the server's or a site's kit from the minimum; a site's data folder is checked as well."""
    problems: list[Problem] = []
    for rule in (_resources, _streamers, _authorization, _signatures, _containers, *([_privacy] if kit.kind == CLIENT else [])):
        try:
            problems += rule(kit)
        except BadFile as bad:
            problems.append(bad.problem)
    return list(dict.fromkeys(problems))  # a file that cannot be read is said once


def _resources(kit: Kit) -> list[Problem]:
    """The allow-list is enforced, names reviewed classes alone, and no log is streamed."""
    path = kit.effective("resources.json")
    said = read_json(path)
    problems = []
    if (mode := said.get("class_list_enforcement_mode")) != "enforce":
        remedy = 'Write "class_list_enforcement_mode": "enforce"'
        problems.append(Problem(path, f"does not enforce the allow-list (class_list_enforcement_mode is {mode!r})", remedy))
    listed = said.get("class_allow_list")
    if not isinstance(listed, list):
        problems.append(Problem(path, "has no class_allow_list, so FLARE's own wide one applies", "Put back the kit's list"))
    else:
        for strange in sorted({str(name) for name in listed} - REVIEWED[kit.kind]):
            problems.append(Problem(path, f"allows {strange}, which is not a reviewed class", "Take it off class_allow_list"))
    if said.get("allow_log_streaming") is not False:
        problems.append(Problem(path, "lets jobs stream the site's log", 'Write "allow_log_streaming": false'))
    if not any(_class_of(component) == GATE[kit.kind] for component in components(path)):
        remedy = f'Add {{"id": "cell_gate", "path": "{GATE[kit.kind]}", "args": {{}}}} to components'
        problems.append(Problem(path, "has no cell gate: whatever reaches FLARE's cells is answered", remedy))
    return problems


def _streamers(kit: Kit) -> list[Problem]:
    """No component of FLARE's that carries logs or events, in any of the files that FLARE reads components from."""
    extra = [p for part in ("startup", "local") for p in sorted((kit.folder / part).glob("*_resources.json"))]
    problems = []
    for path in (kit.effective("resources.json"), *extra):
        for component in components(path):
            if carried := [what for prefix, what in CARRIERS.items() if str(_class_of(component)).startswith(prefix)]:
                what = f"has the component {component.get('id')}, which carries {carried[0]} past every filter"
                problems.append(Problem(path, what, "Remove it from components"))
            elif _class_of(component) is None:  # FLARE would look for a class of its `name`, of whichever module
                what = f"has the component {component.get('id')} and does not say of which class it is"
                problems.append(Problem(path, what, "Write its `path`, or remove it from components"))
    return problems


def _class_of(component: Mapping[str, Any]) -> Any:
    """The class, by the keys in which FLARE looks for it first."""
    return component.get("path", component.get("class_path"))


def _authorization(kit: Kit) -> list[Problem]:
    """Nobody brings code, by job or by command. As FLARE reads it: a role's rule for everything stands for each right, and so
    does one for `*`, whatever is said of the right itself; a category's for each command in it, unless the command is named."""
    path = kit.effective("authorization.json")
    roles = read_json(path).get("permissions")
    if not isinstance(roles, Mapping) or not roles:
        return [Problem(path, "has no permissions", "Put back the kit's file")]
    problems = []
    for role, rights in roles.items():
        for right, what in NOBODY.items():
            rule = rights
            if isinstance(rights, Mapping):
                named = {" ".join(str(name).lower().split()): value for name, value in rights.items()}
                rule = named.get("*", named.get(right, named.get(COMMAND_CATEGORIES.get(right, ""), "none")))
            if not _nobody(rule):
                remedy = f'Write "{right}": "none" for {role}, among rights that are named one by one'
                problems.append(Problem(path, f"lets {role} {what} ({right}: {rule!r})", remedy))
    return problems


def _signatures(kit: Kit) -> list[Problem]:
    """A job is as the person who submitted it signed it, with a certificate of the project's root: FLARE's default."""
    path = kit.configuration
    if read_json(path).get("require_signed_jobs", True) is False:
        return [Problem(path, "takes jobs that nobody signed", "Take require_signed_jobs out")]
    return []


def _nobody(rule: Any) -> bool:
    """Whether every condition is FLARE's "none"; a rule of exceptions alone ("not ...") lets all others in."""
    conditions = rule if isinstance(rule, list) else [rule]
    return bool(conditions) and all(str(condition).strip().lower() in ("none", "no") for condition in conditions)


def _containers(kit: Kit) -> list[Problem]:
    """Where jobs run in containers, each gets an image, and what a site keeps outlives it."""
    containers = Containers.of(kit)
    return containers.problems(kit.kind) if containers else []


def _privacy(kit: Kit) -> list[Problem]:
    """The guard stands in every scope, our jobs' scope is there, and its properties and data are sound."""
    path = kit.folder / "local" / "privacy.json"
    if not path.exists():
        what = "is missing: FLARE would accept every scope, with no filter"
        return [Problem(path, what, "Put back the kit's file (the README, 'A hospital's policy')")]
    scopes = read_json(path).get("scopes")
    scopes = [scope for scope in scopes if isinstance(scope, Mapping)] if isinstance(scopes, list) else []
    problems = []
    if SCOPE not in [scope.get("name") for scope in scopes]:
        problems.append(Problem(path, f"has no scope {SCOPE}, under which our jobs run", f"Add a scope of the name {SCOPE}"))
    for scope in scopes:
        filters = scope.get("task_result_filters")
        outgoing = [entry for entry in (filters if isinstance(filters, list) else []) if _outgoing(entry)]
        guards = [entry.get("path") == GUARD for entry in outgoing]
        if not any(guards):
            what = f"scope {scope.get('name')} does not put the guard on what leaves"
            problems.append(Problem(path, what, f'Add {{"path": "{GUARD}"}} to its task_result_filters'))
        elif not guards[-1]:
            what = f"scope {scope.get('name')} has {outgoing[-1].get('path')} after the guard, which does not see what it sends"
            problems.append(Problem(path, what, "Put the guard last in task_result_filters"))
        problems += [
            Problem(path, f"has {entry['path']} on what leaves, which takes weights for differences", f"Put it into {UPDATE}")
            for entry in outgoing
            if str(entry.get("path")).startswith(FLARES_FILTERS)
        ]
        problems += _site(kit, path, scope)
    return problems or _unbuilt(kit, path)


def _unbuilt(kit: Kit, path: Path) -> list[Problem]:
    """What FLARE says where it cannot build a filter: started, the site would end every job for everybody."""
    logging.disable()  # FLARE would print, and log with a traceback, what is said here in a line
    try:
        with redirect_stdout(StringIO()):
            create_privacy_manager(Workspace(str(kit.folder)), names_only=False)
    except Exception as error:  # whatever a filter's class raises at its arguments
        why = " ".join(str(error).split())
        return [Problem(path, f"names a filter that FLARE cannot build ({why})", "Correct its `path` and `args`")]
    finally:
        logging.disable(logging.NOTSET)
    return []


def _outgoing(entry: Any) -> bool:
    """A filter on outgoing results, which is where FLARE puts one that names no direction, and not one that it leaves out."""
    if not isinstance(entry, Mapping) or entry.get("disabled") is True:
        return False
    return str(entry.get("direction") or "out").lower() in ("out", "inout")


def _site(kit: Kit, path: Path, scope: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with a scope's properties, or with the data that they name."""
    try:
        policy = SitePolicy.of(kit.name, scope.get("properties"), simulated=False)
    except FedDPError as error:
        return [Problem(path, f"scope {scope.get('name')}: {error}", "See the README, 'A hospital's policy'")]
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
    return data_problems(data)
