"""The run's folder and the job's on two file systems, as in a container: no file has a name in both, and both show the same."""

import errno
import os
import stat
import threading

import pytest

from feddp.files import read_events
from feddp.flare.kept import files_of, kept_below
from feddp.stages import memory as server_memory
from feddp.stages.memory import LATEST, ServerMemory
from support.broken_off import RUN, Killed, outcome, same, start

PROGRESS = "progress.jsonl"


@pytest.fixture
def apart(monkeypatch):
    """Every folder is a file system of its own; within one, files may have two names."""
    link = os.link

    def within(source, target, **options):
        if os.path.dirname(source) != os.path.dirname(target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source)
        link(source, target, **options)

    monkeypatch.setattr(os, "link", within)


@pytest.fixture
def linkless(monkeypatch):
    """A file system on which no file has two names."""

    def nowhere(source, target, **options):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source)

    monkeypatch.setattr(os, "link", nowhere)


@pytest.mark.parametrize("disk", ["apart", "linkless"])
def test_a_run_is_broken_off_and_continued(disk, plan_for, tiny_root, tmp_path, toy, request):
    """With the bits of an unbroken run. Two sites and three rounds: the fifth answer is the first one of the third round, so
    the first job ends with two rounds. Both of the run's folders have every line, and once: 3 rounds, and one continuation."""
    plan = plan_for(network=toy, rounds=3, calibration_epochs=1)
    whole = outcome(*start(plan, tiny_root, tmp_path / "whole", "job"))
    request.getfixturevalue(disk)
    with pytest.raises(Killed):
        start(plan, tiny_root, tmp_path / "broken", "first", answers=5)
    kept = files_of(kept_below(tmp_path / "broken/server"), RUN)
    before = (kept / PROGRESS).read_bytes()
    root, folder = start(plan, tiny_root, tmp_path / "broken", "second")
    same(whole, outcome(root, folder))
    assert not (folder / PROGRESS).samefile(kept / PROGRESS), "the control"
    assert (folder / PROGRESS).read_bytes() == (kept / PROGRESS).read_bytes()
    assert (folder.with_name("first") / PROGRESS).read_bytes() == before
    events = [event["event"] for event in read_events(folder / PROGRESS)]
    assert (events.count("round"), events.count("resumed")) == (3, 1)
    name = f"{LATEST}.safetensors"
    assert (folder / name).read_bytes() == (kept / name).read_bytes()
    assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, "as the file that is shown"


@pytest.fixture
def memory(apart, plan_for, toy, tmp_path):
    """Opens the memory of a new job of the run."""

    def opened(job):
        (tmp_path / job).mkdir()
        return ServerMemory(plan_for(network=toy), RUN, tmp_path / job, tmp_path / "kept", tmp_path)

    return opened


def test_a_line_between_the_two_files_is_neither_lost_nor_doubled(memory, monkeypatch, tmp_path):
    """The process dies when `b` is in the first of the two files."""
    first, append, written = memory("first"), server_memory.append_event, []

    def once(path, event, **values):
        if written:
            raise Killed
        written.append(path)
        return append(path, event, **values)

    first.progress("a")
    with monkeypatch.context() as patch:
        patch.setattr(server_memory, "append_event", once)
        with pytest.raises(Killed):
            first.progress("b")
    memory("second").progress("c")
    for folder in ("second", "kept"):
        assert [event["event"] for event in read_events(tmp_path / folder / PROGRESS)] == ["a", "b", "c"]


def test_two_threads_write_one_order(memory, monkeypatch, tmp_path):
    """`a` waits half a second between its two files: meanwhile `b`, which may not come between, would write to both."""
    told, append, halfway, done = memory("job"), server_memory.append_event, threading.Event(), threading.Event()

    def slow(path, event, **values):
        if event == "a" and halfway.is_set():
            done.wait(0.5)
        appended = append(path, event, **values)
        if event == "a":
            halfway.set()
        return appended

    monkeypatch.setattr(server_memory, "append_event", slow)
    thread = threading.Thread(target=told.progress, args=("a",))
    thread.start()
    halfway.wait()
    told.progress("b")
    done.set()
    thread.join()
    orders = [[event["event"] for event in read_events(tmp_path / folder / PROGRESS)] for folder in ("job", "kept")]
    assert orders == [["a", "b"]] * 2
