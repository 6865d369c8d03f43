"""Rounds that runs of a comparison have in common are trained once, and each run has the bits of a run of its own."""

import json
from hashlib import sha256

import pytest
from safetensors.torch import load_file

from feddp.compare.runs import Campaign, Place
from feddp.compare.shared_rounds import SharedRounds
from feddp.compare.variants import Common, Variant
from feddp.errors import FedDPError
from feddp.files import read_events
from feddp.methods.fedavg import FedAvg
from feddp.plan.schema import Plan
from feddp.run import rounds
from feddp.run.rounds import _trains, digest_of
from feddp.stages import calibrate
from feddp.stages import train as stage
from feddp.stages.memory import LATEST

SITES, ROUNDS = ("site-1", "site-2"), 2
HERE = Place("local")


@pytest.fixture
def campaign(tiny_root, tmp_path, toy):
    def make(*variants: str, out="out") -> Campaign:
        common = Common(ROUNDS, 2, toy, 32, ("batch=4",))
        return Campaign([Variant.parse(v) for v in variants], common, (0,), tiny_root, tmp_path / out)

    return make


@pytest.fixture
def trained(monkeypatch) -> list[tuple[str, int]]:
    """The site and the round of each training."""
    calls, train = [], stage.train

    def counted(site, shared, round, *arguments):
        calls.append((site.name, round))
        return train(site, shared, round, *arguments)

    monkeypatch.setattr(stage, "train", counted)
    return calls


ONCE = [(site, round) for round in range(ROUNDS) for site in SITES]
SAME = ["feddp", "feddp@lambda=0", "feddp@calibration_epochs=0"]
PLAIN = ["finetune", "fedavg", "fedavg@start=last"]  # tuned after the last round; of the best round; of the last


@pytest.mark.parametrize("variants", [SAME, PLAIN, PLAIN[::-1]])
def test_the_rounds_are_trained_once_and_no_bit_differs(campaign, trained, variants, capsys):
    """Against each run alone. What was kept for the others is removed at the end."""
    shared = campaign(*variants)
    shared.execute(HERE)
    assert shared.failed == {}
    assert trained == ONCE
    assert capsys.readouterr().err.count(f"its {ROUNDS} rounds are those of another run of this comparison") == 2
    assert {path.name for path in shared.out.iterdir()} == {"runs"}
    for variant in variants:
        (run,) = campaign(variant).runs
        alone = campaign(variant, out=f"alone-{variant}")
        alone.execute(HERE)
        (own,) = alone.runs
        results, wanted = (json.loads((folder / "results.json").read_text()) for folder in (run.folder, own.folder))
        assert results == wanted
        for name in ("shared.safetensors", *(f"sites/{site}/network.safetensors" for site in SITES)):
            found, tensors = load_file(run.folder / name), load_file(own.folder / name)
            assert found.keys() == tensors.keys()
            assert all(found[key].equal(tensors[key]) for key in tensors)
        for site in SITES:
            assert (run.folder / f"sites/{site}/images.csv").read_bytes() == (
                own.folder / f"sites/{site}/images.csv"
            ).read_bytes()
            said, alone_said = (read_events(each.folder / f"sites/{site}/record.jsonl") for each in (run, own))
            assert [event["event"] for event in said] == [event["event"] for event in alone_said], "of no other run"
        rounds = json.loads((run.folder / "time.json").read_text())["rounds"]["wall"]
        assert len(rounds) == ROUNDS
        assert None not in rounds
    assert trained == ONCE * (1 + len(variants)), "the control: alone, each trains"


def test_a_comparison_that_is_broken_off_keeps_the_rounds(campaign, trained, monkeypatch):
    """A calibration fails; the same comparison again, after another program run, trains nothing."""
    answer = calibrate.answer

    def failing(task, message, host):
        if host.plan.calibration.lambda_ == 0:
            raise FedDPError("broken")
        return answer(task, message, host)

    monkeypatch.setattr(calibrate, "answer", failing)
    made = campaign(*SAME[:2])
    made.execute(HERE)
    assert list(made.failed) == ["feddp@lambda=0, seed 0"]
    assert len(list((made.out / "rounds").iterdir())) == 1
    monkeypatch.setattr(calibrate, "answer", answer)
    again = campaign(*SAME[:2])
    again.execute(HERE)
    assert again.failed == {}
    assert trained == ONCE
    assert not (made.out / "rounds").exists()


def test_runs_with_the_same_rounds_follow_one_another(campaign, trained, capsys):
    """So that rounds of one kind lie on the disk at a time."""
    campaign("feddp@lambda=0", "fedavg", "feddp").execute(HERE)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("run ")]
    assert [line.split(": ")[1] for line in said] == ["feddp@lambda=0, seed 0", "feddp, seed 0", "fedavg, seed 0"]
    assert trained == ONCE * 2


def test_nothing_is_kept_for_nobody(campaign, monkeypatch):
    kept = []
    monkeypatch.setattr("feddp.run.rounds.keep", lambda *arguments: kept.append(arguments))
    campaign("fedavg", "feddp").execute(HERE)
    assert kept == []


def test_rounds_without_a_site_are_no_other_runs(campaign, trained, monkeypatch):
    """A site fails in a round of the first run, by chance: the second run trains, and misses nobody."""
    train, failed = stage.train, []

    def failing(site, shared, round, *arguments):
        if site.name == "site-2" and round == 0 and not failed:
            failed.append(site.name)
            raise RuntimeError("by chance")
        return train(site, shared, round, *arguments)

    monkeypatch.setattr(stage, "train", failing)
    made = campaign("feddp@min_sites=1", "feddp@min_sites=1@lambda=0")
    made.execute(HERE)
    assert (made.failed, failed) == ({}, ["site-2"])
    first, second = (json.loads((run.folder / "results.json").read_text()) for run in made.runs)
    assert first["missed"] == {"site-2": 1}
    assert "missed" not in second
    assert trained == [call for call in ONCE if call != ("site-2", 0)] + ONCE


def test_what_a_killed_comparison_left_is_removed(campaign, trained):
    """It was killed after its last run had finished, when it had not removed the rounds, or half of them."""
    made = campaign(*SAME[:2])
    folder = SharedRounds(made.runs, made.out, HERE.machine).folder(made.runs[0])
    made.execute(HERE)
    for name in (folder, folder.with_name(f"{folder.name}.part")):
        (name / "server").mkdir(parents=True)
    campaign(*SAME[:2]).execute(HERE)
    assert not (made.out / "rounds").exists()
    assert trained == ONCE


def test_rounds_that_were_half_taken_are_taken_again_and_a_run_keeps_its_own(plan_for, tmp_path, monkeypatch):
    """A run is killed when it has two of three participants' files. By the server's it counts as having rounds: it comes last.
    Then the run goes on by itself, and what another left is not put over it."""
    plan, folder, workspace, left = plan_for(), tmp_path / "rounds" / "x", tmp_path / "workspace", [2]
    for name in ("server", *plan.sites):
        (folder / name).mkdir(parents=True)
        (folder / name / f"{LATEST}.safetensors").write_text(name)
    copy = rounds._copy

    def killed(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        copy(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "_copy", killed)
        with pytest.raises(KeyboardInterrupt):
            rounds.take(plan, workspace, folder)
    rounds.take(plan, workspace, folder)
    taken = {name: target / f"{LATEST}.safetensors" for name, target in rounds._participants(plan, workspace)}
    assert {name: path.read_text() for name, path in taken.items()} == {name: name for name in ("server", *plan.sites)}
    taken["site-1"].unlink()
    taken["site-1"].write_text("later")
    rounds.take(plan, workspace, folder)
    assert taken["site-1"].read_text() == "later"


def test_rounds_that_cannot_be_kept_cost_no_run(campaign, trained, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("feddp.run.rounds._copy", full)
    made = campaign(*SAME[:2])
    made.execute(HERE)
    assert made.failed == {}
    assert "warning: these rounds are not kept for other runs" in capsys.readouterr().err
    assert trained == ONCE * 2


class Longer(FedAvg):
    """Of another package: its rounds are FedAvg's, and more follows."""

    stages = ("train", "tune")


class Set(FedAvg):
    def __init__(self, hyper):
        super().__init__(hyper)


class Mixed(Longer, Set):
    stages = ("train",)


def test_a_method_of_another_package_has_its_base_rounds_only_if_nothing_else_is_its_own():
    named = type("FedAvg", (FedAvg,), {"round": lambda self, site: 0.0})
    assert _trains(Longer) == _trains(FedAvg)
    assert len({_trains(each) for each in (FedAvg, Set, Mixed, named)}) == 4


def test_which_plans_have_the_same_rounds(plan_for):
    """Later stages, their settings and the choice of the round do not matter; whatever a round reads does."""
    first = digest_of(plan_for())
    same = [{"calibration_epochs": 7}, {"lambda": 0}, {"stages": ("train",)}, {"start": "best"}, {"tune_epochs": 3}]
    assert [digest_of(plan_for(**changes)) == first for changes in same] == [True] * len(same)
    other = [{"lr": 1e-4}, {"rounds": 3}, {"seed": 1}, {"batch": 2}, {"private": ("head",)}, {"method": "fedavg"}]
    other += [{"aggregation": "samples"}, {"network": "unet"}, {"size": 64}, {"sites": ("site-1", "site-2", "site-3")}]
    assert [digest_of(plan_for(**changes)) == first for changes in other] == [False] * len(other)
    methods = {
        name: digest_of(plan_for(method=name, start="last")) for name in ("fedavg", "finetune", "fedbabu", "fedprox", "ditto")
    }
    assert methods["fedavg"] == methods["finetune"]
    assert len(set(methods.values())) == 4
    # each site of Local Train notes its own best round, where that is what it deploys
    assert digest_of(plan_for(method="local")) != digest_of(plan_for(method="local", start="last"))


def test_rounds_that_an_earlier_version_kept_are_found(campaign):
    """It named their folder by the plan, the digests of dataset.json and split.csv, and the machine, not by pixels."""
    made = campaign(*SAME)
    (first, *_) = made.runs
    text = digest_of(Plan.from_json(first.wanted["plan"])) + json.dumps(first.wanted["data"], sort_keys=True) + "here"
    earlier = made.out / "rounds" / sha256(text.encode()).hexdigest()[:16]
    assert SharedRounds(made.runs, made.out, "here").folder(first) != earlier
    earlier.mkdir(parents=True)
    assert SharedRounds(made.runs, made.out, "here").folder(first) == earlier
