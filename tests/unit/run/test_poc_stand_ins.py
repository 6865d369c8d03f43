"""POC mode with stand-ins for FLARE's processes and its session; with FLARE itself: tests/federation/test_poc.py."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from feddp.errors import FedDPError, InputError
from feddp.run.poc import TRIES, PocJob, connect, restarted

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def started():
    """{participant: its processes, in the order of their starts}; they end with the test."""
    found = {}
    yield found
    for process in sum(found.values(), []):
        process.kill()
        process.wait()


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_death_after_the_last_start_says_that_the_site_is_given_up(started, capfd):
    """Four deaths of site-1: three lines that it was started again, one that it is given up; site-2 never died."""

    def start(name):
        started.setdefault(name, []).append(subprocess.Popen([sys.executable, "-c", SLEEP]))
        return started[name][-1]

    with restarted(["server", "site-1", "site-2"], start):
        for death in range(1, TRIES + 2):
            until(lambda death=death: len(started["site-1"]) == death)
            started["site-1"][-1].kill()
        time.sleep(2.5)  # two looks of the watch: nothing more is said or started
    lines = capfd.readouterr().err.splitlines()
    again = "site-1: signal 9 ended its FLARE client; started again"
    given_up = "site-1: signal 9 ended its FLARE client; it was started again 3 times, so the site is given up"
    assert lines == [again, again, again, given_up]
    assert {name: len(processes) for name, processes in started.items()} == {"server": 1, "site-1": 4, "site-2": 1}


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (
            TypeError("half an answer"),
            FedDPError,
            r"POC server does not answer \(TypeError: half an answer\); see .*log.txt$",
        ),
        (InputError("ours"), InputError, "^ours$"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_whatever_flares_session_raises_is_said_with_the_log(tmp_path, raised, kind, said):
    """Errors of our own, and Ctrl-C, stay what they are."""

    def fails(job):
        raise raised

    job = PocJob(tmp_path, SimpleNamespace(submit_job=lambda folder: "id", get_job_meta=fails), tmp_path)
    job._checked = float("-inf")
    with pytest.raises(kind, match=said) as caught:
        job.finished()
    assert type(caught.value) is kind


class Asked:
    """A session of the lead; the sites that have joined are `joined`, an exception is raised. `closed` counts its ends."""

    def __init__(self, joined):
        self.joined, self.closed = joined, 0

    def get_system_info(self):
        if isinstance(self.joined, BaseException):
            raise self.joined
        return SimpleNamespace(client_info=[SimpleNamespace(name=name) for name in self.joined])

    def close(self):
        self.closed += 1
        raise ConnectionError("the server is gone")  # nobody is told of it


@pytest.fixture
def sessions(monkeypatch):
    """Makes the sessions that are opened be these, one after the other, each without waiting."""

    def make(*made):
        left = iter(made)
        monkeypatch.setattr("feddp.run.poc.opened_session", lambda *_, **__: next(left))
        monkeypatch.setattr("feddp.run.poc.time.sleep", lambda _: None)
        return made

    return make


def test_a_session_that_fails_is_closed_and_the_one_that_works_is_not(sessions, tmp_path):
    fails, works = sessions(Asked(TypeError("half an answer")), Asked(["site-1"]))
    assert connect(tmp_path, ["site-1"]) is works
    assert (fails.closed, works.closed) == (1, 0)


def test_one_session_waits_for_sites_that_never_join_and_is_closed(sessions, tmp_path, monkeypatch):
    (session,) = sessions(Asked([]))
    monkeypatch.setattr("feddp.run.poc.READY", 0.05)
    with pytest.raises(FedDPError, match=r"the federation did not start within 0.05 s; see console.log"):
        connect(tmp_path, ["site-1"])
    assert session.closed == 1


def test_ctrl_c_while_the_sites_join_closes_the_session(sessions, tmp_path):
    (session,) = sessions(Asked(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        connect(tmp_path, ["site-1"])
    assert session.closed == 1
