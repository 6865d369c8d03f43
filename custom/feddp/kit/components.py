"""Checks by name the classes that a kit makes FLARE build; the check imports and builds nothing."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nvflare.tool.deploy import deploy_common as flare

from feddp.errors import Problem
from feddp.kit.settings import BUILT, resources
from feddp.provision import AT_SERVER, COMPONENTS, DEPLOYER, GATE, ORPHAN, PRIVATE_FILES, REJOIN, RESTARTER, SETTINGS
from feddp.reading import shown
from feddp.sealing.kit import CLIENT, SERVER, Kit, components, read_json

_STORAGE = "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"
STATSD = "nvflare.fuel_opt.statsd.statsd_reporter.StatsDReporter"  # sends the server's scalars to a host of its choice
_OURS = {PRIVATE_FILES, DEPLOYER, ORPHAN}
# the classes that `nvflare provision` and `nvflare deploy prepare` write, without those that send logs or events; and ours
REVIEWED = {
    SERVER: _OURS
    | {
        GATE[SERVER],
        REJOIN[SERVER],
        AT_SERVER,
        "nvflare.app_common.job_schedulers.job_scheduler.DefaultJobScheduler",
        "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
        _STORAGE,
        "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
        flare.PASSTHROUGH_RESOURCE_MANAGER,
        flare.PROCESS_SERVER_LAUNCHER,
        flare.DOCKER_SERVER_LAUNCHER,
        flare.K8S_SERVER_LAUNCHER,
        STATSD,
    },
    CLIENT: _OURS
    | {
        GATE[CLIENT],
        REJOIN[CLIENT],
        flare.GPU_RESOURCE_MANAGER,
        flare.GPU_RESOURCE_CONSUMER,
        flare.PASSTHROUGH_RESOURCE_MANAGER,
        RESTARTER,
        flare.PROCESS_CLIENT_LAUNCHER,
        flare.DOCKER_CLIENT_LAUNCHER,
        flare.K8S_CLIENT_LAUNCHER,
    },
}
_CLASS_KEYS = ("path", "class_path", "name")  # FLARE takes the class from the first of these that exists


def component_problems(kit: Kit) -> list[Problem]:
    """Returns every unreviewed component of each resources file, and our components that the effective file lacks."""
    problems = []
    for path in resources(kit):
        content = read_json(path)
        listed = content.get("components", [])
        if not isinstance(listed, list):
            problems.append(Problem(path, "has components that are not a list", "Restore the kit's file"))
            listed = []
        named = [(component.get("id") if isinstance(component, Mapping) else "", component) for component in listed]
        named += [(key, content[key]) for key in BUILT[1:] if key in content]
        for name, component in named:
            reasons = unreviewed(component, REVIEWED[kit.kind], f"the component {name}")
            problems += [Problem(path, why, "Remove it from components") for why in reasons]
    path = kit.effective("resources.json")
    content = read_json(path)
    there = content.get("components")
    for key, value in SETTINGS[kit.kind].items():
        if content.get(key) != value:
            problems.append(Problem(path, f"lacks {key}", f"Write exactly: {json.dumps({key: value})}"))
    for number in (args["num_of_gpus"] for args in map(args_of, components(path)) if "num_of_gpus" in args):
        if type(number) is not int or number < 0:
            problems.append(Problem(path, f"has num_of_gpus {shown(number)}, which is not a number of GPUs", "Write 0 or more"))
    for demanded in COMPONENTS[kit.kind]:
        if not isinstance(there, list) or demanded not in there:
            what = f"lacks the component {demanded['id']}, {demanded['path']}"
            problems.append(Problem(path, what, f"Add exactly this to components: {json.dumps(demanded)}"))
    return problems


def args_of(component: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a component's arguments; none where they are not an object, which `unreviewed` refuses."""
    args = component.get("args")
    return args if isinstance(args, Mapping) else {}


def unreviewed(entry: Any, reviewed: Mapping[str, Any] | set[str], what: str) -> Iterator[str]:
    """Yields the reasons against an entry and against the entries in its arguments, which FLARE would build too."""
    if not isinstance(entry, Mapping):
        yield f"has {what}, which is not an object"
        return
    path = entry.get("path")
    if not isinstance(path, str):
        yield f"has {what} without a `path` that names its class"
    elif path not in reviewed:
        yield f"has {what}, of {path}, which is not a reviewed class"
    args = entry.get("args", {})
    if not isinstance(args, Mapping) or "class_attributes" in args:
        yield f"has {what} with arguments that are not a plain object"
        return
    for name, value in args.items():
        if isinstance(value, Mapping) and any(key in value for key in _CLASS_KEYS):
            yield from unreviewed(value, reviewed, f"{what}, {name}")
