"""Compares a kit's effective policy with the consortium's minimum. A hospital may edit its files, but only to be stricter."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nvflare.lighter.constants import ProvFileName
from nvflare.security.security import COMMAND_CATEGORIES

from feddp.errors import BadFile, Problem
from feddp.flare.configuration import COMMUNICATION, INTERNAL, SERVER_CLASSES, SITE_CLASSES
from feddp.flare.own_connections import own_connections_problem
from feddp.kit.components import component_problems
from feddp.kit.containers import Containers, runtime
from feddp.kit.privacy import privacy_problems
from feddp.kit.settings import setting_problems, variable_problems
from feddp.provision import AUTHORIZATION, NOBODY
from feddp.reading import shown
from feddp.sealing.kit import ADMIN, CLIENT, SERVER, Kit, read_json

# FLARE's commands, and the two rights of jobs that belong to no category
RIGHTS = sorted({*COMMAND_CATEGORIES, "submit_job", "clone_job"} - {*NOBODY})
HERE = ("localhost", "127.0.0.1")
_EVERYBODY, _NOBODY = ("any", "all"), ("none", "no")
REVIEWED = {SERVER: frozenset(SERVER_CLASSES.values()), CLIENT: frozenset(SITE_CLASSES.values())}


def policy_problems(kit: Kit) -> list[Problem]:
    """Returns every deviation of a kit from the minimum, and the problems of a site's data folder."""
    rules = [setting_problems, variable_problems]
    if kit.kind != ADMIN:  # FLARE reads no policy from a person's kit
        rules += [_resources, component_problems, _communication, _authorization, _signatures, _containers]
    if kit.kind == CLIENT:
        rules.append(privacy_problems)
    problems: list[Problem] = []
    for rule in rules:
        try:
            problems += rule(kit)
        except BadFile as bad:
            problems.append(bad.problem)
    return list(dict.fromkeys(problems))  # several rules report the same unreadable file


def _resources(kit: Kit) -> list[Problem]:
    """Checks that the allow-list is enforced and names only reviewed classes, and that no log is streamed."""
    path = kit.effective("resources.json")
    content = read_json(path)
    problems = []
    if (mode := content.get("class_list_enforcement_mode")) != "enforce":
        remedy = 'Write "class_list_enforcement_mode": "enforce"'
        problems.append(Problem(path, f"does not enforce the allow-list (class_list_enforcement_mode is {mode!r})", remedy))
    listed = content.get("class_allow_list")
    if not isinstance(listed, list):
        what = "has no class_allow_list, so FLARE's own, broader list applies"
        problems.append(Problem(path, what, "Restore the kit's list"))
    else:
        for unknown in sorted({str(name) for name in listed} - REVIEWED[kit.kind]):
            what = f"allows {unknown}, which is not a reviewed class"
            problems.append(Problem(path, what, "Remove it from class_allow_list"))
    if content.get("allow_log_streaming") is not False:
        problems.append(Problem(path, "lets jobs stream the site's log", 'Write "allow_log_streaming": false'))
    return problems


def _communication(kit: Kit) -> list[Problem]:
    """Checks FLARE's settings of its streams and of the connections between the participant's own processes: with FLARE's own,
    no network gets through a line of 5 Mbit/s, and any user of the machine can claim to be the server, a site or a job."""
    path = kit.folder / "local" / ProvFileName.COMM_CONFIG
    content = read_json(path) if path.exists() else {}
    problems = []
    if lacking := {key: value for key, value in COMMUNICATION.items() if content.get(key) != value}:
        problems.append(Problem(path, "lacks settings of FLARE's streams that a slow line needs", _write(lacking)))
    if why := _own_connections(content.get("internal"), contained=runtime(kit) is not None):
        remedy = "Prepare the kit again with `nvflare deploy prepare`" if runtime(kit) else _write({"internal": INTERNAL})
        problems.append(Problem(path, why, remedy))
    return problems


def _own_connections(internal: Any, contained: bool) -> str:
    """Returns what is wrong with the connections between a participant's processes; containers have hosts of their own."""
    if why := own_connections_problem(internal):
        return why
    host = internal["resources"].get("host")
    return "" if host in HERE or contained else f"makes its jobs connect at {shown(host)}, which other machines can reach too"


def _write(settings: Mapping[str, Any]) -> str:
    return f"Write {json.dumps(settings)[1:-1]} into it"


def _authorization(kit: Kit) -> list[Problem]:
    """Checks that no role may bring code, by job or by command, and that none may do more than in a provisioned kit.

    In FLARE, one rule for a whole role, or for `*`, applies to each right, even if the right has its own rule. A category's
    rule applies to each command in it that has no rule of its own.
    """
    path = kit.effective("authorization.json")
    roles = read_json(path).get("permissions")
    if not isinstance(roles, Mapping) or not roles:
        return [Problem(path, "has no permissions", "Restore the kit's file")]
    problems: list[Problem] = []
    for role, rights in roles.items():
        remedy = f'Write "{{}}": "none" for {role}, and name its other rights one by one'
        found = [
            Problem(path, f"lets {role} {what} ({right}: {rule!r})", remedy.format(right))
            for right, what in NOBODY.items()
            if not _nobody(rule := _rule(rights, right)[1])
        ]
        problems += found or _more(path, role, rights)
    return problems


def _more(path: Path, role: str, rights: Any) -> Iterator[Problem]:
    """Yields the rights with which a role may do more than in a provisioned kit, such as read a site's files."""
    own = AUTHORIZATION["permissions"].get(_word(role), {})
    for right in RIGHTS:
        (name, rule), (_, most) = _rule(rights, right), _rule(own, right)
        if not _within(rule, most):
            remedy = f'Write "{name}": "{most}" for {role}, or "none"'
            yield Problem(path, f"gives {role} more than a kit does ({name}: {shown(rule)})", remedy)


def _rule(rights: Any, right: str) -> tuple[str, Any]:
    """Returns FLARE's rule for a right among those of a role, and its name there: the right's, its category's, or "*"."""
    named = {_word(name): value for name, value in rights.items()} if isinstance(rights, Mapping) else {"*": rights}
    name = next((name for name in ("*", right, COMMAND_CATEGORIES.get(right, "")) if name in named), right)
    return name, named.get(name, "none")


def _within(rule: Any, most: str) -> bool:
    """Whether a rule allows nobody whom `most`, the kit's, does not allow. Of a list, FLARE needs one condition alone."""
    if most in _EVERYBODY:
        return True
    return _nobody(rule) or {*map(_word, rule if isinstance(rule, list) else [rule])} <= {most, *_NOBODY}


def _word(text: Any) -> str:
    return " ".join(str(text).lower().split())


def _signatures(kit: Kit) -> list[Problem]:
    """Checks that jobs must be signed with a certificate of the project's root, FLARE's default."""
    path = kit.configuration
    if read_json(path).get("require_signed_jobs", True) is False:
        return [Problem(path, "accepts unsigned jobs", "Remove require_signed_jobs")]
    return []


def _nobody(rule: Any) -> bool:
    """Whether every condition is FLARE's "none". A rule with only exceptions ("not ...") allows everyone else."""
    conditions = rule if isinstance(rule, list) else [rule]
    return bool(conditions) and all(_word(condition) in _NOBODY for condition in conditions)


def _containers(kit: Kit) -> list[Problem]:
    """If jobs run in containers, checks that each has an image and that the files of a run outlive the container."""
    containers = Containers.of(kit)
    return containers.problems() if containers else []
