"""`feddp watch` of a run's folder: in a terminal while its progress grows, after its end, and where it was broken off."""

import os
import sys
import time
from types import SimpleNamespace

import pexpect
import pytest
from nvflare.fuel.flare_api.api_spec import JobNotRunning
from rich.console import Console

from feddp.errors import FedDPError
from feddp.files import append_event, write_json
from feddp.flare.persistor import STANDING, STATS
from feddp.reporting.standing import fitted, headline, view
from feddp.run import watch as watching
from feddp.run.options import Options, run_here
from feddp.run.session import Request, record
from feddp.run.watch_job import WatchedJob
from feddp.stages.standing import Standing
from feddp.training.claim import hold, release


@pytest.fixture
def folder(tiny_root, tmp_path, plan_for):
    """A run that has begun, as its server writes it; this process holds it."""
    out = tmp_path / "run"
    policies = {site: {"data": str(tiny_root / site)} for site in ("site-1", "site-2")}
    request = Request(plan_for(method="fedavg", rounds=3), policies, out, env="local")
    server = out / "workspace/server/feddp/local"
    server.mkdir(parents=True)
    write_json(out / "run.json", record(request) | {"job": "local"})
    hold(out, patience=0)
    yield out, server / "progress.jsonl"
    release(tmp_path)


def ask(path, round):
    sites = ["site-1", "site-2"]
    append_event(path, "ask", task="train", sites=sites, round=round, phase=0, bytes=dict.fromkeys(sites, 1500))


def answer(path, site, **scalars):
    append_event(path, "answer", site=site, task="train", bytes=1200, scalars={"seconds": 1.0} | scalars)


def test_in_a_terminal_while_the_progress_grows(folder):
    """The table is drawn anew with every event, and the command ends with the run."""
    out, path = folder
    # a worker of xdist inherits COLUMNS, which readline sets, and rich believes it more than the terminal
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    words, env = ["-m", "feddp", "watch", str(out)], {**env, "TERM": "xterm", "NO_COLOR": "1"}
    terminal = pexpect.spawn(sys.executable, words, encoding="utf-8", dimensions=(40, 160), timeout=240, env=env)
    try:
        terminal.expect("running")
        ask(path, 1)
        terminal.expect(r"fedavg on pvt_v2_b0-fpn: running; 0 of 3 rounds done; train round 1")
        terminal.expect(r"site-1 +works [\d.]+ (?:second|minute)s? +— +— +1.5 kB +0 bytes")
        answer(path, "site-1", loss=0.625)
        terminal.expect(r"site-1 +waits +0.625 +— +1.5 kB +1.2 kB")
        append_event(path, "refused", site="site-2", task="train", reason="site site-2: NaN in q.weight")
        terminal.expect(r"site-2 +refused [\d.]+ (?:second|minute)s?: site site-2: NaN in q.weight")
        append_event(path, "round", round=1, of=3, seconds=90.0)
        terminal.expect("1 of 3 rounds done; train round 1; about 3.0 minutes left")
        write_json(out / "results.json", {})
        terminal.expect("fedavg on pvt_v2_b0-fpn: finished; 1 of 3 rounds done")
        terminal.expect(pexpect.EOF)
        terminal.close()
        assert terminal.exitstatus == 0
    finally:
        terminal.close(force=True)


def test_a_broken_off_run_says_what_continues_it(folder, feddp):
    out, path = folder
    ask(path, 1)
    answer(path, "site-1", loss=0.5)
    release(out)
    code, said, wrong = feddp("watch", out)
    assert code == 2
    assert "broken off; 0 of 3 rounds done" in said
    assert [line.split()[1:3] for line in said.splitlines() if line.startswith(" site-")] == [
        ["answered", "0.500"],
        ["no", "answer"],
    ]
    assert wrong == f"feddp: {out} was broken off; to go on: feddp run --resume {out}\n"


def test_a_finished_run_shows_its_end(toy, tiny_root, tmp_path, feddp, capsys):
    """A run of two rounds, as `feddp run` left it, also where its workspace was removed; exit code 0."""
    run_here(tiny_root, tmp_path / "run", Options("fedavg", 2, None, toy, 32, 0, ("batch=4",)), "local")
    capsys.readouterr()
    code, said, wrong = feddp("watch", tmp_path / "run")
    assert (code, wrong) == (0, "")
    assert said.splitlines()[0] == "fedavg on toy: finished; 2 of 2 rounds done"
    assert [line.split()[1] for line in said.splitlines() if line.startswith(" site-")] == ["answered", "answered"]


def test_the_one_running_run_of_a_comparison(folder, feddp, tmp_path, monkeypatch):
    """A folder above it will do; where none runs, or there is no run, the message says so."""
    out, path = folder
    looked = watching.FolderRun(tmp_path)
    assert looked.run.path == out
    release(out)
    assert f"{tmp_path} is no run, and below it one run must be running (there: none)" in feddp("watch", tmp_path)[2]
    assert f"{tmp_path / 'x'} is no run" in feddp("watch", tmp_path / "x")[2]
    assert "name a run's folder, or the kit of a person with --kit" in feddp("watch")[2]


def test_what_is_written_in_a_name_is_no_markup(plan_for):
    """A reason is a site's or the server's text; rich would read [red] in it as a colour."""
    standing = Standing(plan_for())
    standing.add({"event": "refused", "time": time.time(), "site": "a[red]", "task": "train", "reason": "[bold]x"})
    console = Console(width=120, record=True)
    console.print(view(standing.summary(time.time()), "running"))
    assert "a[red]" in console.export_text()
    assert headline({}, "job 1: submitted") == "job 1: submitted"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (80, 12)])
def test_of_many_sites_those_that_need_attention_have_room(plan_for, width, height):
    """64 sites: 33 is refused, 40 lost, 50 late, with reasons that would take many lines. None is below the terminal."""
    names = [f"hospital-{number:02}" for number in range(64)]
    standing = Standing(plan_for())
    standing.add({"event": "ask", "time": 0, "task": "train", "sites": names, "round": 1, "bytes": dict.fromkeys(names, 10**8)})
    for name in names[:30]:
        standing.add({"event": "answer", "time": 5, "site": name, "task": "train", "bytes": 10**8, "scalars": {"loss": 0.5}})
    for name, late in (("hospital-33", False), ("hospital-50", True)):
        reason = f"site {name}: " + "a reason of several lines " * 5
        standing.add({"event": "refused", "time": 6, "site": name, "task": "train", "reason": reason, "late": late})
    standing.sites["hospital-40"].state = "lost"
    console = Console(width=width, height=height, record=True, force_terminal=True)
    console.print(fitted(standing.summary(7), "running", console))
    lines = console.export_text().splitlines()
    assert len(lines) < height
    assert all(len(line) <= width for line in lines)
    shown = [line.split()[:2] for line in lines if line.startswith(" hospital-")]
    troubled = [["hospital-33", "refused"], ["hospital-40", "lost"], ["hospital-50", "late"]]
    assert shown[:3] == troubled[: len(shown)]
    (rest,) = [line for line in lines if line.startswith("and ")]
    assert int(rest.split()[1]) == 64 - len(shown)
    assert sum(int(part.split()[-2]) for part in rest.split(":")[1].split(",")) == 64 - len(shown)


def test_few_sites_are_shown_in_whole(plan_for):
    """Also where the reason for one takes two lines, and in the order of their names."""
    standing = Standing(plan_for())
    standing.add({"event": "ask", "time": 0, "task": "train", "sites": ["a", "b"], "round": 1, "bytes": {"a": 1, "b": 1}})
    standing.add({"event": "refused", "time": 6, "site": "b", "task": "train", "reason": "word " * 30})
    console = Console(width=80, height=24, record=True)
    console.print(fitted(standing.summary(7), "running", console))
    text = console.export_text()
    assert text.count("word") == 60, "in the table and below it"
    assert [line.split()[0] for line in text.splitlines() if line.startswith((" a ", " b "))] == ["a", "b"]


class Told:
    """A session of FLARE's, as far as a watched job asks it: one (status, standing, or what is raised) after the other."""

    def __init__(self, *looks):
        self.looks = list(looks)

    def get_job_meta(self, id):
        self.status, self.standing = self.looks.pop(0)
        if isinstance(self.status, Exception):
            raise self.status
        return {"status": self.status, "job_deploy_detail": ["site-1: OK", "site-2: not authorized"]}

    def show_stats(self, id, target):
        if isinstance(self.standing, Exception):
            raise self.standing
        return {"server": {STATS: {STANDING: self.standing}}}

    def get_system_info(self):
        return SimpleNamespace(client_info=[SimpleNamespace(name="site-1")])


@pytest.fixture
def standing(plan_for):
    """After two of three rounds; site-1 has answered the third, site-2 has not."""
    found, sites = Standing(plan_for(method="fedavg", rounds=3)), ["site-1", "site-2"]
    found.add({"event": "round", "time": 1, "round": 2, "of": 3, "seconds": 1.0})
    found.add({"event": "ask", "time": 2, "task": "train", "sites": sites, "round": 3, "bytes": dict.fromkeys(sites, 10)})
    found.add({"event": "answer", "time": 3, "site": "site-1", "task": "train", "bytes": 1, "scalars": {"loss": 0.25}})
    return found.summary(4)


def test_a_job_that_is_aborted_while_it_is_watched(standing, capsys):
    """Its last standing stays, and the reasons of sites that did not take it; a job without a process yet is waited for."""
    session = Told(("SUBMITTED", {}), ("RUNNING", JobNotRunning("x")), ("RUNNING", standing), ("FINISHED:ABORTED", {}))
    with pytest.raises(FedDPError, match=r"^job j ended FINISHED:ABORTED; site-2: not authorized$"):
        watching.watch(WatchedJob(session, "j"), poll=0)
    said = capsys.readouterr().out
    assert "fedavg on pvt_v2_b0-fpn: FINISHED:ABORTED; 2 of 3 rounds done" in said
    assert [line.split()[1:3] for line in said.splitlines() if line.startswith(" site-")] == [
        ["answered", "0.250"],
        ["no", "answer"],
    ]
    assert not session.looks


def test_a_server_that_goes_away_is_one_line(standing):
    session = Told(("RUNNING", standing), (ConnectionError("gone"), {}))
    with pytest.raises(
        FedDPError, match="the server did not tell job j .*gone.*is it running, and may this person see this job"
    ):
        watching.watch(WatchedJob(session, "j"), poll=0)
