"""The phases of a round: what `fit` trains of a network, and what FedRep and FedBABU do with it."""

import hashlib

import pytest

from feddp.errors import FedDPError, Stopped
from feddp.methods.aggregation import average
from feddp.methods.base import Method
from feddp.plan.resolve import build_network
from feddp.stages.round import LocalRound
from feddp.stages.train import adopt, train
from feddp.stages.tune import tune

EVEN = {"site-1": 1.0, "site-2": 1.0}


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def first(site):
    """γ^0: the shared tensors of the common start."""
    return site.partition.split(build_network(site.plan).state_dict())[0]


def whole(site, slot="start"):
    return site.store.read(slot)[0]


def test_fedrep_trains_the_head_and_then_the_body(open_site, toy, monkeypatch):
    """Over two rounds, so that AdamW has a history and a weight decay to move what is frozen. Buffers are the body's."""
    site = open_site(method="fedrep", network=toy)
    head = {"head.weight", "head.bias"}
    changed, real = [], LocalRound.fit

    def fit(local, **options):
        before, loss = local.copy(), real(local, **options)
        changed.append({name for name, value in local.copy().items() if not value.equal(before[name])})
        return loss

    monkeypatch.setattr(LocalRound, "fit", fit)
    gamma = first(site)
    for round in range(2):
        gamma, _ = train(site, gamma, round)
    assert changed == [head, site.network.state_dict().keys() - head] * 2
    assert "norm.running_mean" in changed[1]


def test_fedbabu_s_head_is_the_common_start_until_the_tuning(open_site, toy, monkeypatch):
    scores = iter(range(100))  # every epoch betters the last, so that the tuned network is kept
    monkeypatch.setattr("feddp.training.calibration.mean_scores", lambda *_: {"iou": float(next(scores)), "dice": 0.0})
    sites = [open_site(name, method="fedbabu", network=toy, tune_epochs=1) for name in EVEN]
    start, gamma = build_network(sites[0].plan).state_dict(), first(sites[0])
    for round in range(2):
        gamma = average({site.name: train(site, gamma, round)[0] for site in sites}, EVEN)
    for site in sites:
        adopt(site, gamma, 2)
        body = {name: value for name, value in whole(site).items() if not name.startswith("head.")}
        assert same(whole(site), body | {name: start[name] for name in ("head.weight", "head.bias")})
        assert not any(value.equal(start[name]) for name, value in body.items())
        tune(site)
        assert not any(value.equal(whole(site)[name]) for name, value in whole(site, "tuned").items())


# --- seeds ------------------------------------------------------------------------------------------------------------------


def seed_by_hand(text):
    """The first 8 bytes of BLAKE2b of the parts, without the lowest bit."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") // 2


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        ("pflfe", [["0/0", "0/1"], ["1/0", "1/1"], ["2/0", "2/1"], ["3/0", "3/1"]]),
        ("fc_pflfe", [["0/0", "0/1", "0/2", "0/3"], ["1/0", "1/1", "1/2", "1/3"]]),
    ],
)
def test_every_epoch_of_every_phase_draws_anew(open_site, monkeypatch, method, steps):
    """seed / site / step / epoch of the step. Two rounds of pFLFE's two phases are the steps 0 to 3, of 2 local epochs each;
    FC-pFLFE's rounds are two steps of 2 + 2 epochs."""
    seeds, site = [], open_site(method=method, local_epochs=2, seed=5)
    monkeypatch.setattr("feddp.training.enhancement.Enhancement.spread", 1.0)
    monkeypatch.setattr("feddp.stages.round.fit_epoch", lambda *given: seeds.append(given[5]) or 0.0)
    monkeypatch.setattr(site, "validate", dict)
    for round in range(2):
        for phase in range(site.plan.phases):
            train(site, first(site), round, phase=phase)
    assert seeds == [seed_by_hand(f"5/site-1/{step}") for epochs in steps for step in epochs]


# --- fit: what a method's phase trains ----------------------------------------------------------------------------------


class Phase(Method):
    """A round of one epoch with these options of `fit`; says what could be trained when the loss was asked."""

    def __init__(self, **options):
        self.options, self.trainable = options, set()

    def round(self, site):
        return site.fit(1, **self.options)

    def loss(self, site, logits, batch):
        self.trainable = {name for name, parameter in site.network.named_parameters() if parameter.requires_grad}
        return super().loss(site, logits, batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": ("hed",)}, "role 'hed'"),
        ({"freeze": ("hed",)}, "role 'hed'"),
        ({"train": ("decoder",)}, "role 'decoder' selects no tensor of Toy"),
        ({"freeze": ("head", "decoder")}, "role 'decoder' selects no tensor of Toy"),
    ],
)
def test_a_phase_of_a_role_that_is_not_there_is_refused(open_site, toy, options, message):
    site = open_site(network=toy)
    site.method = Phase(**options)
    with pytest.raises(FedDPError, match=message):
        train(site, first(site), 0)


@pytest.mark.parametrize(
    ("options", "moving"),
    [
        ({"train": ("query",)}, {"q"}),
        ({"freeze": ("query",)}, {"norm", "head"}),
        ({"train": ("query", "norm"), "freeze": ("norm",)}, {"q"}),
        ({}, {"q", "norm", "head"}),
    ],
)
def test_what_is_frozen_has_no_decay_and_no_history(open_site, toy, options, moving):
    """A weight decay of 0.5 at lr 0.1 would take 5% off every step. AdamW has a state for what it has moved alone."""
    site = open_site(network=toy, lr=0.1, weight_decay=0.5)
    site.method, start = Phase(**options), site.copy()
    sent, _ = train(site, first(site), 0)
    state = site.store.load_state(1)
    after = sent | state.private
    assert {name.split(".")[0] for name in start if not after[name].equal(start[name])} == moving
    assert {name.split(".")[0] for name in state.optimizer} == moving
    assert {name.split(".")[0] for name in site.method.trainable} == moving
    assert all(parameter.requires_grad for parameter in site.network.parameters())
    assert site.network.norm.track_running_stats


def test_after_an_error_nothing_stays_frozen(open_site, toy):
    site = open_site(network=toy)
    site.stopped, site.method = (lambda: True), Phase(train=("query",))
    with pytest.raises(Stopped, match="stopped"):
        train(site, first(site), 0)
    assert all(parameter.requires_grad for parameter in site.network.parameters())
    assert site.network.norm.track_running_stats
