"""Jobs that a server deploys and never starts do not fill a site's disk."""

import json
import os
import shutil
import time
import uuid
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_constant import FLContextKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobLauncherSpec
from nvflare.apis.workspace import Workspace
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.fed.app.fl_app_validator import FLAppValidator
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.privacy_manager import PrivacyService
from nvflare.security.security import FLAuthorizer

from feddp.flare.admission import AdmittingDeployer
from feddp.flare.launcher import Restarting
from feddp.flare.never_started import MOST, make_room
from feddp.flare.policy import SitePolicy
from feddp.jobs.folder import export
from feddp.provision import AUTHORIZATION, GUARD, privacy


class Launcher(JobLauncherSpec):
    def launch_job(self, job_meta, fl_ctx):
        return SimpleNamespace()


@pytest.fixture
def kit(tmp_path, toy, plan_for, monkeypatch):
    """A site's kit whose policy takes the exported job, with FLARE's services as its parent process has them."""
    monkeypatch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("hospital", AUTHORIZATION))
    monkeypatch.setattr(AppAuthzService, "app_validator", FLAppValidator(site_type="client"))
    monkeypatch.setattr(PrivacyService, "manager", None)
    monkeypatch.setattr(ConfigFactory, "_fmt2Loader", dict(ConfigFactory._fmt2Loader))
    AuditService.close()
    AuditService.initialize(str(tmp_path / "audit.txt"))
    plan = plan_for(network=toy)
    export(plan, tmp_path / "job")
    kit = tmp_path / "kit"
    for name in ("startup", "local"):
        (kit / name).mkdir(parents=True)
    properties = {"data": "/data/site"} | SitePolicy.admitting(plan)
    (kit / "local/privacy.json").write_text(json.dumps(privacy(properties)))
    assert GUARD in (kit / "local/privacy.json").read_text()
    yield kit
    AuditService.close()


def deployed(kit, deployer, count) -> list[str]:
    """Deploys a job under so many ids, as a server may; returns the ids in that order."""
    job, ids = kit.parent / "job", [str(uuid.uuid4()) for _ in range(count)]
    app = zip_directory_to_bytes(str(job / "app_client"), "")
    submitter = {"submitter_name": "x@y", "submitter_org": "x", "submitter_role": "super"}
    for number, id in enumerate(ids):
        meta = json.loads((job / "meta.json").read_text()) | {"job_id": id, "study": "default"} | submitter
        assert not deployer.deploy(Workspace(str(kit), "site-1"), id, meta, "app_client", app, FLContext())
        when = time.time() - 10_000 + number  # their order, whatever the file system's clock
        os.utime(kit / id, (when, when))
    return ids


def there(kit, ids) -> list[str]:
    return [id for id in ids if (kit / id).exists()]


def test_jobs_that_never_start_are_bounded(kit):
    """FLARE's deployer keeps all of them, the control."""
    ids = deployed(kit, AppDeployer(), MOST + 3)
    assert there(kit, ids) == ids
    more = deployed(kit, AdmittingDeployer(), 2)
    assert len(there(kit, ids + more)) == MOST
    lines = [line for line in (kit.parent / "audit.txt").read_text().splitlines() if "never started" in line]
    assert [id for id in ids if any(id in line for line in lines)] == [id for id in ids if not (kit / id).exists()]


def test_a_started_job_and_what_is_none_stays(kit):
    (first, second, third) = deployed(kit, AdmittingDeployer(), 3)
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(kit), "site-1"), private=True, sticky=False)
    Restarting(Launcher()).launch_job({JobConstants.JOB_ID: first}, context)
    (kit / second / "log.txt").write_text("of a process of an earlier version")
    (kit / str(uuid.uuid4())).symlink_to(kit / third)
    shutil.copytree(kit / third, kit / "not-a-job")
    before = {path.name for path in kit.iterdir()}
    assert make_room(kit, most=1) == [third]
    assert before - {path.name for path in kit.iterdir()} == {third}
    assert make_room(kit, most=1) == []


def test_what_cannot_be_removed_keeps_no_job_out(kit, monkeypatch):
    first, second = deployed(kit, AdmittingDeployer(), 2)
    remove = shutil.rmtree

    def failing(folder, ignore_errors=False, **more):
        if folder.name == first and not ignore_errors:
            raise PermissionError(first)
        if folder.name != first:
            remove(folder, ignore_errors, **more)

    monkeypatch.setattr(shutil, "rmtree", failing)
    assert make_room(kit, most=1) == [second]
    assert there(kit, [first, second]) == [first]
