"""Whatever ends a command, its FLARE processes end."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from feddp.run.keeper import GRACE, end_below

SLEEP = "import sys, time; time.sleep(600)"
COMMAND = f"""
import signal, subprocess, sys, time
from pathlib import Path
from feddp.run.keeper import watched
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with SIGINT ignored,
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup's with SIGHUP
folder = Path(sys.argv[1])
with watched(folder):
    child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}, "nvflare.fake", str(folder / "site-1")], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(600)
"""


def gone(pid: int, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_stays_when_the_command_is_ended(sent, tmp_path):
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    child = int(command.stdout.readline())
    assert psutil.pid_exists(child)
    command.send_signal(sent)
    command.wait(30)
    try:
        assert gone(child)
    finally:
        end_below(tmp_path)


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


def test_nothing_stays_when_the_user_is_impatient(tmp_path):
    """Ctrl-C twice: the first waits for a process that does not want to end, the second ends that wait. The keeper kills it."""
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND.replace(repr(SLEEP), repr(STUBBORN)), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    lines = [command.stdout.readline(), command.stdout.readline()]  # its number, and the child's word that it is stubborn
    child = next(int(line) for line in lines if line.strip())
    started = time.monotonic()
    command.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert command.poll() is None, "the control: it waits for the child"
    command.send_signal(signal.SIGINT)
    command.wait(5)
    assert time.monotonic() - started < GRACE
    try:
        assert gone(child)
    finally:
        end_below(tmp_path)


def test_other_processes_are_left_alone(tmp_path):
    """Of another run, or of no run: whoever looks at the folder's files."""
    (tmp_path / "run").mkdir()
    words = {
        "ours": ["nvflare.fake", str(tmp_path / "run/site-1")],
        "another's": ["nvflare.fake", str(tmp_path / "run-2/site-1")],
        "a reader": [str(tmp_path / "run/site-1/log.txt")],
    }
    processes = {who: subprocess.Popen([sys.executable, "-c", SLEEP, *more]) for who, more in words.items()}
    try:
        time.sleep(0.3)  # until their command lines are their own
        end_below(tmp_path / "run")
        assert processes["ours"].poll() is not None
        assert processes["another's"].poll() is None
        assert processes["a reader"].poll() is None
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def test_a_process_that_cannot_be_killed_is_named_and_left(tmp_path, monkeypatch, capsys):
    """As one that waits inside the system: signals do not reach it. The other one ends, and the call returns."""
    words = [[sys.executable, "-c", SLEEP, "nvflare.fake", str(tmp_path / site)] for site in ("site-1", "site-2")]
    waiting, other = (subprocess.Popen(command) for command in words)

    def reaches(signal):
        return lambda process: signal(process) if process.pid != waiting.pid else None

    try:
        time.sleep(0.3)  # until their command lines are their own
        with monkeypatch.context() as patch:
            for name in ("terminate", "kill"):
                patch.setattr(psutil.Process, name, reaches(getattr(psutil.Process, name)))
            started = time.monotonic()
            end_below(tmp_path, grace=0.5)
        assert time.monotonic() - started < 10
        assert other.poll() is not None
        assert waiting.poll() is None, "the control"
        assert f"killed, but still there: process {waiting.pid}." in capsys.readouterr().err
    finally:
        for process in (waiting, other):
            process.kill()
            process.wait()
    end_below(tmp_path)
    assert capsys.readouterr().err == "", "nothing to say where all have ended"
