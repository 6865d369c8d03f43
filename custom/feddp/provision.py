"""FedDP's part of every participant's kit: the allow-list, the authorization and each site's policy.

The consortium's minimum is defined here once: `SitePolicyBuilder` writes it into new kits, `feddp.kit` checks kits against it.
"""

import json
import os
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import AdminCommandNames
from nvflare.lighter.constants import CtxKey, PropKey, ProvFileName
from nvflare.lighter.entity import Participant, Project
from nvflare.lighter.spec import Builder, ProvisionContext

from feddp.data.names import alike, require_name_of_site
from feddp.errors import InputError, PolicyError
from feddp.files import write_json, write_text
from feddp.flare.configuration import COMMUNICATION, INTERNAL, SCOPE, SERVER_CLASSES, SITE_CLASSES
from feddp.flare.policy import SitePolicy
from feddp.flare.private_files import OTHERS
from feddp.flare.service import units
from feddp.reading import PLAIN_NAME, is_plain_name, shown
from feddp.sealing.kit import CLIENT, SERVER

GUARD = "feddp.flare.filters.PrivateTensorGuard"
RESOURCES = "resources.json.default"
DEPLOYER = "feddp.flare.admission.AdmittingDeployer"
AT_SERVER = "feddp.flare.admission.AdmittedApp"
LOGGING = "nvflare.app_common.logging."  # FLARE's components that send and receive a job's log; no filter sees it
PRIVATE_FILES = "feddp.flare.private_files.PrivateFiles"
# by kind of participant: the component that refuses messages to its cells that a federation does not need
GATE = {SERVER: "feddp.flare.gate.ServerGate", CLIENT: "feddp.flare.gate.SiteGate"}
ORPHAN = "feddp.flare.orphan.EndsWithParent"
# by kind of participant: the component with which a client that was started again takes part in running jobs again
REJOIN = {SERVER: "feddp.flare.participants.Participants", CLIENT: "feddp.flare.unfinished.Unfinished"}
RESTARTER = "feddp.flare.launcher.JobRestarter"
# by kind of kit: our components, in addition to FLARE's; `feddp kit check` requires each of them exactly as written here
COMPONENTS = {
    kind: [
        {"id": "private_files", "path": PRIVATE_FILES, "args": {}},
        {"id": "cell_gate", "path": gate, "args": {}},
        {"id": "app_deployer", "path": DEPLOYER, "args": {}},
        {"id": "orphan", "path": ORPHAN, "args": {}},
        {"id": "rejoin", "path": REJOIN[kind], "args": {}},
    ]
    for kind, gate in GATE.items()
}
COMPONENTS[CLIENT] += [{"id": "job_restarter", "path": RESTARTER, "args": {}}]
# by kind of kit: further top-level keys of resources.json, which `feddp kit check` requires exactly. FLARE's server validates
# its own app of a job with `app_validator`; our deployer does not see that app
SETTINGS: dict[str, dict[str, Any]] = {SERVER: {"app_validator": {"path": AT_SERVER, "args": {}}}, CLIENT: {}}
# a policy below these values reveals single images or one site's contribution; `feddp kit check` refuses it
MINIMUM = {"min_images": 5, "std_images": 5, "bounds.batch": 2, "bounds.min_sites": 2}
# the rights that no role has, and what they would allow. A log's configuration names classes and functions that Python builds
# and calls, with any arguments
_CODE = "bring code of their own"
NOBODY = {
    "byoc": _CODE,
    "server-predeployed-flwr": _CODE,
    AdminCommandNames.CONFIGURE_JOB_LOG: _CODE,
    AdminCommandNames.CONFIGURE_SITE_LOG: _CODE,
    AdminCommandNames.CALL: "call into a site's components",
    AdminCommandNames.SHOW_ERRORS: "read a site's errors",
}
POLICY = "policy"  # the key of a hospital's properties in the project file
CERTIFICATES = "cert.json"  # FLARE's file in its state folder, with all private keys that it created
STORAGE = "storage"  # the key of the server's folder for jobs and their results

# FLARE's rights: a category or a command, and who has it. `o:site`: persons of the site's organisation; `n:submitter`: the
# person who submitted the job. A right that is not named is denied; a command's rule has priority over its category's. Only
# a hospital's own org_admin may access its files and processes.
_DENIED = dict.fromkeys(NOBODY, "none")
_OWN_SITE = {"operate": "o:site", "shell_commands": "o:site"}
# a running job tells how it stands, with the numbers of its results (`feddp watch`), to those who may download these
_TOLD = str(AdminCommandNames.SHOW_STATS)
_ANY_JOB = dict.fromkeys(("submit_job", "clone_job", "manage_job", "download_job", _TOLD), "any")
_OWN_JOB = {"submit_job": "any"} | dict.fromkeys(("clone_job", "manage_job", "download_job", _TOLD), "n:submitter")
AUTHORIZATION: dict[str, Any] = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": {**_ANY_JOB, "view": "any", **_OWN_SITE, **_DENIED},
        "lead": {**_OWN_JOB, "view": "any", "operate": "none", "shell_commands": "none", **_DENIED},
        "org_admin": {"submit_job": "none", "manage_job": "o:submitter", "view": "any", _TOLD: "none", **_OWN_SITE, **_DENIED},
        "member": {"view": "any", _TOLD: "none", **_DENIED},
    },
}


def privacy(properties: dict[str, Any]) -> dict[str, Any]:
    """Returns a site's privacy.json: one scope with the site's properties (`flare.policy.SitePolicy`) and the guard."""
    return {
        "scopes": [
            {
                "name": SCOPE,
                "properties": properties,
                "task_result_filters": [{"path": GUARD, "args": {}}],
            }
        ]
    }


def restrict(resources: dict[str, Any], classes: list[str], *more: dict[str, Any]) -> dict[str, Any]:
    """Returns a participant's resources.json with `classes` as the allow-list, without log streaming, with `more` components.

    Our components come first: FLARE builds in the order of the file, and its storages create their folders when they are built.
    """
    flares = [c for c in resources.get("components", []) if not c["path"].startswith(LOGGING)]
    ours = {
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": classes,
        "allow_log_streaming": False,
        "components": [*more, *flares],
    }
    return ours | {key: value for key, value in resources.items() if key not in ours}


class SitePolicyBuilder(Builder):
    """A FLARE provisioning builder. It adds our allow-list, gate, admission of jobs, authorization and settings of FLARE's
    communication to the kits of the server and the sites, units for systemd, and a privacy.json to each site's kit. A project
    file names it after FLARE's StaticFileBuilder.

    In the project file, a client's `policy` holds the properties of `flare.policy.SitePolicy` (the data folder on its machine,
    its device, its consent), the server's `storage` its folder for jobs. Resources and authorization are written as FLARE's
    `.default` files, which apply until the hospital adds its own files.
    """

    def initialize(self, project: Project, ctx: ProvisionContext) -> None:
        os.umask(OTHERS)  # FLARE writes keys before `finalize` corrects the modes
        _require_names(project)
        _require_ports(project.get_server())

    def build(self, project: Project, ctx: ProvisionContext) -> None:
        server = project.get_server()
        folder = server.get_prop(STORAGE)
        if folder and not Path(folder).is_absolute():  # the server would look from wherever it was started
            raise PolicyError(f"server {server.name}: `{STORAGE}` is {folder}; write a full path, which begins with /")
        self._restrict(server, SERVER, SERVER_CLASSES, ctx)
        if folder:
            _keep(Path(ctx.get_local_dir(server)) / RESOURCES, Path(folder))
        for client in project.get_clients():
            properties = client.get_prop(POLICY)
            if not properties:
                raise PolicyError(f"site {client.name} has no `{POLICY}` in the project file; write its data folder there")
            SitePolicy.of(client.name, properties, simulated=False)  # refuses a wrong value here, not at the hospital
            properties = {"approve": [], **properties}  # each plan is approved at the hospital, with `feddp kit approve`
            self._restrict(client, CLIENT, SITE_CLASSES, ctx)
            write_json(Path(ctx.get_local_dir(client)) / "privacy.json", privacy(properties))

    def finalize(self, project: Project, ctx: ProvisionContext) -> None:
        """Removes other users' access to kits and state. FLARE finalizes the builders in reverse order: the kits are still in
        the folder where they were built, and CertBuilder later writes the root's key into the file and keeps its mode."""
        state = Path(ctx.get_state_dir())
        if ctx.get(CtxKey.ROOT_PRI_KEY):  # `nvflare package` has none
            (state / CERTIFICATES).touch(mode=0o600)
        Path(ctx.get_workspace()).chmod(0o700)
        for folder in (state, Path(ctx.get_wip_dir())):
            _close(folder)

    @staticmethod
    def _restrict(participant: Participant, kind: str, classes: dict[str, str], ctx: ProvisionContext) -> None:
        local = Path(ctx.get_local_dir(participant))
        resources, allowed = local / RESOURCES, sorted(classes.values())
        content = json.loads(resources.read_text(encoding="utf-8"))
        write_json(resources, restrict(content, allowed, *COMPONENTS[kind]) | SETTINGS[kind])
        write_json(local / "authorization.json.default", AUTHORIZATION)
        write_json(local / ProvFileName.COMM_CONFIG, COMMUNICATION | {"internal": INTERNAL})
        for name, unit in units(kind, participant.name).items():
            write_text(local / name, unit)


def _require_names(project: Project) -> None:
    """Raises InputError if a site's name is reserved, or the server's, or is another participant's but for its case, or if the
    project's is no name of a folder and of a certificate."""
    if not is_plain_name(project.name):
        raise InputError(
            f"{shown(project.name)} is no name of a project, which has {PLAIN_NAME}; correct `name` in the project file"
        )
    sites = [client.name for client in project.get_clients()]
    for name in sites:
        require_name_of_site(name)
    server = project.get_server()
    listed = server.get_prop(PropKey.HOST_NAMES) or []
    hosts = {server.get_prop(PropKey.DEFAULT_HOST), *([listed] if isinstance(listed, str) else listed)}
    own = [server.name, *sorted(host for host in hosts if host and host != server.name)]
    people = [person.name for person in project.get_admins()]
    if twice := alike([*sites, *people]) or next(((s, h) for s in sites for h in own if s.casefold() == h.casefold()), None):
        raise InputError(
            f"{twice[0]} and {twice[1]} are too much alike: give one of them a name that differs in more than case"
        )


def _require_ports(server: Participant) -> None:
    """Raises InputError if a port of the server's is none: FLARE would write it into every kit."""
    for key in (PropKey.FED_LEARN_PORT, PropKey.ADMIN_PORT):
        port = server.get_prop(key)
        if port is not None and (type(port) is not int or not 0 < port < 2**16):
            raise InputError(f"server {server.name}: `{key}` is {shown(port)}; write a whole number from 1 to 65535")


def _close(folder: Path) -> None:
    """Removes other users' access to a folder, its folders and its files."""
    for where, _, files in os.walk(folder):
        for path in (Path(where), *(Path(where) / name for name in files)):
            path.chmod(path.stat().st_mode & ~OTHERS)


def _keep(resources: Path, folder: Path) -> None:
    """Stores jobs and results below `folder`. By default all servers of a machine share one temporary folder."""
    content = json.loads(resources.read_text(encoding="utf-8"))
    manager = next(component for component in content["components"] if component["id"] == "job_manager")
    manager["args"]["uri_root"] = str(folder / "jobs")
    content["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(folder / "snapshots")
    write_json(resources, content)
