"""What a site, a server or a file says is shown, not obeyed: a terminal's commands, rich's brackets, values of other types."""

import io
from types import SimpleNamespace

import pytest
from hypothesis import given
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from rich.console import Console

from feddp.cli import main
from feddp.errors import ContributionError, InputError
from feddp.files import append_event
from feddp.flare.controller import _reply
from feddp.flare.persistor import STANDING, STATS
from feddp.reading import is_name, is_text, plain
from feddp.reporting.standing import view
from feddp.run.follow import Follower
from feddp.run.watch_job import WatchedJob, job_of
from feddp.stages.events import read_progress
from feddp.stages.standing import Standing
from feddp.terminal import Screen
from support.fuzz import cases, changed, tried

TITLE = "\x1b]0;owned\x07"  # sets the title of a terminal's window
ROW = {"event": "ask", "time": 1.0, "task": "train", "sites": ["a"], "round": 1, "bytes": {"a": 5}}


def test_what_a_terminal_obeys_is_replaced():
    """Escape, bell, the same in Unicode's second block (CSI), delete, a turned direction; lines and letters stay."""
    assert plain(f"a{TITLE}\x9b31m\x7f\u202eü\n\tб") == "a\ufffd]0;owned\ufffd\ufffd31m\ufffd\ufffdü\n\tб"
    assert plain("a\rb") == "a b"
    assert is_text("a\nb")
    assert not any(map(is_text, (TITLE, "\ud800", 5, "a" * 10_001)))
    assert not any(map(is_name, ("\x9b31m", "a\u202eb")))


def test_an_error_that_quotes_a_name_does_not_command_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["feddp", "report", str(tmp_path / f"a{TITLE}")])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "a\ufffd]0;owned\ufffd" in said
    assert "\x1b" not in said


def test_the_progress_shows_brackets_and_no_commands(tmp_path, plan_for, capsys):
    """rich takes [/a] for the end of a style, and raised an error."""
    path = tmp_path / "progress.jsonl"
    append_event(path, "refused", site="a", task="train", reason=f"site a: [/a] [red]{TITLE}")
    append_event(path, "error", message=f"[/tmp]{TITLE}")
    Follower(plan_for(method="fedavg"), ["a"], path).until(lambda: True)
    said = capsys.readouterr().err
    assert "site a: [/a] [red]\ufffd]0;owned" in said
    assert "error: [/tmp]\ufffd" in said
    assert "\x1b]" not in said


def test_what_is_watched_commands_no_terminal(plan_for):
    standing = Standing(plan_for(method="fedavg"))
    standing.add(ROW)
    standing.add({"event": "refused", "time": 2.0, "site": "a", "task": "train", "reason": TITLE})
    screen = io.StringIO()
    Screen(file=screen, force_terminal=True, width=120).print(view(standing.summary(3.0), f"ended{TITLE}"))
    assert "refused" in screen.getvalue()
    assert "\x1b]" not in screen.getvalue()


def test_whatever_a_server_tells_is_shown_or_refused(plan_for):
    """Any other exception than InputError fails the test; an empty answer is that of a job that starts."""
    standing = Standing(plan_for(method="fedavg"))
    standing.add(ROW)
    whole, seen = {"server": {STATS: {STANDING: standing.summary(3.0)}}}, {True: 0, False: 0}
    job = WatchedJob(SimpleNamespace(show_stats=None), "j")

    @cases(60)
    @given(changed(whole))
    def told(value):
        job.session.show_stats = lambda id, target: value
        try:
            Console(file=io.StringIO()).print(view(job._standing(), "running"))
            seen[True] += 1
        except InputError:
            seen[False] += 1

    told()
    assert min(seen.values()) > 2, seen


def test_whatever_a_server_says_of_a_job_is_shown_or_refused():
    meta, seen = {"status": "FINISHED:COMPLETED", "job_deploy_detail": ["a: OK", "b: no"], "job_id": "j"}, {True: 0, False: 0}

    @cases(60)
    @given(changed(meta))
    def told(value):
        session = SimpleNamespace(get_job_meta=lambda id: value, list_jobs=lambda id_prefix: [value])
        session.get_system_info = lambda: SimpleNamespace(client_info=[])
        for look in (WatchedJob(session, "j").look, lambda: job_of(session, "j")):
            seen[not tried(InputError, look)[1]] += 1

    told()
    assert min(seen.values()) > 2, seen


def test_a_code_that_a_site_invents_is_not_repeated():
    with pytest.raises(ContributionError, match="train ended with EXECUTION_EXCEPTION;"):
        _reply("a", "train", make_reply(ReturnCode.EXECUTION_EXCEPTION))
    with pytest.raises(ContributionError, match="train ended with a code that FLARE does not have;"):
        _reply("a", "train", make_reply(f"patient Miller{TITLE}"))
    with pytest.raises(ContributionError, match="train ended with a code that FLARE does not have;"):
        _reply("a", "train", make_reply([]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes": 5},
        {"bytes": {"a": "x"}},
        {"time": float("nan")},
        {"sites": "a"},
        {"task": TITLE},
        {"event": None},
        {"round": -1},
        {"round": 100_001},  # more than a plan may have: the accounting has a number for each
        {"event": "answer", "site": "a", "bytes": 5, "scalars": {"samples": 3}},  # without its seconds
    ],
)
def test_an_event_that_no_server_writes_is_one_line(tmp_path, wrong):
    append_event(tmp_path / "p", **ROW)
    assert read_progress(tmp_path / "p") == [ROW]
    append_event(tmp_path / "p", **ROW | wrong)
    with pytest.raises(InputError, match="p: has an event (without a name|whose .* is missing or is none)"):
        read_progress(tmp_path / "p")
