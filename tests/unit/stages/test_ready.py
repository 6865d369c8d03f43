"""The first task of a job: versions, and whether a site can score. The job ends there if it could not run."""

import json
import threading
import time

import pytest

from feddp.errors import PolicyError
from feddp.flare import controller, messages
from feddp.protocol import ADOPT, READY, SCORE, TRAIN
from feddp.stages.events import read_progress
from feddp.stages.ready import NO_SCORE
from feddp.versions import as_numbers, installed
from support.server import SITES, Run, good

HERE = as_numbers(installed())


def told(scoring=True, **versions):
    """The answer of a site whose versions differ from the server's in these."""
    return messages.pack(versions=HERE | versions, scoring=scoring, samples=10)


def changed(name, part, by=1):
    """Another version of a package."""
    return {name: HERE[name] | {part: HERE[name][part] + by}}


@pytest.fixture
def run(plan_for, toy, tmp_path):
    def make(answers, *stages, **plan):
        def answer(site, task, tensors, scalars):
            found = answers.get(site, told()) if task == READY else good(site, task, tensors, scalars)
            return found() if callable(found) else found

        wanted = plan_for(network=toy, sites=tuple(SITES), **{"rounds": 2, "start": "best"} | plan)
        return Run(tmp_path, wanted, SITES, answer).run("ready", *stages)

    return make


def asked(run):
    return [(task, sites) for task, sites, _ in run.sent]


def test_all_sites_are_asked_before_anything_else_and_once(run):
    done = run({}, "train")
    assert done.panics == []
    assert asked(done) == [(task, SITES) for task in (READY, TRAIN, TRAIN, SCORE, ADOPT)]
    assert done.memory.versions.keys() == {"server", *SITES}
    assert done.progress("versions") == []
    answers = [event for event in done.progress("answer") if event["task"] == READY]
    assert [event["scalars"] for event in answers] == [{"versions": HERE, "scoring": True, "samples": 10}] * 3
    assert read_progress(done.folder / "progress.jsonl"), "as `feddp report` and `feddp watch` read it"


def test_a_difference_that_matters_ends_the_job_at_its_start_and_names_all_sites(run):
    done = run({"A": told(**changed("nvflare", "minor")), "C": told(**changed("feddp", "minor"))}, "train")
    (first, *_) = done.panics
    here = installed()
    theirs = f"{HERE['nvflare']['major']}.{HERE['nvflare']['minor'] + 1}.{HERE['nvflare']['patch']} at A"
    assert first.startswith("versions differ: feddp is ")
    assert f"nvflare is {here['nvflare']} at the server, {theirs}" in first
    assert " at C (" in first
    assert first.endswith(" at A and C, or export the job without A and C")


def test_a_version_that_a_site_does_not_tell_is_unknown_and_refused(run):
    """Such an answer says nothing about the package; the lead is told so, and whose it is."""
    without = {name: numbers for name, numbers in HERE.items() if name not in ("timm", "python")}
    done = run({"B": messages.pack(versions=without, scoring=True, samples=10)}, "train")
    assert f"timm is {installed()['timm']} at the server, unknown or not installed at B (" in done.panics[0]
    assert "python" not in done.panics[0]


def test_a_difference_that_does_not_is_shown_and_the_job_runs(run):
    done = run({"B": told(**changed("numpy", "minor"), **changed("python", "minor"))}, "train")
    assert done.panics == []
    (event,) = done.progress("versions")
    assert event["message"].startswith("versions differ: python is ")
    assert "; numpy is " in event["message"]
    assert event["message"].endswith(" at B. The job runs: none of this is known to change results")


@pytest.mark.parametrize(
    ("plan", "ends"),
    [
        ({}, True),
        ({"start": "last"}, False),
        ({"method": "local"}, False),  # each site selects its own best round
    ],
)
def test_a_job_of_which_no_site_can_score_the_rounds_ends_where_it_needs_that(run, plan, ends):
    none = dict.fromkeys(SITES, told(scoring=False))
    assert run(none, **plan).panics == ([NO_SCORE] if ends else [])


def test_one_site_that_can_score_is_enough(run):
    assert run({site: told(scoring=site == "B") for site in SITES}).panics == []


@pytest.mark.parametrize(
    "answer",
    [
        messages.pack(scoring=True, samples=10),
        messages.pack(versions=HERE),
        messages.pack(versions={"left-pad": HERE["torch"]}, scoring=True, samples=10),
        messages.pack(versions={"torch": {"major": "2"}}, scoring=True, samples=10),
        messages.pack(versions={"torch": {"major": 10_000}}, scoring=True, samples=10),
        messages.pack(versions={"torch": {"major": 2, "paths": 1}}, scoring=True, samples=10),
        messages.pack(versions={"torch": 2}, scoring=True, samples=10),
        messages.pack(versions=HERE, scoring=1, samples=10),
        messages.pack(versions="2", scoring=True, samples=10),
        messages.pack(versions=HERE, scoring=True),
        messages.pack(versions=HERE, scoring=True, samples=-1),
    ],
)
def test_a_site_that_answers_otherwise_takes_no_part(run, answer):
    done = run({"B": answer}, "train", min_sites=2)
    assert done.panics == []
    assert [event["site"] for event in done.progress("refused") if event["task"] == READY] == ["B", "B"]
    assert [sites for task, sites in asked(done) if task != READY] == [["A", "C"]] * 4


def test_a_site_that_comes_later_is_asked_when_it_comes(run):
    """It was lost at the start. Its versions matter as the others' do: it is left out, and is not asked again."""
    late = {}

    def absent():
        return late.get("answer")

    for answer, trains in ((told(), True), (told(**changed("timm", "minor")), False)):
        late.clear()
        done = run({"B": absent}, min_sites=2)
        assert done.memory.versions.keys() == {"server", "A", "C"}
        done.sent.clear()
        late["answer"] = answer
        done.run("train")
        assert done.panics == []
        assert asked(done)[:2] == [(TRAIN, ["A", "C"]), (READY, ["B"])]
        assert asked(done)[2] == (TRAIN, SITES if trains else ["A", "C"])
        assert ("B" in done.memory.unfit) != trains
        for path in done.folder.rglob("*"):
            if path.is_file():
                path.unlink()


@pytest.mark.parametrize("sign", [False, True])
def test_a_later_site_that_dies_while_it_is_asked_is_asked_when_it_is_back(run, monkeypatch, sign):
    """The others go on at once: its silence is longer than any patience; or it lives for 0.1 of the 0.4 s, as one that fetches
    the question and then loses its line. Then it gives a sign of life, and takes part."""
    answers = {"B": lambda: None}
    done = run(answers, min_sites=2, rounds=3)
    done.gone, done.open, done.sent[:], ask = set() if sign else {"B"}, {"B"}, [], done.broadcast
    if sign:
        monkeypatch.setattr(controller, "SILENT", 0.4)
        monkeypatch.setattr(controller, "SIGNS", 0.2)

    def broadcast(task, *rest, **named):
        if sign and task.name == READY and "B" in done.open:
            threading.Timer(0.1, lambda: done.heard.update(B=time.monotonic())).start()
        ask(task, *rest, **named)

    def back(site):
        if site == "C" and [task for task, *_ in done.sent].count(TRAIN) == 2:
            done.gone, done.open, answers["B"], done.heard["B"] = set(), set(), told(), time.monotonic()

    answer = done.answer
    done.broadcast, done.answer = broadcast, lambda site, *rest: (back(site), answer(site, *rest))[1]
    done.run("train")
    assert done.panics == []
    assert asked(done)[:4] == [(TRAIN, ["A", "C"]), (READY, ["B"]), (TRAIN, ["A", "C"]), (READY, ["B"])]
    assert asked(done)[4] == (TRAIN, SITES)
    assert [event["site"] for event in done.progress("returned")] == ["B"]
    assert done.memory.unfit == {}


def test_a_later_site_that_lives_and_does_not_answer_holds_nobody_up(run, monkeypatch):
    """Its signs of life prolong a round, for which it computes, but not this question. It is asked once."""
    monkeypatch.setattr(controller, "SILENT", 0.2)
    done = run({"B": lambda: None}, min_sites=2, rounds=3)
    done.open, done.sent[:], ask = {"B"}, [], done.broadcast

    def broadcast(task, *rest, **named):
        done.heard["B"] = float("inf")  # a sign of life at every look
        ask(task, *rest, **named)

    done.broadcast = broadcast
    done.run("train")
    assert done.panics == []
    assert [sites for task, sites in asked(done) if task == READY] == [["B"]]
    assert done.memory.unfit == {"B": "site B did not tell its versions"}
    assert not done.memory.lost


# --- a site ------------------------------------------------------------------------------------------------------------------


def test_a_site_tells_its_versions_and_that_it_can_score(hospital):
    """Of the tiny site, two images are to select by. Nothing is opened and nothing counted."""
    for least, scoring in ((2, True), (3, False)):
        site = hospital(min_images=least)
        tensors, scalars = site.sends(READY, site.executed(READY))
        assert (dict(tensors), scalars) == ({}, {"versions": HERE, "scoring": scoring, "samples": 8})
    assert not (site.folder / "feddp/budget.json").exists()


def test_in_a_simulation_nothing_is_withheld(hospital):
    site = hospital(min_images=3)
    site.simulated = True
    site.submitted(site.plan)
    assert messages.unpack(site.executed(READY))[1]["scoring"] is True


@pytest.mark.parametrize("versions", [{"torch": {"major": "2"}}, {"torch": {"path": 1}}, {"/data": {"major": 1}}, "2.15"])
def test_no_text_leaves_as_a_version(hospital, versions):
    site = hospital()
    site.stopped(READY, messages.pack(versions=versions, scoring=True), "among its scalars")


def test_a_policy_that_refuses_the_job_is_asked_first(hospital):
    site = hospital(methods=["local"])
    assert site.executed(READY).get_return_code() != "OK"
    assert "accepts the methods: local" in site.audited()[-1]
    with pytest.raises(PolicyError):
        site.component.context(site.fl_ctx)


def test_results_have_the_versions_of_all(run):
    done = run({}, "train", "evaluate")
    results = json.loads((done.folder / "results.json").read_text())
    assert results["versions"].keys() == {"server", *SITES}
    assert results["versions"]["server"] == installed()
