"""A policy's budget: how many jobs, and how many results with measured numbers, a site's data answer in all."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from typer.testing import CliRunner

from feddp import protocol
from feddp.adaptation.request import AdaptationRequest
from feddp.cli import app
from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.flare.budget import Ledger, Used
from feddp.flare.policy import Budget, SitePolicy
from feddp.methods import METHODS
from feddp.methods.base import CALIBRATE, HEADS, SPECTRA, TRAIN, TUNE
from feddp.provision import privacy
from support.site import NUMBERS, TABLES


def under(hospital, job):
    """The same job, submitted again: a process of its own, under another id."""
    return hospital.submitted(hospital.plan, job)


def spent(hospital):
    return Ledger("site-1", hospital.folder / "feddp").used().get(str(hospital.data.resolve()), Used())


def trains(hospital, round=0):
    return hospital.executed(protocol.TRAIN, hospital.shared, round=round, phase=0)


def test_measured_numbers_are_counted_and_nothing_else_is(hospital):
    """A loss, scores, tables, and a round's tensors, with or without a number. Not: consent, and what the minimum withholds."""
    site = hospital(consent=[])
    for task, message in (("train", messages.pack(site.shared, **NUMBERS)), ("score", messages.pack(dice=0.5, round=1))):
        site.sends(task, message)
    site.sends("evaluate", messages.pack(**TABLES))
    assert spent(site) == Used(["job"], 3)
    site.sends("train", messages.pack(site.shared, samples=8.0, round=1))
    assert spent(site) == Used(["job"], 4)
    site.sends("introduce", messages.pack(consent=False))
    site.submitted(site.plan, min_images=9).sends("score", messages.pack(dice=0.5))
    assert spent(site) == Used(["job"], 4)


def test_beyond_its_evaluations_nothing_of_a_result_leaves(hospital):
    """The third is refused whole, its tensors too, with a line that says what to do; what measures nothing goes on."""
    site = hospital(budget={"evaluations": 2}, consent=[])
    for _ in range(2):
        assert site.sends("train", messages.pack(site.shared, **NUMBERS))[0].keys() == site.shared.keys()
    words = r"budget for .*site-1 is used up \(2 of 2 evaluations\); nothing was sent; .*`feddp kit budget KIT --reset`"
    site.stopped("train", messages.pack(site.shared, **NUMBERS), words)
    assert "`feddp kit budget KIT --reset`" in site.audited()[-1]
    assert spent(site).evaluations == 2
    assert site.sends("introduce", messages.pack(consent=False)) == ({}, {"consent": False})
    with pytest.raises(FedDPError, match="2 of 2 evaluations"):
        under(site, "another").sends("train", messages.pack(site.shared, **NUMBERS))
    Ledger("site-1", site.folder / "feddp").reset()
    site.sends("train", messages.pack(site.shared, **NUMBERS))
    assert spent(site) == Used(["another"], 1)


def test_a_job_counts_once_and_a_new_one_beyond_the_budget_is_not_opened(hospital):
    """Two jobs, each in several processes; the third is refused before it reads an image, and again at the guard."""
    site = hospital(budget={"jobs": 2})
    for job in ("first", "first", "second", "first"):
        answer = trains(under(site, job))
        assert answer.get_return_code() == ReturnCode.OK
    assert spent(site).jobs == ["first", "second"]
    assert trains(under(site, "third")).get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    refused = re.search(r"\[J:third\]\[A:train#\?\]\[task failed: site site-1: (.*)\]$", site.audited()[-1])[1]
    assert "is used up (2 of 2 jobs); nothing was sent" in refused
    assert "`feddp kit budget KIT --reset`" in refused
    assert not list((site.folder / "feddp/third").glob("*.safetensors"))
    with pytest.raises(FedDPError, match="2 of 2 jobs"):
        site.sends("score", messages.pack(dice=0.5))
    assert trains(under(site, "second")).get_return_code() == ReturnCode.OK, "the control"


def test_a_job_of_outside_is_counted_too(hospital):
    site = hospital(budget={"jobs": 1}, consent=["outside"])
    trains(under(site, "first"))
    site.request = AdaptationRequest("site-2", ("site-1",), "first", "average").to_json()
    answer = under(site, "second").executed(protocol.JOIN)
    assert answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "1 of 1 jobs" in site.audited()[-1]
    site.policy["budget"] = {"jobs": 2}
    answer = under(site, "second").executed(protocol.JOIN)
    assert messages.unpack(answer)[1] == {"consent": True}


def test_each_data_folder_has_its_own_whatever_it_is_called(hospital, tmp_path, tiny_root):
    """A link to the folder is the folder."""
    site = hospital(budget={"jobs": 1})
    trains(under(site, "first"))
    (tmp_path / "link").symlink_to(tiny_root / "site-1")
    site.policy["data"] = str(tmp_path / "link")
    assert trains(under(site, "second")).get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    site.policy["data"] = str(tiny_root / "site-2")
    assert trains(under(site, "second")).get_return_code() == ReturnCode.OK
    assert set(Ledger("site-1", tmp_path / "feddp").used()) == {str((tiny_root / n).resolve()) for n in ("site-1", "site-2")}


def test_in_a_container_the_count_is_where_results_are_kept(hospital, tmp_path, monkeypatch):
    monkeypatch.setenv("NVFL_RESULT_ROOT", str(tmp_path / "kept"))
    site = hospital()
    site.sends("score", messages.pack(dice=0.5))
    assert json.loads((tmp_path / "kept/feddp/budget.json").read_text()) == {
        str(site.data.resolve()): {"jobs": ["job"], "evaluations": 1}
    }
    assert not (tmp_path / "feddp/budget.json").exists()


def test_the_simulator_counts_nothing(hospital):
    site = hospital(budget={"jobs": 1})
    for job in ("first", "second"):
        under(site, job).fl_ctx.set_prop(FLContextKey.SIMULATE_MODE, True)
        assert trains(site).get_return_code() == ReturnCode.OK
    assert not (site.folder / "feddp/budget.json").exists()


WORDS = '{"/d": {"jobs": [], "evaluations": "0"}}'
NEGATIVE = '{"/d": {"jobs": [], "evaluations": -1000}}'  # more than a policy allows, one would think


@pytest.mark.parametrize("content", ["", "{", "[]", '{"/d": 3}', '{"/d": {"jobs": []}}', WORDS, NEGATIVE])
def test_a_count_that_cannot_be_read_lets_nothing_leave(hospital, content):
    site = hospital()
    site.sends("score", messages.pack(dice=0.5))
    path = site.folder / "feddp/budget.json"
    path.write_text(content)
    site.stopped("score", messages.pack(dice=0.5), "budget.json cannot be read .*so nothing leaves; .*--reset")
    assert path.read_text() == content
    Ledger("site-1", path.parent).reset()
    site.sends("score", messages.pack(dice=0.5))


def test_its_files_are_its_owners(hospital):
    """Under an umask that lets everybody read."""
    before = os.umask(0o022)
    try:
        hospital().sends("score", messages.pack(dice=0.5))
    finally:
        os.umask(before)
    folder = hospital().folder / "feddp"
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {"budget.json": 0o600, "kept.lock": 0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_two_processes_lose_no_count(tmp_path):
    """Two jobs at once, 50 evaluations each, on a folder that neither finds."""
    lines = "import sys; from pathlib import Path; from feddp.flare.budget import Ledger; from feddp.flare.policy import Budget"
    each = "Ledger('site-1', Path('feddp')).measured(Path('.'), sys.argv[1], Budget())"
    command = [sys.executable, "-c", f"{lines}\nfor _ in range(50): {each}"]
    jobs = [subprocess.Popen([*command, name], cwd=tmp_path) for name in ("first", "second")]
    assert [job.wait(300) for job in jobs] == [0, 0]
    (used,) = Ledger("site-1", tmp_path / "feddp").used().values()
    assert (sorted(used.jobs), used.evaluations) == (["first", "second"], 100)
    assert not list((tmp_path / "feddp").glob(".*"))


def answers(plan):
    """How many results with measured numbers a whole run asks of a site: one a phase, and those after the rounds."""
    more = {SPECTRA: 0, TRAIN: plan.rounds * plan.phases + 2, TUNE: 1, CALIBRATE: 1, HEADS: plan.heads.heads_epochs}
    return sum(more[stage] for stage in plan.stages) + 1


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].federated])
def test_the_default_is_enough_for_as_many_whole_runs_as_it_has_jobs(plan_for, method):
    """The papers' 200 rounds and 20 local epochs, with every stage that a method can have, 20 times: the most is pFLFE's, of
    two phases, 20 · (2 · 200 + 2 + 1 + 1 + 1) = 8100 of 10,000."""
    plan = plan_for(method=method, rounds=200, calibration_epochs=20, heads_epochs=20)
    stages = {*plan.stages, TUNE, CALIBRATE}
    plan = replace(plan, stages=tuple(stage for stage in (SPECTRA, TRAIN, TUNE, HEADS, CALIBRATE) if stage in stages))
    assert Budget().jobs * answers(plan) <= Budget().evaluations
    if method == "pflfe":
        assert Budget().jobs * answers(plan) == 8100


@pytest.mark.parametrize("wrong", [3, [], {"jobs": 0}, {"jobs": True}, {"jobs": "20"}, {"evaluation": 5}, {"evaluations": 1.5}])
def test_a_budget_that_is_none_is_refused(wrong):
    with pytest.raises(FedDPError, match="site x: privacy.json's budget"):
        SitePolicy.of("x", {"data": "/d", "budget": wrong}, simulated=False)
    assert SitePolicy.of("x", {"data": "/d", "budget": {"jobs": 5}}, simulated=False).budget == Budget(5, 10_000)
    assert SitePolicy.of("x", {"data": "/d"}, simulated=False).budget == Budget(20, 10_000)


# --- feddp kit budget ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kit(tmp_path, tiny_root):
    """What of a site's kit the command reads."""
    folder = tmp_path / "hospital-a"
    for part in ("startup", "local"):
        (folder / part).mkdir(parents=True)
    servers = [{"name": "feddp", "service": {"target": "localhost:8002"}, "identity": "localhost"}]
    (folder / "startup/fed_client.json").write_text(json.dumps({"servers": servers, "client": {"fqsn": "hospital-a"}}))
    (folder / "local/resources.json").write_text(json.dumps({"components": []}))
    (folder / "local/privacy.json").write_text(json.dumps(privacy({"data": str(tiny_root / "site-1"), "budget": {"jobs": 5}})))
    return folder


def said(*arguments):
    done = CliRunner().invoke(app, ["kit", "budget", *map(str, arguments)])
    return done.exit_code, done.output.splitlines(), done.exception


def test_the_command_shows_and_resets(kit, tiny_root, tmp_path):
    data = (tiny_root / "site-1").resolve()
    assert said(kit)[:2] == (0, [f"{data}: 0 of 5 jobs, 0 of 10000 evaluations"])
    ledger = Ledger("hospital-a", kit / "feddp")
    for job in ("one", "two", "one"):
        ledger.measured(data, job, Budget())
    ledger.measured(tmp_path, "one", Budget())
    unnamed = f"{tmp_path.resolve()}: 1 jobs, 1 evaluations; no scope of privacy.json names it now"
    assert said(kit)[:2] == (0, sorted([f"{data}: 2 of 5 jobs, 3 of 10000 evaluations", unnamed]))
    assert said(kit, "--reset")[:2] == (0, [f"{data}: 0 of 5 jobs, 0 of 10000 evaluations"])
    assert ledger.used() == {}


def test_the_command_resets_what_cannot_be_read(kit):
    Ledger("hospital-a", kit / "feddp").reset()
    (kit / "feddp/budget.json").write_text("{")
    assert isinstance(said(kit)[2], FedDPError)
    assert said(kit, "--reset")[0] == 0
    assert said(kit)[0] == 0


def test_another_user_resets_nothing(kit, tiny_root, monkeypatch):
    """The folder that it makes would be closed to the site."""
    monkeypatch.setattr(os, "geteuid", lambda: kit.stat().st_uid + 1)
    assert "type this as that user" in str(said(kit, "--reset")[2])
    assert not (kit / "feddp").exists()
    assert said(kit)[0] == 0


def test_the_command_resets_nothing_under_a_policy_that_is_wrong(kit, tiny_root):
    ledger = Ledger("hospital-a", kit / "feddp")
    ledger.measured(tiny_root / "site-1", "one", Budget())
    (kit / "local/privacy.json").write_text(json.dumps(privacy({"data": 5})))
    assert isinstance(said(kit, "--reset")[2], FedDPError)
    assert [used.jobs for used in ledger.used().values()] == [["one"]]


def test_only_a_site_has_a_budget(kit, tmp_path):
    shutil.move(kit / "startup/fed_client.json", kit / "startup/fed_admin.json")
    admin = {"admin": {"username": "lead", "project_name": "feddp", "host": "localhost", "port": 8003}}
    (kit / "startup/fed_admin.json").write_text(json.dumps(admin))
    assert "only sites have a budget" in str(said(kit)[2])
