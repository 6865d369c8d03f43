"""`feddp kit check --canary`, with a stand-in for FLARE's session; with a server and its sites: test_deployment.py."""

import json
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.fuel.flare_api.api_spec import JobNotRunning
from nvflare.private.fed.server.server_runner import ServerRunner
from nvflare.widgets.info_collector import InfoCollector

from feddp.adaptation.request import AdaptationRequest
from feddp.errors import FedDPError, InputError
from feddp.flare.controller import StageController
from feddp.jobs.folder import export, write_job
from feddp.kit import canary as module
from feddp.kit.canary import Crossing, before_abort, canary, crossings
from feddp.sealing.kit import ADMIN, CLIENT, Kit
from support.server import SITES as SITES_OF_RUN
from support.server import Run, good

SITES = ("site-1", "site-2", "site-3")
JOB = "3b7f0d5e-8a0c-4c5e-9d58-1f2a90c1c3ab"
DOWN = dict.fromkeys(SITES, 2_000_000)


def asked(at, round=2, task="train"):
    return {"event": "ask", "time": at, "task": task, "sites": list(SITES), "round": round, "phase": 0, "bytes": DOWN}


def computed(at, site):
    return {"event": "computed", "time": at, "site": site}


def again(at, site):
    return {"event": "again", "time": at, "site": site, "task": "train"}


def answered(at, site, seconds, round=2):
    scalars = {"loss": 1.0, "seconds": seconds}
    where = {"task": "train", "round": round, "phase": 0}
    return {"event": "answer", "time": at, "site": site, **where, "bytes": 1_500_000, "scalars": scalars}


def ended(round, seconds=9.0):
    return {"event": "round", "time": 50.0, "round": round, "of": 400, "seconds": seconds}


def refused(site, reason):
    where = {"task": "train", "round": 2, "phase": 0}
    return {"event": "refused", "time": 30.0, "site": site, **where, "reason": f"site {site}: {reason}"}


# round 2 begins at 10 s. site-1: 5 s of work, ready at 16 s, so 1 s to it; there at 18.5 s, so 2.5 s back. site-2: 4 s of work,
# ready at 14.5 s, and again after a failed attempt at 19.5 s; there at 20 s: 0.5 s and 5.5 s
SECOND = [
    asked(10.0),
    computed(14.5, "site-2"),
    computed(16.0, "site-1"),
    answered(18.5, "site-1", 5.0),
    computed(19.5, "site-2"),
    answered(20.0, "site-2", 4.0),
]
FIRST = [asked(0.0, round=1), computed(5.0, "site-1"), answered(9.0, "site-1", 1.0, round=1), ended(1)]


def test_each_way_is_timed_by_the_server_in_the_second_round():
    third = [asked(60.0, round=3), computed(65.0, "site-1"), answered(99.0, "site-1", 1.0, round=3)]
    found = crossings([*FIRST, *SECOND, ended(2), *third])
    assert found == {
        "site-1": Crossing(2_000_000, 1_500_000, to_site=1.0, at_site=5.0, back=2.5),
        "site-2": Crossing(2_000_000, 1_500_000, to_site=0.5, at_site=4.0, back=5.5),
    }


def test_a_rounded_time_of_work_makes_no_way_shorter_than_nothing():
    found = crossings([asked(10.0), computed(15.02, "site-1"), answered(16.0, "site-1", 5.1)])
    assert found["site-1"].to_site == 0.0


def test_a_way_back_begins_with_the_answer_that_came():
    """site-1 has its answer at 16 s, and its process dies as it sends it. It is given the task again at 20 s and works 5 s. At
    27 s it has its answer, which is there at 29.5 s: 2.5 s back, and of the 17 s before it, 17 − 5 = 12 s to the site."""
    events = [computed(16.0, "site-1"), again(20.0, "site-1"), computed(27.0, "site-1"), answered(29.5, "site-1", 5.0)]
    (found,) = crossings([asked(10.0), *events]).values()
    assert (found.to_site, found.at_site, found.back) == (12.0, 5.0, 2.5)


def test_what_the_abort_causes_is_no_finding():
    aborted = refused("site-1", "train ended with TASK_ABORTED; the site's audit.log has the reason")
    assert before_abort([*SECOND, ended(2), aborted]) == [*SECOND, ended(2)]
    assert before_abort([*SECOND, aborted, {"event": "error", "message": "too few"}]) == SECOND
    assert before_abort(SECOND) == SECOND


class Session:
    """FLARE's session with a server that says what it is told to.

    Args:
        statuses: of the job, one per question, the last one ever again; after an abort FINISHED:ABORTED.
        events: the server's progress.
    """

    def __init__(self, statuses, events=(), rounds=0, joined=SITES, detail=()):
        self.statuses, self.events, self.rounds, self.joined, self.detail = [*statuses], events, rounds, joined, detail
        self.submitted, self.aborted, self.closed, self.downloads = [], False, False, []

    def get_system_info(self):
        return SimpleNamespace(client_info=[SimpleNamespace(name=name) for name in self.joined])

    def submit_job(self, folder):
        self.submitted.append(folder)
        return JOB

    def get_job_meta(self, job):
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        over = self.aborted and not status.startswith("FINISHED")
        meta = {"status": "FINISHED:ABORTED" if over else status, "job_deploy_detail": list(self.detail)}
        return meta | ({"start_time": "now"} if self.events else {})

    def show_stats(self, job, target):
        assert target == "server"
        if self.rounds is None:
            raise JobNotRunning("its process has ended")
        return {"server": {"feddp": {"round": self.rounds}, "ServerRunner": {"workflow": "train"}}}

    def abort_job(self, job):
        self.aborted = True

    def download_job_result(self, job, destination):
        folder = Path(destination) / job
        (folder / "workspace").mkdir(parents=True)
        (folder / "workspace/progress.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in self.events))
        self.downloads.append(folder)
        return str(folder)

    def close(self):
        self.closed = True


@pytest.fixture
def folder(plan_for, tmp_path):
    return export(plan_for(sites=SITES, min_sites=3, rounds=400), tmp_path / "job")


@pytest.fixture
def lead(tmp_path, monkeypatch):
    """Runs a canary with the lead's kit against a session."""
    monkeypatch.setattr(module, "POLL", 0.01)
    kit = Kit(tmp_path, ADMIN, "lead@consortium.org", "feddp", ("server.example.org", 8002))

    def runs(session, folder, within=60.0):
        monkeypatch.setattr(module, "opened_session", lambda name, kit: session)
        return canary(kit, folder, within)

    return runs


def test_a_good_canary_ends_after_two_rounds_and_leaves_no_download(lead, folder):
    session = Session(["SUBMITTED", "RUNNING"], [*FIRST, *SECOND, ended(2)], rounds=2)
    lines, problems = lead(session, folder)
    assert problems == []
    assert lines == [
        "site-1: 2.0 MB to the site in 1.0 s, 1.5 MB back in 2.5 s; the site worked 5.0 s",
        "site-2: 2.0 MB to the site in 0.5 s, 1.5 MB back in 5.5 s; the site worked 4.0 s",
        "slowest way: from site-2, 5.5 s",
        "round 2 took 9.0 s; 400 such rounds take 60.0 minutes",  # 400 x 9 s
        f"job {JOB} was ended; export the job again with --resume {JOB} to go on after these rounds",
    ]
    assert session.submitted == [str(folder.resolve())]
    assert (session.aborted, session.closed) == (True, True)
    assert session.downloads
    assert not session.downloads[0].exists()


def test_a_task_that_does_not_arrive_is_told_from_an_answer_that_does_not(lead, folder):
    """site-2 has its answer. So had site-3, which was started again: it may not even have the task now."""
    events = [asked(0.0, round=1), computed(5.0, "site-1"), answered(6.0, "site-1", 4.0, round=1), computed(5.5, "site-2")]
    events += [computed(5.5, "site-3"), again(5.8, "site-3")]
    session = Session(["RUNNING"], events)
    lines, problems = lead(session, folder, within=0.05)
    assert lines == []
    back, there = problems
    assert back.startswith("site-2: task train (2.0 MB) did not come back in time: the site has its answer, which does not get")
    assert there.startswith("site-3: task train (2.0 MB) did not come back in time: either the site is still at work")
    assert all("server.example.org:8002; let firewall and proxy pass messages of this size" in line for line in problems)
    assert session.aborted


def moving(site, way, moved, rate):
    where = {"event": "transfer", "time": 30.0, "site": site, "task": "train"}
    return where | {"way": way, "moved": moved, "size": 2_000_000, "rate": rate}


def test_a_slow_line_is_told_from_a_firewall(lead, folder):
    """What still moves needs time, or a faster line; what stands still does not get through."""
    slow = [moving("site-1", "to", 500_000, 12_500), computed(31.0, "site-2"), moving("site-2", "back", 500_000, 12_500)]
    session = Session(["RUNNING"], [asked(0.0, round=1), *slow, moving("site-3", "to", 500_000, 0)])
    _, problems = lead(session, folder, within=0.05)
    to, back, still = problems
    far = "still on the line, 0.5 MB of 2.0 MB at 0.10 Mbit/s; allow more time with --within, or give the site a faster line"
    assert to == f"site-1: task train (2.0 MB) did not come back in time: the task is {far}"
    assert back == f"site-2: task train (2.0 MB) did not come back in time: its answer is {far}"
    assert "let firewall and proxy pass messages of this size" in still


def test_who_did_not_approve_is_named_and_the_others_are_measured(lead, folder):
    unapproved = "site site-3: its administrator has not approved plan 0123 (fedavg); there: feddp kit approve JOB_FOLDER KIT"
    detail = ["server: OK", "site-1: OK", "site-2: OK", f"site-3: {unapproved}"]
    session = Session(["RUNNING"], [*FIRST, *SECOND, ended(2)], rounds=2, detail=detail)
    lines, problems = lead(session, folder)
    assert problems == [f"site-3: {unapproved}"]
    assert len(lines) == 5


def test_a_job_that_runs_nowhere(lead, folder):
    session = Session(["FINISHED:FAILED_TO_RUN"], detail=[f"{site}: not approved" for site in SITES])
    assert lead(session, folder) == ([], [f"{site}: not approved" for site in SITES])
    assert session.downloads == []


def test_what_the_server_refuses_and_why_a_job_fails(lead, folder):
    """The same refusal in both rounds is one problem."""
    reason = "its answer's loss is nan, not a finite number"
    events = [*FIRST, refused("site-2", reason), refused("site-2", reason), {"event": "error", "message": "train: 1 of 3"}]
    _, problems = lead(Session(["FINISHED:EXECUTION_EXCEPTION"], events, rounds=None), folder)
    assert problems == [f"site site-2: {reason}", "train: 1 of 3"]


def test_a_job_that_ends_without_a_reason(lead, folder):
    _, problems = lead(Session(["RUNNING", "FINISHED:ABNORMAL"], FIRST[-1:], rounds=None), folder)
    assert problems == [f"job {JOB} ended (FINISHED:ABNORMAL) before round 2 was complete; read log.txt of the server"]


def test_nothing_is_submitted_where_a_site_is_absent(lead, folder):
    session = Session(["RUNNING"], joined=SITES[:2])
    with pytest.raises(InputError, match="site-3 of .*: not connected to the server; start these kits"):
        lead(session, folder)
    assert session.submitted == []
    assert session.closed


@pytest.mark.parametrize("error", [RuntimeError("the line is down"), KeyboardInterrupt()])
def test_whatever_ends_the_watch_aborts_the_job(lead, folder, error):
    session = Session(["RUNNING"])
    session.show_stats = lambda job, target: (_ for _ in ()).throw(error)
    with pytest.raises(FedDPError if isinstance(error, Exception) else KeyboardInterrupt) as raised:
        lead(session, folder)
    assert session.aborted
    if isinstance(error, Exception):
        assert "8002 did not do what lead@consortium.org asked (RuntimeError: the line is down)" in str(raised.value)


def test_a_hospitals_kit_is_told_who_may(folder, tmp_path):
    kit = Kit(tmp_path / "kit", CLIENT, "site-1", "feddp", ("server", 8002))
    with pytest.raises(InputError, match="is the kit of a client, which cannot submit jobs; the lead runs the canary"):
        canary(kit, folder, 60.0)


def test_a_job_that_is_no_canary(lead, folder, plan_for, tmp_path):
    plan = plan_for(sites=SITES, min_sites=3, rounds=400)
    request = AdaptationRequest("site-1", ("site-2", "site-3"), JOB)
    others = [
        export(plan_for(sites=SITES, min_sites=3, rounds=2), tmp_path / "short"),
        export(plan, tmp_path / "later", resume=JOB),
        write_job(tmp_path / "adapt", "feddp", plan, request, None),
    ]
    for other in others:
        with pytest.raises(InputError, match="is no job of more than 2 rounds that begins a run"):
            lead(Session(["RUNNING"]), other)


# --- what the server tells -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, plan_for):
    return Run(tmp_path, plan_for(sites=("A", "B", "C"), min_sites=3, rounds=2), SITES_OF_RUN, good)


def client_task(status=None, received=None):
    """Task `train` of site A, that FLARE has ended with a status, or whose answer was received at a time."""
    made = ClientTask(Client("A", "A"), Task("train", Shareable()))
    made.task.completion_status, made.result_received_time = status, received
    return made


def test_the_server_notes_when_a_site_has_its_answer(run):
    """FLARE's client asks whether the server still wants the answer before it sends it; its heartbeats are no such sign.

    Nor is the question of a site about a task that is over: its answer was received, the site was given up and the task is
    about to be forgotten, or it was forgotten. FLARE tells all of them apart by the task's id alone.
    """
    stage, communicator = StageController("train"), WFCommServer()
    stage.set_communicator(communicator)
    told = []
    communicator.client_is_active = lambda name, reason, fl_ctx: told.append(reason)
    communicator._client_task_map = {
        "answered": client_task(received=1.0),
        "given up": client_task(TaskCompletionStatus.TIMEOUT),
        "present": client_task(),
    }
    stage.start_controller(run.fl_ctx)
    runner = ServerRunner.__new__(ServerRunner)
    FLComponent.__init__(runner)
    runner.wf_lock, runner.current_wf = threading.RLock(), SimpleNamespace(id="train", controller=stage)
    site = FLContext()
    site.set_prop(ReservedKey.IDENTITY_NAME, "A", private=False)
    run.fl_ctx.set_peer_context(site)

    def asks(id):
        check = Shareable()
        check.set_header(ReservedHeaderKey.TASK_ID, id)
        return runner._handle_task_check("", check, run.fl_ctx).get_return_code()

    runner._handle_job_heartbeat("", Shareable(), run.fl_ctx)
    assert [asks("answered"), asks("given up"), asks("forgotten")] == [ReturnCode.OK, ReturnCode.OK, ReturnCode.TASK_UNKNOWN]
    assert run.progress("computed") == []
    assert asks("present") == ReturnCode.OK
    assert [event["site"] for event in run.progress("computed")] == ["A"]
    assert len(told) == 5, "FLARE is told of every sign"


def test_a_site_that_repeats_itself_does_not_fill_the_server_s_disk(run):
    """Ten lines for each sign until the server asks again; what a site calls its task is not repeated."""
    stage, communicator = StageController("train"), WFCommServer()
    stage.set_communicator(communicator)
    communicator._client_task_map = {"present": client_task()}
    stage.start_controller(run.fl_ctx)
    for _ in range(50):
        communicator.process_task_check("present", run.fl_ctx)
        stage.process_result_of_unknown_task(SimpleNamespace(name="A"), "patient Miller", "1", Shareable(), run.fl_ctx)
    assert len(run.progress("computed")) == 10
    assert [event["task"] for event in run.progress("refused")] == ["unknown"] * 10
    stage.note_late("B", "train")
    assert run.progress("refused")[-1]["task"] == "train"


def test_show_stats_says_how_many_rounds_are_complete(run):
    """Also before the first stage has begun."""
    runner = InfoCollector()
    runner.engine = SimpleNamespace(
        new_context=lambda: nullcontext(run.fl_ctx),
        fire_event=lambda event_type, fl_ctx: run.persistor.handle_event(event_type, fl_ctx),
    )
    assert runner.get_run_stats() == {}
    run.run("train")
    told = runner.get_run_stats()["feddp"]
    assert (told["round"], told["of"]) == (2, 2)
    standing = told["standing"]
    assert (standing["method"], standing["round"], standing["task"]) == (run.persistor.plan.method, 2, "adopt")
    dice = {event["site"]: event["scalars"]["dice"] for event in run.progress("answer") if "dice" in event["scalars"]}
    assert {site: row["dice"] for site, row in standing["sites"].items()} == dice
    assert {row["state"] for row in standing["sites"].values()} == {"waits"}
