"""How far the shared tensors may move: the bound by hand, what a site refuses of γ, and what the server refuses of a site."""

import math

import pytest
import torch
from torch import nn

from feddp.errors import FedDPError, PolicyError, SharedError
from feddp.flare import messages
from feddp.plan.resolve import build_network
from feddp.plan.schema import MOVEMENT
from feddp.protocol import ADOPT, READY, SCORE, TRAIN
from feddp.stages.message import Message
from feddp.stages.movement import DRIFTED, SIZES, Reach, steps_at, steps_of
from feddp.stages.tensors import Expected
from feddp.stages.train import answer
from feddp.training.loop import adamw
from feddp.versions import as_numbers, installed
from support.server import SITES, Run, good

LR, DECAY = 0.01, 0.5
# of 13 images in batches of 4 the last one is left out: 3 steps an epoch; two epochs
STEPS = 2 * 3


@pytest.fixture
def plan(plan_for, toy):
    return plan_for(method="fedavg", network=toy, lr=LR, weight_decay=DECAY, batch=4, local_epochs=2)


@pytest.fixture
def reach(plan):
    return Reach(Expected(plan), steps_at(plan, "A", {"A": 13}))


def moved(before, name, by):
    return before | {name: before[name] + by}


@pytest.fixture
def before(plan):
    state = build_network(plan).state_dict()
    state["q.weight"].fill_(-2.0)
    state["norm.running_var"].fill_(9.0)
    return state


# a parameter: lr · steps · times · (7.3 + decay · |−2|); a mean: 16 · √9 · times; a variance: 16² · 9 · times
@pytest.mark.parametrize(("times", "share"), [(1, 1), (3, 3)])
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("q.weight", LR * STEPS * (MOVEMENT + DECAY * 2)),
        ("head.bias", None),
        ("norm.running_mean", 16 * 3),
        ("norm.running_var", 16**2 * 9),
        ("norm.num_batches_tracked", 8 * STEPS),
    ],
)
def test_the_bound_by_hand(reach, before, name, most, times, share):
    if most is None:
        before[name].zero_()
        most = LR * STEPS * MOVEMENT
    most *= share
    step = 1 if name.endswith("tracked") else most / 1000
    assert reach.beyond(before, moved(before, name, most), times) is None
    found = reach.beyond(before, moved(before, name, most + step), times)
    assert found.name == name
    assert found.share == pytest.approx(1 + step / most, rel=1e-4)
    assert reach.beyond(before, before, times) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38, -1e38])
def test_no_value_is_too_strange_to_be_far(reach, before, value):
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["q.weight"][0, 0] = value
    assert reach.beyond(before, after).name == "q.weight"


def test_initial_tensors_may_differ_as_processors_do_and_no_further(reach, before):
    """Of −2: 2^-13 of it and 2^-20."""
    most = 2 * 2**-13 + 2**-20
    assert reach.beyond(before, moved(before, "q.weight", 0.99 * most), 0) is None
    assert reach.beyond(before, moved(before, "q.weight", 1.01 * most), 0) is not None


def test_half_precision_may_round(plan_for, toy, before):
    """2/3 lies between float16's neighbours 1365/2048 and 1366/2048; it moves by a third of their distance, 2^-11/3. The bound
    is 2^-10 of it, which three of their distances exceed."""
    half = plan_for(method="fedavg", network=toy, lr=1e-9, batch=4, precision="float16")
    reach, known = Reach(Expected(half), 3), before | {"q.weight": torch.full_like(before["q.weight"], 2 / 3)}
    rounded = known | {"q.weight": known["q.weight"].half().float()}
    assert not torch.equal(rounded["q.weight"], known["q.weight"])
    assert reach.beyond(known, rounded) is None
    assert reach.beyond(known, moved(rounded, "q.weight", 3 * 2**-11)) is not None
    single = Reach(Expected(plan_for(method="fedavg", network=toy, lr=1e-9, batch=4)), 3)
    assert single.beyond(known, rounded) is not None, "the control"


@pytest.mark.parametrize(
    ("method", "settings", "passes"),
    [
        ("fedavg", {}, 2),
        ("feddp", {}, 2),
        ("fedrep", {"head_epochs": 5}, 5),
        ("fedrep", {"head_epochs": 1}, 2),
        ("pflfe", {}, 2),  # in each of its two phases
        ("fc_pflfe", {}, 4),
        ("pfedme", {"inner_steps": 3}, 6),
        ("pfedme", {"inner_steps": 3, "pfedme_beta": 2.0}, 6),  # the server's step concerns no contribution
    ],
)
def test_a_method_s_steps(plan_for, pvt, method, settings, passes):
    plan = plan_for(method=method, network=pvt, batch=4, local_epochs=2, **settings)
    assert Reach(Expected(plan), 3)._steps == passes * 3


@pytest.mark.parametrize(("beta", "steps"), [(0.5, 55), (1.0, 55), (2.0, 110)])
def test_the_server_s_own_step_counts_once(plan_for, toy, beta, steps):
    """55 as below; pFedMe's server goes β times as far as the mean."""
    plan = plan_for(method="pfedme", network=toy, batch=4, min_sites=2, pfedme_beta=beta)
    assert steps_of(plan, {"A": 8, "B": 40, "C": 400}) == steps


@pytest.mark.parametrize(("gradients", "steps", "least"), [([1.0] * 10, 10, 5.3), ([1.11**k for k in range(100)], 1, 7.0)])
def test_no_gradients_move_a_parameter_further_than_the_bound(gradients, steps, least):
    """After 3000 zeros, as of a dead unit: those of one that comes to life, and the worst, which grow by β₂ / β₁. By the
    derivation their steps are 5.5 lr in the mean of ten and 7.27 lr at most; bias correction takes 3 % of it here."""
    network = nn.Linear(1, 1, bias=False)
    (weight,), optimizer, places = network.parameters(), adamw(network, LR, 0.0), []
    for gradient in [0.0] * 3000 + gradients:
        places.append(weight.item())
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    assert least < (places[-steps] - weight.item()) / (LR * steps) < MOVEMENT


def test_steps_by_hand(plan_for, toy):
    """Batches of 4: 8, 40 and 400 images are 2, 10 and 100 steps. A mean of `min_sites` = 2 or more of them is furthest with
    the two largest: 55. A median may be the furthest one, and a mean weighted by images may come near it."""
    samples = {"A": 8, "B": 40, "C": 400}
    plan = plan_for(method="fedavg", network=toy, batch=4, min_sites=2)
    assert [steps_at(plan, site, samples) for site in samples] == [2, 10, 100]
    assert steps_of(plan, samples) == 55
    assert steps_of(plan, {"A": 8}) == 2
    for aggregation in ("samples", "median", "trimmed"):
        assert (
            steps_of(
                plan_for(method="fedavg", network=toy, batch=4, min_sites=3, sites=tuple(SITES), aggregation=aggregation),
                samples,
            )
            == 100
        )


def test_no_number_of_images_ends_the_bound(plan_for, toy):
    """A liar among three counts as SIZES times the median of 8, 8 and its own: 18 · 8 images, 36 steps of 4. The mean of the
    three that the plan requires is then at most (2 + 2 + 36) / 3."""
    plan = plan_for(method="fedavg", network=toy, batch=4, min_sites=3)
    samples = {"A": 8, "B": 8, "C": 2**53}
    assert SIZES == 18
    assert steps_at(plan, "C", samples) == 36
    assert steps_of(plan, samples) == (2 + 2 + 36) / 3


def test_half_of_the_sites_cannot_end_the_bound(plan_for, toy):
    """Of two or four sites the lower number in the middle, 8, is an honest one, as long as no more than half of them lie."""
    plan = plan_for(method="fedavg", network=toy, batch=4, min_sites=2)
    for samples in ({"A": 8, "B": 2**53}, {"A": 8, "B": 8, "C": 2**53, "D": 2**53}):
        assert max(steps_at(plan, site, samples) for site in samples) == 36


def test_at_a_site_no_other_one_counts_as_more_than_its_own_images_allow(plan_for, toy):
    """Of three sites two are the median. The honest one of 8 images still allows the two no more than 18 · 8 of them."""
    plan, samples = plan_for(method="fedavg", network=toy, batch=4, min_sites=3), {"A": 8, "B": 2**53, "C": 2**53}
    assert steps_of(plan, samples) > 2**50, "the control"
    assert steps_of(plan, samples, own=8) == (2 + 36 + 36) / 3


# at a site


class At:
    """A site as its host shows it."""

    def __init__(self, site):
        self.name, self.plan, self.site, self.samples = site.name, site.plan, site, len(site.samples)

    def open(self):
        return self.site

    def asked(self, task, shared, round):
        return answer(task, Message(shared, {"round": round, "phase": 0}), self)


@pytest.fixture
def host(open_site, toy):
    return At(open_site(method="fedavg", network=toy, rounds=4))


def first(host):
    return {name: value.clone() for name, value in host.site._first_shared.items()}


def reached(host):
    """How far a parameter near 0 may move in a round."""
    return MOVEMENT * host.site.plan.training.lr * steps_at(host.site.plan, host.name, {host.name: host.samples})


def lens(shared):
    """The principle of a trap: one parameter far from where training leads."""
    return moved(shared, "q.weight", 300 * 1e-3)


def test_a_site_computes_the_first_tensors_itself(host):
    with pytest.raises(SharedError, match="of step 0, 0 after the first ones: q.weight moved by 0.3, "):
        host.asked(TRAIN, lens(first(host)), 0)
    assert host.site.store.latest() == 0, "nothing was trained"
    host.asked(TRAIN, first(host), 0)


@pytest.mark.parametrize(("task", "round"), [(TRAIN, 1), (SCORE, 1), (ADOPT, 1)])
def test_a_site_refuses_what_training_cannot_reach(host, task, round):
    sent = host.asked(TRAIN, first(host), 0).tensors
    with pytest.raises(SharedError, match="1 after those that it knows: q.weight moved by"):
        host.asked(task, lens(first(host)), round)
    host.asked(task, sent, round)  # its own contribution is what a federation of one site gives


def test_small_steps_do_not_add_up_between_looks(host):
    """A repeated round is compared with the tensors before it, and not with its first attempt."""
    sent = host.asked(TRAIN, first(host), 0).tensors
    most = reached(host)
    near = moved(first(host), "q.bias", 0.9 * most)
    host.asked(TRAIN, near, 1)
    with pytest.raises(SharedError, match="q.bias moved by"):
        host.asked(TRAIN, moved(near, "q.bias", 0.9 * most), 1)
    host.asked(TRAIN, sent, 1)


def test_who_missed_rounds_allows_as_many_more(host):
    most = reached(host)
    host.asked(TRAIN, first(host), 0)
    far = moved(first(host), "q.bias", 2.9 * most)
    with pytest.raises(SharedError, match="2 after those that it knows"):
        host.asked(TRAIN, far, 2)
    host.asked(TRAIN, far, 3)


def test_who_comes_late_starts_from_the_first_tensors(host):
    most = reached(host)
    far = moved(first(host), "q.bias", 1.9 * most)
    with pytest.raises(SharedError, match="1 after the first ones"):
        host.asked(TRAIN, far, 1)
    host.asked(TRAIN, far, 2)


# equal gradients give a seventh of the bound; a look is due at every eighth step, or at the first that a site gets after it
@pytest.mark.parametrize(
    ("share", "asked", "told"),
    [
        (0.9, range(18), [8, 16]),
        (0.4, range(9), [8]),
        (0.9, [0, 1, 2, 3, 4, 5, 6, 7, 9, 10], [9]),  # who would walk may leave the site out of every eighth round
        (0.9, [0, 12, 13], [12]),
        (0.9, [12], [12]),
        (0.2, range(10), []),
    ],
)
def test_a_walk_within_the_bound_is_told_to_the_site_s_administrator(open_site, toy, share, asked, told):
    """A server need not jump to a trap: it may go there in steps that a site accepts. If it takes its time, it goes unseen."""
    host, found = At(open_site(method="fedavg", network=toy, rounds=18)), {}
    start, most = first(host), reached(host)
    for t in asked:
        host.site.warned = lambda why, t=t: found.setdefault(t, why)
        host.asked(TRAIN, moved(start, "q.bias", t * share * most), t)
    assert list(found) == told
    for t, why in found.items():
        far = f"q.bias moved by {t * share * most:.3g}, {share:.3g} times as far as the job allows by then"
        assert f"the shared tensors of step {t} are unusually far from the first ones: {far}" in why


def test_a_counter_of_batches_is_no_walk(reach, before):
    """FedDG counts two in a step, a quarter of the bound, in every round."""
    name = "norm.num_batches_tracked"
    assert reach.drifted(before, moved(before, name, 8 * STEPS * 8), 8, 1) is None
    assert reach.drifted(before, moved(before, "q.weight", 0.5 * LR * STEPS * MOVEMENT * 8), 8, 1) is not None, "the control"


@pytest.mark.parametrize("sites", [{"A": 33, "B": 33, "C": 3300}, {"A": 33, "B": 3300, "C": 3300}])
def test_a_site_with_a_hundred_times_the_images_is_honest(plan_for, toy, before, sites):
    """C makes 550 steps of 6 images, of which 18 · 33 / 6 = 99 count at least: 7.3 lr of each is 1.3 lr of each one made."""
    plan = plan_for(method="fedavg", network=toy, lr=LR, batch=6, local_epochs=1, min_sites=1)
    after = moved(moved(before, "q.bias", 550 * 1.2 * LR), "norm.num_batches_tracked", 550)
    for steps in (steps_at(plan, "C", sites), steps_of(plan, sites, own=33)):
        assert Reach(Expected(plan), steps).beyond(before, after) is None


def test_honest_rounds_are_no_walk(open_site, toy):
    """What the site sends is what it gets in the next round, as in a federation of one site."""
    host, found = At(open_site(method="fedavg", network=toy, rounds=9)), []
    host.site.warned, shared = found.append, first(host)
    for t in range(9):
        shared = host.asked(TRAIN, shared, t).tensors
    assert found == []


def test_the_administrator_is_told_once_and_the_server_nothing(hospital, plan_for, toy):
    plan = plan_for(method="fedavg", network=toy, rounds=9, start="last")
    site, sent = hospital(plan=plan, min_images=5), []
    most = MOVEMENT * plan.training.lr * steps_at(plan, "site-1", {"site-1": 8})
    for t in range(9):
        answer = site.answer(TRAIN, moved(site.shared, "q.bias", t * most), round=t, phase=0)
        sent.append(messages.unpack(answer)[1].keys())
    (event,) = [event for event in site.events() if event["event"] == DRIFTED]
    assert event["message"].startswith("the shared tensors of step 8 are unusually far from the first ones: q.bias moved by")
    (line,) = [line for line in site.audited() if "unusually far" in line]
    assert f"[warning: {event['message']}]" in line
    assert sent[3] == sent[8]


def test_a_plan_may_allow_more(open_site, toy):
    host = At(open_site(method="fedavg", network=toy, rounds=4, movement=1000))
    host.asked(TRAIN, first(host), 0)
    host.asked(TRAIN, lens(first(host)), 1)


def test_two_members_of_three_cannot_make_a_site_take_a_trap(host):
    sent, stated = host.asked(TRAIN, first(host), 0).tensors, {host.name: host.samples, "B": 2**53, "C": 2**53}
    assert steps_of(host.plan, stated) > 2**50, "the control: by the table alone the trap is near"
    with pytest.raises(SharedError, match="1 after those that it knows: q.weight moved by"):
        answer(TRAIN, Message(lens(sent), {"round": 1, "phase": 0, "samples": stated}), host)


@pytest.mark.parametrize("samples", [{}, [], 7, {"A": 0}, {"A": 1.5}, {"A": True}, {"A": 2**54}])
def test_numbers_of_images_have_a_form(host, samples):
    with pytest.raises(PolicyError, match="samples|numbers of images"):
        answer(TRAIN, Message(first(host), {"round": 0, "phase": 0, "samples": samples}), host)


def test_names_and_shapes_come_first(host):
    host.asked(TRAIN, first(host), 0)
    for wrong in ({}, first(host) | {"x": torch.zeros(1)}, first(host) | {"q.weight": torch.zeros(1)}):
        with pytest.raises(FedDPError, match="shared part|q.weight is"):
            host.asked(SCORE, wrong, 1)


# at the server


def test_one_member_cannot_choose_the_mean(plan_for, toy, tmp_path):
    """Of three, A answers 3C − 2γ, where the others answer γ: without the bound the mean would be C."""
    plan = plan_for(method="fedavg", network=toy, sites=tuple(SITES), rounds=1, min_sites=2, start="last")

    def said(site, task, tensors, scalars):
        if task == READY:
            return messages.pack(versions=as_numbers(installed()), scoring=True, samples=10)
        answer = good(site, task, tensors, scalars)
        if (site, task) != ("A", TRAIN):
            return answer
        given, metrics = messages.unpack(answer)
        steered = {name: value + 3 * 0.3 if value.is_floating_point() else value for name, value in given.items()}
        return messages.pack(steered, **metrics)

    done = Run(tmp_path, plan, SITES, said).run("ready", "train")
    (refused,) = done.progress("refused")
    assert refused["site"] == "A"
    assert "its contribution is not of this round's training" in refused["reason"]
    assert done.panics == []
    state, start = done.memory.latest(), build_network(plan).state_dict()
    assert all(torch.equal(state[name], start[name]) for name in state)


def test_who_trained_on_other_images_than_it_stated_is_left_out(plan_for, toy, tmp_path):
    """Its number of images weighs its contribution (FedNova, `aggregation=samples`), and says how far it may move."""
    plan = plan_for(method="fednova", network=toy, sites=tuple(SITES), rounds=1, min_sites=2, start="last")

    def said(site, task, tensors, scalars):
        if task == READY:
            return messages.pack(versions=as_numbers(installed()), scoring=True, samples=1 if site == "A" else 10)
        return good(site, task, tensors, scalars)

    done = Run(tmp_path, plan, SITES, said).run("ready", "train")
    (refused,) = done.progress("refused")
    assert refused["reason"].startswith("site A: it trains on 10 images, and stated 1 when the job began")
    assert done.panics == []
