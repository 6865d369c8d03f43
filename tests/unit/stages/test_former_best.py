"""A server that is killed after it marked a better round still has the former best: it selects what an unbroken run selects."""

import json
from dataclasses import replace

import pytest

from feddp import protocol
from feddp.errors import FedDPError
from feddp.files import read_events
from feddp.flare.kept import files_of, kept_below
from feddp.networks import NETWORKS
from feddp.stages.memory import LATEST, ServerMemory, start_file
from support.broken_off import RUN, Killed, Mortal, outcome, same, start
from support.small import Small

# {round: {site: validation IoU of γ after it}}; site-2 is away in round 3
IOU = {
    1: {"site-1": 0.5, "site-2": 0.5},
    2: {"site-1": 0.4, "site-2": 0.4},
    3: {"site-1": 0.6},
    4: {"site-1": 0.58, "site-2": 0.6},
    5: {"site-1": 0.3, "site-2": 0.3},
}


@pytest.fixture
def toy(monkeypatch) -> str:
    """A network with an encoder, which pFLFE asks for."""
    monkeypatch.setitem(NETWORKS, "toy", Small)
    return "toy"


class Scored(Mortal):
    """Its sites' scores are those of the table."""

    def reply(self, task, site, message):
        round = message.scalars.get("round")
        if task == protocol.TRAIN and round in IOU and site not in IOU[round]:
            raise FedDPError(f"site {site}: away")
        answer = super().reply(task, site, message)
        if task in (protocol.TRAIN, protocol.SCORE) and "iou" in answer.scalars:
            return replace(answer, scalars={**answer.scalars, "iou": IOU[round][site]})
        return answer


class KilledBeforeTheSave(Scored):
    def save(self, shared, round):
        if round == 4:
            raise Killed
        super().save(shared, round)


class KilledInTheSecondPhase(Scored):
    def reply(self, task, site, message):
        if task == protocol.TRAIN and (message.scalars["round"], message.scalars["phase"]) == (3, 1):
            raise Killed
        return super().reply(task, site, message)


@pytest.mark.parametrize(
    ("method", "killed"), [("fedavg", KilledBeforeTheSave), ("pflfe", KilledBeforeTheSave), ("pflfe", KilledInTheSecondPhase)]
)
def test_it_selects_what_an_unbroken_run_selects(plan_for, tiny_root, tmp_path, toy, method, killed):
    """Round 1 has 0.5 at both sites. In round 3 site-1 alone has a score, 0.6 above its 0.5: the best, with site-2's 0.5 of
    round 1. Round 4 has (0.58 + 0.6)/2 = 0.59 against (0.6 + 0.5)/2 = 0.55: it is selected. A server without round 1 would
    take round 3 with site-1's 0.6 alone, above 0.58, and select it. pFLFE's rounds have two phases."""
    plan = plan_for(network=toy, method=method, rounds=5, start="best", min_sites=1)
    root, folder = start(plan, tiny_root, tmp_path / "whole", "job", made=Scored)
    assert json.loads((folder / "results.json").read_text())["start_round"] == 4, "the control"
    with pytest.raises(Killed):
        start(plan, tiny_root, tmp_path / "broken", "first", made=killed)
    broken = start(plan, tiny_root, tmp_path / "broken", "second", made=Scored)
    same(outcome(root, folder), outcome(*broken))
    assert not [event for event in read_events(broken[1] / "progress.jsonl") if event["event"] == "damaged"]


def test_the_sites_keep_the_former_best_as_long(plan_for, tiny_root, tmp_path, toy):
    """Of a round with two phases the second one, too, asks to keep round 1, the best on the server's disk: else the sites would
    remove their states of it, those after 1 · 2 steps, before the server has noted that round 3 is better."""
    plan = plan_for(network=toy, method="pflfe", rounds=5, start="best", min_sites=1)

    with pytest.raises(Killed):
        start(plan, tiny_root, tmp_path, "job", made=KilledBeforeTheSave)
    states = {path.stem for path in files_of(kept_below(tmp_path / "site-1"), RUN).glob("state_*")}
    assert {"state_00002", "state_00008"} <= states


@pytest.fixture
def memory(plan_for, toy, tmp_path):
    """Opens the memory of a new job."""
    plan = plan_for(method="fedavg", network=toy, rounds=9)

    def opened():
        (tmp_path / "job").mkdir(exist_ok=True)
        return ServerMemory(plan, RUN, tmp_path / "job", tmp_path / "kept", tmp_path)

    return opened


def rounds(memory, best, last):
    """Saves γ + t as that of round t, up to `last`; marks the rounds `best`, each when it is the latest."""
    gamma = memory.first()
    for t in range(memory.round + 1, last + 1):
        memory.save({name: value + t for name, value in gamma.items()}, t)
        if t in best:
            mark(memory)
    return gamma


def mark(memory):
    memory.best_round = memory.round
    memory.scored[memory.round] = {"A": memory.round / 10}
    memory.keep_best()


def found(memory, gamma, round):
    shared, its = memory.load(memory.best)
    assert (memory.best_round, memory.scored[round], its) == (round, {"A": round / 10}, round)
    assert all(shared[name].equal(gamma[name] + round) for name in gamma)


def bests(tmp_path):
    return {path.stem for path in (tmp_path / "kept").glob("shared_best*")}


def test_a_damaged_latest_file_has_its_best_too(memory, tmp_path):
    """Rounds 1 and 4 are the best so far; the state of round 5 is the first to name 4. It is damaged: that of 4 names 1."""
    first = memory()
    gamma = rounds(first, (1, 4), 5)
    path = tmp_path / f"kept/{LATEST}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    again = memory()
    assert again.round == 4
    found(again, gamma, 1)


def test_only_what_a_state_names_stays(memory, tmp_path):
    """The states of two rounds are on the disk: after round 5 they name 1 and 4, after round 6 both name 4."""
    first = memory()
    for last, left in ((4, {1, 4}), (5, {1, 4}), (6, {4})):
        rounds(first, (1, 4), last)
        assert bests(tmp_path) == {f"shared_best_{t}" for t in left}
    assert start_file(tmp_path / "job", 4).stem == "shared_best"


def test_a_run_of_an_earlier_version_goes_on(memory, tmp_path):
    """It has one file of the best round, whatever round that is; its γ is found there, and the file goes with the next save."""
    first = memory()
    gamma = rounds(first, (1,), 3)
    (tmp_path / "kept/shared_best_1.safetensors").rename(tmp_path / "kept/shared_best.safetensors")
    again = memory()
    found(again, gamma, 1)
    rounds(again, (), 4)
    assert bests(tmp_path) == {"shared_best_1"}
    found(memory(), gamma, 1)
