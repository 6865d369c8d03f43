"""A kit's effective policy against the consortium's minimum. A hospital may edit its own files, and only ask for more."""

from collections.abc import Mapping
from typing import Any

from nvflare.security.security import COMMAND_CATEGORIES

from feddp.errors import BadFile, Problem
from feddp.flare.configuration import SERVER_CLASSES, SITE_CLASSES
from feddp.kit.components import component_problems
from feddp.kit.containers import Containers
from feddp.kit.privacy import privacy_problems
from feddp.kit.settings import setting_problems, variable_problems
from feddp.provision import NOBODY
from feddp.sealing.kit import ADMIN, CLIENT, SERVER, Kit, read_json

REVIEWED = {SERVER: frozenset(SERVER_CLASSES.values()), CLIENT: frozenset(SITE_CLASSES.values())}


def policy_problems(kit: Kit) -> list[Problem]:
    """Every deviation of a kit from the minimum; a site's data folder is checked as well."""
    rules = [setting_problems, variable_problems]
    if kit.kind != ADMIN:  # FLARE reads no policy from a person's kit
        rules += [_resources, component_problems, _authorization, _signatures, _containers]
    if kit.kind == CLIENT:
        rules.append(privacy_problems)
    problems: list[Problem] = []
    for rule in rules:
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
    return problems


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
