"""POC mode with stand-ins for FLARE's processes and its session; with FLARE itself: tests/federation/test_poc.py."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from feddp.errors import FedDPError, InputError
from feddp.run.poc import TRIES, PocJob, restarted

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
