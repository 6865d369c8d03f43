"""A round that was pushed, played again or comes out of order removes nothing of what a site remembers.

A site that has answered rounds 0 to t−1 has the state t and the two before it: round t−1 may come again, and a server that
lost its latest file asks for round t−2.
"""

import pytest
import torch
from nvflare.apis.fl_constant import ReturnCode

from feddp import protocol
from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.networks.weights import fingerprint
from feddp.plan.resolve import build_network
from feddp.stages import heads
from feddp.stages.train import adopt, score, train


def first(site):
    return site.partition.split(build_network(site.plan).state_dict())[0]


def states(store):
    return sorted(int(path.stem.removeprefix("state_")) for path in store.folder.glob("state_*"))


def contents(store):
    """Each file's tensors and texts; a file's bytes hold the texts in any order."""
    read = {path.name: store.read(path.stem) for path in store.folder.glob("*.safetensors")}
    return {name: (fingerprint(tensors), metadata) for name, (tensors, metadata) in read.items()}


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.fixture
def site(open_site, toy):
    return open_site(network=toy, rounds=200)


def trained(site, rounds, keep=None):
    gamma = first(site)
    for round in rounds:
        gamma, _ = train(site, gamma, round, best=keep if keep and round >= keep else None)
    return gamma


WRONG = {
    "a round of no plan's": {"round": 90_000},
    "the round after the last": {"round": 200},
    "a round below 0": {"round": -1},
    "a text for a round": {"round": "4"},
    "a fraction for a round": {"round": 4.0},
    "a truth value for a round": {"round": True},
    "nothing for a round": {"round": None},
    "a phase too many": {"round": 4, "phase": 1},
    "a text for a phase": {"round": 4, "phase": "0"},
    "a best round still to come": {"round": 4, "best": 5},
    "a best round before any score": {"round": 4, "best": 0},
    "a best round of no plan's": {"round": 4, "best": 90_000},
    "a list for a best round": {"round": 4, "best": [1]},
    "a round long answered": {"round": 1},
    "a round of whose state an older one is left": {"round": 3},
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_round_that_a_site_could_not_be_asked_is_refused(site, kind):
    """After four rounds, of which 2 is the best, the states 2, 3 and 4 are there; 2 goes when 3 becomes the best."""
    gamma = trained(site, range(4), keep=2)
    assert states(site.store) == [2, 3, 4]
    if kind == "a round of whose state an older one is left":
        for round in (4, 5):
            gamma, _ = train(site, gamma, round, best=2)
        wrong = {"round": 3, "phase": 0}
        assert states(site.store) == [2, 4, 5, 6]
    else:
        wrong = {"phase": 0} | WRONG[kind]
    before = contents(site.store)
    with pytest.raises(FedDPError, match="site site-1: it was asked for "):
        train(site, gamma, **wrong)
    assert contents(site.store) == before
    train(site, gamma, max(states(site.store)), best=2)  # the control: the next one


@pytest.mark.parametrize("round", [-1, 3, 90_000, "1", 1.0, None, False])
def test_a_round_that_has_no_gamma_is_neither_scored_nor_adopted(open_site, toy, round):
    """Of two rounds there are γ^0, γ^1 and γ^2."""
    site = open_site(network=toy, rounds=2)
    gamma = trained(site, range(2))
    before = contents(site.store)
    for task in (score, adopt):
        with pytest.raises(FedDPError, match="asked for round"):
            task(site, gamma, round)
    assert contents(site.store) == before
    adopt(site, gamma, 2)
    assert site.store.has("start")


@pytest.mark.parametrize("pushed", [5, 50, 199])
def test_a_round_pushed_ahead_costs_no_state_and_no_bit(open_site, toy, pushed):
    """Round `pushed`, of another γ, comes between rounds 3 and 4. All that follows is as in a site to which it did not come,
    and the states behind go again once the rounds in order have passed the one that was pushed."""
    plain, site = (open_site(at=at, network=toy, rounds=200) for at in ("plain", "pushed"))
    gamma = trained(plain, range(4))
    assert same(trained(site, range(4)), gamma)
    train(site, {name: value + 1 if value.is_floating_point() else value for name, value in gamma.items()}, pushed)
    assert states(site.store) == [2, 3, 4, pushed + 1]
    for round in range(4, 8):
        wanted, _ = train(plain, gamma, round)
        gamma, _ = train(site, gamma, round)
        assert same(gamma, wanted)
        kept = states(site.store)
        assert set(kept) >= {round, round + 1}
    assert kept == ([6, 7, 8] if pushed == 5 else [*range(2, 9), pushed + 1])


def test_a_site_that_missed_rounds_comes_back(site):
    """Rounds 2 and 3 went by without it: it goes on with the state after round 1, which stays until round 6 follows round 5."""
    gamma = trained(site, range(2))
    state = site.store.load_state(2)
    train(site, gamma, 4)
    assert states(site.store) == [1, 2, 5]
    assert same(site.store.load_state(4).private, state.private)
    again = contents(site.store)
    train(site, gamma, 4)
    assert contents(site.store) == again
    train(site, gamma, 5)
    assert states(site.store) == [2, 5, 6], "2 is its state before round 4"
    train(site, gamma, 6)
    assert states(site.store) == [5, 6, 7]


@pytest.mark.parametrize(("again", "keep"), [(3, 2), (3, None), (2, None), (0, None)])
def test_a_round_that_comes_again_gives_the_same_and_removes_nothing(open_site, toy, again, keep):
    """The last round, with what it was to keep and without; the best, whose state is still there; the first, which needs none.
    Every state that was there is there to the bit; a round before the last leaves its own, which it left before."""
    site = open_site(network=toy, rounds=200)
    gammas, answers = [first(site)], []
    for round in range(4):
        answers.append(train(site, gammas[-1], round, best=2 if round > 1 else None))
        gammas.append(answers[-1][0])
    assert states(site.store) == [2, 3, 4]
    before = contents(site.store)
    torch.manual_seed(99)
    fresh = open_site(network=toy, rounds=200)
    tensors, numbers = train(fresh, gammas[again], again, best=keep)
    assert same(tensors, answers[again][0])
    assert numbers["loss"] == answers[again][1]["loss"]
    after = contents(site.store)
    assert before.items() <= after.items()
    assert after.keys() - before.keys() <= {f"state_{again + 1:05d}.safetensors"}


def test_without_the_remedy_the_next_round_finds_another_state(site):
    """The control: what was done before, to prune behind whatever was asked for, leaves the next round the wrong state."""
    gamma = trained(site, range(4))
    wanted = site.store.load_state(4).private
    train(site, gamma, 50)
    assert same(site.store.load_state(5).private, wanted)
    train(site, gamma, 4)
    site.store.prune_states({51, 50})
    assert not same(site.store.load_state(4).private, wanted)


def test_phases_are_in_order_too(open_site, pvt):
    """pFLFE's rounds are of two phases: steps 0, 1, 2, 3. The last step again prunes nothing, a phase too early neither."""
    site = open_site(method="pflfe", network=pvt, rounds=4)
    gamma = first(site)
    for step in range(3):
        gamma, _ = train(site, gamma, step // 2, phase=step % 2)
    assert states(site.store) == [2, 3]
    train(site, gamma, 3, phase=0)  # pushed: step 6
    assert states(site.store) == [2, 3, 7]
    train(site, gamma, 1, phase=1)  # the next
    assert states(site.store) == [2, 3, 4, 7]
    with pytest.raises(FedDPError, match="asked for phase 2, where its plan has 0 to 1"):
        train(site, gamma, 1, phase=2)


def test_an_epoch_that_the_exchange_of_heads_does_not_have(open_site, pvt):
    """One round leaves state 1, three epochs the states 2, 3 and 4."""
    site = open_site(method="fedlc", network=pvt, rounds=1, heads_epochs=3)
    adopt(site, train(site, first(site), 0)[0], 1)
    heads.calibrate(site, {}, 1)
    before = contents(site.store)
    for epoch in (0, 4, 90_000, "1", 1.0, None, True):
        for task in (lambda epoch: heads.head(site, epoch), lambda epoch: heads.calibrate(site, {}, epoch)):
            with pytest.raises(FedDPError, match="asked for epoch .*where its plan has 1 to 3"):
                task(epoch)
        assert contents(site.store) == before, epoch
    heads.calibrate(site, {}, 2)
    assert states(site.store) == [1, 2, 3], "1, with which more rounds would begin, stays"


def test_an_epoch_of_heads_that_comes_too_early_removes_nothing(open_site, pvt):
    site = open_site(method="fedlc", network=pvt, rounds=2, heads_epochs=4)
    gamma = trained(site, range(2))
    adopt(site, gamma, 2)
    heads.calibrate(site, {}, 3)  # pushed
    assert states(site.store) == [1, 2, 5]
    for epoch in (1, 2, 3):
        heads.calibrate(site, {}, epoch)
    assert states(site.store) == [1, 2, 3, 4, 5]
    heads.calibrate(site, {}, 4)
    assert states(site.store) == [2, 4, 5, 6], "2, with which more rounds would begin, stays"


# --- through the executors ----------------------------------------------------------------------------------------------------


@pytest.fixture
def site_1(hospital, plan_for, toy):
    return hospital(plan=plan_for(network=toy, rounds=3))


@pytest.mark.parametrize(
    "scalars",
    [
        {"round": 90_000, "phase": 0},
        {"round": 1, "phase": "0"},
        {"round": 1},
        {"phase": 0},
        {"round": 1, "phase": 0, "keep": 7},
    ],
)
def test_a_task_that_was_pushed_is_audited_and_prunes_nothing(site_1, scalars):
    gamma = messages.unpack(site_1.executed(protocol.TRAIN, site_1.shared, round=0, phase=0))[0]
    before = contents(site_1.store)
    pushed = site_1.executed(protocol.TRAIN, gamma, **scalars)
    assert pushed.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "[A:train#?][task failed: site site-1: it was asked for " in site_1.audited()[-1]
    assert contents(site_1.store) == before
    answer = site_1.executed(protocol.TRAIN, gamma, round=1, phase=0)
    assert messages.unpack(answer)[0].keys() == gamma.keys()


@pytest.mark.parametrize("epoch", ["1", [1], 1.5, 7, -1])
def test_an_epoch_of_another_type_or_of_a_task_without_epochs_is_refused_before_anything_is_opened(site_1, epoch):
    """With another epoch, a server could repeat an exchange with peers of its choice."""
    answer = site_1.executed(protocol.COLLECT, epoch=epoch)
    assert answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "asked for epoch" in site_1.audited()[-1]
