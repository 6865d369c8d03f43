"""Logs that others can fill: their files together have a bound, the first and the last lines stay, the removed are counted."""

import inspect
import os
import re
import time
from threading import Thread
from types import SimpleNamespace

import pytest
from nvflare.fuel.sec.audit import Auditor

from feddp import logs
from feddp.files import read_events
from feddp.flare import audit
from feddp.flare.audit import plain_lines
from feddp.logs import KEPT, OLDER, SLOW
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


def age(folder, seconds):
    """Makes all full files of a log older; one with two names once."""
    for path in folder.glob("audit.[0-9]*.log"):
        os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def fill(auditor, numbers):
    for number in numbers:
        auditor.add_event("eve", "look", msg=f"[line {number:06}]")


def test_an_audit_file_is_bounded_and_what_was_before_a_flood_stays(auditor, tmp_path):
    """FLARE's own grows without a bound, the control. Before the flood, a file took longer than SLOW."""
    fill(auditor, range(100))
    assert (tmp_path / "audit.log").stat().st_size > 3 * 2000
    plain_lines(most=10**6)
    fill(auditor, [100])
    assert (tmp_path / "audit.1.log").exists()
    age(tmp_path, SLOW + DAY)
    fill(auditor, range(101, 110))  # honest; then it begins, in the same file
    fill(auditor, range(110, 2000))
    files = {path.name for path in tmp_path.iterdir()}
    kept = {"audit.kept-1.log", "audit.kept-2.log", "audit.kept-3.log"}
    assert files == {"audit.log", *kept, *(f"audit.{number}.log" for number in range(1, OLDER + 1))}
    flood = [path for path in tmp_path.iterdir() if path.name not in kept]
    assert sum(path.stat().st_size for path in flood) < (OLDER + 1) * 2300
    first, whole = content(tmp_path, "audit.kept-2.log"), content(tmp_path, "audit*.log")
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


FAST, MEDIUM = 60.0, 19 * DAY
FLOODS = {
    "fast": [FAST] * 20,
    "not quite slow": [MEDIUM] * 10,
    "slow": [SLOW] * 4,
    "slow, then fast": [SLOW, *[FAST] * 20] * 2,
    "in turns": [SLOW, FAST] * 2,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
@pytest.mark.parametrize("quiet", [100 * DAY, MEDIUM, DAY], ids=["at its end", "in the middle", "at its beginning"])
@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_no_flood_removes_what_was_before_it_for_60_days(tmp_path, monkeypatch, flood, quiet, links):
    """Whether it begins at the end of a file, which was slow to fill, or at the beginning, so that the file was fast."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError("no links")))
    clock, path = Clock(monkeypatch), tmp_path / "audit.log"
    clock.turn(path, 100 * DAY, "long before")
    clock.turn(path, quiet, "what happened")
    for seconds in flood:
        clock.turn(path, seconds, "flood")
    assert "what happened" in content(tmp_path, "audit*.log")
    assert len([*tmp_path.iterdir()]) <= OLDER + KEPT
    for _ in range(OLDER):  # the control: later it is gone
        clock.turn(path, SLOW, "flood")
    assert "what happened" not in content(tmp_path, "audit*.log")


class Clock:
    """Days in moments: the time that a log sees, from which files are turned and dated."""

    def __init__(self, monkeypatch):
        self.now = time.time()
        monkeypatch.setattr("feddp.logs.time", SimpleNamespace(time=lambda: self.now))

    def turn(self, path, seconds, line):
        """A file that takes so long until it is full."""
        self.now += seconds
        path.write_text(f"{line}\n")
        os.utime(path, (self.now, self.now))
        logs.turned(path)


def test_an_auditor_that_closes_while_its_file_is_turned_is_closed(auditor, monkeypatch):
    """It would have got a new file, which nobody closes, and would have written into it."""
    plain_lines(most=10**6)
    closing = []

    def turned(path):
        closing.append(Thread(target=auditor.close))
        closing[0].start()
        closing[0].join(0.3)
        return logs.turned(path)

    monkeypatch.setattr(audit, "turned", turned)
    while not closing:
        fill(auditor, [1])
    closing[0].join()
    assert auditor.audit_file is None


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
    assert f"{(1 + OLDER + KEPT) * logs.YEARS_BYTES // mib} MiB" in page
