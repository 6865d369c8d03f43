"""Answers drawn at random: each is refused as its site's, or holds exactly the task's tensors, and numbers within bounds."""

import json
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddp import protocol
from feddp.errors import ContributionError
from feddp.methods.aggregation import combine
from feddp.methods.base import AGGREGATIONS
from feddp.stages import evaluate, train
from feddp.stages.memory import ServerMemory
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.stages.spool import Spool
from feddp.training.columns import METRICS, VOLUME_METRICS
from support.fuzz import ANY, cases, changed
from support.site import NUMBERS

SITES = ("A", "B", "C", "D")


def summary(metrics):
    return {metric: {"mean": 0.5, "std": 0.1, "n": 3} for metric in metrics}


TRAINED = NUMBERS | {"seconds": 0.1}
WHEN = dict.fromkeys(protocol.WHEN, summary(METRICS))
EVALUATED = {**WHEN, "volumes": dict.fromkeys(WHEN, summary(VOLUME_METRICS)), "peers": {"B": summary(METRICS)}}


class Asked(Server):
    """A server whose sites answer what `answers` says."""

    def __init__(self, memory):
        super().__init__(memory, sealed=False)
        self.answers = {}

    def joined(self):
        return SITES

    def warn(self, message):
        assert message.startswith("refused: site A")

    def progress(self, event, **metadata):
        json.dumps(metadata, allow_nan=False)

    def send(self, task, sites, data, received):
        for site in sites:
            received(site, lambda site=site: self.answers[site])
        return {}


@pytest.fixture
def server(toy, plan_for, tmp_path):
    plan = plan_for(method="fedavg", network=toy, sites=SITES, min_sites=3)
    return Asked(ServerMemory(plan, "job", tmp_path, tmp_path / "kept", tmp_path))


@pytest.fixture
def spool(tmp_path):
    with Spool(tmp_path) as spool:
        yield spool


def numbers(value):
    """Every number below, with its name."""
    for name, below in value.items():
        if isinstance(below, dict):
            yield from numbers(below)
        else:
            yield name, below


@cases(200)
@given(scalars=changed(TRAINED))
def test_numbers_of_a_round(server, spool, scalars):
    if not isinstance(scalars, dict):
        return
    first = server.memory.first()
    server.answers = dict.fromkeys(SITES, Message(first, TRAINED)) | {"A": Message(first, scalars)}
    accepted, _ = train._ask_to_train(server, first, 1, 0, spool, None)
    assert {"B", "C", "D"} <= accepted.keys()
    if "A" in accepted:
        for name in TRAINED:
            value = scalars[name]
            assert type(value) in (int, float) or name in ("round", "phase")
            assert math.isfinite(value)
            assert name == "loss" or 0 <= value <= 2**53
            assert name not in ("dice", "iou") or value <= 1
        assert scalars["samples"] >= 1
    for rule in AGGREGATIONS:
        weights = {site: answer.scalars["samples"] if rule == "samples" else 1.0 for site, answer in accepted.items()}
        mean = combine(rule, {site: answer.tensors for site, answer in accepted.items()}, weights)
        assert all(torch.isfinite(value).all() for value in mean.values())


@cases(150)
@given(scalars=changed(EVALUATED))
def test_numbers_of_an_evaluation(server, scalars):
    if not isinstance(scalars, dict):
        return
    server.answers = dict.fromkeys(SITES, Message({}, EVALUATED)) | {"A": Message({}, scalars)}
    accepted = server.ask(protocol.EVALUATE, Message(), (), partial(evaluate._check, server.plan.classes))
    if "A" in accepted:
        for name, value in numbers(
            {name: scalars[name] for name in (*EVALUATED, "withheld", "std_withheld") if name in scalars}
        ):
            assert name in ("mean", "std", "n", "withheld", "std_withheld")
            assert type(value) in (int, float)
            assert 0 <= value <= 2**53
        if "final" in scalars:
            assert 0 <= scalars["final"]["dice"]["mean"] <= 1


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]
EXTREME = [0.0, 1.0, -3e38, 3e38, float("nan"), float("inf"), -float("inf"), 1e-45]


@st.composite
def tensor(draw):
    """A tensor of any kind, or something else."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(ANY)
    shape = draw(st.sampled_from([(), (0,), (1,), (4,), (1, 4, 1, 1), (4, 3, 1, 1), (2, 2)]))
    value = torch.full(shape, 1).to(draw(st.sampled_from(DTYPES)))
    if value.is_floating_point() and value.numel():
        value = value.clone()
        value.view(-1)[draw(st.integers(0, value.numel() - 1))] = draw(st.sampled_from(EXTREME))
    if kind == 1:
        return value.to("meta")
    if kind == 2 and value.ndim == 2:
        return value.to_sparse()
    return value


@cases(200)
@given(data=st.data(), rule=st.sampled_from(AGGREGATIONS), factor=st.sampled_from([0.0, 1.0, 3.0]))
def test_tensors_of_a_round(server, spool, data, rule, factor):
    """A contribution with changed tensors is accepted only if they are exactly the plan's and finite.

    The three others send γ itself, so median and trimmed mean of all four are γ whatever the fourth sends.
    """
    first = server.memory.first()
    mine = dict(first)
    for name in data.draw(st.lists(st.sampled_from([*first, "intruder", ""]), min_size=1, max_size=3, unique=True)):
        if data.draw(st.booleans()) or name not in mine:
            mine[name] = data.draw(tensor())
        elif data.draw(st.booleans()):
            extreme = EXTREME[:4] if first[name].is_floating_point() else [0, -1, 2**53, -(2**63)]
            mine[name] = torch.full_like(first[name], data.draw(st.sampled_from(extreme)))
        else:
            del mine[name]
    server.answers = dict.fromkeys(SITES, Message(first, TRAINED)) | {"A": Message(mine, TRAINED)}
    federation = server.plan.federation
    object.__setattr__(federation, "norm_factor", factor)
    accepted, _ = train._ask_to_train(server, first, 1, 0, spool, None)
    assert {"B", "C", "D"} <= accepted.keys()
    if "A" in accepted:
        assert mine.keys() == first.keys()
        for name, value in mine.items():
            assert (value.shape, value.dtype, value.layout, value.device) == (
                first[name].shape,
                first[name].dtype,
                torch.strided,
                torch.device("cpu"),
            )
            assert torch.isfinite(value).all()
    mean = combine(rule, {site: answer.tensors for site, answer in accepted.items()}, dict.fromkeys(SITES, 1.0))
    assert all(torch.isfinite(value).all() for value in mean.values())
    if rule in ("median", "trimmed"):
        assert all(torch.equal(mean[name], first[name]) for name in first)


@cases(60)
@given(scalars=changed({"consent": True}), tensors=st.dictionaries(st.text(max_size=5), tensor(), max_size=2))
def test_a_collection(server, scalars, tensors):
    """Of FedAvg, nothing is collected for the calibration: an answer with any tensor is refused."""
    if not isinstance(scalars, dict):
        return
    server.answers = dict.fromkeys(SITES, Message({}, {"consent": False})) | {"A": Message(tensors, scalars)}
    accepted = server.ask(protocol.COLLECT, Message(), ("consent",))
    assert {"B", "C", "D"} <= accepted.keys()
    if "A" in accepted:
        assert type(scalars["consent"]) is bool
        assert not tensors


def test_the_drawn_server_accepts_good_answers(server, spool):
    """The control of the tests above."""
    first = server.memory.first()
    server.answers = dict.fromkeys(SITES, Message(first, TRAINED))
    assert sorted(train._ask_to_train(server, first, 1, 0, spool, None)[0]) == sorted(SITES)
    server.answers = dict.fromkeys(SITES, Message({}, EVALUATED))
    assert sorted(server.ask(protocol.EVALUATE, Message(), (), partial(evaluate._check, server.plan.classes))) == sorted(SITES)
    server.answers = dict.fromkeys(SITES, Message({}, {}))
    server.warn = lambda message: None
    with pytest.raises(ContributionError, match="0 of 4 sites answered well"):
        server.ask(protocol.COLLECT, Message(), ("consent",))
