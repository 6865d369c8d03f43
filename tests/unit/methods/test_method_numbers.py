"""The methods' rounds, against numbers worked out by hand: a step is θ − lr · gradient, the loss is linear in the logits."""

import math

import pytest
import torch
from torch import nn, tensor

from feddp.methods.aggregation import average
from feddp.networks import NETWORKS
from feddp.partition import ENCODER, HEAD
from feddp.plan.resolve import build_method, build_network
from feddp.stages.calibrate import calibrate, personal
from feddp.stages.evaluate import evaluate
from feddp.stages.site import Site
from feddp.stages.train import adopt, score, train
from feddp.stages.tune import tune
from feddp.training.calibration import mean_scores
from feddp.training.losses import LOSSES, bernoulli_kl

EVEN = {"site-1": 1.0, "site-2": 1.0}
PFEDME = {"pfedme_lambda": 2, "pfedme_eta": 0.25, "inner_steps": 2}


class One(nn.Module):
    """A single parameter, which is the logit everywhere; in training mode so is what is added, so that modes differ."""

    added = 0.0

    def __init__(self, channels: int, classes: int, pretrained: bool = False):
        super().__init__()
        self.w = nn.Parameter(tensor(1.0))

    def forward(self, x):
        return (self.w + self.added * self.training).expand(len(x), 1, *x.shape[2:])


class Product(nn.Module):
    """The logit is h · b everywhere. h = 2 is the head; b = 3 is the encoder, and a normalisation's for FedBN."""

    roles = {ENCODER: ("body",), HEAD: ("head",)}

    def __init__(self, channels: int, classes: int, pretrained: bool = False):
        super().__init__()
        self.body, self.head = nn.LayerNorm(1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.body.weight, 3.0)
        nn.init.constant_(self.head.weight, 2.0)

    def forward(self, x):
        return (self.head.weight * self.body.weight).view(1, 1, 1, 1).expand(len(x), 1, *x.shape[2:])


@pytest.fixture
def by_hand(open_site, monkeypatch):
    """Opens a site whose 8 samples are two batches of 4, at lr 0.1, with the loss 1 · logit, or another slope times it."""
    monkeypatch.setitem(NETWORKS, "one", One)
    monkeypatch.setitem(NETWORKS, "product", Product)
    monkeypatch.setattr("feddp.stages.site.adamw", lambda network, lr, _: torch.optim.SGD(network.parameters(), lr=lr))
    exact = {"lr": 0.1, "augment": False, "clip": 1e6, "rounds": 5}

    def open(method, name="site-1", slope=1.0, network="one", **changes) -> Site:
        monkeypatch.setitem(LOSSES, f"slope {slope}", lambda logits, mask: slope * logits.mean())
        return open_site(name, method=method, network=network, loss=f"slope {slope}", **(exact | changes))

    return open


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def numbers(tensors):
    return {name: pytest.approx(value.item(), abs=1e-6) for name, value in tensors.items()}


def first(site):
    """γ^0: the shared tensors of the common start."""
    return site.partition.split(build_network(site.plan).state_dict())[0]


def whole(site, slot="start"):
    return site.store.read(slot)[0]


# --- the rates of the stages --------------------------------------------------------------------------------------------


def test_each_stage_has_its_own_learning_rate(by_hand, monkeypatch):
    """L = w, two batches per epoch. A round at 0.1: 1 → 0.8. One epoch of tuning at 0.01: 0.78. One of calibration at 0.001:
    0.778. (Every epoch scores better than the one before, so each stage's network is kept.)"""
    scores = iter(range(100))
    monkeypatch.setattr("feddp.training.calibration.mean_scores", lambda *_: {"iou": float(next(scores)), "dice": 0.0})
    monkeypatch.setattr("feddp.training.calibration.adamw", lambda network, lr, _: torch.optim.SGD(network.parameters(), lr=lr))
    rates = {"tune_lr": 0.01, "tune_epochs": 1, "calibration_lr": 0.001, "calibration_epochs": 1}
    site = by_hand("fedavg", stages=("train", "tune", "calibrate"), **rates)
    sent, _ = train(site, {"w": tensor(1.0)}, 0)
    assert numbers(sent) == {"w": 0.8}
    adopt(site, sent, 1)
    tune(site)
    assert numbers(whole(site, "tuned")) == {"w": 0.78}
    calibrate(site, {})
    assert numbers(whole(site, "calibrated")) == {"w": 0.778}


# --- Ditto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(("weight", "one", "two"), [(1, 0.81, 0.5611), (2, 0.82, 0.5248), (0, 0.8, 0.6)])
def test_ditto_pulls_its_personal_model_to_what_was_received(by_hand, weight, one, two, fresh):
    """L = w, so w falls by 0.1 a step: 1, 0.9, 0.8 is sent. v starts there too, its gradient is 1 + λ (v − w^t), w^t = 1:

    λ = 1: 1, 0.9, then 1 + (0.9 − 1) = 0.9: v = 0.81. λ = 2: 1, 0.9, then 0.8: 0.82. λ = 0: 0.8, local training.
    (Pulled to the trained w_k = 0.8 the first gradient would be 1.2, not 1.)
    Round 2 receives 0.5 and sends 0.4, then 0.3. v goes on from where it was, w^t = 0.5:
    λ = 1: 0.81 − 0.131 = 0.679, − 0.1179 = 0.5611. λ = 2: 0.82 − 0.164 = 0.656, − 0.1312 = 0.5248. λ = 0: 0.7, 0.6.
    """
    site = by_hand("ditto", ditto_lambda=weight)
    for round, (received, sent, v) in enumerate([(1.0, 0.8, one), (0.5, 0.3, two)]):
        site = by_hand("ditto", ditto_lambda=weight) if fresh else site
        found, _ = train(site, {"w": tensor(received)}, round)
        assert numbers(found) == {"w": sent}
        assert numbers(site.store.load_state(round + 1).personal) == {"w": v}
    adopt(site, {"w": tensor(7.0)}, 2)
    assert numbers(whole(site)) == {"w": two}


@pytest.mark.parametrize("fresh", [True, False])
def test_ditto_s_two_models_keep_their_optimisers_over_the_rounds(by_hand, monkeypatch, fresh):
    """SGD with momentum 1/2, lr 0.1, λ = 0, slope 1: the velocity is 1, 1.5 in round 1; 1.75, 1.875 in round 2.

    w and v both go from 1 to 1 − 0.1 − 0.15 = 0.75. Round 2 receives 1 again: w = 1 − 0.175 − 0.1875 = 0.6375; v goes on from
    0.75: 0.3875. With a new optimiser v would be 0.5; with w's, which comes first, v would be 0.6375 after round 1.
    """

    def momentum(network, lr, _):
        return torch.optim.SGD(network.parameters(), lr=lr, momentum=0.5)

    site = by_hand("ditto", ditto_lambda=0)
    for round, (sent, v) in enumerate([(0.75, 0.75), (0.6375, 0.3875)]):
        site = by_hand("ditto", ditto_lambda=0) if fresh else site
        monkeypatch.setattr("feddp.stages.site.adamw", momentum)
        assert numbers(train(site, {"w": tensor(1.0)}, round)[0]) == {"w": sent}
        assert numbers(site.store.load_state(round + 1).personal) == {"w": v}


def test_ditto_sends_what_fedavg_sends(open_site, toy):
    """To the bit, over two rounds, with AdamW, dropout and batch normalisation: the personal model leaves no trace in w."""
    ditto, fedavg = (open_site(at=method, method=method, network=toy) for method in ("ditto", "fedavg"))
    gamma = first(ditto)
    for round in range(2):
        sent, metrics = train(ditto, gamma, round)
        wanted, plain = train(fedavg, gamma, round)
        assert same(sent, wanted)
        assert metrics["loss"] == plain["loss"]
        assert same(ditto.store.load_state(round + 1).optimizer, fedavg.store.load_state(round + 1).optimizer)
        gamma = {name: value + 1 if value.is_floating_point() else value for name, value in sent.items()}


@pytest.mark.parametrize(("method", "settings"), [("ditto", {}), ("pfedme", PFEDME)])
def test_the_personal_model_is_what_is_scored(by_hand, method, settings):
    """A positive w calls every pixel lesion: of A lesion pixels among 1024, Dice is 2A/(A + 1024). A negative w: 0.

    The personal model of the first round is above 0 (Ditto: 0.81; pFedMe: 0.6724); −5 is received in the second.
    """
    site = by_hand(method, **settings)
    train(site, {"w": tensor(1.0)}, 0)
    areas = [sample["mask"].sum().item() for sample in site.validation]
    wanted = pytest.approx(sum(2 * area / (area + 1024) for area in areas) / 2)
    assert min(areas) > 0
    assert score(site, {"w": tensor(-5.0)}, 1)["dice"] == wanted
    assert train(site, {"w": tensor(-5.0)}, 1)[1]["dice"] == wanted


def seen_peers(monkeypatch):
    """What IGC takes as the peers' whole networks, one entry a calibration."""
    from feddp.stages import calibrate as module

    seen, real = [], module.with_inconsistency
    monkeypatch.setattr(module, "with_inconsistency", lambda net, peers, *rest: seen.append(peers) or real(net, peers, *rest))
    return seen


def test_igc_after_ditto_compares_the_whole_personal_models(open_site, toy, monkeypatch):
    """No tensor is private, yet each site deploys its own network: all of it is given, and is what peers rebuild."""
    sites = [open_site(name, method="ditto", network=toy, stages=("train", "calibrate")) for name in EVEN]
    gamma = first(sites[0])
    gamma = average({site.name: train(site, gamma, 0)[0] for site in sites}, EVEN)
    for site in sites:
        adopt(site, gamma, 1)
        assert same(whole(site), site.store.load_state(1).personal)
        assert same(personal(site), whole(site))
        assert not any(value.equal(gamma[name]) for name, value in personal(site).items() if value.is_floating_point())
    seen = seen_peers(monkeypatch)
    calibrate(sites[0], {"site-2": personal(sites[1])})
    assert [list(peers) for peers in seen] == [["site-2"]]
    assert same(seen[0]["site-2"], whole(sites[1]))
    network = build_network(sites[0].plan)
    network.load_state_dict(whole(sites[1]))
    found = evaluate(sites[0])["peers"]["site-2"]
    wanted = mean_scores(network, sites[0].test)
    assert {metric: found[metric]["mean"] for metric in wanted} == pytest.approx(wanted)


# --- pFedMe -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False])
def test_pfedme_moves_w_towards_theta(by_hand, fresh):
    """λ = 2, η = 1/4 (ηλ = 1/2), K = 2, L = θ: the gradient is 1 + 2 (θ − w), a step a tenth of it. w = θ = 1 at first.

    Batch 1: θ = 0.9; gradient 0.8, θ = 0.82; w = 1 − (1 − 0.82)/2 = 0.91.
    Batch 2: gradient 1 + 2 (0.82 − 0.91) = 0.82, θ = 0.738; 0.656, θ = 0.6724; w = 0.91 − (0.91 − 0.6724)/2 = 0.7912.
    Without λ in the inner steps θ would be 0.8 after the first batch.
    The losses θ + (θ − w)²: 1, 0.9 + 0.01, 0.82 + 0.0081, 0.738 + 0.029584: mean 0.876421.
    Round 2 receives 0: θ starts there, not at 0.6724. The same numbers less 1: w = −0.2088, θ = −0.3276.
    """
    site = by_hand("pfedme", **PFEDME)
    sent, metrics = train(site, {"w": tensor(1.0)}, 0)
    assert numbers(sent) == {"w": 0.7912}
    assert metrics["loss"] == pytest.approx(0.876421, abs=1e-6)
    assert numbers(site.store.load_state(1).personal) == {"w": 0.6724}
    site = by_hand("pfedme", **PFEDME) if fresh else site
    sent, _ = train(site, {"w": tensor(0.0)}, 1)
    assert numbers(sent) == {"w": -0.2088}
    assert numbers(site.store.load_state(2).personal) == {"w": -0.3276}
    adopt(site, {"w": tensor(7.0)}, 2)
    assert numbers(whole(site)) == {"w": -0.3276}


class Counting(One):
    """Two buffers that every pass in training mode moves, as batch normalisation's do."""

    def __init__(self, *shape, **options):
        super().__init__(*shape, **options)
        self.register_buffer("mean", tensor(0.0))
        self.register_buffer("count", tensor(0))

    def forward(self, x):
        self.mean += self.training
        self.count += self.training
        return super().forward(x)


def test_pfedme_s_buffers_follow_as_its_weights_do(by_hand, monkeypatch):
    """K = 2 passes on each of two batches: θ's mean is 2, then 4. With ηλ = 1/2 w's is 0 + 2/2 = 1, then 1 + 3/2 = 2.5.

    A counter has no halves: it is θ's, 4.
    """
    monkeypatch.setitem(NETWORKS, "counting", Counting)
    site = by_hand("pfedme", network="counting", **PFEDME)
    sent, _ = train(site, first(site), 0)
    assert numbers(sent) == {"w": 0.7912, "mean": 2.5, "count": 4}
    assert numbers(site.store.load_state(1).personal) == {"w": 0.6724, "mean": 4, "count": 4}


@pytest.mark.parametrize("inner", [1, 5])
def test_pfedme_takes_k_steps_on_every_batch(open_site, toy, inner):
    """8 samples in batches of 4, two rounds: AdamW counts 2 · 2 · K."""
    site = open_site(method="pfedme", network=toy, inner_steps=inner)
    gamma = first(site)
    for round in range(2):
        gamma, _ = train(site, gamma, round)
    steps = {value.item() for name, value in site.store.load_state(2).optimizer.items() if name.endswith("/step")}
    assert steps == {4 * inner}


@pytest.mark.parametrize(("beta", "wanted"), [(1.0, 0.8), (0.5, 0.9), (0.25, 0.95)])
def test_pfedme_s_server_steps_towards_the_mean(plan_for, beta, wanted):
    """(1 − β) · 1 + β · 0.8 = 1 − 0.2 β. A counter has no halves: it is the mean's."""
    method = build_method(plan_for(method="pfedme", pfedme_beta=beta))
    previous, mean = {"w": tensor(1.0), "n": tensor(4)}, {"w": tensor(0.8), "n": tensor(6)}
    assert numbers(method.aggregate(previous, mean)) == {"w": wanted, "n": 6}
    assert previous["w"] == 1


# --- FedGKD -----------------------------------------------------------------------------------------------------------

Q = -math.log(3)  # the logit of 1/4


def test_bernoulli_kl_by_hand():
    """p ln(p/q) + (1−p) ln((1−p)/(1−q)) with q = 1/4, an image with two pixels:

    p = 1/2: (ln 2 + ln 2/3)/2 = ln(4/3)/2 = 0.143841. p = 3/4: (3/4) ln 3 − (1/4) ln 3 = (ln 3)/2. Their mean: (ln 2)/2.
    By the logits: (q − p)/2 = −1/8 and −1/4. The teacher has no gradient.
    """
    teacher, logits = tensor([[[[0.5, 0.75]]]], requires_grad=True), torch.full((1, 1, 1, 2), Q, requires_grad=True)
    found = bernoulli_kl(teacher, logits)
    found.backward()
    assert found.item() == pytest.approx(math.log(2) / 2, abs=1e-6)
    assert logits.grad.flatten().tolist() == pytest.approx([-1 / 8, -1 / 4], abs=1e-6)
    assert teacher.grad is None


@pytest.mark.parametrize(
    ("p", "logit", "wanted"),
    [
        (0.5, Q, 0.143841),
        (0.0, Q, 0.287682),  # −ln(3/4): so too for a teacher's logit 0 that was taken for a probability
        (1.0, Q, 1.386294),  # ln 4
        (0.25, Q, 0.0),
        (1.0, -1000.0, 1000.0),
        (1.0, 1000.0, 0.0),
        (0.0, -1000.0, 0.0),
    ],
)
def test_bernoulli_kl_is_finite_and_zero_where_equal(p, logit, wanted):
    assert bernoulli_kl(torch.full((2, 1, 3, 3), p), torch.full((2, 1, 3, 3), logit)).item() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.8, 1.6])
def test_fedgkd_s_round_by_hand(by_hand, gamma):
    """L_seg = ln 3 · w at lr 1; 0 is received, and is the teacher: p = 1/2.

    First batch: q = 1/2 too, no KL; w = −ln 3, so q = 1/4. Second: gradient ln 3 + (γ/2)(1/4 − 1/2) = ln 3 − γ/8;
    w = −2 ln 3 + γ/8. The losses are 0 and −(ln 3)² + (γ/2) · 0.143841. Taken from the teacher's logit 0 as if it were p,
    the first gradient would already be ln 3 + γ/4.
    """
    site = by_hand("fedgkd", slope=math.log(3), lr=1.0, gkd_gamma=gamma)
    sent, metrics = train(site, {"w": tensor(0.0)}, 0)
    assert numbers(sent) == {"w": pytest.approx(-2 * math.log(3) + gamma / 8, abs=1e-6)}
    assert metrics["loss"] == pytest.approx((gamma / 2 * 0.143841 - math.log(3) ** 2) / 2, abs=1e-6)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("models", "teachers", "kept"),
    [(1, [1, 3, 2], []), (2, [1, 2, 2.5], [2]), (3, [1, 2, 2], [2, 3]), (5, [1, 2, 2], [1, 2, 3])],
)
def test_fedgkd_s_teacher_is_the_mean_of_the_last_received(by_hand, monkeypatch, models, teachers, kept, fresh):
    """1, 3 and 2 are received. M = 2: 1; (1 + 3)/2; (3 + 2)/2. M = 3: 1; 2; (1 + 3 + 2)/3 = 2. M = 5 has no more than those.

    What must be remembered for the fourth round are the last M − 1. The student's logits have 9 added in training mode;
    the teacher's have not. A single mode of the three rounds would teach other numbers.
    """
    taught = []

    def spy(teacher, logits):
        assert not teacher.requires_grad
        taught.append(torch.logit(teacher.flatten()[0]).item())
        return bernoulli_kl(teacher, logits)

    monkeypatch.setattr("feddp.training.losses.bernoulli_kl", spy)
    monkeypatch.setattr(One, "added", 9.0)
    site = by_hand("fedgkd", gkd_models=models)
    for round, received in enumerate([1.0, 3.0, 2.0]):
        site = by_hand("fedgkd", gkd_models=models) if fresh else site
        train(site, {"w": tensor(received)}, round)
    assert taught == pytest.approx([teacher for teacher in teachers for _ in range(2)], abs=1e-5)  # two batches a round
    assert sorted(value.item() for value in site.store.load_state(3).memory.values()) == kept


# --- private heads and private bodies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "mine", "one", "two"),
    [
        ("fedper", "head", [(1.7, 2.8), (1.43, 2.53)], [(1.4, 2.6), (0.86, 2.42)]),
        ("lg_fedavg", "body", [(1.7, 2.8), (1.27, 2.645)], [(1.4, 2.6), (1.03, 2.29)]),
        ("fedbn", "body", [(1.7, 2.8), (1.27, 2.645)], [(1.4, 2.6), (1.03, 2.29)]),
        ("fedrep", "head", [(1.7, 2.83), (1.4225, 2.63275)], [(1.4, 2.72), (0.845, 2.606)]),
        ("fedbabu", "head", [(2.0, 2.8), (2.0, 2.5)], [(2.0, 2.6), (2.0, 2.3)]),
        ("centralized", "both", [(1.7, 2.8), (1.42, 2.63)], [(1.4, 2.6), (0.88, 2.32)]),
        ("local", "both", [(1.7, 2.8), (1.42, 2.63)], [(1.4, 2.6), (0.88, 2.32)]),
    ],
)
def test_what_two_rounds_send_and_keep(by_hand, method, mine, one, two):
    """One batch; L = s h b with s = 1 at site-1 and 2 at site-2, from (h, b) = (2, 3); a step is (h − 0.1 s b, b − 0.1 s h).

    Both at once: (1.7, 2.8) and (1.4, 2.6). FedPer averages b to 2.7: from (1.7, 2.7), (1.43, 2.53); from (1.4, 2.7),
    (1.4 − 0.54, 2.7 − 0.28). LG-FedAvg and FedBN average h to 1.55: from (1.55, 2.8), (1.27, 2.645); from (1.55, 2.6),
    (1.03, 2.29). Alone: from (1.7, 2.8), (1.42, 2.63); from (1.4, 2.6), (0.88, 2.32).
    FedRep's body has its gradient at the new head: b = 3 − 0.17 and 3 − 0.28, mean 2.775; then h = 1.7 − 0.2775 = 1.4225
    and 1.4 − 0.555 = 0.845, b = 2.775 − 0.14225 = 2.63275 and 2.775 − 0.169 = 2.606.
    FedBABU's head stays at 2: b falls by 0.2 s: mean 2.7, then 2.5 and 2.3.
    """
    sites = [by_hand(method, name, slope, "product", batch=8) for name, slope in (("site-1", 1.0), ("site-2", 2.0))]
    gamma = first(sites[0])
    private = {"head": {"head.weight"}, "body": {"body.weight"}, "both": {"head.weight", "body.weight"}}[mine]
    for round in range(2):
        sent = {site.name: train(site, gamma, round)[0] for site in sites}
        for site, wanted in zip(sites, (one, two), strict=True):
            kept = site.store.load_state(round + 1).private
            assert kept.keys() == private
            assert numbers(kept | sent[site.name]) == {"head.weight": wanted[round][0], "body.weight": wanted[round][1]}
        gamma = average(sent, EVEN)
    for site in sites:
        kept = site.store.load_state(2).private
        adopt(site, gamma, 2)
        assert same(whole(site), gamma | kept)


@pytest.mark.parametrize(
    ("head_epochs", "local_epochs", "wanted"), [(1, 1, (1.7, 2.83)), (3, 1, (1.1, 2.89)), (1, 2, (1.7, 2.66))]
)
def test_fedrep_s_phases_have_epochs_of_their_own(by_hand, head_epochs, local_epochs, wanted):
    """From (2, 3): every epoch of the head takes 0.1 · 3 off h; then every epoch of the body 0.1 h off b.

    (1, 1): 1.7 and 3 − 0.17. (3, 1): 2 − 0.9 = 1.1 and 3 − 0.11. (1, 2): 1.7 and 3 − 0.34.
    """
    site = by_hand("fedrep", network="product", batch=8, head_epochs=head_epochs, local_epochs=local_epochs)
    sent, _ = train(site, first(site), 0)
    found = site.store.load_state(1).private | sent
    assert numbers(found) == {"head.weight": wanted[0], "body.weight": wanted[1]}


# --- IOP-FL, inside -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(("tau", "wanted"), [(0.9, (0.8, 0.35, 1.655)), (1, (0.8, 0.3, 1.8)), (0.5, (0.8, 0.55, 1.175))])
def test_iop_fl_accumulates_the_trained_models(by_hand, tau, wanted, fresh):
    """L = w, two steps of 0.1 a round: 1, 0.5 and 2 are received, w_k = 0.8, 0.3 and 1.8 trained and sent.

    P starts at the first of them, 0.8. τ = 0.9: 0.9 · 0.3 + 0.1 · 0.8 = 0.35, 0.9 · 1.8 + 0.1 · 0.35 = 1.655. τ = 1: the last
    alone. τ = 1/2: 0.55, 1.175. The federation is FedAvg's: what is sent is w_k, and P has no part in it.
    """
    site = by_hand("iop_fl", tau=tau)
    for round, (received, sent) in enumerate([(1.0, 0.8), (0.5, 0.3), (2.0, 1.8)]):
        site = by_hand("iop_fl", tau=tau) if fresh else site
        found, _ = train(site, {"w": tensor(received)}, round)
        assert numbers(found) == {"w": sent}
        assert numbers(site.store.load_state(round + 1).personal) == {"w": wanted[round]}
    adopt(site, {"w": tensor(7.0)}, 3)
    assert numbers(whole(site)) == {"w": wanted[2]}
