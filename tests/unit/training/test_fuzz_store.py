"""A site's store with damaged files: each is refused by its name, or is read as it was written."""

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddp.errors import FedDPError
from feddp.training.store import State, Store
from support.fuzz import ANY, TEXT, cases, changed, tried

STATE = State(3, {"q.weight": torch.ones(2, 2)}, {"head.bias": torch.zeros(1)}, {"q.weight/step": torch.tensor(4)}, {})


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def loaded(store):
    """The state, or None if it is refused."""
    state, error = tried(FedDPError, store.load_state, 3)
    if error:
        return None
    assert type(state.round) is int
    for group in (state.private, state.personal, state.optimizer, state.memory):
        assert all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in group.items())
    return state


def test_a_state_is_read_as_it_was_written(store):
    store.save_state(STATE)
    assert loaded(store).private["q.weight"].equal(STATE.private["q.weight"])


@cases(150)
@given(data=st.data())
def test_a_state_with_changed_bytes(store, data):
    store.save_state(STATE)
    file = store.folder / "state_00003.safetensors"
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    file.write_bytes(content)
    loaded(store)


@cases(100)
@given(data=st.data())
def test_a_state_of_any_header(store, data):
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = {"__metadata__": {"round": "3"}, "private/q": tensor}
    text = json.dumps(data.draw(changed(header))).encode()
    (store.folder / "state_00003.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    loaded(store)


@cases(60)
@given(name=TEXT, round=TEXT)
def test_a_state_of_any_names(store, name, round):
    name, round = (text.encode("utf-8", "replace").decode() for text in (name, round))
    store.write("state_00003", {name: torch.ones(1)}, round=round)
    loaded(store)


@cases(100)
@given(content=st.binary(max_size=40) | ANY.map(lambda value: json.dumps(value).encode()))
def test_a_claim_over_any_plan(store, content):
    """Only the plan itself is accepted."""
    plan = {"method": "feddp", "rounds": 2}
    (store.folder / "plan.json").write_bytes(content)
    with pytest.raises(FedDPError):
        store.claim(plan)
