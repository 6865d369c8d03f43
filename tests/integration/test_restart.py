"""A site's launcher: a job's process that a signal ended is started again, one that ended by itself is not."""

import signal
import subprocess
import sys
import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle

from feddp.flare import endings, launcher
from feddp.flare.launcher import TRIES, RestartedJob

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
ENDED = "pass"
FAILED = "raise SystemExit(101)"
WAITS = "import time; time.sleep(600)"


@pytest.fixture
def job(tmp_path):
    """Makes a job whose processes do what the codes say, one after the other, the last one ever again."""
    handles = []

    class Job:
        def __init__(self, *codes):
            self.codes, self.started, self.told, self.left = [*codes], 0, [], tmp_path / "rc"
            self.left.write_text("101\n")
            self.handle = RestartedJob(self.start, self.told.append, self.left, pause=0.01)
            handles.append(self.handle)

        def start(self):
            code = self.codes[min(self.started, len(self.codes) - 1)]
            self.started += 1
            self.process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
            return ProcessHandle(process=self.process)

    yield Job
    for handle in handles:
        handle.terminate()


def test_a_killed_process_is_started_again(job):
    job = job(KILLED, KILLED, ENDED)
    job.handle.wait()
    assert job.started == 3
    assert job.handle.poll() == JobReturnCode.SUCCESS
    assert [line.split(";")[1] for line in job.told] == [f" start 1 of {TRIES} in 0 s", f" start 2 of {TRIES} in 0 s"]
    assert all("ended by signal SIGKILL" in line for line in job.told)


def test_it_is_given_up_after_some_starts(job):
    """This site then leaves the job: FLARE would end it for all sites, whatever `min_sites` is, for either code."""
    job = job(KILLED)
    job.handle.wait()
    assert job.started == TRIES + 1
    assert job.handle.poll() == JobReturnCode.UNKNOWN
    assert not job.left.exists()
    said = f"it was started {TRIES} times again within 60 minutes, and is given up; this site leaves the job"
    assert job.told[-1] == f"its process was ended by signal SIGKILL; {said}"


@pytest.mark.parametrize(
    ("apart", "kills", "numbers"),
    [(1200.0, 9, [1, 2, 3, 3, 3, 3, 3, 3, 3]), (1199.0, 9, [1, 2, 3]), (3600.0, 9, [1] * 9)],
)
def test_only_the_kills_of_an_hour_count(job, monkeypatch, apart, kills, numbers):
    """Want of memory once a night must not end a run of days. Of kills 1200 s apart, at most two earlier ones are less than
    3600 s old, so each start is the third at most; at 1199 s, three are (3597 s), and the fourth kill is the last. A kill of
    3600 s ago counts no more."""
    now = count(0.0, apart)
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: next(now)))
    job = job(*[KILLED] * kills, ENDED)
    job.handle.wait()
    ended = len(numbers) == kills
    assert job.started == len(numbers) + 1
    assert job.handle.poll() == (JobReturnCode.SUCCESS if ended else JobReturnCode.UNKNOWN)
    starts = [f"its process was ended by signal SIGKILL; start {number} of {TRIES} in 0 s" for number in numbers]
    assert job.told[: len(numbers)] == starts
    assert len(job.told) == len(numbers) + (not ended)


@pytest.mark.parametrize(
    ("code", "result"), [(ENDED, JobReturnCode.SUCCESS), ("raise SystemExit(1)", JobReturnCode.EXECUTION_ERROR)]
)
def test_a_process_that_ends_by_itself_is_not_started_again(job, code, result):
    job = job(code)
    job.handle.wait()
    assert (job.started, job.handle.poll(), job.told) == (1, result, [])
    assert job.left.exists(), "FLARE reads the code that the process left"


def test_one_that_fails_after_its_restart_ends_this_sites_part_alone(job):
    """As when the job ended at the server meanwhile: FLARE would end the whole job for the code that the process left."""
    job = job(KILLED, FAILED)
    job.handle.wait()
    assert job.handle.poll() == JobReturnCode.UNKNOWN
    assert not job.left.exists()
    assert "failed with exit code 101; this site leaves the job" in job.told[-1]


def test_an_abort_ends_it_for_good(job):
    job = job(WAITS)
    assert job.handle.poll() == JobReturnCode.UNKNOWN
    waiting = threading.Thread(target=job.handle.wait)
    waiting.start()
    job.handle.terminate()
    waiting.join(10)
    assert not waiting.is_alive()
    assert job.started == 1
    assert job.process.poll() == -signal.SIGKILL


def test_want_of_memory_is_told_from_other_signals(job, monkeypatch, tmp_path):
    """The kernel's counter grew by one while the process ran."""
    counter = tmp_path / "vmstat"
    counter.write_text("pgfault 7\noom_kill 4\n")
    monkeypatch.setattr(endings, "_VMSTAT", counter)
    job = job(WAITS, ENDED)
    waiting = threading.Thread(target=job.handle.wait)
    waiting.start()
    counter.write_text("pgfault 9\noom_kill 5\n")
    job.process.kill()
    waiting.join(10)
    assert "ended by the system for want of memory" in job.told[0]
    assert "--set batch" in job.told[0]


def test_a_machine_without_the_counter_has_no_such_line(monkeypatch, tmp_path):
    monkeypatch.setattr(endings, "_VMSTAT", tmp_path / "none")
    assert endings.killed_for_memory() == 0


def test_the_pause_doubles(job):
    """0.2 s, then 0.4 s."""
    made = job(KILLED, KILLED, ENDED)
    made.started = 0
    slow = RestartedJob(made.start, made.told.append, made.left, pause=0.2)
    started = time.monotonic()
    slow.wait()
    assert time.monotonic() - started > 0.6
