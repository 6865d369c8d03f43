"""The methods' rounds, against numbers worked out by hand: a step is θ − lr · gradient, the loss is linear, or a square."""

import math

import pytest
import torch
from torch import nn, tensor

from feddp.errors import InputError
from feddp.methods import OWN
from feddp.methods.aggregation import average, combine
from feddp.methods.fednova import local_steps
from feddp.networks import LAYERS, NETWORKS
from feddp.networks.lora import AdaptedLinear
from feddp.partition import DECODER, ENCODER, HEAD, QUERY, SPATIAL_ADAPTER
from feddp.plan.resolve import build_method, build_network
from feddp.stages import spectra
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
    """The logit is h · b everywhere. h = 2 is the head, and all that is FedOAP's own; b = 3 the encoder and normalisation."""

    roles = {ENCODER: ("body",), HEAD: ("head",), QUERY: ("head",), SPATIAL_ADAPTER: ("head",)}

    def __init__(self, channels: int, classes: int, pretrained: bool = False):
        super().__init__()
        self.body, self.head = nn.LayerNorm(1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.body.weight, 3.0)
        nn.init.constant_(self.head.weight, 2.0)

    def forward(self, x):
        return (self.head.weight * self.body.weight).view(1, 1, 1, 1).expand(len(x), 1, *x.shape[2:])


@pytest.fixture
def by_hand(open_site, monkeypatch):
    """Opens a site whose 8 samples are two batches of 4, at lr 0.1, with the loss 1 · logit, another slope, or logit²."""
    monkeypatch.setitem(NETWORKS, "one", One)
    monkeypatch.setitem(NETWORKS, "product", Product)
    monkeypatch.setitem(LAYERS, "spatial_adapter", lambda network, classes: network)
    monkeypatch.setattr("feddp.stages.site.adamw", lambda network, lr, _: torch.optim.SGD(network.parameters(), lr=lr))
    exact = {"lr": 0.1, "augment": False, "clip": 1e6, "rounds": 5}

    def open(method, name="site-1", slope=1.0, network="one", power=1, **changes) -> Site:
        name_of_loss = f"slope {slope}"
        monkeypatch.setitem(LOSSES, name_of_loss, lambda logits, mask: slope * (logits**power).mean())
        monkeypatch.setattr("feddp.training.settings.LOSS_NAMES", (name_of_loss,))
        return open_site(name, method=method, network=network, loss=name_of_loss, **(exact | changes))

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


TWO_MODELS = ("apfl", "ditto")  # the shared one and the personal one are trained as long
NORMED = {"fedbn": "resnet", "silobn": "resnet"}
HEADS_FIRST = ("fc_pflfe", "fedrep", "pflfe")  # epochs of another kind before, which have tests of their own


@pytest.mark.usefixtures("resnet")
@pytest.mark.parametrize("method", sorted(OWN.keys() - set(HEADS_FIRST)))
def test_a_round_has_as_many_epochs_as_the_plan_says(open_site, pvt, monkeypatch, method):
    """3 of each model that is trained, in the first round and in the second, where MOON has a previous model; FedDG with the
    spectra of a peer."""
    epochs = []
    monkeypatch.setattr("feddp.stages.round.fit_epoch", lambda *given: epochs.append(given) or 0.0)
    site = open_site(method=method, network=NORMED.get(method, pvt), local_epochs=3)
    if method == "feddg":
        spectra.keep(site, {"site-2": spectra.given(open_site("site-2", method="feddg", network=pvt), 2)})
    gamma = first(site)
    for round in range(2):
        epochs.clear()
        train(site, gamma, round)
        assert len(epochs) == (6 if method in TWO_MODELS else 3)


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
@pytest.mark.parametrize(
    ("method", "settings", "one", "two"), [("ditto", {"ditto_lambda": 0}, 0.75, 0.3875), ("apfl", {}, 0.8125, 0.665625)]
)
def test_two_models_keep_their_optimisers_over_the_rounds(by_hand, monkeypatch, method, settings, one, two, fresh):
    """SGD with momentum 1/2, lr 0.1, slope 1: w's velocity is 1, 1.5 in round 1; 1.75, 1.875 in round 2. 1 is received in both.

    w: 1 − 0.1 − 0.15 = 0.75; 1 − 0.175 − 0.1875 = 0.6375. Ditto, λ = 0: v has the same velocities: 0.75, and goes on to 0.3875.
    With a new optimiser v would be 0.5; with w's, which comes first, v would be 0.6375 after round 1.
    APFL, α = 1/2: v's gradient is 1/2, its velocity 0.5, 0.75; 0.875, 0.9375. v: 1 − 0.05 − 0.075 = 0.875, then
    0.875 − 0.0875 − 0.09375 = 0.69375. m = (v + w)/2: 0.8125, then 0.665625. With a new optimiser v would be 0.75 in round 2,
    m = 0.69375; with w's (1.25, 1.125) 0.7625 in round 1, m = 0.75625.
    """

    def momentum(network, lr, _):
        return torch.optim.SGD(network.parameters(), lr=lr, momentum=0.5)

    site = by_hand(method, **settings)
    for round, (sent, mix) in enumerate([(0.75, one), (0.6375, two)]):
        site = by_hand(method, **settings) if fresh else site
        monkeypatch.setattr("feddp.stages.site.adamw", momentum)
        assert numbers(train(site, {"w": tensor(1.0)}, round)[0]) == {"w": sent}
        assert numbers(site.store.load_state(round + 1).personal) == {"w": mix}


@pytest.mark.parametrize("method", ["apfl", "ditto"])
def test_the_personal_model_leaves_no_trace_in_what_is_sent(open_site, toy, method):
    """FedAvg's tensors to the bit, over two rounds, with AdamW, dropout and batch normalisation."""
    personal, fedavg = (open_site(at=name, method=name, network=toy) for name in (method, "fedavg"))
    gamma = first(personal)
    for round in range(2):
        sent, metrics = train(personal, gamma, round)
        wanted, plain = train(fedavg, gamma, round)
        assert same(sent, wanted)
        assert metrics["loss"] == plain["loss"]
        assert same(personal.store.load_state(round + 1).optimizer, fedavg.store.load_state(round + 1).optimizer)
        gamma = {name: value + 1 if value.is_floating_point() else value for name, value in sent.items()}


@pytest.mark.parametrize(("method", "settings"), [("apfl", {}), ("ditto", {}), ("pfedme", PFEDME)])
def test_the_personal_model_is_what_is_scored(by_hand, method, settings):
    """A positive w calls every pixel lesion: of A lesion pixels among 1024, Dice is 2A/(A + 1024). A negative w: 0.

    The personal model of the first round is above 0 (APFL: 0.85; Ditto: 0.81; pFedMe: 0.6724); −5 is received in the second.
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


# --- FedProx ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mu", "one", "two", "loss"), [(1, 0.81, 0.31, 0.9525), (2, 0.82, 0.32, 0.955), (0, 0.8, 0.3, 0.95)])
def test_fedprox_pulls_what_it_sends_to_what_was_received(by_hand, mu, one, two, loss):
    """L = w + (μ/2)(w − w^t)², w^t = 1: the gradients are 1, then 1 − 0.1 μ: w = 0.9, then 0.9 − 0.1 + 0.01 μ = 0.8 + 0.01 μ.

    The losses are 1 and 0.9 + (μ/2) · 0.01; their mean is 0.95 + 0.0025 μ. The second round receives 0.5: the same less 0.5.
    """
    site = by_hand("fedprox", prox_mu=mu)
    for round, (received, sent) in enumerate([(1.0, one), (0.5, two)]):
        found, metrics = train(site, {"w": tensor(received)}, round)
        assert numbers(found) == {"w": sent}
        assert metrics["loss"] == pytest.approx(loss - (1 - received), abs=1e-6)
        assert site.store.load_state(round + 1).personal == {}


# --- FedNova ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "samples", "wanted"),
    [("uniform", (8, 16), 0.55), ("samples", (8, 16), 4 / 9), ("uniform", (8, 8), 0.5), ("samples", (16, 8), 4 / 9)],
)
def test_fednova_divides_each_change_by_its_steps(plan_for, aggregation, samples, wanted):
    """γ^t = 1; the sites send 0.8 and 0.2: changes of 0.2 and 0.8. Batches of 4.

    8 and 16 samples: τ = 2 and 4, changes per step 0.1 and 0.2. Uniform: their mean 0.15 times τ_eff = 3: 1 − 0.45 = 0.55.
    p = 1/3 and 2/3: (0.1 + 0.4)/3 = 1/6 times τ_eff = (2 + 8)/3: 1 − 5/9 = 4/9. Equal τ: FedAvg's mean, 0.5.
    16 and 8 samples: 0.05 and 0.4 a step; p = 2/3 and 1/3: (0.1 + 0.4)/3 = 1/6 times τ_eff = (8 + 2)/3: 4/9 again.
    """
    plan = plan_for(method="fednova", aggregation=aggregation)
    method, names = build_method(plan), tuple(EVEN)
    weights = method.weights(plan, dict(zip(names, samples, strict=True)))
    sent = {name: {"w": tensor(value)} for name, value in zip(names, (0.8, 0.2), strict=True)}
    mean = combine(aggregation, sent, weights)
    assert numbers(method.aggregate({"w": tensor(1.0)}, mean, weights)) == {"w": pytest.approx(wanted, abs=1e-6)}


@pytest.mark.parametrize("claimed", [1, 2**53])
def test_one_false_number_of_samples_does_not_make_fednova_s_step(plan_for, claimed):
    """Batches of 4; 400 samples are 100 steps, the median. What is claimed counts as 10 or 1000 steps; p = 1/3.

    10: τ_eff = 70, Σ p/τ = (0.01 + 0.01 + 0.1)/3 = 0.04, s = 2.8. 1000: τ_eff = 400, Σ p/τ = (0.01 + 0.01 + 0.001)/3 = 0.007,
    s = 2.8 too. Without the bound: 1 step gives s = 67 · 0.34 = 22.78, and 2^51 steps some 5·10^12.
    """
    plan = plan_for(method="fednova", sites=("a", "b", "c"))
    weights = build_method(plan).weights(plan, {"a": 400, "b": 400, "c": claimed})
    assert sum(weights.values()) == pytest.approx(2.8)


@pytest.mark.parametrize(("few", "many", "step"), [(4, 76, 100 / 19), (76, 4, 100 / 19), (4, 156, 840.5 / 156)])
def test_fednova_s_bound_begins_at_a_ratio_of_19_between_two_sites(plan_for, few, many, step):
    """Batches of 4. 1 and 19 steps, mean 10: 1 is a tenth of it, no bound. τ_eff = 10, Σ p/τ = (1 + 1/19)/2 = 10/19.

    1 and 39 steps, mean 20: 1 counts as 2. τ_eff = 20.5, Σ p/τ = (1/2 + 1/39)/2 = 41/156, s = 5.39. Unbounded: 400/39 = 10.3.
    """
    plan = plan_for(method="fednova")
    weights = build_method(plan).weights(plan, dict(zip(EVEN, (few, many), strict=True)))
    assert sum(weights.values()) == pytest.approx(step)


@pytest.mark.parametrize(("batch", "epochs", "steps"), [(4, 1, 2), (4, 3, 6), (3, 1, 3), (7, 2, 2), (8, 1, 1), (100, 1, 1)])
def test_the_server_counts_a_site_s_steps(open_site, toy, batch, epochs, steps):
    """8 samples: 4 + 4; 3 + 3 + 2; of 7 + 1 the single one is dropped; 8. As many as AdamW at the site has counted."""
    site = open_site(method="fednova", network=toy, batch=batch, local_epochs=epochs)
    train(site, first(site), 0)
    counted = {value.item() for name, value in site.store.load_state(1).optimizer.items() if name.endswith("/step")}
    assert counted == {steps}
    assert local_steps(site.plan.training, 8.0) == steps


# --- SiloBN -----------------------------------------------------------------------------------------------------------


class Normed(One):
    """The logit is the parameter; a batch normalisation, whose momentum is 1/2, sees the parameter as every pixel."""

    def __init__(self, *shape, **options):
        super().__init__(*shape, **options)
        self.norm = nn.BatchNorm2d(1, momentum=0.5)

    def forward(self, x):
        self.norm(self.w.detach().expand(len(x), 1, 1, 1))
        return super().forward(x)


def test_silobn_keeps_statistics_and_sends_weights(by_hand, monkeypatch):
    """L = s w, s = 1 and 2. The mean goes half of the way to the w of each batch, the variance of equal pixels halves.

    Site 1: w = 1, 0.9, then 0.8 is sent; mean 0.5, then 0.7; variance 1/2, 1/4. Site 2: w = 1, 0.8, then 0.6; 0.5, then 0.65.
    Both receive 0.7, with their own statistics. Site 1: w = 0.7, 0.6, then 0.5; mean 0.7, then 0.65. Site 2: w = 0.7, 0.5, then
    0.3; 0.675, then 0.5875. Variance 1/16. Averaged statistics would begin the round at 0.675.
    """
    monkeypatch.setitem(NETWORKS, "normed", Normed)
    sites = [by_hand("silobn", name, slope, "normed") for name, slope in (("site-1", 1.0), ("site-2", 2.0))]
    gamma = first(sites[0])
    for round, wanted in enumerate([((0.8, 0.7), (0.6, 0.65), 1 / 4), ((0.5, 0.65), (0.3, 0.5875), 1 / 16)]):
        sent = {site.name: train(site, gamma, round)[0] for site in sites}
        for site, (w, mean) in zip(sites, wanted[:2], strict=True):
            assert numbers(sent[site.name]) == {"w": w, "norm.weight": 1, "norm.bias": 0}
            kept = {"running_mean": mean, "running_var": wanted[2], "num_batches_tracked": 2 * round + 2}
            found = numbers(site.store.load_state(round + 1).private)
            assert found == {f"norm.{name}": value for name, value in kept.items()}
        gamma = average(sent, EVEN)
    adopt(sites[1], gamma, 2)
    assert numbers(whole(sites[1]))["norm.running_mean"] == 0.5875
    assert numbers(whole(sites[1]))["w"] == 0.4


# --- APFL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("settings", "one", "two"),
    [
        ({}, 0.85, 0.55),
        ({"apfl_alpha": 0}, 0.8, 0.3),
        ({"apfl_alpha": 1}, 0.8, 0.6),
        ({"apfl_adaptive": True}, 0.84743, 0.479871),
        ({"apfl_adaptive": True, "apfl_alpha": 0}, 0.8, 0.3),
    ],
)
def test_apfl_trains_a_local_model_in_the_mix(by_hand, settings, one, two, fresh):
    """L = m = α v + (1 − α) w_k; v's gradient is α, α's is v − w_k. w falls by 0.1 a step: 1 is received, 0.8 is sent.

    α = 1/2: v = 1, 0.95, 0.9: m = 0.85. Round 2 receives 0.5 and sends 0.3; v goes on to 0.8: m = 0.55. α = 0: m = w_k.
    α = 1: v is trained alone: 0.8, then 0.6. Adaptive, with the step lr = 0.1: gradients 0.5 and 0.2: v = 0.95, α = 0.48;
    then 0.48 and 0.15: v = 0.902, α = 0.465: m = 0.8 + 0.465 · 0.102 = 0.84743. Round 2, w_k = 0.3: 0.465 and 0.602:
    v = 0.8555, α = 0.4048; 0.4048 and 0.5555: v = 0.81502, α = 0.34925: m = 0.3 + 0.34925 · 0.51502 = 0.479871. From α = 0
    it would fall below 0.
    """
    site = by_hand("apfl", **settings)
    for round, (received, sent, mix) in enumerate([(1.0, 0.8, one), (0.5, 0.3, two)]):
        site = by_hand("apfl", **settings) if fresh else site
        found, _ = train(site, {"w": tensor(received)}, round)
        assert numbers(found) == {"w": sent}
        assert numbers(site.store.load_state(round + 1).personal) == {"w": mix}
    adopt(site, {"w": tensor(7.0)}, 2)
    assert numbers(whole(site)) == {"w": two}


def test_apfl_s_weight_does_not_exceed_1(by_hand):
    """After the round that begins with 1, v = 0.902 and α = 0.465. 7 is received, w_k = 6.8.

    Gradients 0.465 and 0.902 − 6.8 = −5.898: v = 0.8555, α = 0.465 + 0.5898, clipped to 1. Then v falls by 0.1: m = v = 0.7555.
    """
    site = by_hand("apfl", apfl_adaptive=True)
    train(site, {"w": tensor(1.0)}, 0)
    train(site, {"w": tensor(7.0)}, 1)
    state = site.store.load_state(2)
    assert state.memory["alpha"] == 1
    assert numbers(state.personal) == {"w": 0.7555}


def test_apfl_s_mix_normalises_by_its_own_statistics(by_hand, monkeypatch):
    """w's passes at 1 and 0.9 leave the mean 0.7, as under SiloBN. The mix begins with the received 0 too, with w_k = 0.8.

    m = 0.8 + (1 − 0.8)/2 = 0.9, then 0.8 + (0.95 − 0.8)/2 = 0.875: mean 0.45, then 0.6625. What is sent is w's 0.7.
    """
    monkeypatch.setitem(NETWORKS, "normed", Normed)
    site = by_hand("apfl", network="normed")
    sent, _ = train(site, first(site), 0)
    assert numbers(sent)["norm.running_mean"] == 0.7
    assert numbers(site.store.load_state(1).personal)["norm.running_mean"] == 0.6625


# --- statistics of personal models ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "w", "mean", "variance", "count"), [("ditto", 0.5611, 0.717, 1 / 16, 4), ("iop_fl", 0.35, 0.4075, 0.925, 12)]
)
def test_a_personal_model_s_statistics(by_hand, monkeypatch, method, w, mean, variance, count):
    """Round 1 receives w = 1, mean 0, variance 1: passes at 1 and 0.9, mean 0.5, 0.7, variance 1/2, 1/4; so too for Ditto's v.

    Round 2 receives w = 0.5, mean 0.2, variance 4, 10 batches: passes at 0.5 and 0.4, mean 0.35, 0.375, variance 2, 1, sent.
    Ditto, λ = 1: v goes on from 0.81, with passes there and at 0.679, to 0.5611; its mean from 0.7: 0.755, 0.717; its variance
    from 1/4; its counter from 2. (With w's statistics: 0.375. From those received: 0.505, 0.592.)
    IOP-FL, τ = 0.9: P = 0.9 · 0.3 + 0.1 · 0.8 = 0.35, mean 0.9 · 0.375 + 0.1 · 0.7 = 0.4075, variance 0.9 · 1 + 0.1/4 = 0.925;
    the counter is the last round's, 10 + 2.
    """
    monkeypatch.setitem(NETWORKS, "normed", Normed)
    site = by_hand(method, network="normed")
    gamma = first(site)
    train(site, gamma, 0)
    statistics = {"running_mean": tensor([0.2]), "running_var": tensor([4.0]), "num_batches_tracked": tensor(10)}
    returned = gamma | {"w": tensor(0.5)} | {f"norm.{name}": value for name, value in statistics.items()}
    sent = numbers(train(site, returned, 1)[0])
    assert (sent["norm.running_mean"], sent["norm.running_var"], sent["norm.num_batches_tracked"]) == (0.375, 1, 12)
    kept = {"w": w, "norm.running_mean": mean, "norm.running_var": variance, "norm.num_batches_tracked": count}
    assert numbers(site.store.load_state(2).personal) == kept | {"norm.weight": 1, "norm.bias": 0}


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


def test_pfedme_s_w_may_reach_theta_and_not_pass_it(by_hand):
    """λ = 2, η = 1/2, K = 1: w is θ after each batch. θ = 0.9; then the gradient is 1 + 2 (0.9 − 0.9), and both are 0.8."""
    site = by_hand("pfedme", pfedme_lambda=2, pfedme_eta=0.5, inner_steps=1)
    assert numbers(train(site, {"w": tensor(1.0)}, 0)[0]) == {"w": 0.8}
    with pytest.raises(InputError, match=r"pfedme_eta=0.51 times pfedme_lambda=2(\.0)? is above 1, so that w would"):
        by_hand("pfedme", pfedme_lambda=2, pfedme_eta=0.51)


@pytest.mark.parametrize(("beta", "wanted"), [(1.0, 0.8), (0.5, 0.9), (0.25, 0.95), (2.0, 0.6)])
def test_pfedme_s_server_steps_towards_the_mean(plan_for, beta, wanted):
    """(1 − β) · 1 + β · 0.8 = 1 − 0.2 β."""
    method = build_method(plan_for(method="pfedme", pfedme_beta=beta))
    previous = {"w": tensor(1.0)}
    assert numbers(method.aggregate(previous, {"w": tensor(0.8)}, EVEN)) == {"w": wanted}
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


def test_fedgkd_forgets_the_oldest_of_more_than_ten_models(by_hand):
    """1 to 13 are received, M = 12: the teacher of round 14 needs the last 11 besides what it receives, 3 to 13."""
    site = by_hand("fedgkd", gkd_models=12, batch=8, rounds=13)
    for round in range(13):
        train(site, {"w": tensor(round + 1.0)}, round)
    assert sorted(value.item() for value in site.store.load_state(13).memory.values()) == [*range(3, 14)]


# --- private heads and private bodies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "mine", "one", "two"),
    [
        ("fedper", "head", [(1.7, 2.8), (1.43, 2.53)], [(1.4, 2.6), (0.86, 2.42)]),
        ("fedoap", "head", [(1.7, 2.8), (1.43, 2.53)], [(1.4, 2.6), (0.86, 2.42)]),
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
    (1.4 − 0.54, 2.7 − 0.28). So does FedOAP, whose rounds perturb nothing.
    LG-FedAvg and FedBN average h to 1.55: from (1.55, 2.8), (1.27, 2.645); from (1.55, 2.6), (1.03, 2.29).
    Alone: from (1.7, 2.8), (1.42, 2.63); from (1.4, 2.6), (0.88, 2.32).
    FedRep's body has its gradient at the new head: b = 3 − 0.17 and 3 − 0.28, mean 2.775; then h = 1.7 − 0.2775 = 1.4225
    and 1.4 − 0.555 = 0.845, b = 2.775 − 0.14225 = 2.63275 and 2.775 − 0.169 = 2.606.
    FedBABU's head stays at 2: b falls by 0.2 s: mean 2.7, then 2.5 and 2.3.
    """
    slopes, last = (("site-1", 1.0), ("site-2", 2.0)), {"batch": 8, "start": "last"}
    sites = [by_hand(method, name, slope, "product", **last) for name, slope in slopes]
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


# --- FedOAP -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("better", [False, True])
@pytest.mark.parametrize(("weight", "noise", "above"), [(0.5, 0.4, 0.75), (0.1, 0.1, 0.75), (0.5, 0.4, 0.999)])
def test_fedoap_s_local_stage_perturbs_what_is_far_from_the_mask(by_hand, monkeypatch, weight, noise, above, better):
    """L_seg = mean z², z = h · b = 6 everywhere, sigmoid(6) = 0.9975 and ε = 1: noise σ on the share f of background pixels,
    whose error is above 0.75 but not above 0.999.

    L = (1 − η) 36 + η (36 + f (12 σ + σ²)). Its gradient by z is g = 12 + 2 η σ f, by h = 2 and b = 3 it is 3 g and 2 g: the
    one step, at 0.01, leads to (2 − 0.03 g, 3 − 0.02 g), which is kept if it scores better. The step changes no IoU, so the
    start is kept otherwise. The round before perturbs nothing: its loss is 36.
    """
    if better:
        scores = iter(range(100))
        monkeypatch.setattr("feddp.training.calibration.mean_scores", lambda *_: {"iou": float(next(scores)), "dice": 0.0})
    monkeypatch.setattr("feddp.training.calibration.adamw", lambda network, lr, _: torch.optim.SGD(network.parameters(), lr=lr))
    monkeypatch.setattr("torch.randn_like", torch.ones_like)
    own = {"perturbed_weight": weight, "perturbed_noise": noise, "perturbed_above": above, "tune_epochs": 1, "tune_lr": 0.01}
    site = by_hand("fedoap", network="product", power=2, batch=8, lr=1e-9, **own)
    _, metrics = train(site, first(site), 0)
    assert metrics["loss"] == pytest.approx(36)
    adopt(site, first(site), 1)
    f = (above < 0.99) * (1 - torch.stack([sample["mask"] for sample in site.samples]).double().mean().item())
    done = tune(site)
    assert above > 0.99 or 0.5 < f < 1
    assert done.losses == [pytest.approx(36 + weight * f * (12 * noise + noise**2), abs=1e-4)]
    assert done.best == better
    g = better * (12 + 2 * weight * noise * f)
    assert numbers(whole(site, "tuned")) == {"head.weight": 2 - 0.03 * g, "body.weight": 3 - 0.02 * g}


def test_fedoap_s_noise_is_of_the_seed(by_hand, monkeypatch):
    """With L_seg = mean z and all pixels perturbed the loss of an epoch is 6 + η σ mean ε: the same again, and no constant."""
    own = {"perturbed_weight": 1, "perturbed_noise": 100, "perturbed_above": 0, "tune_epochs": 2, "tune_lr": 1e-9}
    losses = []
    for at in ("once", "again"):
        site = by_hand("fedoap", network="product", batch=8, lr=1e-9, at=at, **own)
        train(site, first(site), 0)
        adopt(site, first(site), 1)
        losses.append(tune(site).losses)
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]
    assert all(0 < abs(loss - 6) < 10 for loss in losses[0])


# --- MOON -------------------------------------------------------------------------------------------------------------


class Direction(nn.Module):
    """The deepest features are a vector of two numbers at every pixel; to the second is added something in training mode."""

    out_channels = [2]
    added = 0.0

    def __init__(self):
        super().__init__()
        self.z = nn.Parameter(tensor([1.0, 0.0]))

    def forward(self, x):
        z = self.z + tensor([0.0, self.added * self.training])
        return [x, z.view(1, 2, 1, 1).expand(len(x), 2, 3, 5)]


class Represented(nn.Module):
    def __init__(self, channels: int, classes: int, pretrained: bool = False):
        super().__init__()
        self.encoder = Direction()

    def forward(self, x):
        return self.encoder(x)[-1].mean().expand(len(x), 1, *x.shape[2:])


@pytest.fixture
def represented(by_hand, monkeypatch):
    monkeypatch.setitem(NETWORKS, "represented", Represented)
    return lambda batch=8, **changes: by_hand("moon", slope=0.0, network="represented", batch=batch, **changes)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(("mu", "tau", "y", "loss"), [(2, 0.5, -0.0476812, 0.2538560), (1, 1, -0.0268941, 0.3132617)])
def test_moon_turns_away_from_the_last_local_model(represented, fresh, mu, tau, y, loss):
    """L_seg is 0. Round 1 receives (0, 1), and has no previous model: it sends (0, 1), at loss 0.

    Round 2 receives z = z_glob = (1, 0), and z_prev = (0, 1): the cosines are 1 and 0, the loss μ ln(1 + e^(−1/τ)). The cosine
    with z_glob is at its maximum, so the gradient is (μ/τ) σ(−1/τ) of the other's, (0, 1); a step is a tenth of it:
    μ = 2, τ = 1/2: 0.4 σ(−2) = 0.4 · 0.119203; 2 · 0.126928. μ = τ = 1: 0.1 σ(−1) = 0.1 · 0.268941; 0.313262.
    """
    settings = {"moon_mu": mu, "moon_temperature": tau}
    site = represented(**settings)
    sent, metrics = train(site, {"encoder.z": tensor([0.0, 1.0])}, 0)
    assert (sent["encoder.z"].tolist(), metrics["loss"]) == ([0, 1], 0)
    site = represented(**settings) if fresh else site
    sent, metrics = train(site, {"encoder.z": tensor([1.0, 0.0])}, 1)
    assert sent["encoder.z"].tolist() == pytest.approx([1, y], abs=1e-6)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert site.store.load_state(2).memory["z"].equal(sent["encoder.z"])


@pytest.mark.parametrize(
    ("mu", "tau", "z", "loss"), [(2, 0.5, (0.9980128, -0.0893574), 0.2432153), (1, 1, (0.9993105, -0.0525328), 0.3097296)]
)
def test_moon_s_other_models_stand_still_over_a_round(represented, mu, tau, z, loss):
    """Two batches of equal images, z_glob = (1, 0) and z_prev = (0, 1) as above. After the first step z = (1, y), of length n.

    There the cosines are 1/n and y/n; with d = (y − 1)/n the loss is μ ln(1 + e^(d/τ)), and ∇d = (1 + y)/n³ · (−y, 1). So
    z = (1 + 0.1 g y, y − 0.1 g), g = (μ/τ) σ(d/τ) (1 + y)/n³.
    μ = 2, τ = 1/2: y = −0.0476812, n = 1.0011361, d = −1.0464922: g = 4 · 0.1097806 · 0.9523188/1.0034122 = 0.4167623.
    The loss is the mean of 0.2538560 and 2 ln(1 + e^−2.0929845) = 0.2325746.
    μ = τ = 1: y = −0.0268941, n = 1.0003616, d = −1.0265230: g = 0.2637588 · 0.9731059/1.0010851 = 0.2563870. The loss is
    the mean of 0.3132617 and ln(1 + e^−1.0265230) = 0.3061974.
    (If z_glob were the network in training, its cosine would stay 1, and y would end at −0.0913557 and −0.0532344.)
    """
    site = represented(batch=4, moon_mu=mu, moon_temperature=tau)
    train(site, {"encoder.z": tensor([0.0, 1.0])}, 0)
    sent, metrics = train(site, {"encoder.z": tensor([1.0, 0.0])}, 1)
    assert sent["encoder.z"].tolist() == pytest.approx(z, abs=1e-6)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)


def test_moon_s_other_models_are_in_eval_mode(represented, monkeypatch):
    """In training mode z = (1, 0) + (0, 1), as near to (1, 0) as to (0, 1): the loss is ln 2. In training mode the others would
    be (1, 1) and (0, 2), with the cosines 1 and 1/√2."""
    monkeypatch.setattr(Direction, "added", 1.0)
    site = represented()
    train(site, {"encoder.z": tensor([0.0, 1.0])}, 0)
    _, metrics = train(site, {"encoder.z": tensor([1.0, 0.0])}, 1)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_moon_without_its_loss_sends_what_fedavg_sends(open_site, pvt):
    """To the bit, over two rounds of a network with dropout: the two models beside it draw no number and leave no trace."""
    moon, fedavg = (open_site(at=at, method=at, network=pvt, **more) for at, more in (("moon", {"moon_mu": 0}), ("fedavg", {})))
    gamma = first(moon)
    for round in range(2):
        sent, wanted = (train(site, gamma, round)[0] for site in (moon, fedavg))
        assert same(sent, wanted)
        gamma = sent


# --- FedRoD -----------------------------------------------------------------------------------------------------------


class Times(nn.Module):
    """An encoder whose only feature is b = 3 at every pixel."""

    out_channels = [1]

    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(tensor(3.0))

    def forward(self, x):
        return [self.b.expand(len(x), 1, *x.shape[2:])]


class Last(nn.Module):
    def forward(self, features):
        return features[-1]


class Headed(nn.Module):
    """The logit is h · b everywhere, h = 2 the head's only weight."""

    def __init__(self, channels: int, classes: int, pretrained: bool = False):
        super().__init__()
        self.encoder, self.decoder = Times(), Last()
        self.segmentation_head = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.Identity())
        nn.init.constant_(self.segmentation_head[0].weight, 2.0)


@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize(("slope", "p", "loss"), [(1.0, -0.3, 9.002476), (-2.0, 0.6, -8.997524), (0.0, 0.0, 3.002476)])
def test_fedrod_s_shared_tensors_see_the_balanced_risk_alone(by_hand, monkeypatch, name, slope, p, loss):
    """(h, b) = (2, 3), the personal weight p = 0; one batch of all images. The generic logit is 6 everywhere.

    Foreground and background weigh 1/2 each, whatever a site's share: the balanced loss is (ln(1 + e^−6) + ln(1 + e^6))/2 =
    3.002476, its gradient σ(6)/2 − σ(−6)/2 = σ(6) − 1/2 = 0.497527. So h = 2 − 0.3 · 0.497527 and b = 3 − 0.2 · 0.497527, of
    every site and every slope. The plain loss is s (6 + 3 p): s · 6 is added to the loss, and p falls by 0.1 · 3 s.
    """
    monkeypatch.setitem(NETWORKS, "headed", Headed)
    site = by_hand("fedrod", name, slope, "headed", batch=8)
    sent, metrics = train(site, first(site), 0)
    assert numbers(sent) == {"segmentation_head.0.weight": 1.850742, "encoder.b": 2.900495}
    assert numbers(site.store.load_state(1).private) == {"personal_head.0.weight": p}
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    adopt(site, sent, 1)
    logits = site.network.eval()(torch.zeros(1, 3, 2, 2))
    assert logits.flatten().tolist() == pytest.approx([(1.850742 + p) * 2.900495] * 4, abs=1e-5)


@pytest.mark.parametrize("slope", [1.0, -2.0])
def test_fedrod_s_personal_head_gives_the_features_no_gradient(by_hand, monkeypatch, slope):
    """Two batches of 4: the second begins with a personal weight of p = −0.3 s, whose gradient to b would be s p.

    Step 1 as above: h = 1.850742, b = 2.900495. There h b = 5.368068, and the gradient σ(h b) − 1/2 = 0.495359 times b is h's,
    times h is b's: h = 1.850742 − 0.0495359 · 2.900495 = 1.707063, b = 2.900495 − 0.0495359 · 1.850742 = 2.808816, of every
    slope. (With the personal head's gradient b would be 0.03 s² more.) p falls by 0.1 · 3 s, then by 0.1 · 2.900495 s.

    A batch's own balance is not 1/2 each; so every image of the site is given the same mask, half of it foreground.
    """
    monkeypatch.setitem(NETWORKS, "headed", Headed)
    site = by_hand("fedrod", slope=slope, network="headed", batch=4)
    for sample in site.samples:
        sample["mask"] = torch.zeros_like(sample["mask"])
        sample["mask"][:, :16] = 1
    sent, _ = train(site, first(site), 0)
    assert numbers(sent) == {"segmentation_head.0.weight": 1.707063, "encoder.b": 2.808816}
    assert numbers(site.store.load_state(1).private) == {"personal_head.0.weight": pytest.approx(-0.5900495 * slope, abs=1e-6)}


@pytest.mark.parametrize(("first_image", "loss"), [(0, 2.0033009), (4, 4.0016505)])
def test_fedrod_weighs_by_the_share_of_the_site_not_of_the_batch(by_hand, monkeypatch, first_image, loss):
    """Two of the site's eight images are foreground everywhere, the others nowhere: f = 1/4, so foreground weighs 2 and
    background 2/3. The generic logit is 6 everywhere, and the plain loss is 0.

    A batch of the first four images is half foreground: (2 ln(1 + e^−6) + 2/3 ln(1 + e^6))/2 = 0.0024757 + 6.0024757/3 =
    2.0033009. One of the last four has none: 2/3 · 6.0024757 = 4.0016505. (By their own shares: 3.0024757, and for no
    foreground 6.0024757/2.)
    """
    monkeypatch.setitem(NETWORKS, "headed", Headed)
    site = by_hand("fedrod", slope=0.0, network="headed", batch=4)
    for i, sample in enumerate(site.samples):
        sample["mask"] = torch.full_like(sample["mask"], float(i < 2))
    part = site.samples[first_image : first_image + 4]
    batch = {name: torch.stack([sample[name] for sample in part]) for name in ("image", "mask")}
    assert site.batch_loss(site.network(batch["image"]), batch).item() == pytest.approx(loss, abs=1e-5)


# --- LoRA -------------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """The logit is h · c · (W + B A), with (h, c, W, A, B) = (2, 1, 3, 5, 0)."""

    roles = {ENCODER: ("encoder",), DECODER: ("decoder",), HEAD: ("head",)}

    def __init__(self, channels: int, classes: int, pretrained: bool = False):
        super().__init__()
        self.encoder, self.decoder, self.head = (nn.Linear(1, 1, bias=False) for _ in range(3))
        self.encoder = AdaptedLinear(self.encoder, rank=1)
        for layer, value in ((self.head, 2.0), (self.decoder, 1.0), (self.encoder, 3.0), (self.encoder.lora_a, 5.0)):
            nn.init.constant_(layer.weight, value)

    def forward(self, x):
        return self.head(self.decoder(self.encoder(torch.ones(1)))).expand(len(x), 1, *x.shape[2:])


@pytest.mark.parametrize(("freeze", "w"), [("false", 2.8), ("true", 3.0)])
@pytest.mark.parametrize("private", ["", "none"])
def test_lora_trains_its_adapters_beside_what_they_adapt(by_hand, monkeypatch, freeze, w, private):
    """A step of L = h c (W + B A): B falls by 0.1 h c A = 1, A by 0.1 h c B = 0, W by 0.1 h c = 0.2 unless it is frozen, c by
    0.1 h W = 0.6 and h by 0.1 c W = 0.3. With private=none the adapters are sent."""
    monkeypatch.setitem(NETWORKS, "adapted", Adapted)
    monkeypatch.setitem(LAYERS, "lora", lambda network, classes, rank: network)
    changes = {"private": private} if private else {}
    site = by_hand("lora", network="adapted", batch=8, lora_freeze=freeze, **changes)
    sent, _ = train(site, first(site), 0)
    kept = site.store.load_state(1).private
    adapters = {"encoder.lora_a.weight": 5.0, "encoder.lora_b.weight": -1.0}
    base = {"encoder.weight": w, "decoder.weight": 0.4, "head.weight": 1.7}
    assert numbers(kept) == ({} if private else adapters)
    assert numbers(sent) == (base | adapters if private else base)
