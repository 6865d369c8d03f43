"""A participant's process was killed: orphans end, a site's jobs start again, and the server's jobs know the new client."""

import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace

import psutil
import pytest
from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, RunProcessKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.resource_manager_spec import ResourceConsumerSpec
from nvflare.apis.workspace import Workspace
from nvflare.app_common.resource_managers.auto_clean_resource_manager import AutoCleanResourceManager
from nvflare.fuel.sec.audit import Auditor, AuditService
from nvflare.private.fed.client.client_engine_internal_spec import ClientEngineInternalSpec
from nvflare.private.fed.server.client_manager import ClientManager

from feddp.flare import controller, unfinished
from feddp.flare.audit import audit_if_possible
from feddp.flare.participants import Participants
from feddp.flare.unfinished import TRIES, UNFINISHED, Unfinished
from feddp.lean import JOBS
from support.disk import TAKES, full
from support.server import SITES, Run, good

SITE, JOB = "hospital-a", "3b7f0d5e-8a0c-4c5e-9d58-1f2a90c1c3ab"

# a FLARE client's process, which builds the component and starts a job's process. This one builds it when it is told to, and
# then begins its run, or never gets so far
PARENT = """
import json, subprocess, sys, time
from feddp.flare.orphan import EndsWithParent
EndsWithParent()
child = subprocess.Popen([sys.executable, "-c", *json.loads(sys.argv[1])], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
CHILD = """
import sys, time
from pathlib import Path
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.sec.audit import AuditService
from feddp.flare.orphan import EndsWithParent
folder = Path(sys.argv[2])
(folder / "runs").touch()
while not (folder / "go").exists():
    time.sleep(0.05)
component = EndsWithParent()
if sys.argv[3] == "begins on a full disk":
    AuditService.initialize(str(folder / "audit.txt")).audit_file = open("/dev/full", "w")
if sys.argv[3]:
    component.handle_event(EventType.START_RUN, FLContext())
(folder / "built").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["runs", "built"])
@pytest.mark.parametrize(
    ("module", "begins", "ends"),
    [(*each, True) for each in product(JOBS, ("begins", "begins on a full disk", ""))] + [("client_train", "", False)],
)
def test_a_jobs_process_ends_with_its_parent(module, begins, ends, killed, tmp_path):
    """Also where the parent ends before the job's process has got so far that FLARE builds its components, and where the line
    for the audit file has no room."""
    assert find_spec(module) or not ends, "FLARE has it no longer"
    command = [sys.executable, "-c", PARENT, json.dumps([CHILD, module, str(tmp_path), begins])]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        if killed == "built":
            (tmp_path / "go").touch()
        until((tmp_path / killed).exists)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        (tmp_path / "go").touch()
        _, alive = psutil.wait_procs([child], timeout=10 if ends else 2)
        assert (alive == []) is ends
    finally:
        if child.is_running():
            child.kill()
        parent.stdout.close()


def until(holds) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Resources(AutoCleanResourceManager):
    """FLARE's manager of two processors; `check_resources` and the book-keeping are FLARE's own."""

    def _deallocate(self, resources):
        self.resources["cpus"] += resources["cpus"]

    def _check_required_resource_available(self, resource_requirement):
        return resource_requirement.get("cpus", 0) <= self.resources["cpus"]

    def _reserve_resource(self, resource_requirement):
        self.resources["cpus"] -= resource_requirement.get("cpus", 0)
        return {"cpus": resource_requirement.get("cpus", 0)}

    def _resource_to_dict(self):
        return dict(self.resources)


class Consumer(ResourceConsumerSpec):
    def consume(self, resources):
        pass


class Engine(ClientEngineInternalSpec):
    """What the component and FLARE's START_JOB ask of a client's engine."""

    def __init__(self, root):
        self.started = []
        self.components = {
            SystemComponents.RESOURCE_MANAGER: Resources({"cpus": 2}, expiration_period=30),
            SystemComponents.RESOURCE_CONSUMER: Consumer(),
        }
        self.root = root

    def get_component(self, name):
        return self.components[name]

    def new_context(self):
        fl_ctx = FLContext()
        fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(self.root), SITE), private=True)
        fl_ctx.set_prop("__identity_name__", SITE, private=False)
        fl_ctx.get_engine = lambda *a, **k: self
        fl_ctx.get_identity_name = lambda *a, **k: SITE
        return fl_ctx

    def start_app(self, job_id, job_meta, allocated_resource=None, token=None, resource_manager=None):
        self.started.append((job_id, job_meta["resource_spec"], allocated_resource))


Engine.__abstractmethods__ = frozenset()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site's workspace with a deployed job, and the component as each new parent process builds it."""
    for folder in ("startup", "local", JOB):
        (tmp_path / folder).mkdir()
    lines = []
    monkeypatch.setattr(unfinished, "audit_if_possible", lambda fl_ctx, line: lines.append(line) or line)

    class Site:
        root, noted, told = tmp_path, tmp_path / "feddp" / UNFINISHED, lines

        def __init__(self, needs=None):
            self.meta = {"job_id": JOB, "resource_spec": {SITE: needs or {}}}
            (tmp_path / JOB / "meta.json").write_text(json.dumps(self.meta))

        def event(self, event_type, **props):
            """In a parent process of its own; returns the jobs that it started."""
            engine = Engine(tmp_path)
            fl_ctx = engine.new_context()
            for name, value in props.items():
                fl_ctx.set_prop(name, value, private=True, sticky=False)
            Unfinished().handle_event(event_type, fl_ctx)
            return engine.started

        def launched(self):
            self.event(EventType.AFTER_JOB_LAUNCH, **{FLContextKey.JOB_META: self.meta})

        def started_again(self, monkeypatch):
            monkeypatch.setattr(unfinished.threading, "Thread", Now)
            return self.event(EventType.SYSTEM_START)

    return Site


class Now:
    """A thread that has run when it was started."""

    def __init__(self, target, args, daemon):
        self.start = lambda: target(*args)


def test_a_job_that_ran_is_started_again_with_its_resources(site, monkeypatch):
    site = site(needs={"cpus": 2})
    site.launched()
    assert site.started_again(monkeypatch) == [(JOB, {SITE: {"cpus": 2}}, {"cpus": 2})]
    assert site.told == [f"job {JOB} ran when this site's client ended; it is started again"]


def test_a_job_that_ended_is_not(site, monkeypatch):
    site = site()
    site.launched()
    site.event(EventType.JOB_COMPLETED, **{FLContextKey.CURRENT_JOB_ID: JOB})
    assert site.started_again(monkeypatch) == []
    assert site.told == []


def test_it_is_given_up_after_some_starts_within_an_hour(site, monkeypatch):
    site = site()
    site.launched()
    starts = [len(site.started_again(monkeypatch)) for _ in range(TRIES + 2)]
    assert starts == [1] * TRIES + [0, 0]
    assert f"it is given up: it was started again {TRIES} times within 60 minutes" in site.told[-1]
    assert len(site.told) == TRIES + 1, "the last start does not know the job any more"


def test_restarts_of_long_ago_do_not_count(site, monkeypatch):
    """A run of days outlives a machine's weekly restart."""
    site = site()
    site.launched()
    site.noted.write_text(json.dumps({JOB: [time.time() - 3601 - i for i in range(TRIES)]}))
    assert len(site.started_again(monkeypatch)) == 1


def test_nor_do_those_that_a_clock_ahead_has_noted(site, monkeypatch):
    site = site()
    site.launched()
    site.noted.write_text(json.dumps({JOB: [time.time() + 100 * 86_400] * TRIES}))
    assert len(site.started_again(monkeypatch)) == 1


def test_without_the_resources_or_the_files_it_is_given_up_with_the_reason(site, monkeypatch):
    needy = site(needs={"cpus": 3})
    needy.launched()
    assert needy.started_again(monkeypatch) == []
    assert 'the site lacks its resources ({"cpus": 3})' in needy.told[-1]
    needy.launched()
    (needy.root / JOB / "meta.json").unlink()
    assert needy.started_again(monkeypatch) == []
    assert "its files are not in this workspace any more" in needy.told[-1]


def test_a_full_disk_stops_no_start(site, monkeypatch, tmp_path, caplog):
    """Neither the note nor the audit file takes a byte more; both jobs are started, and the log has what the files lack."""
    site, other = site(), JOB.replace("3", "4")
    (tmp_path / other).mkdir()
    (tmp_path / other / "meta.json").write_text(json.dumps(site.meta | {"job_id": other}))
    site.launched()
    site.noted.write_text(before := json.dumps({JOB: [], other: []}))
    audit_file = tmp_path / "audit.txt"
    audit_file.write_text("x" * TAKES)
    monkeypatch.setattr(AuditService, "the_auditor", Auditor(str(audit_file)))
    monkeypatch.setattr(unfinished, "audit_if_possible", audit_if_possible)
    with full(tmp_path):
        started = site.started_again(monkeypatch)
        assert audit_file.read_text() == "x" * TAKES, "the control: a line of the audit file would be here"
    assert [job for job, *_ in started] == [JOB, other]
    assert site.noted.read_text() == before
    for job in (JOB, other):
        assert f"job {job}: {site.noted.parent}: {UNFINISHED} was not written" in caplog.text
        assert f"job {job} ran when this site's client ended; it is started again (not in the audit file: " in caplog.text


@pytest.mark.parametrize("content", ['["' + JOB, f'["{JOB}"]', f'{{"{JOB}": 1}}'])
def test_a_damaged_note_starts_nothing_and_names_the_file(site, monkeypatch, content):
    site = site()
    site.launched()
    site.noted.write_text(content)
    assert site.started_again(monkeypatch) == []
    assert f"{site.noted} " in site.told[-1]
    assert "; remove it; no job is started again" in site.told[-1]


def test_a_client_that_registers_again_keeps_its_place_in_the_servers_jobs():
    """FLARE's own client manager: hospital-a's old token is gone, hospital-b's stays."""
    manager = ClientManager()
    old, new, other = Client(SITE, "old"), Client(SITE, "new"), Client("hospital-b", "b")
    manager.clients = {client.token: client for client in (new, other)}
    before = {client.token: client for client in (old, other)}
    processes = {"job": {RunProcessKey.PARTICIPANTS: before}, "others": {RunProcessKey.PARTICIPANTS: {"b": other}}}
    engine = SimpleNamespace(run_processes=processes, get_clients=lambda: list(manager.get_clients().values()))
    fl_ctx = FLContext()
    fl_ctx.get_engine = lambda *a, **k: engine
    Participants().handle_event(EventType.CLIENT_REGISTER_PROCESSED, fl_ctx)
    assert processes["job"][RunProcessKey.PARTICIPANTS] == {"new": new, "b": other}
    assert processes["others"][RunProcessKey.PARTICIPANTS] == {"b": other}
    assert before.keys() == {"old", "b"}, "FLARE's threads may still walk through it"


def test_a_job_that_is_done_waits_half_a_minute_for_a_client_that_is_gone():
    """FLARE's own default, 900 s, would keep a finished run RUNNING."""
    runner = SimpleNamespace(client_outcome_wait_timeout=900.0)
    fl_ctx = FLContext()
    fl_ctx.get_engine = lambda *a, **k: SimpleNamespace(job_runner=runner)
    Participants().handle_event(EventType.SYSTEM_START, fl_ctx)
    assert runner.client_outcome_wait_timeout == 30


def test_a_waiting_server_asks_for_the_tokens(tmp_path, plan_for, monkeypatch):
    """Site B is silent for 0.3 s of a round; its new token can be known only by asking meanwhile."""
    monkeypatch.setattr(controller, "CLIENTS", 0.1)
    monkeypatch.setattr(controller, "SILENT", 0.3)

    def answer(site, task, tensors, scalars):
        return None if site == "B" else good(site, task, tensors, scalars)

    run = Run(tmp_path, plan_for(method="fedavg", rounds=1), SITES, answer)
    run.open = {"B"}
    asked = []

    def sync():
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise RuntimeError("Cannot get participating clients")

    run.fl_ctx.get_engine().sync_clients_from_main_process = sync
    run.run("train")
    assert run.panics == []
    assert len(asked) > 1, "a parent process that did not answer is asked again"
