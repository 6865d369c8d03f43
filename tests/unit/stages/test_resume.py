"""A run that is broken off anywhere and continued ends with the bits of an unbroken one."""

import itertools
import json
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from feddp import protocol
from feddp.errors import BadFile, FedDPError, PolicyError
from feddp.files import read_events
from feddp.flare.kept import files_of, kept_below
from feddp.networks import NETWORKS
from feddp.networks.weights import read_network, save_network
from feddp.stages.memory import BEST, LATEST, PREVIOUS, ServerMemory, start_file
from feddp.stages.message import Message
from feddp.stages.site import last_network
from feddp.stages.train import note
from feddp.training import claim
from support.broken_off import RUN, SITES, Killed, Mortal, outcome, same, start
from support.small import Small

# a private rule, a personal model, an exchange at every epoch, one before the rounds, a tuning, a best round of a site's own.
# The first two have a third round, before which an earlier one's files are removed: by a server that keeps its latest two, and
# by one that keeps its best too
SHAPES = {
    "feddp": {"rounds": 3, "calibration_epochs": 2},
    "ditto": {"rounds": 3, "stages": ("train", "calibrate"), "calibration_epochs": 1, "start": "best"},
    "fedlc": {"heads_epochs": 2},
    "feddg": {},
    "fedbabu": {"tune_epochs": 1},
    "local": {},
}
ANSWERS = {"feddp": 14, "ditto": 16, "fedlc": 16, "feddg": 14, "fedbabu": 10, "local": 10}


@pytest.fixture
def toy(monkeypatch) -> str:
    """A network with all the parts that a method asks for, among them FedLC."""
    monkeypatch.setitem(NETWORKS, "toy", Small)
    return "toy"


@pytest.fixture
def federation(tiny_root, tmp_path):
    """Starts a job of the run `name`; it ends after `answers` answers."""

    def begin(plan, name, job, answers=float("inf"), made=Mortal):
        return start(plan, tiny_root, tmp_path / name, job, answers, made)

    return begin


@pytest.fixture
def copies(tmp_path):
    """The run's folder as a process that ends after each answer would leave it, made while an unbroken one goes on."""
    found = []

    class Copied(Mortal):
        def reply(self, task, site, message):
            if task != protocol.READY:  # which changes no file
                found.append(shutil.copytree(tmp_path / "whole", tmp_path / f"broken-{len(found)}"))
            return super().reply(task, site, message)

    return Copied, found


@pytest.mark.parametrize("method", SHAPES)
def test_broken_off_after_every_answer(method, plan_for, federation, toy, copies):
    """Another job continues from what there was after the first answer, after the second, and so on."""
    plan = plan_for(network=toy, method=method, **SHAPES[method])
    copied, found = copies
    whole = outcome(*federation(plan, "whole", "first", made=copied))
    for broken in found[1:]:
        assert not list(broken.glob("server/*/results.json")), "the control: there was something left to do"
        same(whole, outcome(*federation(plan, broken.name, "second")))
    assert len(found) == ANSWERS[method], "the control: there were answers to break off after"


def test_broken_off_again_and_again(plan_for, federation, toy):
    """Each job makes one round's answers and no more: the run ends all the same."""
    plan = plan_for(network=toy, rounds=3, calibration_epochs=1)
    whole = outcome(*federation(plan, "whole", "job"))
    for number in itertools.count():
        try:
            done = federation(plan, "broken", f"job-{number}", answers=5)
        except Killed:
            continue
        break
    assert number >= 3
    same(whole, outcome(*done))


def test_more_rounds_are_an_extension(plan_for, federation, toy):
    """A finished run of 2 rounds, continued with a plan of 4, ends as a run of 4."""
    short, long = (plan_for(network=toy, rounds=rounds, calibration_epochs=1) for rounds in (2, 4))
    federation(short, "grown", "first")
    same(outcome(*federation(long, "whole", "job")), outcome(*federation(long, "grown", "second")))


def test_an_extension_is_broken_off_after_every_answer(plan_for, federation, toy, copies):
    """Whatever the sites have removed of the former end by then."""
    short, long = (plan_for(network=toy, rounds=rounds, calibration_epochs=1) for rounds in (1, 2))
    copied, found = copies
    federation(short, "whole", "first")
    federation(long, "whole", "second", made=copied)
    whole = outcome(*federation(long, "unbroken", "job"))
    for broken in found[1:]:
        same(whole, outcome(*federation(long, broken.name, "third")))
    assert len(found) == 10, "the control: there were answers to break off after"


# {what site-2 misses: whether it is that task, of the extension}
MISSED = {
    "the end": lambda task, round: task == protocol.ADOPT,
    "a local stage": lambda task, round: task == protocol.CALIBRATE,
    "all of it until the exchange": lambda task, round: task == protocol.ADOPT or (task == protocol.TRAIN and round >= 2),
}


@pytest.mark.parametrize("what", MISSED)
def test_a_site_that_misses_a_part_of_an_extension_has_no_part_of_the_former_end(plan_for, federation, toy, tmp_path, what):
    """As in a run of 4 rounds in which it misses the same: no ρ and no evaluation of round 2, no network of another round."""

    class Away(Mortal):
        def reply(self, task, site, message):
            if site == "site-2" and MISSED[what](task, message.scalars.get("round")):
                raise FedDPError(f"site {site}: away")
            return super().reply(task, site, message)

    short, long = (plan_for(network=toy, rounds=rounds, calibration_epochs=1, min_sites=1) for rounds in (2, 4))
    federation(short, "grown", "first")
    ends = [federation(long, name, "second", made=Away) for name in ("grown", "whole")]
    results, networks = [], []
    for root, folder in ends:
        results.append((folder / "results.json").read_bytes())
        last = {site: last_network(files_of(kept_below(root / site), RUN)) for site in SITES}
        networks.append({site: (path.name, load_file(path)) for site, path in last.items() if path})
    assert results[0] == results[1]
    grown, whole = networks
    assert {site: name for site, (name, _) in grown.items()} == {site: name for site, (name, _) in whole.items()}
    for site, (_, tensors) in whole.items():
        assert all(tensors[name].equal(value) for name, value in grown[site][1].items())


def test_a_finished_run_gives_its_results_again(plan_for, federation, toy):
    """Also the matrix, whose peers' networks the sites have removed."""
    plan = plan_for(network=toy, rounds=2, calibration_epochs=1)
    root, first = federation(plan, "run", "first")
    _, second = federation(plan, "run", "second")
    assert (second / "results.json").read_bytes() == (first / "results.json").read_bytes()
    assert b'"matrix"' in (second / "results.json").read_bytes()


def damage(path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_server_file_costs_one_round(plan_for, federation, toy, tmp_path):
    """The latest γ is damaged: the job continues from the round before, says so, and ends with the same bits."""
    plan = plan_for(network=toy, rounds=3, calibration_epochs=1)
    whole = outcome(*federation(plan, "whole", "job"))
    # 2 answers a round: broken off in the third, γ^2 is the latest
    with pytest.raises(Killed):
        federation(plan, "broken", "first", answers=5)
    kept = files_of(kept_below(tmp_path / "broken" / "server"), RUN)
    damage(kept / f"{LATEST}.safetensors")
    root, folder = federation(plan, "broken", "second")
    same(whole, outcome(root, folder))
    (event,) = [event for event in read_events(folder / "progress.jsonl") if event["event"] == "damaged"]
    assert event["message"].endswith("the file is damaged); the round before it is used")


def test_another_plan_is_refused_by_what_differs(plan_for, federation, toy):
    federation(plan_for(network=toy, rounds=2, calibration_epochs=1), "run", "first")
    with pytest.raises(FedDPError, match="belongs to a run with seed=0, but this job has seed=1"):
        federation(plan_for(network=toy, rounds=2, calibration_epochs=1, seed=1), "run", "second")


def test_the_jobs_folder_has_what_a_download_needs(plan_for, federation, toy):
    """γ of the start round, whichever job made it, and the progress of both."""
    plan = plan_for(network=toy, rounds=3, start="best", method="fedavg")
    with pytest.raises(Killed):
        federation(plan, "run", "first", answers=5)
    _, folder = federation(plan, "run", "second")
    assert {path.stem for path in folder.glob("*.safetensors")} == {LATEST, BEST}
    assert start_file(folder, 3).exists()
    lines = (folder / "progress.jsonl").read_text().splitlines()
    assert sum('"event": "round"' in line for line in lines) == 3
    assert sum('"event": "resumed"' in line for line in lines) == 1


def memory_of(tmp_path, plan):
    (tmp_path / "job").mkdir(exist_ok=True)
    return ServerMemory(plan, RUN, tmp_path / "job", tmp_path / "kept", tmp_path)


def test_a_server_killed_while_it_marked_a_better_round_finds_the_best_one(tmp_path, plan_for, toy):
    """keep_best links γ² as the best; the process dies before the next save writes that round 2 is the best. The last save says
    round 1."""
    plan = plan_for(method="fedavg", network=toy, rounds=5)
    memory = memory_of(tmp_path, plan)
    gamma = memory.first()
    for round in (1, 2):
        memory.save({name: value + round for name, value in gamma.items()}, round)
        if round == 1:
            memory.best_round, memory.scored = 1, {1: {"A": 0.5}}
            memory.keep_best()
    memory.best_round, memory.scored = 2, {2: {"A": 0.6}}
    memory.keep_best()
    assert memory.load(memory.best)[1] == 2, "the control"
    again = memory_of(tmp_path, plan)
    found, round = again.load(again.best)
    assert (again.best_round, round) == (1, 1)
    assert all(found[name].equal(gamma[name] + 1) for name in gamma)


def test_damaged_best_tensors_are_lost_and_said(tmp_path, plan_for, toy):
    """Of round 1, the best, only the file of the best is left, and its header is broken: the run goes on without it."""
    plan = plan_for(method="fedavg", network=toy, rounds=5)
    memory = memory_of(tmp_path, plan)
    for round in (1, 2, 3):
        memory.save(memory.first(), round)
        if round == 1:
            memory.best_round, memory.scored = 1, {1: {"A": 0.5}}
            memory.keep_best()
    (tmp_path / "kept/shared_best_1.safetensors").write_bytes(b"\xff" * 100)
    again = memory_of(tmp_path, plan)
    assert (again.round, again.best_round, again.scored) == (3, None, {})
    said = [event["message"] for event in read_events(tmp_path / "job/progress.jsonl") if event["event"] == "damaged"]
    assert said == ["the shared tensors of round 1, the best so far, are lost"]


def test_a_continued_run_compares_with_all_rounds_site_by_site(tmp_path, plan_for, toy):
    """Round 1 has 0.5 at A and 0.9 at B, so 0.7. Round 2 lacks B, and A has 0.6 there: above A's 0.5, though not above 0.7."""
    plan = plan_for(method="fedavg", network=toy, rounds=5)
    memory = memory_of(tmp_path, plan)
    memory.save(memory.first(), 1)
    note(SimpleNamespace(memory=memory, plan=plan), 1, {"A": scored(0.5001), "B": scored(0.9)})
    memory.save(memory.first(), 2)
    again = memory_of(tmp_path, plan)
    assert (again.best_round, again.scored) == (1, {1: {"A": 0.5, "B": 0.9}})
    note(SimpleNamespace(memory=again, plan=plan), 2, {"A": scored(0.6)})
    assert (again.best_round, again.scored) == (2, {1: {"A": 0.5, "B": 0.9}, 2: {"A": 0.6}})


def scored(iou):
    return Message(scalars={"iou": iou})


def test_a_damaged_first_round_starts_again(tmp_path, plan_for, toy):
    plan = plan_for(method="fedavg", network=toy, rounds=5)
    memory = memory_of(tmp_path, plan)
    memory.save(memory.first(), 1)
    latest = tmp_path / "kept/shared_latest.safetensors"
    latest.write_bytes(latest.read_bytes()[:-1])
    assert memory_of(tmp_path, plan).round == 0
    assert memory_of(tmp_path, plan).round == 0, "and again"


def test_two_damaged_files_of_the_server_ask_for_a_new_job(tmp_path, plan_for, toy):
    plan = plan_for(method="fedavg", network=toy, rounds=5)
    memory = memory_of(tmp_path, plan)
    for round in (1, 2):
        memory.save(memory.first(), round)
    for name in (LATEST, PREVIOUS):
        damage(tmp_path / f"kept/{name}.safetensors")
    with pytest.raises(BadFile, match=r"shared_latest.safetensors: .*checksum.*\. Submit the job as a new one\.$"):
        memory_of(tmp_path, plan)


def test_an_extension_that_is_killed_before_its_first_round_is_still_one(tmp_path, plan_for, toy):
    """Two rounds are done; the job with four rounds is killed before it saves, when its plan is on the disk already."""
    memory = memory_of(tmp_path, plan_for(method="fedavg", network=toy, rounds=2))
    for round in (1, 2):
        memory.save(memory.first(), round)
    memory.without = {"calibration": {"site-2": "does not consent"}}
    memory.finish("train")
    longer = plan_for(method="fedavg", network=toy, rounds=4)
    for _ in range(2):
        again = memory_of(tmp_path, longer)
        assert (again.round, again.done, again.without) == (2, [], {})


def test_a_run_with_head_calibration_is_not_extended(tmp_path, plan_for, toy):
    """The epochs' states have replaced those of the rounds, from which an extension would start."""
    plan = plan_for(method="fedlc", network=toy, rounds=2)
    memory_of(tmp_path, plan)
    with pytest.raises(PolicyError, match="has 2 rounds and cannot be extended: .* stage heads .*; submit the job as a new"):
        memory_of(tmp_path, plan_for(method="fedlc", network=toy, rounds=3))
    memory_of(tmp_path, plan)


def test_a_site_without_consent_is_still_named_by_a_later_job(tmp_path, plan_for, toy):
    """And a state of an earlier version, which has no such entry, is read."""
    plan = plan_for(method="fedavg", network=toy, rounds=5)
    memory = memory_of(tmp_path, plan)
    memory.without = {"spectra": {"site-2": "does not consent"}}
    memory.save(memory.first(), 1)
    assert memory_of(tmp_path, plan).without == {"spectra": {"site-2": "does not consent"}}
    path = tmp_path / "kept/shared_latest.safetensors"
    shared, metadata = read_network(path)
    state = json.loads(metadata["state"])
    del state["without"]
    save_network(path, shared, {"round": metadata["round"], "state": json.dumps(state)})
    again = memory_of(tmp_path, plan)
    assert (again.round, again.without) == (1, {})


def test_a_server_reads_its_stored_plan_once(tmp_path, plan_for, toy, monkeypatch):
    plan, read, found = plan_for(method="fedavg", network=toy), claim.read_own, []
    memory_of(tmp_path, plan)
    monkeypatch.setattr(claim, "read_own", lambda path, *others: found.append(path) or read(path, *others))
    memory_of(tmp_path, plan)
    assert found == [tmp_path / "kept/plan.json"]
