"""Logs that others can fill: their files together have a bound, the first and the last lines stay, the removed are counted."""

import inspect
import os
import re
import time

import pytest
from nvflare.fuel.sec.audit import Auditor

from feddp import logs
from feddp.files import read_events
from feddp.flare import audit
from feddp.flare.audit import plain_lines
from feddp.logs import FIRST, OLDER
from feddp.stages.events import read_progress
from feddp.stages.memory import ServerMemory
from feddp.training.store import Store
from support import ROOT

DAY = 86_400.0


def content(folder, pattern) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob(pattern)))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Whose log keeps 1,000 bytes, and 500 twice of its end."""
    monkeypatch.setattr("feddp.training.store.place_for", lambda path: logs.place_for(path, 1000, 500))
    return Store(tmp_path)


def test_a_run_s_log_keeps_its_first_and_its_last_lines(store, tmp_path):
    for number in range(300):
        store.record("error", number=number)
    files = sorted(path.name for path in tmp_path.glob("record*"))
    assert files == ["record.before.jsonl", "record.jsonl", "record.last.jsonl"]
    assert sum(path.stat().st_size for path in tmp_path.glob("record*")) < 1000 + 2 * 500 + 3 * 150, "and a line more in each"
    first = [event["number"] for event in read_events(tmp_path / "record.jsonl")]
    assert first == [*range(len(first))]
    assert len(first) > 10
    (before, *more), (last, *newest) = (read_events(tmp_path / f"record.{name}.jsonl") for name in ("before", "last"))
    numbers = [event["number"] for event in (*more, *newest)]
    assert numbers == [*range(numbers[0], 300)], "no gap before the end"
    assert before["event"] == last["event"] == "removed_lines"
    removed = int(re.match(r"(\d+) earlier lines were removed", last["message"])[1])
    assert removed + len(first) + len(numbers) == 300


def test_a_log_of_honest_length_is_one_file(tmp_path):
    store = Store(tmp_path)
    for round in range(50):
        store.record("train", round=round)
    assert [path.name for path in tmp_path.iterdir()] == ["record.jsonl"]


@pytest.fixture
def auditor(tmp_path, monkeypatch):
    """Writes files of 2,000 bytes, as a gate has it."""
    for name in ("add_event", "add_job_event"):
        monkeypatch.setattr(Auditor, name, inspect.unwrap(getattr(Auditor, name)))
    monkeypatch.setattr(audit, "YEARS_BYTES", 2000)
    made = Auditor(str(tmp_path / "audit.log"))
    yield made
    made.close()


def fill(auditor, numbers):
    for number in numbers:
        auditor.add_event("eve", "look", msg=f"[line {number:06}]")


def test_an_audit_file_is_bounded_and_a_flood_s_beginning_stays(auditor, tmp_path):
    """FLARE's own grows without a bound, the control. Before the flood, a file took longer than a day."""
    fill(auditor, range(100))
    assert (tmp_path / "audit.log").stat().st_size > 3 * 2000
    plain_lines(most=10**6)
    fill(auditor, [100])
    assert (tmp_path / "audit.1.log").exists()
    long_ago = time.time() - 2 * DAY
    os.utime(tmp_path / "audit.1.log", (long_ago, long_ago))
    fill(auditor, range(101, 110))  # honest; then it begins, in the same file
    fill(auditor, range(110, 2000))
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"audit.log", "audit.first-1.log", *(f"audit.{number}.log" for number in range(1, OLDER + 1))}
    flood = [path for path in tmp_path.iterdir() if path.name != "audit.first-1.log"]
    assert sum(path.stat().st_size for path in flood) < (OLDER + 1) * 2300
    first, whole = content(tmp_path, "audit.first-1.log"), content(tmp_path, "audit*.log")
    assert "[line 000101]" in first
    assert "[line 000110]" in first, "the first line of the flood"
    assert "[line 001000]" not in whole
    assert "[line 001999]" in whole
    newest = content(tmp_path, "audit.1.log").splitlines()[0]
    assert int(re.search(r"\[(\d+) earlier lines were removed\]", newest)[1]) > 1000


def test_an_audit_file_that_an_administrator_moved_makes_way_for_a_new_one(auditor, tmp_path):
    """Its lines go on in the moved file until that is full, and then in a file of the old name; nothing is lost."""
    plain_lines(most=10**6)
    fill(auditor, range(10))
    (tmp_path / "audit.log").rename(tmp_path / "kept-by-the-administrator")
    fill(auditor, range(10, 60))
    assert (tmp_path / "kept-by-the-administrator").stat().st_size < 2 * audit.YEARS_BYTES
    assert "[line 000059]" in (tmp_path / "audit.log").read_text()


def test_as_many_beginnings_as_said_are_kept(tmp_path):
    path = tmp_path / "audit.log"
    for flood in range(FIRST + 2):
        for number in range(4):
            path.write_text(f"flood {flood}, file {number}\n")
            logs.turned(path)
            if number == 0:  # the time before the flood was long
                os.utime(tmp_path / "audit.1.log", (time.time() - DAY / 2,) * 2)
                if (tmp_path / "audit.2.log").exists():
                    os.utime(tmp_path / "audit.2.log", (time.time() - 3 * DAY,) * 2)
    assert content(tmp_path, "audit.first-1.log") == f"flood {FIRST + 1}, file 0\n"
    assert len([*tmp_path.glob("audit.first-*.log")]) == FIRST


def test_every_line_of_a_log_for_years_is_there_or_counted(tmp_path):
    path = tmp_path / "audit.log"
    total = removed = 0
    for number in range(40):
        lines = number % 5 + 1
        total += lines
        head = f"[{logs.removed_line(removed)}]\n" if removed else ""
        path.write_text(head + "x\n" * lines)
        removed = logs.turned(path)
    there = content(tmp_path, "audit.[1-9].log").count("x\n")
    assert there + removed == total


def test_a_file_that_cannot_be_turned_goes_on(auditor, tmp_path, monkeypatch):
    plain_lines(most=10**6)
    monkeypatch.setattr(audit, "turned", lambda _: (_ for _ in ()).throw(PermissionError("read-only")))
    fill(auditor, range(60))
    assert content(tmp_path, "audit.log").count("[line ") == 60


def test_the_server_s_progress_keeps_room_for_the_rounds(plan_for, toy, tmp_path, monkeypatch):
    """Readers refuse a file of more than EVENT_BYTES, and the run would have no results."""
    monkeypatch.setattr("feddp.stages.memory.EVENT_BYTES", 4000)
    memory = ServerMemory(plan_for(network=toy), "job", tmp_path, tmp_path / "kept", tmp_path)
    seen = []
    memory.watch(seen.append)
    for number in range(100):
        memory.progress("again", site="a", task=f"train {number}")
    memory.progress("round", round=1, of=2, seconds=1.0)
    events = read_progress(tmp_path / "progress.jsonl")
    assert [event["event"] for event in events].count("again") < 40
    assert events[-1]["event"] == "round"
    assert len(seen) == 101, "and all of them are shown"


def test_the_documented_bounds_are_those():
    page = (ROOT / "docs/how-to/it-administrator.md").read_text(encoding="utf-8")
    mib = 1 << 20
    assert f"{(logs.RUN_BYTES + 2 * logs.LAST_BYTES) // mib} MiB" in page
    assert f"{(1 + OLDER + FIRST) * logs.YEARS_BYTES // mib} MiB" in page
