"""What a site deploys: the export of a plan that its policy takes, and nothing else, whoever says he submitted it.

FLARE's own classes throughout: its zip of an app, its deployer underneath ours, its parser of a job's configuration, its
server's validator of what is submitted. Each attack has its control: without ours it does its work, or the genuine job passes.
"""

import http.server
import io
import json
import os
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import uuid
import zlib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZIP_DEFLATED, ZIP_LZMA, ZipFile, ZipInfo

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, JobConstants, WorkspaceConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobLauncherSpec
from nvflare.apis.workspace import Workspace
from nvflare.fuel.common.excepts import ConfigError
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.fuel.utils.config import ConfigFormat
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.fuel_opt.utils.pyhocon_loader import PyhoconLoader
from nvflare.lighter.utils import serialize_cert, sign_folders
from nvflare.private.fed.app.fl_app_validator import FLAppValidator
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.fed.client.client_executor import JobExecutor
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.json_configer import JsonConfigurator
from nvflare.private.privacy_manager import PrivacyService
from nvflare.security.security import FLAuthorizer

from feddp.adaptation.request import AdaptationRequest
from feddp.errors import FedDPError
from feddp.flare.admission import AdmittedApp, AdmittingDeployer
from feddp.flare.archive import read_app
from feddp.flare.job_folder import read_folder
from feddp.flare.launcher import JobRestarter, Restarting
from feddp.flare.policy import SitePolicy
from feddp.flare.unused import removed_of
from feddp.jobs.folder import export, write_job
from feddp.kit.approve import read_job
from feddp.networks import DEFAULT, NETWORKS
from feddp.provision import AUTHORIZATION, GUARD
from support.certificates import Office
from support.disk import full
from support.docs_pages import commands_for
from support.small import Small

SITE, SITES = "site-1", ("site-1", "site-2", "site-3")
CLIENT, SERVER = "app_client/config/config_fed_client.json", "app_server/config/config_fed_server.json"
JOB = "0d2c1f2e-1111-4222-8333-444455556666"
BYTES = 1024 * 1024


@pytest.fixture(scope="module", autouse=True)
def _small():
    """What is deployed depends on the network's name alone; each export makes one, to see that the private rule fits it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETWORKS, DEFAULT, Small)
        yield


@pytest.fixture
def plan(plan_for):
    return plan_for(sites=SITES, min_sites=3)


@pytest.fixture
def folder(plan, tmp_path):
    return export(plan, tmp_path / "ours")


@pytest.fixture
def hospital(tmp_path, plan):
    """A site's kit, its audit file, and FLARE's services as its parent process has them."""
    AuditService.close()
    AuditService.initialize(str(tmp_path / "audit.txt"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("hospital", AUTHORIZATION))
        patch.setattr(AppAuthzService, "app_validator", FLAppValidator(site_type="client"))
        patch.setattr(PrivacyService, "manager", None)
        patch.setattr(ConfigFactory, "_fmt2Loader", dict(ConfigFactory._fmt2Loader))
        yield Hospital(tmp_path / "kit", tmp_path / "audit.txt", SitePolicy.admitting(plan))
    AuditService.close()


class Hospital:
    def __init__(self, kit: Path, audit: Path, properties: dict):
        self.kit, self.audit = kit, audit
        for name in ("startup", "local"):
            (kit / name).mkdir(parents=True)
        self.policy(properties)

    def policy(self, properties: dict) -> None:
        scope = {
            "name": "feddp",
            "properties": {"data": "/secret/place"} | properties,
            "task_result_filters": [{"path": GUARD}],
        }
        (self.kit / "local/privacy.json").write_text(json.dumps({"scopes": [scope]}))

    def deploys(
        self, folder: Path, job: str = JOB, deployer=AdmittingDeployer, data: bytes | None = None, **meta
    ) -> str | None:
        """What FLARE's client does when the server sends an app: nothing where it is deployed, else why not. The submitter has
        the role to which FLARE allows everything."""
        submitter = {"submitter_name": "x@y", "submitter_org": "x", "submitter_role": "super"}
        ids = {"job_id": meta.pop("meta_id", job), "study": "default"}
        content = json.loads((folder / "meta.json").read_text()) | ids | submitter | meta
        app = zip_directory_to_bytes(str(folder / "app_client"), "") if data is None else data
        said = deployer().deploy(Workspace(str(self.kit), SITE), job, content, "app_client", app, FLContext())
        assert str(self.kit) not in (said or ""), "the server and the lead get no path of the site"
        return said

    def refuses(self, folder: Path, *words: str, **given) -> str:
        """Nothing is unpacked, and the audit file has what the lead is told, in one line; where it names files, with paths."""
        said = self.deploys(folder, **given)
        assert said is not None
        assert "\n" not in said
        for word in words:
            assert word in said
        assert not (self.kit / JOB).exists()
        assert self.audit.read_text().splitlines()[-1].replace(f"{self.kit}/", "").endswith(f"[{said}]")
        return said


def changed(folder: Path, file: str, change) -> Path:
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    return folder


@pytest.fixture
def office(hospital):
    """The consortium's root, known at the site."""
    made = Office()
    (hospital.kit / "startup/rootCA.pem").write_bytes(serialize_cert(made.root))
    return made


def signed(folder: Path, office: Office, role: str | None) -> Path:
    """As the console leaves it: two files more in every folder of an app."""
    certificate, key = office.issue("somebody", role)
    (folder.parent / "own.crt").write_bytes(serialize_cert(certificate))
    sign_folders(str(folder / "app_client"), key, str(folder.parent / "own.crt"))
    return folder


@pytest.mark.parametrize("role", ["lead", "project_admin"])
def test_a_genuine_job_is_deployed_as_flare_deploys_it(hospital, folder, office, role):
    assert hospital.deploys(signed(folder, office, role)) is None
    deployed = hospital.kit / JOB / f"app_{SITE}" / "config/config_fed_client.json"
    assert deployed.read_bytes() == (folder / CLIENT).read_bytes()


@pytest.mark.parametrize("role", ["member", "org_admin", "super", None])
def test_who_may_not_submit_signs_no_job(hospital, folder, office, role):
    """Whatever meta.json says of the submitter: a changed server writes it. None is a hospital's or the server's own.
    FLARE's deployer takes all of them, the control."""
    hospital.refuses(signed(folder, office, role), "its signer somebody has no right to submit_job here")
    assert hospital.deploys(folder, deployer=AppDeployer) is None


class Launcher(JobLauncherSpec):
    """Notes what it is told to start."""

    def __init__(self):
        super().__init__()
        self.started = []

    def launch_job(self, job_meta, fl_ctx):
        self.started.append(job_meta[JobConstants.JOB_ID])
        return SimpleNamespace()


LEAD, MEMBER = ("one", "org", "lead"), ("other", "org", "member")


@pytest.mark.parametrize(
    ("verified", "signers", "words"),
    [
        (True, [LEAD], None),
        (True, [LEAD, MEMBER], "its signer other has no right to submit_job here"),
        (True, [], "its signature is wrong"),
        (False, [LEAD], "its signature is wrong"),
    ],
)
def test_all_signers_need_the_right(hospital, folder, office, monkeypatch, verified, signers, words):
    """FLARE gives a list of them. Of an app that is refused nothing stays."""
    found = "feddp.flare.admission.verify_folder_signature_and_get_signers"
    monkeypatch.setattr(found, lambda app, root: (verified, signers))
    if words is None:
        assert hospital.deploys(signed(folder, office, "lead")) is None
    else:
        hospital.refuses(signed(folder, office, "lead"), words)


def test_what_flares_deployer_refuses_names_no_folder_of_the_site(hospital, folder, monkeypatch):
    """`deploys` looks for the kit's path in each answer."""
    monkeypatch.setattr(AppDeployer, "deploy", lambda *given: f"{hospital.kit}/{JOB}/app_site-1 is not valid")
    assert hospital.deploys(folder).endswith(f"refused: {JOB}/app_site-1 is not valid")


@pytest.mark.parametrize("role", ["lead", "member", None])
def test_what_lies_deployed_is_not_started_without_a_right(hospital, folder, office, role):
    """A server may say so before the admission has looked at the signers, or after a kill in between: as FLARE's deployer
    leaves it."""
    assert hospital.deploys(signed(folder, office, role), deployer=AppDeployer) is None
    launcher, fl_ctx = Launcher(), FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(hospital.kit), SITE), private=True, sticky=False)
    if role == "lead":
        Restarting(launcher).launch_job({JobConstants.JOB_ID: JOB}, fl_ctx)
        assert launcher.started == [JOB]
        return
    with pytest.raises(FedDPError, match=f"job {JOB} not started: its signer somebody has no right to submit_job here"):
        Restarting(launcher).launch_job({JobConstants.JOB_ID: JOB}, fl_ctx)
    assert launcher.started == []
    assert f"[job {JOB} not started: its signer somebody has no right to submit_job here]" in hospital.audit.read_text()
    assert not (hospital.kit / JOB).exists()


def test_a_job_that_cannot_be_started_tells_the_server_no_path(hospital, monkeypatch):
    """FLARE answers the server's command to start a job with the error's text. The first start is the control."""
    monkeypatch.setattr(JobExecutor, "start_app", JobExecutor.start_app)  # as it is now, after the test
    of = SimpleNamespace(client_name=SITE)

    def start():
        asked = of, JOB, {}, SimpleNamespace(workspace=str(hospital.kit)), None, None, None
        JobExecutor(None, "").start_app(*asked, fl_ctx=FLContext())

    with pytest.raises(RuntimeError, match=f"{hospital.kit}/{JOB}/meta.json"):
        start()
    for _ in range(2):
        JobRestarter()
    with pytest.raises(FedDPError, match=f"^job {JOB} not started: this site failed; its audit.log has the reason$"):
        start()
    assert f"{hospital.kit}/{JOB}/meta.json]" in hospital.audit.read_text()
    assert len(hospital.audit.read_text().splitlines()) == 1
    with full(hospital.kit), pytest.raises(FedDPError, match=f"^job {JOB} not started: this site failed"):
        start()
    assert len(hospital.audit.read_text().splitlines()) == 1, "the control: the second line had no room"


def test_an_app_whose_signature_cannot_be_checked_any_more_is_not_started(hospital, folder, office):
    assert hospital.deploys(signed(folder, office, "lead")) is None
    launcher, fl_ctx = Launcher(), FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(hospital.kit), SITE), private=True, sticky=False)
    (hospital.kit / "startup/rootCA.pem").write_bytes(serialize_cert(Office().root))
    with pytest.raises(FedDPError, match="not started: its signature is wrong"):
        Restarting(launcher).launch_job({JobConstants.JOB_ID: JOB}, fl_ctx)
    assert launcher.started == []


def test_a_refusal_changes_no_word_of_the_job(hospital, folder):
    """Where the kit's folder were taken out of the job's own words, a lead could try out where it is."""
    shown = []
    for guess in (f"{hospital.kit}/x", "/opt/other/x"):
        app = io.BytesIO()
        with ZipFile(app, "w") as archive:
            archive.writestr(guess, "")
        content = json.loads((folder / "meta.json").read_text())
        workspace = Workspace(str(hospital.kit), SITE)
        said = AdmittingDeployer().deploy(workspace, JOB, content, "app_client", app.getvalue(), FLContext())
        shown.append(said.replace(guess, "GUESS"))
    assert shown[0] == shown[1]
    assert "the app holds 'GUESS', which no exported job has" in shown[0]


def _nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["x" * 300_000], "characters, 6 objects and lists; the limits are 262144 and 500"),
        (_nested(600), "objects and lists; the limits are"),
        (_nested(3000), "is not plain JSON (RecursionError)"),
        ([b"x"], "is not plain JSON (TypeError)"),
    ],
    ids=["large", "deep", "deeper", "bytes"],
)
def test_what_a_server_puts_under_flares_own_keys_is_bounded(hospital, folder, value, words):
    """FLARE writes it to meta.json at the site, of any size."""
    hospital.refuses(folder, words, schedule_history=value)


def test_an_app_of_folders_in_folders_is_refused_in_words(folder):
    """1500 of them: more than Python's own walks can follow."""
    deepest = folder / "app_client"
    descriptor = os.open(deepest, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("a", dir_fd=descriptor)
        inner = os.open("a", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    try:
        with pytest.raises(FedDPError, match="app_client holds 'a', which no exported job has"):
            read_job(folder)
    finally:
        subprocess.run(["rm", "-r", str(deepest / "a")], check=True)


def test_no_other_project_signs_a_job(hospital, folder, office):
    said = hospital.deploys(signed(folder, Office(), "lead"))
    assert "does not pass signature verification" in said
    assert not (hospital.kit / JOB).exists()


RUN = "5a2c1f2e-1111-4222-8333-444455557777"


def stored(hospital, plan, run=RUN) -> Path:
    """The folder that an earlier job of this plan left at the site."""
    folder = hospital.kit / "feddp" / run
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    return folder


def test_a_job_continues_a_run_of_its_own_plan(hospital, plan, tmp_path):
    """The site has the run's folder, or was absent so far; a plan of more rounds, once approved, extends the run."""
    job = export(plan, tmp_path / "again", resume=RUN)
    assert hospital.deploys(job) is None
    stored(hospital, plan)
    assert hospital.deploys(job, job=str(uuid.uuid4())) is None
    longer = replace(plan, rounds=plan.rounds + 1)
    hospital.policy(SitePolicy.admitting(longer))
    assert hospital.deploys(export(longer, tmp_path / "longer", resume=RUN), job=str(uuid.uuid4())) is None


def test_a_job_continues_no_other_run(hospital, plan, tmp_path):
    """Its private rule would apply to the tensors that the other plan left here."""
    stored(hospital, replace(plan, method="fedavg"))
    job = export(plan, tmp_path / "again", resume=RUN)
    said = hospital.refuses(job, "belongs to a run with method='fedavg', but this job has method='feddp'")
    assert "submit the job as a new one" in said


def test_a_job_continues_no_run_that_the_site_removed(hospital, plan, tmp_path):
    """With an empty folder the site would take part as one that was absent so far; nor is the run's id taken again."""
    folder = stored(hospital, plan)
    removed = removed_of(folder.parent, RUN)
    job = export(plan, tmp_path / "again", resume=RUN)
    assert hospital.deploys(job) is None
    removed.parent.mkdir()
    folder.rename(removed)
    said = hospital.deploys(job, job=str(uuid.uuid4()))
    assert f"it removed the run {RUN}, which was unused for long (`keep_days` in privacy.json)" in said
    assert "was deployed before" in hospital.deploys(export(plan, tmp_path / "new"), job=RUN)


def test_a_job_gets_no_more_of_a_run_than_the_run_gave(hospital, plan, tmp_path):
    """The hospital has added consent since; the plan is still approved."""
    folder = stored(hospital, plan)
    terms = {"data": "/secret/place", "private": [], "consent": [], "recipients": None}
    (folder / "terms.json").write_text(json.dumps(terms))
    job = export(plan, tmp_path / "again", resume=RUN)
    assert hospital.deploys(job) is None
    hospital.policy(SitePolicy.admitting(plan) | {"consent": ["calibration"]})
    said = hospital.deploys(job, job=str(uuid.uuid4()))
    assert "belongs to a run that began under another consent in privacy.json; submit the job as a new one" in said


def test_an_adaptation_gets_no_network_of_a_run_that_keeps_more_private(hospital, plan, tmp_path):
    """The hospital has loosened `private` since the run. Consent and data may change: it consents after the run."""
    request = AdaptationRequest("site-9", (SITE,), RUN)
    job = write_job(tmp_path / "late", "feddp", plan, request, None)
    approved = {"approve": [{"job": "late", "plan": plan.digest(request.to_json())}], "consent": ["outside"]}
    terms = {"data": "/other/place", "private": ["query"], "consent": [], "recipients": []}
    (stored(hospital, plan) / "terms.json").write_text(json.dumps(terms))
    hospital.policy(approved)
    hospital.refuses(job, f"{RUN} belongs to a run that keeps query private here", "leave this site out of the adaptation")
    hospital.policy(approved | {"private": ["query"]})
    assert hospital.deploys(job) is None


@pytest.mark.parametrize("name", ["plan.json", "terms.json"])
def test_a_damaged_file_of_a_run_is_named_without_its_place(hospital, plan, tmp_path, name):
    """The path may hold the name of a person or of a disk; it is in the audit file."""
    (stored(hospital, plan) / name).write_text("{")
    said = hospital.refuses(export(plan, tmp_path / "again", resume=RUN), f"refused: feddp/{RUN}/{name} is not readable JSON")
    assert "submit the job as a new one" in said
    assert f"{hospital.kit}/feddp/{RUN}/{name}" in hospital.audit.read_text()


def test_in_a_container_the_run_is_named_without_its_place_too(hospital, plan, tmp_path, monkeypatch):
    """There the site's files are not in the workspace."""
    monkeypatch.setenv(WorkspaceConstants.ENV_VAR_RESULT_ROOT, str(tmp_path / "a volume"))
    folder = tmp_path / "a volume/feddp" / RUN
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{")
    said = hospital.deploys(export(plan, tmp_path / "again", resume=RUN))
    assert said.startswith(f"job {JOB} refused: feddp/{RUN}/plan.json is not readable JSON")


def test_of_an_error_that_nobody_foresaw_the_server_learns_nothing(hospital, folder):
    """The control: FLARE's deployer alone puts the path of the file into its error, and FLARE answers with that text."""
    hospital.kit.joinpath("blocked").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "get_run_dir", lambda self, job: str(hospital.kit / "blocked" / job))
        with pytest.raises(Exception, match=f"Not a directory: '{hospital.kit}/blocked"):
            hospital.deploys(folder, deployer=AppDeployer)
        said = hospital.deploys(folder)
    assert said == f"job {JOB} not deployed: site {SITE} failed; its audit.log has the reason"
    assert f"[job {JOB} not deployed: Exception: exception NotADirectoryError" in hospital.audit.read_text()


def test_of_an_app_that_could_not_be_deployed_nothing_stays(hospital, folder, monkeypatch):
    """As at a full disk: FLARE has unpacked the app, and fails to write meta.json."""
    monkeypatch.setattr(Workspace, "get_job_meta_path", lambda self, job: f"{self.get_run_dir(job)}/no/meta.json")
    with pytest.raises(Exception, match="No such file"):
        hospital.deploys(folder, deployer=AppDeployer)
    assert (hospital.kit / JOB).exists(), "the control"
    shutil.rmtree(hospital.kit / JOB)
    assert "not deployed" in hospital.deploys(folder)
    assert not (hospital.kit / JOB).exists()


def test_what_a_job_continues_is_an_id_of_flares(hospital, plan, tmp_path):
    """Any other name could lead to what the site keeps across runs."""
    hospital.refuses(export(plan, tmp_path / "again", resume="local"), "does not have the form of FLARE's job ids")
    for wrong in ("../local", "", 7, None, ["x"]):
        job = export(plan, tmp_path / "again", resume=RUN)
        changed(job, CLIENT, lambda content, wrong=wrong: content["components"][0]["args"].update(resume=wrong))
        assert hospital.deploys(job) is not None, wrong


def test_the_pages_command_exports_such_a_job(tmp_path, monkeypatch, feddp):
    """The command of continue.md, as printed."""
    (command,) = commands_for("test_admission", "docs/how-to/continue.md")
    monkeypatch.chdir(tmp_path)
    code, out, err = feddp(*shlex.split(command)[1:])
    assert code == 0, err
    _, job = read_job(tmp_path / out.strip())
    assert job.resume == "3b7f0d5e-8a0c-4c5e-9d58-1f2a90c1c3ab"


def test_a_job_is_deployed_once(hospital, folder):
    """Its id is the server's word: FLARE would remove what lies under it, and that of a folder of the kit's own too."""
    assert hospital.deploys(folder) is None
    no_id = "its id does not have the form"
    for id, words in ((JOB, "was deployed before"), ("local", no_id), ("startup", no_id), ("../kit", no_id)):
        said = hospital.deploys(folder, job=id)
        assert words in said
    kept = hospital.kit / "feddp" / (other := str(uuid.uuid4()))
    kept.mkdir(parents=True)
    assert "was deployed before" in hospital.deploys(folder, job=other)
    removed_of(hospital.kit / "feddp", removed := str(uuid.uuid4())).mkdir(parents=True)
    assert "was deployed before" in hospital.deploys(folder, job=removed)
    (kept.parent / (link := str(uuid.uuid4()))).symlink_to("nowhere")
    assert "was deployed before" in hospital.deploys(folder, job=link)
    assert (hospital.kit / JOB).is_dir()
    assert (hospital.kit / "local/privacy.json").exists()
    hospital.deploys(folder, job="local", deployer=AppDeployer)
    assert not (hospital.kit / "local/privacy.json").exists(), "the control"


def test_a_job_that_comes_twice_at_once_is_deployed_once(hospital, folder, monkeypatch):
    """Both threads would find that nothing lies there, if one did not wait for the other."""
    real, said, deployer = AdmittingDeployer._deploy, [], AdmittingDeployer()

    def slowly(*given):
        time.sleep(0.5)
        real(*given)

    monkeypatch.setattr(AdmittingDeployer, "_deploy", staticmethod(slowly))
    threads = [
        threading.Thread(target=lambda: said.append(hospital.deploys(folder, deployer=lambda: deployer))) for _ in range(2)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert said.count(None) == 1
    assert sum("was deployed before" in (each or "") for each in said) == 1


CODE = {"id": "x", "path": "subprocess.Popen", "args": {"args": "id"}}
SMUGGLED = {
    "components[1]": (CLIENT, lambda c: c["components"].append(CODE)),
    "components[0].path": (CLIENT, lambda c: c["components"][0].update(path="feddp.flare.persistor.SharedTensorPersistor")),
    "components[0].args.device": (CLIENT, lambda c: c["components"][0]["args"].update(device="cuda")),
    "executors[0].tasks[0]": (CLIENT, lambda c: c["executors"][0]["tasks"].insert(0, "evaluate")),
    "executors[0].executor.path": (CLIENT, lambda c: c["executors"][0]["executor"].update(path="os.mkdir")),
    "executors[0].executor.args": (CLIENT, lambda c: c["executors"][0]["executor"].update(args={"x": CODE})),
    "executors[0].tasks[1]": (CLIENT, lambda c: c["executors"][0]["tasks"].insert(1, "harvest")),
    "task_result_filters[0].filters[1]": (CLIENT, lambda c: c["task_result_filters"][0]["filters"].append({"path": "x.Y"})),
    "task_result_filters is missing": (CLIENT, lambda c: c.pop("task_result_filters")),
    "task_data_filters": (CLIENT, lambda c: c.update(task_data_filters=[{"tasks": ["*"], "filters": [CODE]}])),
    "format_version": (CLIENT, lambda c: c.update(format_version=True)),
    "tensor_download_chunk_size": (CLIENT, lambda c: c.update(tensor_download_chunk_size=1)),
    "handlers": (CLIENT, lambda c: c.update(handlers=[CODE])),
    "settings.lr": (CLIENT, lambda c: _settings(c).update(lr="0.002")),
    "settings.private": (CLIENT, lambda c: _settings(c).update(private="none")),
    "private {'id'": (CLIENT, lambda c: _settings(c).update(private=[CODE])),
    "unknown setting": (CLIENT, lambda c: _settings(c).update(path="os.mkdir")),
    "unknown keys": (CLIENT, lambda c: _plan(c).update(path="os.mkdir")),
    "rounds=True": (CLIENT, lambda c: _plan(c).update(rounds=True)),
    "min_clients is 1": ("meta.json", lambda m: m.update(min_clients=1)),
    "launcher_spec": ("meta.json", lambda m: m.update(launcher_spec={SITE: {"docker": {"image": "x"}}})),
    "byoc": ("meta.json", lambda m: m.update(byoc=True)),
    "custom_props": ("meta.json", lambda m: m.update(custom_props={"x": 1})),
    "stats_pool_config": ("meta.json", lambda m: m.update(stats_pool_config={})),
    "mandatory_clients": ("meta.json", lambda m: m.update(mandatory_clients=[SITE])),
    "deploy_map.app_client[0]": ("meta.json", lambda m: m["deploy_map"].update(app_client=["site-0", "site-2", "site-3"])),
    "resource_spec.site-1.image": ("meta.json", lambda m: m.update(resource_spec={SITE: {"image": "x"}})),
    "resource_spec.site-1.docker": ("meta.json", lambda m: m.update(resource_spec={SITE: {"docker": {"num_of_gpus": 1}}})),
    "resource_spec.site-1.num_of_gpus": ("meta.json", lambda m: m.update(resource_spec={SITE: {"num_of_gpus": "1"}})),
    "resource_spec.@default": ("meta.json", lambda m: m.update(resource_spec={"@default": {"num_of_gpus": 1}})),
    "scope": ("meta.json", lambda m: m.update(scope="")),
}


def _plan(config: dict) -> dict:
    return config["components"][0]["args"]["plan"]


def _settings(config: dict) -> dict:
    return _plan(config)["settings"]


@pytest.mark.parametrize("place", SMUGGLED)
def test_whatever_differs_from_the_export_is_refused_by_its_place(hospital, folder, place):
    """The policy takes any plan: it is the folder that is refused. FLARE's own deployer would unpack each of them."""
    hospital.policy({"approve": "any"})
    file, change = SMUGGLED[place]
    hospital.refuses(changed(folder, file, change), place)


def test_gpus_may_be_asked_for_and_change_nothing_else(hospital, folder):
    spec = {SITE: {"num_of_gpus": 1, "mem_per_gpu_in_GiB": 15.5}}
    assert hospital.deploys(changed(folder, "meta.json", lambda m: m.update(resource_spec=spec))) is None


def test_a_job_is_started_under_the_id_that_it_is_deployed_under(hospital, folder):
    """FLARE's launcher goes by meta.json's: code that an earlier job left under that id would run with this one."""
    hospital.refuses(folder, "job_id is", meta_id="00000000-0000-4000-8000-000000000001")


def test_a_plan_that_was_changed_is_another_plan(hospital, folder):
    hospital.refuses(changed(folder, CLIENT, lambda c: _plan(c).update(rounds=3)), "its administrator has not approved plan")


def test_an_app_for_another_side_or_site_is_refused(hospital, folder):
    others = {"app_server": ["server"], "app_client": ["site-2", "site-3"]}
    hospital.refuses(folder, "deploy_map.app_client[0]", deploy_map=others)
    said = AdmittingDeployer().deploy(Workspace(str(hospital.kit), SITE), JOB, {}, "app_server", b"", FLContext())
    assert '"app_server", but the export writes "app_client"' in said
    elsewhere = AdmittingDeployer().deploy(
        Workspace(str(hospital.kit), "site-9"),
        JOB,
        json.loads((folder / "meta.json").read_text()) | {"job_id": JOB},
        "app_client",
        zip_directory_to_bytes(str(folder / "app_client"), ""),
        FLContext(),
    )
    assert "deploy_map does not name site site-9" in elsewhere


# files


@pytest.mark.parametrize(
    "name",
    [
        "custom/mine.py",
        "config/config_fed_client.conf",
        "config/config_fed_client.yml",
        "config/config_fed_client.json.default",
        "config/log_config.json",
        "config/weights.safetensors",
        "config/deeper/config_fed_client.json",
        "privacy.json",
    ],
)
def test_a_file_more_is_refused_by_its_name(hospital, folder, name):
    """By the role `super`, to which FLARE's authorization allows code: the control deploys it."""
    path = folder / "app_client" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("1")
    first = name if path.parent.name == "config" or "/" not in name else f"{name.rsplit('/', 1)[0]}"
    hospital.refuses(folder, f"the app holds '{first}")
    assert hospital.deploys(folder, deployer=AppDeployer) is None
    assert (hospital.kit / JOB / f"app_{SITE}" / name).exists(), "the control"


def packed(*entries: tuple[ZipInfo | str, bytes], **options) -> bytes:
    data = io.BytesIO()
    with ZipFile(data, "w", **options) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return data.getvalue()


def test_a_link_or_a_path_out_of_the_app_is_refused(hospital, folder):
    link = ZipInfo("config/config_fed_client.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    hospital.refuses(folder, "which is not a plain file", data=packed((link, b"/etc/passwd")))
    good = (folder / CLIENT).read_bytes()
    for name in ("../config_fed_client.json", "/etc/config_fed_client.json", "config/../../x"):
        hospital.refuses(folder, repr(name), data=packed(("config/config_fed_client.json", good), (name, good)))
    assert hospital.deploys(folder, data=packed(("config/config_fed_client.json", good))) is None


def test_a_bomb_is_refused_before_it_is_unpacked(hospital, folder):
    """By size, by what it unpacks to, by members, and where the directory of the zip lies about the size."""
    hospital.refuses(folder, f"{2 * BYTES} bytes; the limit is", data=b"x" * 2 * BYTES)
    huge = packed(("config/config_fed_client.json", b" " * 200 * BYTES), compression=ZIP_DEFLATED)
    assert len(huge) < BYTES
    hospital.refuses(folder, f"unpacks to {200 * BYTES} bytes", data=huge)
    many = packed(*((f"config/{n}", b"") for n in range(5000)))
    hospital.refuses(folder, "the app holds 5000 files; the limit is 100", data=many)
    place = huge.rindex(b"PK\x01\x02")
    lying = huge[: place + 24] + struct.pack("<I", 1000) + huge[place + 28 :]
    hospital.refuses(folder, "the app is not a readable zip", data=lying)
    hospital.refuses(folder, "not a readable zip", data=b"PK nothing")
    newer = bytearray(packed(("config/config_fed_client.json", b"{}")))
    for at in (4, newer.rindex(b"PK\x01\x02") + 6):
        newer[at] = 99  # the version of the format that is needed to read it
    hospital.refuses(folder, "not a readable zip", data=bytes(newer))
    broken = bytearray(packed(("config/config_fed_client.json", b" " * BYTES), compression=ZIP_DEFLATED))
    broken[80:100] = b"\xff" * 20
    hospital.refuses(folder, "not a readable zip", data=bytes(broken))
    other = packed(("config/config_fed_client.json", (folder / CLIENT).read_bytes()), compression=ZIP_LZMA)
    hospital.refuses(folder, "not a plain file", data=other)
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = packed(*[("config/config_fed_client.json", (folder / CLIENT).read_bytes())] * 2)
    hospital.refuses(folder, "twice", data=twice)


def test_no_more_is_unpacked_than_is_read(folder):
    """A directory that says 1 KB, with the checksum of the first KB, of 100 MB in a zip of less than 1 MB."""
    packer = zlib.compressobj(9, wbits=-15)
    stream = b"".join([*(packer.compress(b" " * BYTES) for _ in range(100)), packer.flush()])
    made = io.BytesIO()
    with ZipFile(made, "w") as archive:
        archive.writestr("config/config_fed_client.json", b" " * 1024)
    plain = made.getvalue()
    body = plain.index(b" " * 1024)
    method, size = struct.pack("<H", ZIP_DEFLATED), struct.pack("<I", len(stream))
    local = plain[:8] + method + plain[10:18] + size + plain[22:body]
    at = plain.rindex(b"PK\x01\x02")
    central = plain[at : at + 10] + method + plain[at + 12 : at + 20] + size + plain[at + 24 : plain.rindex(b"PK\x05\x06")]
    end = plain[plain.rindex(b"PK\x05\x06") :]
    lying = local + stream + central + end[:16] + struct.pack("<I", len(local) + len(stream)) + end[20:]
    assert len(lying) < BYTES
    tracemalloc.start()
    assert read_app(lying, "config/config_fed_client.json") == b" " * 1024
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * BYTES


@pytest.mark.parametrize("properties", [[1], 5, "abc"])
def test_properties_that_are_none_are_the_sites_own_to_read(hospital, folder, properties):
    privacy = hospital.kit / "local/privacy.json"
    content = json.loads(privacy.read_text())
    content["scopes"][0]["properties"] = properties
    privacy.write_text(json.dumps(content))
    hospital.refuses(folder, "its privacy.json is not valid")


# what FLARE would expand, include, or read otherwise


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format_version": 2, "format_version": 2}', "the key 'format_version' occurs twice"),
        ('{"x": NaN}', "NaN is not a number"),
        ('{"x": ' + "1" * 5000 + "}", "is not plain JSON"),
        ('{"x": "\u00e4"}', "is not plain JSON"),
        ("[" * 100_000, "more than 500 objects and lists"),
        (" " * 300 * 1024, "the limit is 262144"),
        ("include url(http://127.0.0.1/x)", "is not plain JSON"),
        ("[]", "is not a JSON object"),
        ('{"components": []}', "components[0] is missing"),
    ],
)
def test_only_plain_json_is_read(hospital, folder, text, words):
    (folder / CLIENT).write_text(text, encoding="utf-8")
    hospital.refuses(folder, "config_fed_client.json", words)


@pytest.mark.parametrize("value", ["{$SECRET}", "${SECRET}", "$SECRET", "{lr}", "x}"])
def test_nothing_of_a_job_is_expanded(hospital, folder, value):
    def everywhere(config):
        _settings(config)["loss"] = value

    said = hospital.refuses(changed(folder, CLIENT, everywhere), "args.plan.settings.loss contains one of $, {, }")
    assert "SECRET" not in said, "not even its name comes back"
    key = changed(folder, CLIENT, lambda c: (_settings(c).pop("loss"), c.update({value: 1})))
    hospital.refuses(key, "contains one of $, {, }")


def test_flare_expands_the_environment_in_plain_json(monkeypatch, tmp_path):
    """Why: FLARE's parser of a job's configuration, the control of the test above."""

    class Parser(JsonConfigurator):
        seen = None

        def process_config_element(self, config_ctx, node):
            if node.path() == "lr":
                Parser.seen = node.element

    monkeypatch.setenv("SECRET", "0.0317")
    (tmp_path / "job.json").write_text('{"format_version": 2, "lr": "{$SECRET}"}')
    Parser(str(tmp_path / "job.json"), ["feddp"], ["errors"]).configure()
    assert Parser.seen == "0.0317"


@contextmanager
def listening():
    """A server that counts who asks it."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"stolen = 1")

        def log_message(self, *words):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/x", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_hocon_is_never_parsed_and_its_include_never_fetched(hospital, tmp_path, folder):
    """FLARE's own loader fetches it; with a deployer of ours in the process no loader of FLARE's reads anything but JSON."""
    with listening() as (url, asked):
        (tmp_path / "hocon").mkdir()
        (tmp_path / "hocon/config_fed_client.conf").write_text(f'include url("{url}")\n')
        ConfigFactory._fmt2Loader[ConfigFormat.PYHOCON] = PyhoconLoader()
        loaded = ConfigFactory.load_config("config_fed_client.json", [str(tmp_path / "hocon")])
        assert loaded.to_dict() == {"stolen": 1}, "the control"
        assert asked == ["/x"]
        AdmittingDeployer()
        with pytest.raises(ValueError, match="PYHOCON is not accepted; write JSON"):
            ConfigFactory.load_config("config_fed_client.json", [str(tmp_path / "hocon")])
        (folder / "app_client/config/config_fed_client.json").unlink()
        shutil.copy(tmp_path / "hocon/config_fed_client.conf", folder / "app_client/config")
        hospital.refuses(folder, "the app holds 'config/config_fed_client.conf'")
        assert asked == ["/x"]
    for other in set(ConfigFormat) - {ConfigFormat.JSON}:
        with pytest.raises(ValueError, match="write JSON"):
            ConfigFactory.get_config_loader(other).load_config_from_str("a = 1")
    assert ConfigFactory.get_config_loader(ConfigFormat.JSON).load_config_from_str('{"a": 1}').to_dict() == {"a": 1}


# the server


def submitted(folder: Path) -> tuple[bool, str, dict]:
    """What FLARE's server says of a job that is submitted."""
    return JobMetaValidator().validate(folder.name, zip_directory_to_bytes(str(folder.parent), folder.name))


def test_the_server_fetches_nothing_for_a_job_that_is_submitted(hospital, folder):
    """FLARE's validator reads meta.conf, and the server's configuration, by HOCON: the control fetches both."""
    with listening() as (url, asked):
        for file, lines in (("meta.json", (folder / "meta.json").read_text()), (SERVER, "{}")):
            path = folder / file
            whole = path.read_text()
            path.with_suffix(".conf").write_text(f'include url("{url}")\n{lines[1:-2] if lines != "{}" else ""}\n')
            path.unlink()
            ConfigFactory._fmt2Loader[ConfigFormat.PYHOCON] = PyhoconLoader()
            before = len(asked)
            submitted(folder)
            assert len(asked) == before + 1, "the control"
            AdmittingDeployer()
            valid, said, _ = submitted(folder)
            assert not valid
            assert said == "PYHOCON is not accepted; write JSON"
            assert len(asked) == before + 1
            path.with_suffix(".conf").unlink()
            path.write_text(whole)
    assert submitted(folder)[:2] == (True, "")


def blocked(meta: dict) -> str | None:
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.JOB_META, meta, private=True, sticky=False)
    AdmittingDeployer().handle_event(EventType.SUBMIT_JOB, fl_ctx)
    return fl_ctx.get_prop(FLContextKey.JOB_BLOCK_REASON)


def test_the_server_refuses_what_meta_says_when_it_is_submitted(hospital, folder):
    valid, _, meta = submitted(folder)
    assert valid
    assert blocked(meta) is None
    (folder / "app_client/custom").mkdir()
    assert blocked(submitted(folder)[2]) == "meta.json: byoc is True, but the export writes no such key"
    assert "launcher_spec" in blocked(meta | {"launcher_spec": {"server": {"docker": {"image": "x"}}}})
    assert "the apps of deploy_map" in blocked(meta | {"deploy_map": {"app_server": ["server"], "mine": ["site-1"]}})


def test_the_server_refuses_its_own_app(folder):
    app = folder / "app_server"
    assert AdmittedApp().validate(str(app)) == ("", {})
    changed(folder, SERVER, lambda c: c["workflows"][0].update(path="os.mkdir"))
    assert AdmittedApp().validate(str(app))[0].startswith("config_fed_server.json: workflows[0].path is ")
    (app / "config/config_fed_server.conf").write_text("a = 1")
    assert "app_server holds 'config/config_fed_server.conf'" in AdmittedApp().validate(str(app))[0]
    (app / "config/config_fed_server.conf").unlink()
    os.symlink("/etc/passwd", app / "config/passwd")
    assert "holds the link config/passwd" in AdmittedApp().validate(str(app))[0]


# the policy, as it is when the job comes


def test_an_approval_holds_from_the_moment_it_is_written(hospital, folder, plan):
    hospital.policy({})
    hospital.refuses(folder, f"site {SITE}: its administrator has not approved plan {plan.digest()[:12]}", "feddp kit approve")
    hospital.policy({"approve": [{"job": "another", "plan": "0" * 64}]})
    hospital.refuses(folder, "has not approved")
    hospital.policy({"approve": [{"job": "ours", "plan": plan.digest()}]})
    assert hospital.deploys(folder) is None


def test_what_is_wrong_with_a_policy_is_the_sites_own(hospital, folder):
    hospital.policy({"approve": "any", "consents": "x"})
    said = hospital.refuses(folder, "its privacy.json is not valid")
    assert "consents" not in said
    assert "unknown properties ['consents']" in hospital.audit.read_text()
    hospital.refuses(folder, "privacy scope 'study' is not allowed", scope="study")
    (hospital.kit / "local/privacy.json").unlink()
    said = hospital.refuses(folder, "its privacy.json is not valid")
    assert str(hospital.kit) not in said


def _first(content: dict) -> dict:
    return content["scopes"][0]


def _changed(change):
    def bytes_of(content: dict) -> bytes:
        change(content)
        return json.dumps(content).encode()

    return bytes_of


# forms of a privacy.json: what the audit file says, and whether FLARE fails at it
FORMS = {
    "begins with a byte order mark": (lambda c: json.dumps(c).encode("utf-8-sig"), True),
    "is not UTF-8 text": (lambda c: json.dumps(c).encode("utf-16"), True),
    "the default_scope 'other', but no scope of that name": (_changed(lambda c: c.update(default_scope="other")), True),
    "has the scope b twice": (_changed(lambda c: c["scopes"].extend([{"name": "b"}, {"name": "b"}])), True),
    "has a scope whose name is 7": (_changed(lambda c: c["scopes"].append({"name": 7})), True),
    "has a scope whose name is ''": (_changed(lambda c: c["scopes"].append({"name": ""})), False),
    "has a scope whose name is None": (_changed(lambda c: c["scopes"].append({"properties": {}})), False),
    "has 'study' among its scopes": (_changed(lambda c: c["scopes"].append("study")), False),
    "scope b: privacy.json's properties are None": (
        _changed(lambda c: c["scopes"].append({"name": "b", "properties": None})),
        True,
    ),
    "its task_data_filters are not a list": (_changed(lambda c: _first(c).update(task_data_filters={"path": GUARD})), False),
    "a filter in task_result_filters has the direction 'up'": (
        _changed(lambda c: _first(c)["task_result_filters"][0].update(direction="up")),
        True,
    ),
    "scope feddp has the key 'private', which FLARE ignores": (_changed(lambda c: _first(c).update(private=["query"])), False),
    "the file has the key 'min_images', which FLARE ignores": (_changed(lambda c: c.update(min_images=50)), False),
    "scopes[0].properties.data contains one of $, {, }, which FLARE expands": (
        _changed(lambda c: _first(c)["properties"].update(data="{$HOME}/images")),
        False,
    ),
    "scopes[1].name contains one of $, {, }, which FLARE expands": (
        _changed(lambda c: c["scopes"].append({"name": "{$NOPE}"})),
        True,
    ),
    "makes FLARE build {'#1': {'path': 'x'}}": (_changed(lambda c: c.update(components={"#1": {"path": "x"}})), False),
}


@pytest.mark.parametrize("words", FORMS)
def test_a_policy_that_flare_does_not_load_refuses_the_job_at_this_site_alone(hospital, folder, words):
    """Whichever scope it is in: FLARE reads all of them in the job's process, whose end is that of the job at all sites."""
    bytes_of, flare_fails = FORMS[words]
    privacy = hospital.kit / "local/privacy.json"
    privacy.write_bytes(bytes_of(json.loads(privacy.read_text())))
    hospital.refuses(folder, "its privacy.json is not valid; its administrator runs `feddp kit check`")
    assert words in hospital.audit.read_text()
    if flare_fails:
        with pytest.raises((ValueError, ConfigError)):
            create_privacy_manager(Workspace(str(hospital.kit), SITE), names_only=False)


def test_a_scope_that_is_new_takes_effect_with_the_next_job(hospital, folder):
    """FLARE's client has read the names of the scopes when it started; the control: its deployer still refuses."""
    workspace, privacy = Workspace(str(hospital.kit), SITE), hospital.kit / "local/privacy.json"
    PrivacyService.initialize(create_privacy_manager(workspace, names_only=True))
    content = json.loads(privacy.read_text())
    content["scopes"].append({**_first(content), "name": "research"})
    privacy.write_text(json.dumps(content))
    assert hospital.deploys(folder, deployer=AppDeployer, scope="research") == "privacy scope 'research' is not allowed"
    assert hospital.deploys(folder, scope="research") is None


def test_a_participant_that_waits_for_jobs_has_loaded_nothing_that_trains(tmp_path):
    """Every one of them, the server too, imports the admission when it starts."""
    heavy = "monai", "timm", "segmentation_models_pytorch", "torchvision", "scipy"
    code = f"import sys, feddp.flare.admission; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_both_sides_are_read_back_to_the_plan(folder, plan):
    assert [read_folder(side, folder / f"app_{side}").plan for side in ("server", "client")] == [plan, plan]


def test_a_folder_whose_sides_differ_in_the_plan_is_two_jobs(folder):
    changed(folder, SERVER, lambda c: _plan(c).update(rounds=5))
    with pytest.raises(FedDPError, match="the server's app has another plan"):
        read_job(folder)
