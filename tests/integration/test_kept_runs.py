"""Which folders of runs a participant removes when a job starts there, and which it never touches."""

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


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "feddp"


def test_an_old_run_is_removed_and_a_younger_one_stays(kept):
    old, young = run_of(kept, OLD, 91), run_of(kept, YOUNG, 89)
    assert remove_unused(kept, 90, ()) == [f"run {OLD} removed: unused for 91 days"]
    assert not old.exists()
    assert len(list(young.rglob("*"))) == 5, "the four files and the folder"
    assert list(removed_of(kept, OLD).iterdir()) == []
    assert remove_unused(kept, 90, ()) == []


@pytest.mark.parametrize("young", ["state_00001.safetensors", "masks/1.png", "masks", "."])
def test_anything_modified_since_keeps_the_run(kept, young):
    """Of a file that is replaced, the folder's own time is young too; of one that is appended to, only its own."""
    folder = run_of(kept, OLD, 91)
    os.utime(folder / young)
    assert remove_unused(kept, 90, ()) == []
    assert folder.exists()


def test_a_run_in_use_stays(kept):
    """Its training may pause for longer than any number of days."""
    folder = run_of(kept, OLD, 91)
    hold(folder)
    aged(folder, 91)
    assert remove_unused(kept, 90, ()) == []
    release(kept)
    assert len(remove_unused(kept, 90, ())) == 1, "the control"


def test_the_jobs_own_runs_stay(kept):
    run_of(kept, OLD, 91)
    assert remove_unused(kept, 90, {OLD}) == []
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
    assert remove_unused(kept, 90, ()) == []
    assert set(kept.rglob("*")) - set(before) == {kept / "kept.lock"}
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
    assert len(remove_unused(kept, 90, ())) == 1
    assert (outside / "1.png").exists()
    assert not folder.exists()


def test_nothing_is_moved_through_a_link(kept, tmp_path):
    run_of(tmp_path / "elsewhere", YOUNG, 91)
    run_of(kept, OLD, 91)
    (kept / "removed").symlink_to(tmp_path / "elsewhere")
    assert remove_unused(kept, 90, ()) == [f"no run was removed: {kept / 'removed'} is a link; replace it by a folder"]
    assert (kept / OLD / "plan.json").exists()
    assert (tmp_path / "elsewhere" / YOUNG / "plan.json").exists()


def test_what_a_killed_process_left_is_removed_the_next_time(kept):
    """It had moved the run and removed some of its files."""
    (run_of(kept / "removed", OLD, 91) / "plan.json").unlink()
    assert remove_unused(kept, 90, ()) == []
    assert list(removed_of(kept, OLD).iterdir()) == []


def test_what_cannot_be_removed_is_named_and_the_others_go(kept):
    """A file of that name is in the way."""
    run_of(kept, OLD, 91), run_of(kept, YOUNG, 91)
    removed_of(kept, OLD).parent.mkdir()
    removed_of(kept, OLD).write_text("in the way")
    first, second = remove_unused(kept, 90, ())
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
    assert trains(site) == ""
    assert [line for line in site.audited() if f"[run {OLD} removed: unused for 8 days (keep_days)]" in line]
    assert (not (kept / OLD).exists(), (kept / YOUNG).exists()) == (True, True)
    aged(kept / YOUNG, 8)
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
    assert trains(site.submitted(site.plan, YOUNG, resume=OLD)) == ""
    assert not removed_of(kept, OLD).exists(), "it went on in a folder that is new"
    release(kept)
    aged(kept / OLD, 8)
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

    monkeypatch.setattr(unused, "_modified", modified)
    (line,) = remove_unused(kept, 7, ())
    assert line.startswith(f"run {OLD} removed: ")
    claiming.join(10)
    assert refused == [REFUSED.format(OLD)]


def test_an_adaptation_keeps_the_run_whose_networks_it_needs(hospital, kept):
    site = hospital(keep_days=7, consent=["outside"])
    site.request = AdaptationRequest("site-1", ("site-2",), OLD, "average").to_json()
    run_of(kept, OLD, 8), run_of(kept, YOUNG, 8)
    answer = site.submitted(site.plan, OWN).executed(protocol.JOIN)
    assert messages.unpack(answer)[1] == {"consent": True}
    assert ((kept / OLD).exists(), (kept / YOUNG).exists()) == (True, False)


def test_the_simulator_removes_nothing(hospital, kept):
    site = hospital()
    site.simulated = True
    run_of(kept, OLD, 91)
    assert trains(site.submitted(site.plan)) == ""
    assert (kept / OLD).exists()


def test_a_refused_job_removes_nothing(hospital, kept):
    site = hospital(methods=["fedavg"])
    run_of(kept, OLD, 91)
    assert trains(site) == ReturnCode.EXECUTION_EXCEPTION
    assert (kept / OLD).exists()


def test_the_server_removes_after_ninety_days(tmp_path, kept, plan_for, toy, caplog):
    run_of(kept, OLD, 91), run_of(kept, YOUNG, 89)
    with caplog.at_level("INFO"):
        assert Run(tmp_path, plan_for(network=toy, sites=SITES), SITES, None).memory.round == 0
    assert f"run {OLD} removed: unused for 91 days" in caplog.text
    assert [folder.name for folder in sorted(kept.iterdir()) if folder.is_dir()] == [YOUNG, "job", "removed"]
