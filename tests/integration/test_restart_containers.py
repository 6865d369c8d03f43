"""A killed container or pod is started again, one that ended by itself is not: FLARE's handles, and stand-ins for engines."""

import signal
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from docker.errors import NotFound
from kubernetes.client.exceptions import ApiException
from nvflare.apis.fl_constant import FLContextKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobLauncherSpec, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_opt.job_launcher import k8s_launcher
from nvflare.app_opt.job_launcher.docker_launcher import ClientDockerJobLauncher, DockerJobHandle
from nvflare.app_opt.job_launcher.k8s_launcher import ClientK8sJobLauncher, K8sJobHandle
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.fuel.sec.audit import Auditor, AuditService
from nvflare.private.fed.utils.fed_utils import get_job_launcher

from feddp.flare import endings, launcher
from feddp.flare.launcher import TRIES, JobRestarter, RestartedJob, Restarting
from support.disk import TAKES, full

KILLED, OUT_OF_MEMORY, EVICTED, DELETED = 128 + signal.SIGKILL, "OOMKilled", "Evicted", None


class Engine:
    """A container engine whose containers end with the given exit codes and are removed then, as FLARE asks for.

    Args:
        ends: called when one ends.
        early: they are gone before anybody looks.
    """

    def __init__(self, codes, ends=lambda: None, early=False):
        self.codes, self.ends, self.early, self.started = codes, ends, early, 0
        self.containers = self

    def start(self):
        code = self.codes[min(self.started, len(self.codes) - 1)]
        self.started += 1
        both_wait = threading.Barrier(2)  # a container ends when FLARE and we wait for it

        def wait():
            if not self.early:
                both_wait.wait(10)
            self.container = None
            self.ends()
            return {"StatusCode": code}

        container = SimpleNamespace(id="c", status="running", wait=wait, stop=lambda timeout: None, remove=lambda force: None)
        self.container = None if self.early else container
        return DockerJobHandle("c", "hospital-a-job", self, container=container)

    def get(self, _):
        if self.container is None:
            raise NotFound("no such container")
        return self.container


class Cluster:
    """A cluster whose pods end as said: with an exit code, for want of memory, evicted, or deleted by others."""

    def __init__(self, ends):
        self.ends, self.started, self.deleted = ends, 0, 0

    def start(self):
        assert self.started == self.deleted, "the pods have one name"
        self.end = self.ends[min(self.started, len(self.ends) - 1)]
        self.started += 1
        config = {"name": "pod", "image": "image", "command": "module", "container_name": "job"}
        return K8sJobHandle("job", self, config, namespace="feddp", pod_name="pod")

    def read_namespaced_pod(self, name, namespace):
        assert (name, namespace) == ("pod", "feddp")
        if self.end is DELETED:
            raise ApiException(status=404)
        if self.end == EVICTED:
            return SimpleNamespace(status=SimpleNamespace(phase="Failed", container_statuses=None))
        memory = self.end == OUT_OF_MEMORY
        code = KILLED if memory else self.end
        sidecar = SimpleNamespace(exit_code=7, reason="Error")
        job = SimpleNamespace(exit_code=code, reason=OUT_OF_MEMORY if memory else "Error")
        named = (("sidecar", sidecar), ("job", job))
        statuses = [SimpleNamespace(name=name, state=SimpleNamespace(terminated=how)) for name, how in named]
        return SimpleNamespace(status=SimpleNamespace(phase="Failed" if code else "Succeeded", container_statuses=statuses))

    def delete_namespaced_pod(self, name, namespace, grace_period_seconds):
        self.deleted += 1


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Waits for a job's end; returns its handle and the lines that were told."""
    monkeypatch.setattr(k8s_launcher, "POLL_INTERVAL", 0.01)

    def runs(engine):
        told = []
        handle = RestartedJob(engine.start, told.append, tmp_path / "rc", pause=0.01)
        handle.wait()
        return handle, told

    return runs


ENGINES = pytest.mark.parametrize("engine", [Engine, Cluster])


@ENGINES
def test_a_killed_one_is_started_again(run, engine):
    engine = engine([KILLED, KILLED, 0])
    handle, told = run(engine)
    assert engine.started == 3
    assert handle.poll() == JobReturnCode.SUCCESS
    assert [line.split(";")[0] for line in told] == ["its process was ended by signal SIGKILL"] * 2


@ENGINES
def test_it_is_given_up_after_some_starts(run, engine):
    engine = engine([KILLED])
    handle, told = run(engine)
    assert engine.started == TRIES + 1
    assert handle.poll() == JobReturnCode.UNKNOWN
    assert "is given up; this site leaves the job" in told[-1]


@ENGINES
@pytest.mark.parametrize("code", [0, 1, ProcessExitCode.EXCEPTION, 255])
def test_one_that_ends_by_itself_is_not_started_again(run, engine, code):
    """255 is no signal's number plus 128."""
    engine = engine([code])
    handle, told = run(engine)
    assert (engine.started, told) == (1, [])
    assert (handle.poll() == JobReturnCode.SUCCESS) == (code == 0)


@ENGINES
def test_one_that_fails_after_its_restart_ends_this_sites_part_alone(run, engine):
    handle, told = run(engine([KILLED, 1]))
    assert handle.poll() == JobReturnCode.UNKNOWN
    assert "failed with exit code 1; this site leaves the job" in told[-1]


def test_a_container_that_nobody_saw_end_is_not_started_again(run):
    """Its exit code went with it."""
    engine = Engine([KILLED], early=True)
    handle, told = run(engine)
    assert (engine.started, told) == (1, [])
    assert handle.poll() == JobReturnCode.EXECUTION_ERROR


def test_a_containers_want_of_memory_is_told(run, monkeypatch, tmp_path):
    """The machine's counter is 5 when the first container ends and 5 when the second does."""
    counter = tmp_path / "vmstat"
    counter.write_text("oom_kill 4\n")
    monkeypatch.setattr(endings, "_VMSTAT", counter)
    _, told = run(Engine([KILLED, KILLED, 0], ends=lambda: counter.write_text("oom_kill 5\n")))
    assert [("for want of memory" in line) for line in told] == [True, False]


def test_a_pods_want_of_memory_is_told(run):
    _, told = run(Cluster([OUT_OF_MEMORY, KILLED, 0]))
    assert [("for want of memory" in line) for line in told] == [True, False]


@pytest.mark.parametrize("end", [EVICTED, DELETED])
def test_a_pod_that_was_evicted_or_deleted_is_started_again(run, end):
    cluster = Cluster([end, 0])
    handle, _ = run(cluster)
    assert cluster.started == 2
    assert handle.poll() == JobReturnCode.SUCCESS


def test_a_start_that_fails_is_told_and_the_site_leaves_the_job(run):
    """Of the killed process' code, FLARE would end the job for all sites."""
    engine = Engine([KILLED])
    start = engine.start

    def fails():
        if engine.started:
            raise RuntimeError("cannot connect to Docker daemon")
        return start()

    engine.start = fails
    handle, told = run(engine)
    why = "its process could not be started again (RuntimeError: cannot connect to Docker daemon)"
    assert told[-1] == f"{why}; this site leaves the job"
    assert handle.poll() == JobReturnCode.UNKNOWN


def test_an_abort_while_it_starts_again_ends_it(run, tmp_path):
    """A cluster may take minutes to start a pod. Pods are deleted before the second start, by the abort, and the one that was
    started meanwhile."""
    cluster, starting, goes_on = Cluster([KILLED]), threading.Event(), threading.Event()
    start = cluster.start

    def slowly():
        if not cluster.started:
            return start()
        handle = start()
        starting.set()
        assert goes_on.wait(10)
        return handle

    handle = RestartedJob(slowly, lambda line: None, tmp_path / "rc", pause=0.01)
    waiting = threading.Thread(target=handle.wait)
    waiting.start()
    assert starting.wait(10)
    handle.terminate()
    goes_on.set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert (cluster.started, cluster.deleted) == (2, 3)


def test_of_another_handle_nobody_knows_how_it_ended(run):
    """Such as Slurm's, whose launcher submits a job once."""

    class Handle(JobHandleSpec):
        terminate = wait = lambda self: None

        def poll(self):
            return ProcessExitCode.INFRASTRUCTURE_ERROR

    handle, told = run(SimpleNamespace(start=Handle))
    assert (handle.poll(), told) == (ProcessExitCode.INFRASTRUCTURE_ERROR, [])


# --- in FLARE's client -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ClientProcessJobLauncher, ClientDockerJobLauncher, ClientK8sJobLauncher])
@pytest.mark.parametrize("first", [True, False])
def test_flare_takes_the_sites_launcher_with_restarts_around_it(kind, first):
    """Wherever the component stands in resources.json, and whichever launcher the site has."""
    flares = kind(config_file_path="") if kind is ClientK8sJobLauncher else kind()
    components = [JobRestarter(), flares] if first else [flares, JobRestarter()]
    fl_ctx = FLContext()

    def fire_event(event_type, fl_ctx):
        for component in components:
            component.handle_event(event_type, fl_ctx)

    fl_ctx.get_engine = lambda *a, **k: SimpleNamespace(new_context=lambda: nullcontext(fl_ctx), fire_event=fire_event)
    for _ in range(2):  # FLARE asks for every job
        taken = get_job_launcher({}, fl_ctx)
        assert isinstance(taken, Restarting)
        assert taken.launcher is flares


@pytest.fixture
def launched(tmp_path):
    """Waits for the end of a job that a site's launcher started; returns its handle."""

    def launch(engine):
        fl_ctx = FLContext()
        workspace = SimpleNamespace(get_run_dir=lambda job: str(tmp_path / job), get_app_dir=lambda job: str(tmp_path / job))
        fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)
        flares = type("Launcher", (JobLauncherSpec,), {"launch_job": lambda self, job_meta, fl_ctx: engine.start()})
        handle = Restarting(flares()).launch_job({JobConstants.JOB_ID: "some-job"}, fl_ctx)
        handle.wait()
        return handle

    return launch


def test_the_sites_administrator_reads_why_a_job_was_started_again(launched, monkeypatch):
    lines = []
    monkeypatch.setattr(launcher, "audit_if_possible", lambda fl_ctx, line: lines.append(line) or line)
    assert launched(Engine([KILLED, 0])).poll() == JobReturnCode.SUCCESS
    assert lines == [f"job some-job: its process was ended by signal SIGKILL; start 1 of {TRIES} in 2 s"]


def test_a_killed_one_is_started_again_on_a_full_disk(launched, tmp_path, monkeypatch, caplog):
    """The audit file takes not a byte more; the log has the line."""
    (file := tmp_path / "audit.txt").write_text("x" * TAKES)
    monkeypatch.setattr(AuditService, "the_auditor", Auditor(str(file)))
    engine = Engine([KILLED, 0])
    with full(tmp_path):
        handle = launched(engine)
        assert file.read_text() == "x" * TAKES, "the control: the line would be here"
    assert (engine.started, handle.poll()) == (2, JobReturnCode.SUCCESS)
    assert "start 1 of 3 in 2 s (not in the audit file: " in caplog.text
