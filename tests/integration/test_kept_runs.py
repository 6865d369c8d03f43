"""Which folders of runs a participant removes when a job starts there, and which it never touches."""

import json
import os
import threading
import time

import pytest
from nvflare.apis.fl_constant import ReturnCode

from feddp import protocol
from feddp.adaptation.request import AdaptationRequest
from feddp.errors import PolicyError
from feddp.flare import messages, unused
from feddp.flare.policy import SitePolicy
from feddp.flare.unused import remove_unused, removed_of
from feddp.networks import build
from feddp.networks.weights import fingerprint
from feddp.training.claim import hold, is_held, release
from support.server import SITES, Run

OLD, YOUNG, OWN = (f"{digit * 8}-0000-4000-8000-{digit * 12}" for digit in "abc")
DAY = 86_400
REFUSED = (
    "site site-1: it removed the run {}, which was unused for long (`keep_days` in privacy.json);"
    " submit the job as a new one, or leave this site out"
)


def aged(path, days):
    """Lays the last change of a path, and of everything in it, so many days back."""
    then = time.time() - days * DAY
    for at, folders, files in os.walk(path):
        for name in (*folders, *files):
            os.utime(os.path.join(at, name), (then, then), follow_symlinks=False)
    os.utime(path, (then, then))


def run_of(kept, name, days):
    """A run's folder, with a folder inside it."""
    folder = kept / name
    (folder / "masks").mkdir(parents=True)
    for file in ("plan.json", ".lock", "state_00001.safetensors", "masks/1.png"):
        (folder / file).write_text("{}")
    aged(folder, days)
    return folder


def found(kept):
    """As if a look eight days ago had found all runs there unused, and one before them all had been long ago."""
    now, runs = time.time(), {}
    for folder in kept.iterdir():
        if folder.is_dir() and not folder.is_symlink():
            modified = unused._modified(folder)
            runs[folder.name] = {"modified": modified, "used": modified, "over": now - 8 * DAY}
    (kept / "unused.json").write_text(json.dumps({"time": 0.0, "runs": runs}))


def removed_at_once(kept, days, present=()):
    """The lines of a look after `found`."""
    found(kept)
    return remove_unused(kept, days, present)


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "feddp"


class Clock:
    """This machine's clock, which a test may turn."""

    def __init__(self):
        self.days, self._time = 0.0, time.time

    def __call__(self):
        return self._time() + self.days * DAY


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


# --- the clock ---------------------------------------------------------------------------------------------------------------


def looks(kept, clock, *days, keep=90):
    """Returns by day, of looks on these days, the runs that are there after the look."""
    there = {}
    for clock.days in days:
        remove_unused(kept, keep, ())
        there[clock.days] = sorted(path.name for path in kept.iterdir() if path.is_dir() and path.name != "removed")
    return there


def test_a_clock_far_ahead_removes_nothing_in_one_look_and_is_forgotten_when_it_is_right_again(kept, clock):
    """Runs of today and of 50 days ago. One job by a clock 100 days ahead, one the next day by the right one, and so on: the
    run of 50 days ago goes as without the jump, in the first look that is 7 days after one that found it 90 days old."""
    run_of(kept, OLD, 50), run_of(kept, YOUNG, 0)
    there = looks(kept, clock, 0, 100, 1, 101, 2, 39, 45, 89, 91, 95, 96.5, 98.5)
    assert [day for day, runs in there.items() if runs == [OLD, YOUNG]] == [0, 100, 1, 101, 2, 39, 45, 89, 91, 95, 96.5]
    assert there[98.5] == [], "both count from the first look ever, which knew no time to compare the files' with"


def test_a_clock_ahead_for_days_removes_nothing_for_a_week(kept, clock):
    run_of(kept, OLD, 0)
    there = looks(kept, clock, 0, 100, 101, 103, 106.9, 7)
    assert set(map(tuple, there.values())) == {(OLD,)}
    assert looks(kept, clock, 100, 106.9)[106.9] == [OLD], "the count begins anew"
    assert looks(kept, clock, 107.1)[107.1] == [], "the control: a clock that stays there is believed"


def test_a_run_that_a_clock_behind_has_written_is_as_old_as_the_first_look_at_it(kept, clock):
    """In 1970, say, until the network has corrected it; its files are then 20,000 days old."""
    kept.mkdir()
    looks(kept, clock, 0)
    run_of(kept, OLD, 20_000)
    there = looks(kept, clock, 1, 9, 40, 90, 92, 98)
    assert set(map(tuple, there.values())) == {(OLD,)}
    assert looks(kept, clock, 99.1)[99.1] == []


def test_where_the_clock_is_right_a_run_is_as_old_as_its_files(kept, clock):
    """It was written 60 days before a look, after another: 30 days later it is 90 days old, and a week later it goes."""
    kept.mkdir()
    looks(kept, clock, -70)
    clock.days = 0
    run_of(kept, OLD, 60)
    there = looks(kept, clock, 0, 29.9, 30.1, 37)
    assert set(map(tuple, there.values())) == {(OLD,)}
    assert looks(kept, clock, 37.2)[37.2] == []


def test_the_removal_is_announced_once(kept, clock):
    kept.mkdir()
    looks(kept, clock, -1000)
    clock.days = 0
    run_of(kept, OLD, 95)
    what = "a job that starts here in 7 days or later removes it"
    assert remove_unused(kept, 90, ()) == [f"run {OLD} unused for 95 days if this machine's clock is right; {what}"]
    clock.days = 1
    assert remove_unused(kept, 90, ()) == []
    clock.days = 8
    assert remove_unused(kept, 90, ()) == [f"run {OLD} removed: unused for 103 days"]


def test_with_one_day_as_the_limit_two_looks_on_two_days_are_needed(kept, clock):
    run_of(kept, OLD, 0)
    assert looks(kept, clock, 0, 1.1, 2)[2] == [OLD]
    assert looks(kept, clock, 2.2, keep=1)[2.2] == [OLD], "the first look with this limit"
    assert looks(kept, clock, 3.3, keep=1)[3.3] == []


def test_a_folder_in_the_place_of_the_looks_ends_no_job(kept):
    run_of(kept, OLD, 1000)
    (kept / "unused.json").mkdir()
    wrong = f"{kept}: unused.json was not written (Is a directory); remove the folder of this name; unused runs stay for longer"
    assert remove_unused(kept, 90, ())[1:] == [wrong]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"time": 1, "runs": {"x": 1}}',
        '{"time": 1, "runs": []}',
        '{"time": NaN, "runs": {}}',
        '{"time": "now", "runs": {}}',
        '{"time": 1, "runs": {"x": {"modified": "a", "used": 1}}}',
        '{"time": 1, "runs": {"x": {"modified": 1, "used": 1, "more": 1}}}',
    ],
)
def test_what_is_damaged_lets_runs_stay_and_says_so(kept, text):
    run_of(kept, OLD, 1000)
    (kept / "unused.json").write_text(text)
    (line,) = remove_unused(kept, 90, ())
    assert line.startswith(f"{kept / 'unused.json'} ")
    assert line.endswith("; it is written anew, and unused runs stay for longer")
    assert (kept / OLD).exists()
    assert remove_unused(kept, 90, ()) == []


# --- which runs --------------------------------------------------------------------------------------------------------------


def test_an_old_run_is_removed_and_a_younger_one_stays(kept):
    old, young = run_of(kept, OLD, 91), run_of(kept, YOUNG, 89)
    assert removed_at_once(kept, 90) == [f"run {OLD} removed: unused for 91 days"]
    assert not old.exists()
    assert len(list(young.rglob("*"))) == 5, "the four files and the folder"
    assert list(removed_of(kept, OLD).iterdir()) == []
    assert removed_at_once(kept, 90) == []


@pytest.mark.parametrize("young", ["state_00001.safetensors", "masks/1.png", "masks", "."])
def test_anything_modified_since_keeps_the_run(kept, young):
    """Of a file that is replaced, the folder's own time is young too; of one that is appended to, only its own."""
    folder = run_of(kept, OLD, 91)
    os.utime(folder / young)
    assert removed_at_once(kept, 90) == []
    assert folder.exists()


def test_a_run_in_use_stays(kept):
    """Its training may pause for longer than any number of days."""
    folder = run_of(kept, OLD, 91)
    hold(folder)
    aged(folder, 91)
    assert removed_at_once(kept, 90) == []
    release(kept)
    assert len(removed_at_once(kept, 90)) == 1, "the control"


def test_the_jobs_own_runs_stay(kept):
    run_of(kept, OLD, 91)
    assert removed_at_once(kept, 90, {OLD}) == []
    assert (kept / OLD / "plan.json").exists()


def test_what_is_no_runs_folder_stays(kept, tmp_path):
    """A file, a folder of another name, one without a plan (of an adaptation, with its masks), and a link to a run."""
    elsewhere = run_of(tmp_path / "elsewhere", YOUNG, 91)
    run_of(kept, "archive", 91)
    (run_of(kept, OWN, 91) / "plan.json").unlink()
    (kept / "site.secret").write_text("secret")
    (kept / YOUNG).symlink_to(elsewhere)
    (kept / OLD.replace("a", "d")).write_text("a file")
    for folder in (kept / "archive", kept / OWN, elsewhere):
        aged(folder, 91)
    before = sorted(kept.rglob("*"))
    assert removed_at_once(kept, 90) == []
    assert set(kept.rglob("*")) - set(before) == {kept / "kept.lock", kept / "unused.json"}
    assert set(before) <= set(kept.rglob("*"))
    assert len(list(elsewhere.rglob("*"))) == 5


def test_a_link_in_a_run_is_removed_and_what_it_names_stays(kept, tmp_path):
    outside = tmp_path / "images"
    outside.mkdir()
    (outside / "1.png").write_text("an image")
    folder = run_of(kept, OLD, 91)
    for name in ("link", "masks/link"):
        (folder / name).symlink_to(outside)
    aged(folder, 91)
    assert len(removed_at_once(kept, 90)) == 1
    assert (outside / "1.png").exists()
    assert not folder.exists()


def test_nothing_is_moved_through_a_link(kept, tmp_path):
    run_of(tmp_path / "elsewhere", YOUNG, 91)
    run_of(kept, OLD, 91)
    (kept / "removed").symlink_to(tmp_path / "elsewhere")
    assert removed_at_once(kept, 90) == [f"no run was removed: {kept / 'removed'} is a link; replace it by a folder"]
    assert (kept / OLD / "plan.json").exists()
    assert (tmp_path / "elsewhere" / YOUNG / "plan.json").exists()


def test_what_a_killed_process_left_is_removed_the_next_time(kept):
    """It had moved the run and removed some of its files."""
    (run_of(kept / "removed", OLD, 91) / "plan.json").unlink()
    assert removed_at_once(kept, 90) == []
    assert list(removed_of(kept, OLD).iterdir()) == []


def test_what_cannot_be_removed_is_named_and_the_others_go(kept):
    """A file of that name is in the way."""
    run_of(kept, OLD, 91), run_of(kept, YOUNG, 91)
    removed_of(kept, OLD).parent.mkdir()
    removed_of(kept, OLD).write_text("in the way")
    first, second = removed_at_once(kept, 90)
    assert first.startswith(f"run {OLD} not removed: ")
    assert first.endswith(f"; remove {kept / OLD}")
    assert second == f"run {YOUNG} removed: unused for 91 days"


def test_a_participant_without_runs(kept):
    assert remove_unused(kept, 90, ()) == []
    assert not kept.exists()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "90", None])
def test_days_that_are_none_are_refused(wrong):
    with pytest.raises(PolicyError, match="privacy.json's keep_days is .*; write a number of days, at least 1"):
        SitePolicy.of("x", {"data": "/d", "keep_days": wrong}, simulated=False)


def test_nothing_is_removed_by_default_and_one_day_is_the_least(hospital, kept):
    """The folder has the hospital's own network."""
    run_of(kept, OLD, 4000)
    found(kept)
    assert trains(hospital()) == ""
    assert (kept / OLD).exists()
    assert SitePolicy.of("x", {"data": "/d", "keep_days": 1}, simulated=False).keep_days == 1


# --- when a job starts -------------------------------------------------------------------------------------------------------


def trains(site):
    return site.executed(protocol.TRAIN, site.shared, round=0, phase=0).get_return_code("")


def test_a_site_removes_by_its_policy_and_says_so(hospital, kept):
    """Once per process: what grows old while the job runs goes when the next job starts."""
    site = hospital(keep_days=7)
    run_of(kept, OLD, 8), run_of(kept, YOUNG, 6)
    found(kept)
    assert trains(site) == ""
    assert [line for line in site.audited() if f"[run {OLD} removed: unused for 8 days (keep_days)]" in line]
    assert (not (kept / OLD).exists(), (kept / YOUNG).exists()) == (True, True)
    aged(kept / YOUNG, 8)
    found(kept)
    trains(site)
    assert (kept / YOUNG).exists()
    trains(site.submitted(site.plan, "another"))
    assert not (kept / YOUNG).exists()


def test_a_job_that_continues_an_old_run_keeps_it(hospital, kept):
    site = hospital(keep_days=7)
    site.submitted(site.plan, OLD)
    assert trains(site) == ""
    release(kept)
    aged(kept / OLD, 8)
    found(kept)
    assert trains(site.submitted(site.plan, YOUNG, resume=OLD)) == ""
    assert not removed_of(kept, OLD).exists(), "it went on in a folder that is new"
    release(kept)
    aged(kept / OLD, 8)
    found(kept)
    assert trains(site.submitted(site.plan, OWN)) == "", "the control"
    assert not (kept / OLD).exists()


def test_a_job_that_continues_a_removed_run_is_refused_in_its_own_process(hospital, kept):
    """In a container the parent process, which admits the job, does not see the volume with the runs."""
    site = hospital(keep_days=7)
    removed_of(kept, OLD).mkdir(parents=True)
    assert trains(site.submitted(site.plan, YOUNG, resume=OLD)) == ReturnCode.EXECUTION_EXCEPTION
    error = site.audited()[-1]
    assert f"it removed the run {OLD}, which was unused for long" in error
    assert not (kept / OLD / "plan.json").exists(), "it took no part as a site that was absent so far"
    assert trains(site.submitted(site.plan, OLD)) == ReturnCode.EXECUTION_EXCEPTION, "the run's own job, started again"
    assert trains(site.submitted(site.plan, OWN)) == "", "the control"


@pytest.mark.parametrize("brought", [False, True], ids=["train", "initial"])
def test_a_run_that_is_removed_while_the_job_starts_is_refused(hospital, kept, toy, plan_for, monkeypatch, brought):
    """The job has looked, and imports MONAI for seconds; another job's process here removes the run meanwhile. FLARE asks for
    the task again: the folder, which is there again and empty, must not be taken then either."""
    site = hospital(keep_days=7)
    state = build(toy, 3, 1, seed=0).state_dict()
    plan = plan_for(network=toy, weights=fingerprint(state)) if brought else site.plan
    site.submitted(plan, OLD)
    task = (protocol.INITIAL, state) if brought else (protocol.TRAIN, site.shared)

    def answers():
        return site.executed(*task, **({} if brought else {"round": 0, "phase": 0})).get_return_code("")

    assert answers() == "", "the run begins"
    release(kept)
    aged(kept / OLD, 8)
    found(kept)
    lines = []
    monkeypatch.setattr("feddp.flare.site.import_monai", lambda: lines.extend(remove_unused(kept, 7, ())))
    site.submitted(plan, YOUNG, resume=OLD)
    for _ in range(2):
        assert answers() == ReturnCode.EXECUTION_EXCEPTION
        assert f"it removed the run {OLD}, which was unused for long" in site.audited()[-1]
    assert lines == [f"run {OLD} removed: unused for 8 days"], "the control"
    assert not (kept / OLD / "plan.json").exists()
    assert not list((kept / OLD).glob("*.safetensors")), "no new private tensors"


def test_a_removal_that_has_seen_the_folder_unheld_ends_before_the_claim(hospital, kept, monkeypatch):
    """It has looked at the lock, and moves the folder a moment after the job has locked it."""
    site = hospital(keep_days=7)
    site.submitted(site.plan, OLD)
    assert trains(site) == ""
    release(kept)
    aged(kept / OLD, 8)
    found(kept)
    context = site.submitted(site.plan, YOUNG, resume=OLD).component.context(site.fl_ctx)
    refused = []

    def claims():
        try:
            context.claim()
        except PolicyError as error:
            refused.append(str(error))

    claiming = threading.Thread(target=claims)

    def modified(folder):
        claiming.start()
        while not is_held(folder):
            time.sleep(0.01)
        claiming.join(0.5)  # it would end now if it did not wait for the removal
        return 0.0

    looked = {"time": 0.0, "runs": {OLD: {"modified": 0.0, "used": 0.0, "over": 0.0}}}
    (kept / "unused.json").write_text(json.dumps(looked))
    monkeypatch.setattr(unused, "_modified", modified)
    (line,) = remove_unused(kept, 7, ())
    assert line.startswith(f"run {OLD} removed: ")
    claiming.join(10)
    assert refused == [REFUSED.format(OLD)]


def test_an_adaptation_keeps_the_run_whose_networks_it_needs(hospital, kept):
    site = hospital(keep_days=7, consent=["outside"])
    site.request = AdaptationRequest("site-1", ("site-2",), OLD, "average").to_json()
    run_of(kept, OLD, 8), run_of(kept, YOUNG, 8)
    found(kept)
    answer = site.submitted(site.plan, OWN).executed(protocol.JOIN)
    assert messages.unpack(answer)[1] == {"consent": True}
    assert ((kept / OLD).exists(), (kept / YOUNG).exists()) == (True, False)


def test_the_simulator_removes_nothing(hospital, kept):
    site = hospital()
    site.simulated = True
    run_of(kept, OLD, 91)
    found(kept)
    assert trains(site.submitted(site.plan)) == ""
    assert (kept / OLD).exists()


def test_a_refused_job_removes_nothing(hospital, kept):
    site = hospital(methods=["fedavg"])
    run_of(kept, OLD, 91)
    found(kept)
    assert trains(site) == ReturnCode.EXECUTION_EXCEPTION
    assert (kept / OLD).exists()


def test_the_server_removes_after_ninety_days(tmp_path, kept, plan_for, toy, caplog):
    run_of(kept, OLD, 91), run_of(kept, YOUNG, 89)
    found(kept)
    with caplog.at_level("INFO"):
        assert Run(tmp_path, plan_for(network=toy, sites=SITES), SITES, None).memory.round == 0
    assert f"run {OLD} removed: unused for 91 days" in caplog.text
    assert [folder.name for folder in sorted(kept.iterdir()) if folder.is_dir()] == [YOUNG, "job", "removed"]
