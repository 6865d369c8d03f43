"""What every participant's kit needs from us: the allow-list, who may do what, and each site's own policy.

The consortium's minimum is written down here once: `SitePolicyBuilder` puts it into new kits, `feddp.kit` holds a kit in use
against it.
"""

import json
import os
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import AdminCommandNames
from nvflare.lighter.constants import CtxKey
from nvflare.lighter.entity import Participant, Project
from nvflare.lighter.spec import Builder, ProvisionContext

from feddp.errors import PolicyError
from feddp.files import write_json
from feddp.flare.configuration import SERVER_CLASSES, SITE_CLASSES
from feddp.flare.policy import SitePolicy
from feddp.flare.private_files import OTHERS
from feddp.jobs.folder import SCOPE
from feddp.sealing.kit import CLIENT, SERVER

GUARD = "feddp.flare.filters.PrivateTensorGuard"
RESOURCES = "resources.json.default"
DEPLOYER = "feddp.flare.admission.AdmittingDeployer"
AT_SERVER = "feddp.flare.admission.AdmittedApp"
LOGGING = "nvflare.app_common.logging."  # FLARE's components that send and receive a job's log, past every filter
PRIVATE_FILES = "feddp.flare.private_files.PrivateFiles"
# the component that refuses whatever reaches a participant's cells and is not needed, by the participant's kind
GATE = {SERVER: "feddp.flare.gate.ServerGate", CLIENT: "feddp.flare.gate.SiteGate"}
# the components that a kit of ours has beside FLARE's, by its kind; `feddp kit check` demands each of them as it stands here
COMPONENTS = {
    kind: [
        {"id": "private_files", "path": PRIVATE_FILES, "args": {}},
        {"id": "cell_gate", "path": gate, "args": {}},
        {"id": "app_deployer", "path": DEPLOYER, "args": {}},
    ]
    for kind, gate in GATE.items()
}
# what else of the kind a kit's resources.json says at its top, and `feddp kit check` demands to the letter: what FLARE's server
# asks about its own app of a job, which no deployer of ours sees there
SETTINGS: dict[str, dict[str, Any]] = {SERVER: {"app_validator": {"path": AT_SERVER, "args": {}}}, CLIENT: {}}
# below which a site's policy shows single images, or one site's contribution: nobody's is provisioned so, and `feddp kit check`
# refuses it
MINIMUM = {"min_images": 5, "std_images": 5, "bounds.batch": 2, "bounds.min_sites": 2}
# the rights that nobody has, and what they would let a person do. A log's configuration names classes and functions that Python
# builds and calls, with any arguments
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
CERTIFICATES = "cert.json"  # FLARE's, in its state folder, with every private key that it has made
STORAGE = "storage"  # the key of the folder in which the server keeps jobs and their results

# FLARE's rights: a category or a command, and who has it. `o:site`: whoever's organisation is the site's own, `n:submitter`:
# whose job it is. What is not named is denied. A hospital's files and processes are its own org_admin's, nobody else's.
# A command that is named goes before its category.
_DENIED = dict.fromkeys(NOBODY, "none")
_OWN_SITE = {"operate": "o:site", "shell_commands": "o:site"}
_ANY_JOB = dict.fromkeys(("submit_job", "clone_job", "manage_job", "download_job"), "any")
_OWN_JOB = {"submit_job": "any"} | dict.fromkeys(("clone_job", "manage_job", "download_job"), "n:submitter")
AUTHORIZATION = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": {**_ANY_JOB, "view": "any", **_OWN_SITE, **_DENIED},
        "lead": {**_OWN_JOB, "view": "any", "operate": "none", "shell_commands": "none", **_DENIED},
        "org_admin": {"submit_job": "none", "manage_job": "o:submitter", "view": "any", **_OWN_SITE, **_DENIED},
        "member": {"view": "any", **_DENIED},
    },
}


def privacy(properties: dict[str, Any]) -> dict[str, Any]:
    """A site's privacy.json: one scope, with the site's properties (`flare.policy.SitePolicy`) and the guard on all results."""
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
    """A participant's resources.json: `classes` are the whole allow-list, no log is streamed, `more` components are added.

    FLARE builds in the order of the file, and its storages make their folders when they are built: ours come first of all.
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
    """A FLARE provisioning builder, named after FLARE's own StaticFileBuilder in a project file: our allow-list, our gate, our
    admission of jobs and our authorization in the server's and every site's kit, a privacy.json in every site's.

    A client of the project file says under `policy` what `flare.policy.SitePolicy` holds: where its data lie on its own
    machine, its device, its consent; the server under `storage` where it keeps jobs. Resources and authorization are written as
    FLARE's `.default` files, which are in force until the hospital puts files of its own beside them.
    """

    def initialize(self, project: Project, ctx: ProvisionContext) -> None:
        os.umask(OTHERS)  # keys are written before `finalize` closes what FLARE leaves open

    def build(self, project: Project, ctx: ProvisionContext) -> None:
        server = project.get_server()
        self._restrict(server, SERVER, SERVER_CLASSES, ctx)
        if folder := server.get_prop(STORAGE):
            _keep(Path(ctx.get_local_dir(server)) / RESOURCES, Path(folder))
        for client in project.get_clients():
            properties = client.get_prop(POLICY)
            if not properties:
                raise PolicyError(f"site {client.name} has no `{POLICY}` in the project file; say there where its data lie")
            properties = {"approve": [], **properties}  # each plan is approved at the hospital, by `feddp kit approve`
            SitePolicy.of(client.name, properties, simulated=False)  # a wrong word is refused here, not at the hospital
            self._restrict(client, CLIENT, SITE_CLASSES, ctx)
            write_json(Path(ctx.get_local_dir(client)) / "privacy.json", privacy(properties))

    def finalize(self, project: Project, ctx: ProvisionContext) -> None:
        """Kits and state are their owner's alone. FLARE finalizes in the reverse order of the builders: the kits lie where
        they were built, and CertBuilder, which comes later, keeps the mode of the file into which it writes the root's key."""
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
        said = json.loads(resources.read_text(encoding="utf-8"))
        write_json(resources, restrict(said, allowed, *COMPONENTS[kind]) | SETTINGS[kind])
        write_json(local / "authorization.json.default", AUTHORIZATION)


def _close(folder: Path) -> None:
    """Takes from a folder, its folders and its files what others than their owner may do with them."""
    for where, _, files in os.walk(folder):
        for path in (Path(where), *(Path(where) / name for name in files)):
            path.chmod(path.stat().st_mode & ~OTHERS)


def _keep(resources: Path, folder: Path) -> None:
    """Jobs and results below `folder`. FLARE's own place is in the temporary folder, one for every server of the machine."""
    content = json.loads(resources.read_text(encoding="utf-8"))
    manager = next(component for component in content["components"] if component["id"] == "job_manager")
    manager["args"]["uri_root"] = str(folder / "jobs")
    content["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(folder / "snapshots")
    write_json(resources, content)
