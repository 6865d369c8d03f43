"""A site's files: what is written is read back, whole or not at all."""

import copy
import errno
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn, tensor

from feddp.errors import BadFile, FedDPError, PolicyError, StorageError
from feddp.files import RECORD, read_events
from feddp.networks import weights
from feddp.stages.order import state_before
from feddp.training.claim import claim, hold, is_held
from feddp.training.loop import adamw
from feddp.training.store import State, Store, optimizer_tensors, restore_optimizer


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "job" / "site-1")


def state(round):
    """A state that says which round it is of."""
    return State(round, private={"q": tensor([float(round)])})


def rounds(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_a_state_is_read_back_as_it_was(store):
    """Dots and slashes in names, counters and half precision included; the three parts do not mix."""
    given = State(
        round=3,
        private={"a.q.weight": torch.randn(2, 3), "n": tensor(5), "optimizer/x": tensor(1.0)},
        optimizer={"a.q.weight/exp_avg": torch.randn(2, 3), "a.q.weight/step": tensor(2.0)},
        memory={"a.q.weight": torch.randn(2).bfloat16()},
    )
    store.save_state(given)
    read = Store(store.folder).load_state(3)
    assert read.round == 3
    for part in ("private", "optimizer", "memory"):
        wanted, found = getattr(given, part), getattr(read, part)
        assert found.keys() == wanted.keys()
        assert all(found[k].equal(wanted[k]) and found[k].dtype == wanted[k].dtype for k in wanted)


def test_the_latest_state_at_or_before_a_round_is_read(store):
    for round in (2, 5, 10):
        store.save_state(state(round))
    assert [store.load_state(t).round for t in (0, 1, 2, 4, 5, 9, 10, 400)] == [0, 0, 2, 2, 5, 5, 10, 10]
    assert store.load_state(9).private["q"].item() == 5
    assert store.load_state(1) == State(0)


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({5, 6}, [5, 6]),
        ({2, 5, 6}, [2, 5, 6]),
        ({3, 6}, [2, 6]),  # of round 3, the site has what it had after round 2
        ({1}, []),
        (set(), []),
        ({900}, [6]),
    ],
)
def test_pruning_leaves_exactly_what_is_needed(store, keep, left):
    """States 2, 4, 5 and 6 are there; what `load_state` gives for a kept round is the same before and after."""
    for round in (2, 4, 5, 6):
        store.save_state(state(round))
    store.write("start", {"w": tensor(1.0)})
    before = {t: store.load_state(t).round for t in keep}
    store.prune_states(iter(keep))
    assert rounds(store) == ["start.safetensors"] + [f"state_{r:05d}.safetensors" for r in left]
    assert {t: store.load_state(t).round for t in keep} == before


def test_a_crash_while_writing_leaves_the_old_file(store, monkeypatch):
    store.write("start", {"w": tensor(1.0)}, site="site-1")

    def crash(source, target):
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(OSError, match="power cut"):
            store.write("start", {"w": tensor(2.0)})
        with pytest.raises(OSError, match="power cut"):
            store.save_state(state(1))
    assert rounds(store) == ["start.safetensors"]
    tensors, metadata = store.read("start")
    assert tensors["w"].item() == 1
    assert metadata == {"site": "site-1"}
    assert store.load_state(1) == State(0)


def test_a_half_written_file_is_no_state(store):
    """What a killed process leaves is hidden under another name, and is never taken for a state."""
    store.save_state(state(1))
    (store.folder / ".state_00002.safetensors.77.tmp").write_bytes(b"half")
    assert store.load_state(2).round == 1
    store.prune_states([2])
    assert store.load_state(2).round == 1


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_an_unreadable_file_is_named(store, content):
    store.save_state(state(4))
    path = store.folder / "state_00004.safetensors"
    path.write_bytes(path.read_bytes()[:-2] if content is None else content)
    with pytest.raises(FedDPError, match="state_00004.safetensors: cannot be read"):
        store.load_state(4)


def test_a_damaged_only_state_names_what_helps_and_it_does(store):
    """Nobody can save a state again. Without the file, the site goes on as one that missed all rounds so far."""
    store.save_state(state(4))
    flipped(store.folder / "state_00004.safetensors")
    with pytest.raises(BadFile) as refused:
        state_before("site-1", store, 4, "round 4", first=False)
    end = "Submit the job as a new one, or remove the file: this site's private tensors then start again."
    assert str(refused.value).endswith(f"does not match its checksum: the file is damaged). {end}")
    store.remove("state_00004")
    assert state_before("site-1", store, 4, "round 4", first=False) == State(0)


def test_a_damaged_state_before_sound_ones_is_not_to_be_removed(store):
    """Without the file of the best round, the site would take its start for the state of that round."""
    store.save_state(state(4))
    store.save_state(state(9))
    flipped(store.folder / "state_00004.safetensors")
    with pytest.raises(BadFile, match=r"Submit the job as a new one\.$"):
        store.load_state(4)
    assert store.load_state(9).round == 9


@pytest.mark.parametrize(
    ("tensors", "round", "what"),
    [("private/q", "four", "its round is 'four'"), ("public/q", "4", "'public/q' is no tensor of one")],
)
def test_a_file_that_is_no_state_is_none(store, tensors, round, what):
    store.write("state_00004", {tensors: tensor(1.0)}, round=round)
    with pytest.raises(BadFile, match=rf"state_00004.safetensors: is no state: {what}\. Submit the job as a new one, or"):
        store.load_state(4)


def test_another_damaged_file_of_a_run_asks_for_a_new_job(store):
    store.write("start", {"w": tensor(1.0)})
    flipped(store.folder / "start.safetensors")
    with pytest.raises(BadFile, match=r"start.safetensors: .*checksum.*\. Submit the job as a new one\.$"):
        store.read("start")


def flipped(path) -> None:
    """Changes one bit of the last tensor in a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_state_gives_way_to_the_one_before_it(store):
    """One bit of a tensor is another number, which no format notices: the checksum does."""
    for round in (3, 4):
        store.save_state(state(round))
    flipped(store.folder / "state_00004.safetensors")
    assert store.load_state(4).round == 3
    (line,) = [event for event in read_events(store.folder / RECORD) if event["event"] == "damaged"]
    what = "its content does not match its checksum: the file is damaged"
    end = f"state_00004.safetensors: cannot be read as tensors ({what}); it was renamed, and the state before it is used"
    assert line["message"].endswith(end), "no remedy: nobody has to do anything"
    assert store.latest() == 3, "the damaged file is gone"


def test_the_metadata_are_under_the_checksum_too(store):
    store.write("start", {"a": torch.ones(2)}, round="3")
    path = store.folder / "start.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"round":"3"', b'"round":"4"'))
    with pytest.raises(FedDPError, match="does not match its checksum"):
        store.read("start")


def plan_of(**changes) -> dict:
    return {"method": "feddp", "rounds": 2} | changes


def test_a_run_may_get_more_rounds_and_no_other_plan(store):
    for rounds in (plan_of(), plan_of(rounds=5), plan_of(rounds=5)):
        claim(store.folder, rounds)
    for other in (plan_of(rounds=4), plan_of(rounds=5, method="fedavg"), plan_of(rounds=6, seed=1)):
        with pytest.raises(PolicyError, match="belongs to a run with"):
            claim(store.folder, other)
    claim(store.folder, plan_of(rounds=5))  # a refused plan changes nothing


def test_a_folder_is_one_processs_at_a_time(store):
    """Another process waits for its end, then says who to end."""
    hold(store.folder)
    hold(store.folder)  # this process has it
    code = f"""
from pathlib import Path
from feddp.errors import PolicyError
from feddp.training.claim import hold
try:
    hold(Path({str(store.folder)!r}), patience=0.3)
except PolicyError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "is in use by another process" in done.stdout


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(store, monkeypatch, number):
    """As some network drives answer. With locks again, the folder can be taken: nothing of the attempt is left. An earlier test
    may have held a folder of this name, which pytest has removed since."""
    monkeypatch.setattr("feddp.training.claim._held", {})

    def flock(handle, how):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", flock)
        for take in (hold, is_held):
            with pytest.raises(StorageError, match=r"job/site-1: its file system has no locks .* on a local disk"):
                take(store.folder)
    assert not is_held(store.folder)
    hold(store.folder)
    assert is_held(store.folder)


def test_another_failure_of_a_lock_is_no_fault_of_the_file_system(store, monkeypatch):
    def flock(handle, how):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="Input/output error"):
        hold(store.folder)


def test_a_missing_file_is_named(store):
    with pytest.raises(FedDPError, match="start.safetensors does not exist"):
        store.read("start")


def test_files_come_and_go(store):
    assert not store.has("peers")
    store.write("peers", {"site-2/q": tensor(1.0)})
    assert store.has("peers")
    store.remove("peers")
    store.remove("peers")
    assert not store.has("peers")


def test_the_record_grows_by_a_line_an_event(store):
    store.record("train", round=0, loss=1.5)
    store.record("adopt", round=1)
    lines = (store.folder / "record.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert events[0].pop("time") <= events[1].pop("time") <= time.time()
    assert events == [
        {"event": "train", "round": 0, "loss": 1.5},
        {"event": "adopt", "round": 1},
    ]


def step(network, optimizer, inputs):
    optimizer.zero_grad()
    network(inputs).square().mean().backward()
    optimizer.step()


def test_an_optimizer_goes_on_where_it_stopped(store):
    """Two steps in one go; and one step, through the file into a fresh network and optimiser, one step: the same bits.

    AdamW's second step depends on the first through three numbers a parameter: both moments and the step count.
    """
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    halves, idle = copy.deepcopy(whole), copy.deepcopy(whole)
    first, second = torch.randn(5, 3), torch.randn(5, 3)

    one = adamw(whole, 0.1, 0.01)
    step(whole, one, first)
    step(whole, one, second)

    before = adamw(halves, 0.1, 0.01)
    step(halves, before, first)
    store.save_state(State(1, private=halves.state_dict(), optimizer=optimizer_tensors(before, halves)))
    read = store.load_state(1)
    after = adamw(idle, 0.1, 0.01)
    idle.load_state_dict(read.private)
    restore_optimizer(after, idle, read.optimizer)
    step(idle, after, second)

    for name, value in whole.state_dict().items():
        assert idle.state_dict()[name].equal(value), name
    expected = optimizer_tensors(one, whole)
    assert expected.keys() == {f"{n}/{slot}" for n in whole.state_dict() for slot in ("step", "exp_avg", "exp_avg_sq")}
    for name, value in optimizer_tensors(after, idle).items():
        assert value.equal(expected[name]), name


def test_a_restored_optimizer_shares_no_memory_with_what_was_read():
    network = nn.Linear(2, 1)
    first = adamw(network, 0.1, 0.0)
    step(network, first, torch.ones(1, 2))
    saved = {name: value.clone() for name, value in optimizer_tensors(first, network).items()}
    kept = {name: value.clone() for name, value in saved.items()}
    second = adamw(network, 0.1, 0.0)
    restore_optimizer(second, network, saved)
    step(network, second, torch.ones(1, 2))
    assert all(saved[name].equal(kept[name]) for name in saved)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_what_cannot_be_read_now_is_not_damaged(store, monkeypatch, error):
    """The newest private tensors must not give way to older ones because this process has too many files open."""
    for round in (1, 2):
        store.save_state(State(round, {"w": torch.ones(2)}))

    def fails(*arguments, **named):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(weights, "safe_open", fails)
        with pytest.raises(StorageError, match="cannot be read now"):
            store.load_state(2)
    assert store.load_state(2).round == 2
