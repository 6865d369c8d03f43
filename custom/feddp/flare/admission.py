"""Accepts or refuses jobs before FLARE unpacks, parses or builds any part of them.

A job's folder is a function of its plan (`feddp.flare.configuration`). Anything else in it is refused by name, independent of
the submitter and his role. Then a site checks the job against its policy, which it reads from privacy.json at that moment.
"""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

from nvflare.apis.app_deployer_spec import AppDeployerSpec
from nvflare.apis.app_validation import AppValidator
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import AdminCommandNames, FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.sec.authz import AuthorizationService, AuthzContext, Person
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE
from nvflare.lighter.utils import verify_folder_signature_and_get_signers
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.privacy_manager import PrivacyService

from feddp.errors import FedDPError, PolicyError
from feddp.flare.archive import read_app
from feddp.flare.audit import audit
from feddp.flare.configuration import APPS, CLIENT, FILES, META, SERVER, require_object
from feddp.flare.documents import only_json, require_document, require_equal
from feddp.flare.earlier import require_earlier
from feddp.flare.ends import tell_at_site
from feddp.flare.job_folder import admitted, read_folder, require_meta
from feddp.flare.kept import JOB_ID, files_of
from feddp.flare.never_started import MOST, make_room
from feddp.flare.policy import SitePolicy
from feddp.flare.scopes import scopes_of
from feddp.flare.unused import removed_of
from feddp.flare.workspace import kept_by
from feddp.reading import one_line


class AdmittingDeployer(FLComponent, AppDeployerSpec):
    """For resources.json, under the id at which FLARE looks for an app deployer.

    At a site it deploys valid jobs that the policy accepts; it reports each refusal to the lead (`get_job_meta`) and writes
    a line to the site's audit file. When a job starts, it says which certificates end soon. FLARE's server has its own
    deployer: there, this class checks the meta.json of submitted jobs, and `AdmittedApp` checks the rest.
    """

    def __init__(self) -> None:
        super().__init__()
        only_json()
        self._one_at_a_time = threading.Lock()

    def deploy(
        self, workspace: Workspace, job_id: str, job_meta: dict[str, Any], app_name: str, app_data: bytes, fl_ctx: FLContext
    ) -> str | None:
        with self._one_at_a_time:
            try:
                self._admit(workspace, job_id, job_meta, app_name, app_data, fl_ctx)
                for removed in make_room(Path(workspace.get_root_dir())):
                    audit(
                        fl_ctx,
                        f"job {removed} removed: it never started, and {MOST} deployed jobs that did not are kept at most",
                    )
                self._deploy(workspace, job_id, job_meta, app_name, app_data, fl_ctx)
            except FedDPError as error:
                line = audit(fl_ctx, f"job {job_id} refused: {error}")
                self.log_warning(fl_ctx, line, fire_event=False)
                return line
            except Exception as error:  # of any type; FLARE would send its text, which may hold paths, to the server
                line = audit(fl_ctx, f"job {job_id} not deployed: {type(error).__name__}: {error}")
                self.log_exception(fl_ctx, line, fire_event=False)
                return f"job {job_id} not deployed: site {workspace.site_name} failed; its audit.log has the reason"
        return None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SUBMIT_JOB:
            try:
                require_meta(fl_ctx.get_prop(FLContextKey.JOB_META))
            except FedDPError as error:
                fl_ctx.set_prop(FLContextKey.JOB_BLOCK_REASON, audit(fl_ctx, str(error)), private=True, sticky=False)
        elif event_type == EventType.AFTER_JOB_LAUNCH:  # at a site
            tell_at_site(self.logger, fl_ctx, Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir()))

    def _admit(
        self, workspace: Workspace, job_id: str, job_meta: dict[str, Any], app_name: str, app_data: bytes, fl_ctx: FLContext
    ) -> None:
        site = workspace.site_name
        if not isinstance(job_id, str) or not JOB_ID.fullmatch(job_id):
            raise PolicyError("its id does not have the form of FLARE's job ids")
        kept = kept_by(site, workspace.get_root_dir())
        for folder in (Path(workspace.get_run_dir(job_id)), files_of(kept, job_id), removed_of(kept, job_id)):
            if os.path.lexists(folder):
                raise PolicyError(f"site {site}: a job of this id was deployed before; submit the job again for a new id")
        require_equal("the app", APPS[CLIENT], app_name, "its name")
        job = admitted(CLIENT, read_app(app_data, FILES[CLIENT]))
        meta = require_object(META, "all of it", job_meta)
        require_document(META, meta)  # FLARE writes it to the disk, with what a server puts under FLARE's own keys
        require_meta(meta, job)
        require_equal(META, job_id, meta.get("job_id"), "job_id")  # FLARE starts the job's process in the folder of that name
        if site not in meta["deploy_map"][APPS[CLIENT]]:
            raise PolicyError(f"{META}: deploy_map does not name site {site}")
        policy = self._policy(workspace, meta["scope"], fl_ctx)
        policy.accept(site, job.plan, job.asked)
        try:
            require_earlier(site, kept, job, policy)
        except FedDPError as error:  # where the files lie stays at the site
            audit(fl_ctx, str(error))
            raise PolicyError(without_folders(str(error), workspace)) from error

    @staticmethod
    def _deploy(
        workspace: Workspace, job_id: str, job_meta: dict[str, Any], app_name: str, app_data: bytes, fl_ctx: FLContext
    ) -> None:
        """Has FLARE deploy an admitted app; nothing of it stays if that fails."""
        try:
            refused = AppDeployer().deploy(workspace, job_id, job_meta, app_name, app_data, fl_ctx)
        except Exception:  # of any type that FLARE or the disk raises; it goes on, and `deploy` reports it
            shutil.rmtree(workspace.get_run_dir(job_id), ignore_errors=True)
            raise
        if refused:
            raise PolicyError(without_folders(refused, workspace))
        require_signers(workspace, job_id)

    @staticmethod
    def _policy(workspace: Workspace, scope: str, fl_ctx: FLContext) -> SitePolicy:
        """Reads the site's current policy, and has FLARE read the names of the scopes, which it did when its client started."""
        site = workspace.site_name
        try:
            found = scopes_of(Path(workspace.get_site_privacy_file_path())).get(scope)
            policy = SitePolicy.of(site, found.get("properties"), simulated=False) if found is not None else None
        except FedDPError as error:  # the details of the file stay at the site
            audit(fl_ctx, str(error))
            what = "its privacy.json is not valid; its administrator runs `feddp kit check`"
            raise PolicyError(f"site {site}: {what}") from error
        if policy is None:
            raise PolicyError(f"site {site}: privacy scope '{scope}' is not allowed; its privacy.json has no such scope")
        PrivacyService.initialize(create_privacy_manager(workspace, names_only=True))
        return policy


def without_folders(text: str, workspace: Workspace) -> str:
    """Returns a text for the server: the site's files are `feddp/<job id>/plan.json`, without the place of its folders.

    Only for texts without a word of the job: where the job's words changed too, a lead could try out what the folder is.
    """
    root = Path(workspace.get_root_dir())
    for folder in (kept_by(workspace.site_name, str(root)).parent, root):  # the first one is elsewhere in a container
        text = text.replace(f"{folder}/", "")
    return text


def require_signers(workspace: Workspace, job_id: str) -> None:
    """Removes a deployed app and raises PolicyError if its signature is wrong, or its signer has no right to submit jobs here.

    FLARE accepts the signature of any certificate of the project, also a member's or a hospital's. The certificate contains the
    role, so the server cannot change it. An app without a signature gets here only if `require_signed_jobs` is off.
    """
    app = workspace.get_app_dir(job_id)
    if not os.path.exists(os.path.join(app, NVFLARE_SIG_FILE)):
        return
    verified, signers = verify_folder_signature_and_get_signers(app, workspace.get_file_path_in_startup("rootCA.pem"))
    if not verified or not signers:
        shutil.rmtree(workspace.get_run_dir(job_id), ignore_errors=True)
        raise PolicyError("its signature is wrong; submit the job again")
    for signer in (Person(*signer) for signer in signers):
        allowed, _ = AuthorizationService.authorize(AuthzContext(AdminCommandNames.SUBMIT_JOB, signer, signer))
        if not allowed or signer.role == "super":  # for its own tests, FLARE allows that role everything
            shutil.rmtree(workspace.get_run_dir(job_id), ignore_errors=True)  # a start may have removed it
            raise PolicyError(f"its signer {signer.name} has no right to {AdminCommandNames.SUBMIT_JOB} here")


class AdmittedApp(AppValidator):
    """For the server's resources.json, as its `app_validator`: FLARE calls it after unpacking the server's app."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        try:
            read_folder(SERVER, Path(app_folder))
        except FedDPError as error:
            return one_line(str(error)), {}
        return "", {}
