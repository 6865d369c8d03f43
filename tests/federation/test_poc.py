"""A real federation on this machine, which `poc/run.sh` starts: certificates, a process a site, the sites' own policies.

One POC for all tests.
"""

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pexpect
import psutil
import pytest
from nvflare.fuel.flare_api.api_spec import NoConnection
from safetensors.torch import load_file
from typer.testing import CliRunner

from feddp.cli import app
from feddp.errors import FedDPError
from feddp.files import read_events
from feddp.jobs import adaptation as outside
from feddp.jobs import folder as jobs
from feddp.lean import JOBS
from feddp.protocol import rounded
from feddp.run import options
from feddp.run import poc as run_poc
from feddp.run.poc import LEAD, SERVER, PocJob, connect, federation
from feddp.run.session import copy_results
from feddp.stages.memory import start_file
from support.captured import those_in, value_of
from support.command import ended
from support.deployment import approved
from support.docs_pages import ROOT, blocks, commands_for

pytestmark = pytest.mark.poc

SITES = ["site-1", "site-2", "site-3", "site-4"]
UNSEEN = SITES[-1]  # consents to nothing
# hands its words over, and ends as they did
FEDDP = """#!/usr/bin/env bash
printf '%s\\n' "$@" > asked.part
mv asked.part asked
until [ -e code ]; do sleep 0.1; done
code=$(cat code)
rm code
exit "$code"
"""
SHORT = {"data": ["--images", "30", "--size", "32"], "run": ["--size", "32", "--without-consent", UNSEEN]}


@pytest.fixture(scope="module")
def terminal():
    """A terminal in which the lead watches the job of `feddp`, from its submission on: what it showed, when it has ended."""
    shown = SimpleNamespace(spawn=None, log=io.StringIO())

    def start(kits):
        (line,) = commands_for("test_poc", "docs/how-to/watch.md")
        words = ["-m", *line.replace("kits/lead@consortium.org", str(kits / LEAD)).split()]
        env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
        shown.spawn = pexpect.spawn(sys.executable, words, encoding="utf-8", dimensions=(40, 200), timeout=600, env=env)
        shown.spawn.logfile_read = shown.log
        shown.thread = threading.Thread(target=shown.spawn.expect, args=[pexpect.EOF])
        shown.thread.start()  # it reads all the while, as a terminal does

    shown.start = start
    yield shown
    if shown.spawn is not None:
        shown.spawn.close(force=True)
        shown.thread.join()


def answered(command: list[str], folder: Path) -> str:
    """A script of ours, whose `feddp` commands (FEDDP) run in this process, shortened (SHORT); what all of them printed."""
    printed, asked = io.StringIO(), folder / "asked"
    with open(folder / "script.log", "w", encoding="utf-8") as log:
        script = subprocess.Popen(["bash", *command], cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while script.poll() is None:
            if not asked.exists():
                time.sleep(0.1)
                continue
            name, *words = asked.read_text().splitlines()
            asked.unlink()
            with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(printed):
                patch.chdir(folder)
                code = ended(["feddp", name, *words, *SHORT[name]])
            (folder / "code.part").write_text(str(code))
            (folder / "code.part").rename(folder / "code")
    finally:
        with suppress(ProcessLookupError):  # it has ended, and its `feddp` with it
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()
    said = printed.getvalue() + (folder / "script.log").read_text()
    assert script.returncode == 0, said[-6000:]
    return said


@pytest.fixture(scope="module")
def poc(tmp_path_factory, capture, terminal):
    """`poc/run.sh` in a checkout whose environment is this one, on few and small images. The federation that its run starts
    stays for all tests. Three hospitals consent to everything, one to nothing. What policies and lists stop is in
    test_deployment.py."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "poc").mkdir()
    shutil.copy(ROOT / "poc/run.sh", folder / "poc")
    (folder / "tools").mkdir()
    (folder / "tools/feddp").write_text(FEDDP)
    (folder / "tools/feddp").chmod(0o755)
    (folder / "poc/environment.sh").write_text(f'cd "{folder}"\nexport PATH="{folder}/tools:$PATH"\n')
    started = SimpleNamespace(folder=folder)
    with ExitStack() as stays:

        @contextmanager
        def staying(request):
            started.plan = request.plan
            started.kits, started.session = stays.enter_context(federation(request))
            yield started.kits, started.session

        @contextmanager
        def environment(request, job):
            with run_poc.poc(request, job) as started.job:
                terminal.start(started.kits)
                yield started.job

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_poc, "federation", staying)
            patch.setattr(options, "environment", {"poc": environment}.__getitem__)
            command = ["poc/run.sh", "--out", "runs/poc", "--rounds", "2", "--calibration-epochs", "1"]
            started.said = answered(command, folder)

        def submit(job_folder):
            job = PocJob(started.kits, started.session, job_folder)
            deadline = time.monotonic() + 240
            while not job.finished():
                assert time.monotonic() < deadline, f"{job_folder.name} did not end: {job.log.read_text()[-2000:]}"
                time.sleep(0.5)
            return job

        started.submit = submit
        yield started


@pytest.fixture(scope="module")
def feddp(poc):
    succeeded, server = poc.job.outcome()
    assert succeeded, poc.job.log.read_text()[-3000:]
    return poc.job, server, json.loads((server / "results.json").read_text())


def test_the_readme_shows_what_poc_run_prints(poc):
    """Line by line, numbers aside."""

    def shape(line: str) -> str:
        return " ".join(re.sub(r"\d+(\.\d+)?|±|—|─", "", line).split())

    printed = {shape(line) for line in poc.said.replace(" \n", " ").splitlines()} | set(map(shape, poc.said.splitlines()))
    (shown,) = [block.text for block in blocks("README.md") if block.kind == "text"]
    assert [line for line in shown.splitlines() if shape(line) and shape(line) not in printed] == []


def test_poc_run_leaves_a_page(poc):
    """No site of so few images lets a standard deviation leave: the interval is over the four sites, not over images."""
    page = (poc.folder / "runs/poc/report.html").read_text(encoding="utf-8")
    assert f"Report: {poc.folder.resolve() / 'runs/poc/report.html'}" in poc.said
    assert "standard deviations over fewer than" in page
    assert "Intervals over sites" in page
    assert "paired by test image" not in page


def test_the_first_tutorial_finds_what_poc_run_left(poc, monkeypatch):
    """Its blocks that name the folder; the others, after a run without FLARE, are run by test_docs_commands.py."""
    monkeypatch.chdir(poc.folder)
    found = [block for block in blocks("docs/tutorials/first-federation.md") if "runs/poc" in block.text]
    assert [block.kind for block in found] == ["bash", "bash", "python", "bash"]
    for block in found[1:]:
        words = shlex.split(block.text)
        if block.kind == "python":
            exec(compile(block.text, "page", "exec"), {})
        elif words[0] == "feddp":
            assert ended(words) == 0
        else:
            subprocess.run(words, check=True)


def test_feddp_runs_through_both_stages_on_certificates(feddp):
    _, _, results = feddp
    assert set(results["sites"]) == set(SITES)
    for site in results["sites"].values():
        for when in ("before_calibration", "final"):
            assert set(site[when]) == {"dice", "iou", "hd", "hd95", "assd", "assd-medpy"}
            assert 0 <= site[when]["dice"]["mean"] <= 1
            assert site[when]["dice"]["n"] >= 2
            assert all("std" not in cell and cell == rounded(name, cell) for name, cell in site[when].items())
        assert site["std_withheld"] == 20
    assert results["rounded"] is True


def test_the_lead_learns_where_the_time_went(feddp, poc):
    """By the server's events and the sites' own logs, whose seconds the guard rounds to tenths: a site's own parts are what it
    noted, `sending` lasts from its offer to its answer, and all parts are the round. Nothing is scored in the first round."""
    job, server, _ = feddp
    times = json.loads((poc.folder / "runs/poc/time.json").read_text())
    events, walls = read_events(server / "progress.jsonl"), times["rounds"]["wall"]
    asked = [event["time"] for event in events if event["event"] == "ask" and event["task"] == "train"]
    assert len(walls) == len(asked) == 2
    assert set(times["sites"]) == set(SITES)
    for site, parts in times["sites"].items():
        of_site = [event for event in events if event.get("site") == site]
        answers = [event for event in of_site if event["event"] == "answer" and event["task"] == "train"]
        noted = [event for event in read_events(job.store(site) / "record.jsonl") if event["event"] == "train"]
        assert parts["evaluating"][0] is None
        for round, wall in enumerate(walls):
            offer = next(each for each in of_site if each["event"] == "computed" and each["time"] > asked[round])
            assert parts["sending"][round] == pytest.approx(answers[round]["time"] - offer["time"], abs=0.002)
            own = [parts[name][round] or 0 for name in ("computing", "loading", "evaluating", "storing")]
            assert sum(own) == pytest.approx(noted[round]["seconds"], abs=0.2)
            assert sum(seconds[round] or 0 for seconds in parts.values()) == pytest.approx(wall, abs=0.2)
    assert list(times["stages"]) == ["ready", "train", "calibrate", "evaluate"]


def test_the_job_s_processes_load_no_compiler_and_the_sites_none_of_what_monai_takes(feddp, capture):
    """What `feddp.lean` leaves out, in the processes that FLARE started; torch, and MONAI at the sites, are the control."""
    (job, _, _), (site, server) = feddp, JOBS
    assert capture.loaded(site, job.id) == [{"torch", "monai"}] * len(SITES)
    of_torch = {"torch", "torch._dynamo.config", "torch._refs"}
    assert [modules & of_torch for modules in capture.loaded(server, job.id)] == [{"torch"}]


def test_the_lead_sees_the_job_while_it_runs(feddp, terminal):
    """Over FLARE's admin session: rounds, tasks, what each site does, and its last loss and Dice as the server has them."""
    job, server, results = feddp
    terminal.thread.join(60)
    terminal.spawn.close()
    said = terminal.log.getvalue()
    assert terminal.spawn.exitstatus == 0, said[-3000:]
    assert "feddp on pvt_v2_b0-fpn: running; " in said
    last = said[said.rindex("feddp on pvt_v2_b0-fpn: ") :]
    assert last.startswith("feddp on pvt_v2_b0-fpn: finished; ")
    answers = [event for event in read_events(server / "progress.jsonl") if event["event"] == "answer"]
    losses = {f"{event['scalars']['loss']:.3f}" for event in answers if "loss" in event["scalars"]}
    for site in SITES:
        (loss,) = re.findall(rf"{site} +\w+.*? +(\d\.\d{{3}}|—) +", last)[:1]
        assert loss in losses | {"—"}
    assert any(f" {loss} " in said for loss in losses), "some losses were shown"


def test_others_do_not_see_what_it_measures(feddp, poc):
    """A hospital's kit has no session; an id that no job has, and the end of a job that nobody watched, are said."""
    kits, (job, _, _) = poc.kits, feddp
    for words, said in (
        (["--kit", kits / "site-1"], "is the kit of a client; jobs are watched with a person's kit"),
        (["zzz", "--kit", kits / LEAD], "zzz: there is not one job whose id begins so (there: none); name a job's id"),
        (["--kit", kits / LEAD], "not one job is under way (there: none); name a job's id"),
    ):
        done = CliRunner().invoke(app, ["watch", *map(str, words)])
        assert said in str(done.exception), done.output
    done = CliRunner().invoke(app, ["watch", job.id, "--kit", str(kits / LEAD)])
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, f"job {job.id}: finished")


def test_a_site_without_consent_neither_gives_nor_receives(feddp):
    """The run goes on, and the results say who was calibrated with how many peers; the matrix has the exchangers alone."""
    job, server, results = feddp
    calibration = {site: results["sites"][site]["calibration"] for site in SITES}
    assert calibration.pop(UNSEEN) == {"calibrated": False, "peers": 0, "tuned": True}
    exchangers = set(SITES) - {UNSEEN}
    assert calibration == dict.fromkeys(exchangers, {"calibrated": True, "peers": 2, "tuned": True})
    assert results["without"] == {"calibration": {UNSEEN: "does not consent"}}
    assert set(results["matrix"]) == exchangers
    assert all(set(row) == exchangers for row in results["matrix"].values())
    own = load_file(job.store(UNSEEN) / "state_00002.safetensors")
    private = [value for name, value in own.items() if name.startswith("private/")]
    assert len(private) == 16
    for folder in (server, *map(job.store, sorted(exchangers)), job.progress.parents[1]):
        for path in folder.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert not any(value.numpy().tobytes()[:64] in content for value in private), path


def test_every_site_ends_with_a_network_of_its_own(feddp):
    job, _, _ = feddp
    networks = [load_file(job.store(site) / "calibrated.safetensors") for site in SITES]
    query = "encoder.model.stages_0.blocks.0.attn.q.weight"
    assert not any((one[query] == other[query]).all() for one, other in combinations(networks, 2))


def test_a_hospital_that_joins_later_gets_the_donors_models_and_nobody_else_does(poc, feddp, capture, tmp_path):
    """The job of `feddp job-outside`, from what download_job brought of the finished run, equals `feddp adapt` on the networks
    that the donors took home, bit for bit. The newcomer keeps masks and no model, the donors' files are as they were, and no
    value of a donor's network is in a file of the server's or in a frame that it got or sent; that the search finds what is
    there, the shared tensors show."""
    kits = poc.kits
    earlier, server, results = feddp
    assert results["job"] == earlier.id
    donors, newcomer = ["site-1", "site-2"], "site-3"
    before = {path: path.read_bytes() for site in donors for path in earlier.store(site).iterdir()}
    data, home, options = poc.folder / "data/synthetic-4" / newcomer, tmp_path / "run", ["epochs=1", "seed=3"]
    with capture:
        made = outside.export(server, newcomer, donors, tmp_path / "outside", "routing", options, score=True)
        job = poc.submit(approved(made, *(kits / site for site in (*donors, newcomer))))
    succeeded, left = job.outcome()
    assert succeeded, job.log.read_text()[-3000:]

    for site in donors:
        copy_results(earlier.store(site), home / "sites" / site)
    shutil.copy(start_file(server, results["start_round"]), home / "shared.safetensors")
    (home / "results.json").write_text(json.dumps({"sites": dict.fromkeys(donors)}))
    words = ["--models", home, "--images", data, "--out", tmp_path / "masks", "--epochs", 1, "--seed", 3, "--score"]
    done = CliRunner().invoke(app, ["adapt", *map(str, words)])
    assert done.exit_code == 0, done.output
    expected, found = ({p.name: p.read_bytes() for p in folder.glob("*.png")} for folder in (tmp_path / "masks", masks(job)))
    assert found == expected
    assert len(found) >= 2
    here, there = (json.loads((folder / "adapt.json").read_text()) for folder in (tmp_path / "masks", masks(job)))
    assert here["losses"] == there["losses"]

    said = json.loads((left / "results.json").read_text())
    assert (said["run"], said["newcomer"], said["donors"], said["without"]) == (earlier.id, newcomer, donors, {})
    assert said["sealed"] is True
    assert said["images"] == len(found)
    first, least = here["losses"][0], min(here["losses"])
    assert (said["loss_before"], said["loss"]) == (rounded("loss", first), rounded("loss", least))
    exact = json.loads((tmp_path / "masks/scores.json").read_text())["summary"]
    assert said["scores"] == {m: {"mean": rounded("mean", cell["mean"], m), "n": cell["n"]} for m, cell in exact.items()}

    assert {path: path.read_bytes() for site in donors for path in earlier.store(site).iterdir()} == before
    assert not list(job.store(newcomer).rglob("*.safetensors"))
    shared = load_file(start_file(server, results["start_round"]))
    known = {value_of(tensor) for tensor in shared.values()}
    personal = {value_of(t) for s in donors for t in load_file(earlier.store(s) / "calibrated.safetensors").values()} - known
    assert len(personal) > 100
    contents = [path.read_bytes() for root in (kits / SERVER, left) for path in root.rglob("*") if path.is_file()]
    for places in (contents, [capture.frames()]):
        found = set().union(*(those_in(content, known | personal) for content in places))
        assert len(found & known) > 50, "the control"
        assert not found & personal


def masks(job) -> Path:
    return job.store("site-3") / "masks"


def test_a_job_of_an_unknown_scope_is_refused_by_every_site(poc, tmp_path):
    """Of the plan that every site admits."""
    kits = poc.kits
    job = poc.submit(jobs.export(poc.plan, tmp_path / "unscoped", "research"))
    assert job._status != "FINISHED:COMPLETED"
    done = CliRunner().invoke(app, ["watch", job.id, "--kit", str(kits / LEAD)])
    assert f"job {job.id} ended {job._status}; " in str(done.exception)
    assert "site-1: " in str(done.exception), "a hospital's reason is shown"
    assert not (kits / "site-1" / "feddp" / job.id).exists(), "no site opened its data for it"


def test_the_kits_hold_our_policy_and_stream_no_logs(poc):
    kits = poc.kits
    for name in (SERVER, *SITES):
        local = kits / name / "local"
        for path in [p for p in (local / "resources.json", local / "resources.json.default") if p.exists()]:
            resources = json.loads(path.read_text())
            assert resources["class_list_enforcement_mode"] == "enforce"
            assert all(c.startswith("feddp.flare.") for c in resources["class_allow_list"])
            assert resources["allow_log_streaming"] is False
            assert not {"site_log_streamer", "log_receiver"} & {c["id"] for c in resources["components"]}
    privacy = json.loads((kits / "site-3/local/privacy.json").read_text())
    assert privacy["scopes"][0]["task_result_filters"] == [{"path": "feddp.flare.filters.PrivateTensorGuard", "args": {}}]


def test_a_server_that_is_busy_for_longer_than_flare_waits_is_waited_for(poc):
    """FLARE waits 5 s for an answer; then its session raises NoConnection, and a run would end on it."""
    kits = poc.kits
    # of a process that has ended and was not waited for, the command is None
    (server,) = [p for p in psutil.process_iter(["cmdline"]) if {"-m", str(kits / SERVER)} <= {*(p.info["cmdline"] or ())}]
    session = connect(kits, SITES)
    goes_on = threading.Timer(6.5, server.resume)
    server.suspend()
    goes_on.start()
    try:
        assert {client.name for client in session.get_system_info().client_info} == set(SITES)
    finally:
        goes_on.join()
        session.close()


def test_a_server_that_is_not_ready_is_asked_again(monkeypatch, tmp_path):
    """FLARE's session raises NoConnection, or a TypeError on a server that listens before it has its certificate; and where no
    site ever joins, the last reason is said, with where to look."""
    joined = SimpleNamespace(get_system_info=lambda: SimpleNamespace(client_info=[SimpleNamespace(name="site-1")]))
    answers = iter([NoConnection("nobody there"), TypeError("'None' is not an instance of 'bytes'"), joined])

    def session(*_, **__):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("feddp.run.poc.opened_session", session)
    monkeypatch.setattr("feddp.run.poc.time.sleep", lambda _: None)
    assert connect(tmp_path, ["site-1"]) is joined
    monkeypatch.setattr("feddp.run.poc.READY", 0.05)
    answers = iter(lambda: TypeError("half an answer"), None)
    with pytest.raises(FedDPError, match=r"within 0.05 s \(last: TypeError: half an answer\); see console.log"):
        connect(tmp_path, ["site-1"])
