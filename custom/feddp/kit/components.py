"""The classes that a kit may have FLARE build, told by their names: nothing here is imported or built to find out."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nvflare.tool.deploy import deploy_common as flare

from feddp.errors import Problem
from feddp.kit.settings import BUILT, resources
from feddp.provision import AT_SERVER, COMPONENTS, DEPLOYER, GATE, PRIVATE_FILES, SETTINGS
from feddp.sealing.kit import CLIENT, SERVER, Kit, read_json

_STORAGE = "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"
_OURS = {PRIVATE_FILES, DEPLOYER}
# what `nvflare provision` and `nvflare deploy prepare` write, less what carries logs or events out; and ours
REVIEWED = {
    SERVER: _OURS
    | {
        GATE[SERVER],
        AT_SERVER,
        "nvflare.app_common.job_schedulers.job_scheduler.DefaultJobScheduler",
        "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
        _STORAGE,
        "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
        flare.PASSTHROUGH_RESOURCE_MANAGER,
        flare.PROCESS_SERVER_LAUNCHER,
        flare.DOCKER_SERVER_LAUNCHER,
        flare.K8S_SERVER_LAUNCHER,
    },
    CLIENT: _OURS
    | {
        GATE[CLIENT],
        flare.GPU_RESOURCE_MANAGER,
        flare.GPU_RESOURCE_CONSUMER,
        flare.PASSTHROUGH_RESOURCE_MANAGER,
        flare.PROCESS_CLIENT_LAUNCHER,
        flare.DOCKER_CLIENT_LAUNCHER,
        flare.K8S_CLIENT_LAUNCHER,
    },
}
_CLASS_KEYS = ("path", "class_path", "name")  # in which FLARE looks for a class, the first that is there


def component_problems(kit: Kit) -> list[Problem]:
    """Every component that is not on the list, in each file of resources, and those of ours that the one in force lacks."""
    problems = []
    for path in resources(kit):
        said = read_json(path)
        listed = said.get("components", [])
        if not isinstance(listed, list):
            problems.append(Problem(path, "has components that are no list", "Put back the kit's file"))
            listed = []
        named = [(component.get("id") if isinstance(component, Mapping) else "", component) for component in listed]
        named += [(key, said[key]) for key in BUILT[1:] if key in said]
        for name, component in named:
            strange = strangers(component, REVIEWED[kit.kind], f"the component {name}")
            problems += [Problem(path, why, "Remove it from components") for why in strange]
    path = kit.effective("resources.json")
    said = read_json(path)
    there = said.get("components")
    for key, value in SETTINGS[kit.kind].items():
        if said.get(key) != value:
            problems.append(Problem(path, f"lacks {key}", f"Write, to the letter: {json.dumps({key: value})}"))
    for demanded in COMPONENTS[kit.kind]:
        if not isinstance(there, list) or demanded not in there:
            what = f"lacks the component {demanded['id']}, {demanded['path']}"
            problems.append(Problem(path, what, f"Add to components, to the letter: {json.dumps(demanded)}"))
    return problems


def strangers(entry: Any, reviewed: Mapping[str, Any] | set[str], what: str) -> Iterator[str]:
    """Why FLARE is not to build an entry, or one nested in its arguments, as FLARE would go through them."""
    if not isinstance(entry, Mapping):
        yield f"has {what}, which is no object"
        return
    path = entry.get("path")
    if not isinstance(path, str):
        yield f"has {what} and does not say of which class it is by a `path`"
    elif path not in reviewed:
        yield f"has {what}, of {path}, which is no reviewed class"
    args = entry.get("args", {})
    if not isinstance(args, Mapping) or "class_attributes" in args:
        yield f"has {what} with arguments that are no plain object"
        return
    for name, value in args.items():
        if isinstance(value, Mapping) and any(key in value for key in _CLASS_KEYS):
            yield from strangers(value, reviewed, f"{what}, {name}")
