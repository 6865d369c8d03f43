"""A site of a run, driven as FLARE's executors drive it, over two synthetic sites."""

import csv
import json
import math
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.small import paired
from feddp.data.folder import SiteFolder
from feddp.data.pixels import write_png
from feddp.errors import FedDPError, Stopped, StorageError
from feddp.methods.aggregation import average
from feddp.methods.base import Method
from feddp.networks import DEFAULT, NETWORKS
from feddp.plan.resolve import build_network
from feddp.protocol import LOADING, STORING, TRAIN
from feddp.stages.calibrate import calibrate, personal
from feddp.stages.evaluate import evaluate
from feddp.stages.message import Message
from feddp.stages.site import Site
from feddp.stages.train import adopt, answer, train
from feddp.stages.tune import tune
from feddp.training.calibration import mean_scores
from feddp.training.columns import METRICS, columns
from feddp.training.loop import predict
from feddp.training.metrics import measure, summarize
from feddp.training.store import Store, together
from support.disk import full

EVEN = {"site-1": 1.0, "site-2": 1.0}
STARVED = "no image in split val"


@pytest.fixture
def open_site(tiny_root, tmp_path):
    """Opens a site as a new process would; `at` is where its store lies."""

    def open(plan, name="site-1", at=None, data=None, **options) -> Site:
        folder = SiteFolder.open(data or tiny_root / name)
        return Site(name, folder, plan, Store(tmp_path / (at or name)), **options)

    return open


def first(site):
    """γ^0: the shared tensors of the common start."""
    return site.partition.split(build_network(site.plan).state_dict())[0]


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def same_state(one, other):
    return one.round == other.round and all(
        same(getattr(one, part), getattr(other, part)) for part in ("private", "optimizer", "memory")
    )


def means_of(network, samples):
    """The mean of every metric over `samples`."""
    rows = [row for maps, batch in predict(network, samples) for row in measure(maps, batch["mask"])]
    return {metric: summary["mean"] for metric, summary in summarize(rows).items()}


def timeless(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("seconds")}


def trained(sites, rounds):
    """Trains `sites` together from the common start; returns γ^0 to γ^rounds."""
    history = [first(sites[0])]
    for round in range(rounds):
        history.append(average({site.name: train(site, history[-1], round)[0] for site in sites}, EVEN))
    return history


def tensors(site, slot):
    return site.store.read(slot)[0]


# --- a round is a pure function ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["pvt", "toy"])
@pytest.mark.usefixtures("pvt", "toy")
def test_a_fresh_process_takes_the_next_round_to_the_same_bits(plan_for, open_site, network):
    """Both networks have dropout, the samples are shuffled and turned, AdamW has a history: all must come back.

    8 samples in batches of 4 are 2 steps a round: after two rounds AdamW counts 4.
    """
    plan = plan_for(network=network)
    one = open_site(plan, at="one")
    start = first(one)
    mine, metrics = train(one, start, 0)
    again, later = train(one, mine, 1)

    torch.manual_seed(99)
    fresh, fresh_metrics = train(open_site(plan, at="two"), start, 0)
    assert same(fresh, mine)
    assert not same(fresh, start)
    assert timeless(fresh_metrics) == timeless(metrics)
    site = open_site(plan, at="two")
    fresh_again, fresh_later = train(site, fresh, 1)
    assert same(fresh_again, again)
    assert not same(fresh_again, fresh)
    assert timeless(fresh_later) == timeless(later)
    for round in (1, 2):
        assert same_state(site.store.load_state(round), one.store.load_state(round))
        assert site.store.load_state(round).round == round
        history = site.store.load_state(round).optimizer
        assert {value.item() for name, value in history.items() if name.endswith("/step")} == {2 * round}

    redelivered, _ = train(open_site(plan, at="two"), fresh, 1)
    assert same(redelivered, again)
    assert same_state(site.store.load_state(2), one.store.load_state(2))


def test_the_first_round_redelivered_gives_the_same_bits(plan_for, open_site, toy):
    """Even after later rounds: round 0 starts from nothing, whatever is stored."""
    site = open_site(plan_for(network=toy))
    mine, metrics = train(site, first(site), 0)
    state = site.store.load_state(1)
    train(site, mine, 1)
    again, again_metrics = train(site, first(site), 0)
    assert same(again, mine)
    assert timeless(again_metrics) == timeless(metrics)
    assert same_state(site.store.load_state(1), state)


def test_chance_comes_from_seed_site_and_round(plan_for, open_site, toy, tiny_root):
    """The same images, network, γ and ρ; only the name, the run's seed (with the old start) or the round differs."""
    plan, data = plan_for(network=toy), tiny_root / "site-1"
    site = open_site(plan)
    start, initial = first(site), build_network(plan).state_dict()
    mine, _ = train(site, start, 0)
    assert not same(train(open_site(plan, "other", data=data), start, 0)[0], mine)
    assert not same(train(open_site(plan_for(network=toy, seed=1), at="seed", initial=initial), start, 0)[0], mine)
    assert not same(train(open_site(plan, at="round"), start, 1)[0], mine)
    assert same(train(open_site(plan, at="same", initial=initial), start, 0)[0], mine)


def test_a_round_reports_the_scores_of_what_was_received(plan_for, open_site, toy):
    """γ^1 with the site's ρ^1, before training: scored here by hand on the validation images; none in round 0."""
    site = open_site(plan_for(network=toy))
    mine, metrics = train(site, first(site), 0)
    assert metrics.keys() == {"loss", "samples", "seconds", LOADING, STORING}
    assert metrics["samples"] == 8
    received = {name: value + 0.1 if value.is_floating_point() else value for name, value in mine.items()}
    network = build_network(site.plan)
    network.load_state_dict(site.partition.join(received, site.store.load_state(1).private))
    wanted = mean_scores(network, site.validation)
    _, later = train(site, received, 1)
    assert {name: later[name] for name in ("dice", "iou")} == wanted


def test_a_site_that_opens_for_a_round_counts_it_as_loading(plan_for, open_site, toy, monkeypatch):
    """A clock that stands still but for 5 s, in which the folder is opened and the network built: these are the seconds of the
    round, and all of them loading. The second round finds the site open, and takes none."""
    now = [0.0]
    monkeypatch.setattr("feddp.stages.stopwatch.time", SimpleNamespace(monotonic=lambda: now[0]))
    site = open_site(plan_for(network=toy))
    opening = [5.0, 0.0]

    def opened():
        now[0] += opening.pop(0)
        return site

    host, gamma = SimpleNamespace(name=site.name, plan=site.plan, open=opened, samples=10), first(site)
    for round, seconds in enumerate((5.0, 0.0)):
        said = answer(TRAIN, Message(gamma, {"round": round, "phase": 0}), host).scalars
        assert (said["seconds"], said[LOADING], said[STORING]) == (seconds, seconds, 0.0)


def test_an_aborted_round_leaves_no_state(plan_for, open_site, toy):
    site = open_site(plan_for(network=toy), stopped=lambda: True)
    with pytest.raises(Stopped, match="stopped"):
        train(site, first(site), 0)
    assert site.store.load_state(9).round == 0


def test_a_wrong_gamma_is_refused(plan_for, open_site, toy):
    site = open_site(plan_for(network=toy))
    with pytest.raises(FedDPError, match="missing head.bias"):
        train(site, {name: value for name, value in first(site).items() if name != "head.bias"}, 0)
    with pytest.raises(FedDPError, match="unexpected q.bias"):
        train(site, first(site) | {"q.bias": torch.zeros(4)}, 0)


class Phases(Method):
    """Two calls of `fit` in a round."""

    def round(self, site):
        site.fit(1)
        return site.fit(1)


def test_a_method_trains_in_phases_as_in_epochs(plan_for, open_site, toy):
    """The second phase draws other samples than the first: two phases of an epoch are, to the bit, one of two."""
    phases, epochs = open_site(plan_for(network=toy)), open_site(plan_for(network=toy, local_epochs=2), at="epochs")
    phases.method = Phases(None)
    assert same(train(phases, first(phases), 0)[0], train(epochs, first(epochs), 0)[0])


# --- what is private ----------------------------------------------------------------------------------------------------

QUERIES = {
    f"encoder.model.stages_{stage}.blocks.{block}.attn.q.{kind}"
    for stage in range(4)
    for block in range(2)
    for kind in ("weight", "bias")
}


def test_private_tensors_stay_and_differ(plan_for, open_site, monkeypatch):
    """Both sites start from the same ρ. After a round each has its own, and neither is the mean of the two."""
    monkeypatch.setitem(NETWORKS, DEFAULT, paired)
    sites = [open_site(plan_for(), name) for name in EVEN]
    for site in sites:
        mine, _ = train(site, first(site), 0)
        assert not mine.keys() & QUERIES
        assert mine.keys() == set(site.partition.shared)
    own = [site.store.load_state(1).private for site in sites]
    start = build_network(sites[0].plan).state_dict()
    for name in QUERIES:
        mean = (own[0][name] + own[1][name]) / 2
        for state in (start[name], own[1][name], mean):
            assert not torch.allclose(own[0][name], state, rtol=0, atol=1e-7), name
        assert not torch.allclose(own[1][name], mean, rtol=0, atol=1e-7), name


def test_a_private_tensor_is_never_overwritten_by_what_is_received(plan_for, open_site, toy):
    """The round starts from the ρ the site stored: with a rate near zero, it is still that after the round."""
    site = open_site(plan_for(network=toy))
    train(site, first(site), 0)
    before = site.store.load_state(1).private
    still = open_site(plan_for(network=toy, lr=1e-30))
    train(still, first(site), 1)
    assert same(still.store.load_state(2).private, before)


def test_private_tensors_start_from_the_weights_the_job_brought(plan_for, open_site, toy):
    """At a rate near zero a round leaves ρ where it was: at `initial`, not at what the seed gives."""
    site = open_site(plan_for(network=toy, lr=1e-30), initial=build_network(plan_for(network=toy, seed=8)).state_dict())
    train(site, first(site), 0)
    wanted = build_network(plan_for(network=toy, seed=8)).state_dict()
    assert same(site.store.load_state(1).private, {name: wanted[name] for name in ("q.weight", "q.bias")})


def test_local_training_exchanges_nothing(plan_for, open_site, toy):
    site = open_site(plan_for(network=toy, method="local"))
    mine, _ = train(site, {}, 0)
    assert mine == {}
    assert average({"site-1": mine, "site-2": {}}, EVEN) == {}
    assert site.store.load_state(1).private.keys() == site.network.state_dict().keys()


# --- what stage 1 hands on --------------------------------------------------------------------------------------------


def test_adopt_joins_gamma_and_rho_of_the_same_round(plan_for, open_site, toy):
    """Three rounds; round 1 was the best, and `keep` holds its ρ while 2 and 3 come."""
    site = open_site(plan_for(network=toy, rounds=3))
    gammas, rhos = [first(site)], [None]
    for round in range(3):
        gammas.append(train(site, gammas[-1], round, best=1 if round else None)[0])
        rhos.append(site.store.load_state(round + 1).private)
    assert not same(rhos[1], rhos[2])
    assert sorted(path.name for path in site.store.folder.glob("state_*")) == [f"state_0000{t}.safetensors" for t in (1, 2, 3)]

    fresh = open_site(plan_for(network=toy, rounds=3))
    scores = adopt(fresh, gammas[1], 1)
    assert same(tensors(fresh, "start"), fresh.partition.join(gammas[1], rhos[1]))
    network = build_network(fresh.plan)
    network.load_state_dict(tensors(fresh, "start"))
    wanted = mean_scores(network, fresh.validation)
    assert scores == wanted
    adopt(fresh, gammas[3], 3)
    assert same(tensors(fresh, "start"), fresh.partition.join(gammas[3], rhos[3]))


def test_states_that_nobody_needs_are_removed(plan_for, open_site, toy):
    """Round t needs the state t, and leaves t + 1; both stay, in case round t comes again, and t - 1, in case the server lost
    its latest file and asks for the round before."""
    site = open_site(plan_for(network=toy, rounds=3))
    trained_to = first(site)
    for round in range(3):
        trained_to, _ = train(site, trained_to, round)
    assert sorted(path.name for path in site.store.folder.glob("state_*")) == [
        "state_00001.safetensors",
        "state_00002.safetensors",
        "state_00003.safetensors",
    ]


def test_a_saved_network_says_what_it_is(plan_for, open_site, toy):
    site = open_site(plan_for(network=toy, seed=5))
    adopt(site, first(site), 0)
    assert site.store.read("start")[1] == {
        "network": "toy",
        "channels": "3",
        "classes": '["lesion"]',
        "labels": "nested",
        "size": "32",
        "method": "feddp",
        "seed": "5",
        "normalise": "zscore",
        "selection": "val",
        "site": "site-1",
    }


# --- stage 2 and evaluation -------------------------------------------------------------------------------------------


@pytest.fixture
def adopted(plan_for, open_site, toy):
    """Two sites after a round and its adoption."""

    def make(**changes) -> list[Site]:
        sites = [open_site(plan_for(network=toy, **changes), name) for name in EVEN]
        gamma = trained(sites, 1)[-1]
        for site in sites:
            adopt(site, gamma, 1)
        return sites

    return make


# an IoU that no network reaches and every epoch betters: all tunings keep their last epoch, so that bits can be compared
@pytest.fixture
def _last_epoch_wins(monkeypatch):
    scores = iter(range(10**6))
    monkeypatch.setattr("feddp.training.calibration.mean_scores", lambda *_: {"iou": float(next(scores)), "dice": 0.0})


def test_personal_is_what_rebuilds_the_network(adopted):
    one, two = adopted()
    given = personal(two)
    assert given.keys() == {"q.weight", "q.bias"}
    assert same(tensors(one, "start") | given, tensors(two, "start"))


def test_personal_after_a_tuning_is_the_tuned_network(adopted):
    one, _ = adopted(stages=("train", "tune", "calibrate"), tune_epochs=1, tune_lr=0.5)
    tune(one)
    assert same(personal(one), tensors(one, "tuned"))


@pytest.mark.usefixtures("_last_epoch_wins")
def test_a_site_already_calibrated_gives_what_it_gave_before(adopted):
    """The exchange may come again, after a crash: peers join ρ with γ, so it must be the ρ of the common start."""
    one, two = adopted(calibration_lr=0.1)
    before = personal(one)
    calibrate(one, {"site-2": personal(two)})
    assert not same({name: tensors(one, "calibrated")[name] for name in before}, before)
    assert same(personal(one), before)


@pytest.mark.usefixtures("_last_epoch_wins")
def test_stages_that_come_again_end_in_the_same_bits(adopted):
    one, two = adopted(stages=("train", "tune", "calibrate"), tune_epochs=1, tune_lr=0.1, calibration_lr=0.1)
    tune(two)
    peers = {"site-2": personal(two)}

    def stages():
        tune(one)
        calibrate(one, peers)
        return tensors(one, "tuned"), tensors(one, "calibrated")

    once, twice = stages(), stages()
    assert same(once[0], twice[0])
    assert same(once[1], twice[1])
    assert not same(once[0], tensors(one, "start"))
    assert not same(once[0], once[1])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda t: t.pop("q.bias"), "q.bias is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is not expected"),
        (lambda t: t.update({"q.bias": torch.zeros(5)}), r"q.bias is \(5,\)"),
        (lambda t: t["q.bias"].fill_(float("nan")), "q.bias holds values that are not finite"),
        (lambda t: t["q.bias"].fill_(1e9), "q.bias holds 1e.09, but a weight is from -65504 to 65504"),
    ],
)
def test_a_peer_with_wrong_tensors_is_named(adopted, harm, message):
    one, two = adopted()
    given = personal(two)
    harm(given)
    with pytest.raises(FedDPError, match=f"site site-2: .*{message}|site site-2: {message}"):
        calibrate(one, {"site-2": given})
    assert not one.store.has("peers")
    assert not one.store.has("calibrated")

    told = {}
    calibrate(one, {"site-2": given, "site-3": personal(two)}, told.__setitem__)
    assert [*told] == ["site-2"], "one that is good is enough"
    assert {name.split("/")[0] for name in tensors(one, "peers")} == {"site-3"}
    assert one.store.has("calibrated")


def test_one_negative_variance_of_a_peer_leaves_that_peer_out_and_the_others_are_used(adopted):
    """With it the peer's network gives NaN, and with that the site's own loss: it would be told to lower its rate."""
    one, two = adopted(method="fedbn", stages=("train", "calibrate"))
    given = personal(two)
    bad = {name: value.clone() for name, value in given.items()}
    bad["norm.running_var"][0] = -1
    told = {}
    done = calibrate(one, {"site-2": bad, "site-3": given}, told.__setitem__)
    assert np.isfinite(done.losses).all()
    assert [*told] == ["site-2"]
    assert "site site-2: norm.running_var holds -1, but a running variance is from 0 to 65504" in str(told["site-2"])
    assert {name.split("/")[0] for name in tensors(one, "peers")} == {"site-3"}


def test_a_peer_whose_network_gives_no_finite_maps_is_left_out_of_the_calibration(adopted, monkeypatch):
    """Its tensors are in their domains, and the network that they complete gives NaN: what it gives is not stored either."""
    one, two = adopted()
    given = personal(two)
    bad = {name: torch.full_like(value, 7) for name, value in given.items()}
    forward, told = type(one.network).forward, {}
    monkeypatch.setattr(
        type(one.network), "forward", lambda self, x: forward(self, x) * (math.nan if self.q.bias[0] == 7 else 1)
    )
    done = calibrate(one, {"site-2": bad, "site-3": given}, told.__setitem__)
    assert np.isfinite(done.losses).all()
    assert [*told] == ["site-2"]
    assert {name.split("/")[0] for name in tensors(one, "peers")} == {"site-3"}
    one.store.write("peers", together({"b": bad, "c": given}))
    told.clear()
    assert evaluate(one, told.__setitem__)["peers"].keys() == {"c"}, "nor of the evaluation, which goes on"
    assert [*told] == ["b"]


@pytest.mark.parametrize(("name", "value"), [("norm.running_var", -1.0), ("head.bias", 1e9), ("head.bias", math.nan)])
def test_a_site_trains_on_no_gamma_that_means_nothing(open_site, plan_for, toy, name, value):
    site = open_site(plan_for(network=toy))
    gamma = {key: tensor.clone() for key, tensor in site.partition.split(site.network.state_dict())[0].items()}
    gamma[name].fill_(value)
    before = site.copy()
    with pytest.raises(FedDPError, match=f"site site-1 was sent γ: {name} holds"):
        train(site, gamma, 0)
    assert same(before, site.copy())
    assert site.store.latest() == 0


@pytest.mark.usefixtures("_last_epoch_wins")
def test_without_peers_it_is_tuned_with_lambda_zero(adopted, plan_for, open_site):
    """From the same start: without peers, and with peers and λ = 0, the same bits; with peers and λ = 1, others."""
    one, two = adopted(calibration_lr=0.01)
    peers = {"site-2": personal(two)}
    ends = {}
    for at, weight, given in (("alone", 1, {}), ("zero", 0, peers), ("one", 1, peers)):
        shutil.copytree(one.store.folder, one.store.folder.parent / at)
        site = open_site(plan_for(network="toy", calibration_lr=0.01, **{"lambda": weight}), at=at)
        calibrate(site, given)
        assert site.store.has("peers") == (at == "one")  # what is not used is not kept
        ends[at] = tensors(site, "calibrated")
    assert same(ends["alone"], ends["zero"])
    assert not same(ends["alone"], ends["one"])
    assert not same(ends["alone"], tensors(one, "start"))


@pytest.mark.parametrize("delta", ["frozen", "live", "std"])
def test_peers_are_asked_once(adopted, delta):
    """8 samples are one batch of prediction, 2 networks: 2 passes. Scored 1 + 2 times, trained in 2 · 8/4 steps: 3 + 4."""
    one, two = adopted(calibration_epochs=2, delta=delta)
    passes = []
    one.network.register_forward_hook(lambda *_: passes.append(1))
    calibrate(one, {"site-2": personal(two)})
    assert len(passes) == 2 + 3 + 4


def test_a_site_that_missed_stage_1_says_so(plan_for, open_site, toy):
    site = open_site(plan_for(network=toy))
    for action in (personal, tune, evaluate, lambda site: calibrate(site, {})):
        with pytest.raises(FedDPError, match="site site-1: stage 1 left no network"):
            action(site)


def test_a_process_that_dies_at_the_end_of_its_evaluation_leaves_no_peers_tensors(adopted, monkeypatch):
    """The result is stored, the peers' tensors are not yet removed; the task comes again."""
    one, two = adopted()
    calibrate(one, {"site-2": personal(two)})
    one.store.write("spectra", {"site-2/centres": torch.zeros(1)})
    kept = one.keep_evaluation

    def killed(found):
        kept(found)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(one, "keep_evaluation", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate(one)
    assert one.store.has("peers"), "the control"
    assert evaluate(one)["peers"].keys() == {"site-2"}
    assert not one.store.has("peers")
    assert not one.store.has("spectra")


def test_the_table_is_on_the_disk_before_the_evaluation_counts(adopted, monkeypatch):
    """evaluation.json answers every later request, so a table that a power failure emptied would never be made again."""
    one, _ = adopted(method="local")
    replace, replaced = os.replace, []

    def replacing(part, path):
        replaced.append(path.name)
        replace(part, path)

    monkeypatch.setattr(os, "replace", replacing)
    evaluate(one)
    assert replaced == ["images.csv", "evaluation.json"]


def test_a_full_disk_in_the_evaluation_is_said_and_leaves_no_table(adopted):
    one, _ = adopted(method="local")
    with full(one.store.folder), pytest.raises(StorageError, match="images.csv was not written"):
        evaluate(one)
    assert not [path for path in one.store.folder.iterdir() if "images.csv" in path.name or path.name == "evaluation.json"]
    assert evaluate(one)["final"].keys() >= {"dice"}, "the control"


def test_an_evaluation_that_is_stopped_leaves_nothing(adopted):
    one, _ = adopted(method="local")
    one.stopped = lambda: True
    with pytest.raises(Stopped, match="stopped"):
        evaluate(one)
    assert not [path for path in one.store.folder.iterdir() if path.name in ("images.csv", "evaluation.json")]
    one.stopped = lambda: False
    assert evaluate(one)["final"].keys() >= {"dice"}, "the control"


def rows_of(site, table="images.csv"):
    with open(site.store.folder / table, newline="") as handle:
        return list(csv.DictReader(handle))


@pytest.mark.parametrize(
    ("changes", "before", "final"),
    [
        ({"method": "local"}, "start", "start"),
        ({"method": "finetune", "tune_epochs": 1}, "start", "tuned"),
        ({"method": "feddp"}, "start", "calibrated"),
        ({"method": "feddp", "stages": ("train", "tune", "calibrate"), "tune_epochs": 1}, "tuned", "calibrated"),
    ],
)
def test_the_network_is_evaluated_before_and_after_its_last_stage(adopted, changes, before, final):
    """The rows of images.csv are of these networks and of the two test images; the summaries are their means."""
    one, two = adopted(**changes)
    if "tune" in one.plan.stages:
        tune(one)
        tune(two)
    if "calibrate" in one.plan.stages:
        calibrate(one, {"site-2": personal(two)})
    # another prediction for every network on disk, so that they cannot be confused
    for shift, slot in enumerate(sorted({before, final})):
        state = tensors(one, slot)
        state["head.bias"] += shift - 0.5
        one.store.write(slot, state)

    found = evaluate(one)
    assert found.keys() == {"before_calibration", "final", "peers"}
    rows = rows_of(one)
    stems = [row.image for row in one.folder.rows_of("test")]
    assert [(row["network"], row["image"]) for row in rows] == [
        (slot, stem) for slot in dict.fromkeys((before, final)) for stem in stems
    ]
    network = build_network(one.plan)
    for name, slot in (("before_calibration", before), ("final", final)):
        network.load_state_dict(tensors(one, slot))
        means = {metric: summary["mean"] for metric, summary in found[name].items()}
        assert means == means_of(network, one.test)
        assert {summary["n"] for summary in found[name].values()} == {2}
        for metric, mean in means.items():
            values = [float(row[metric]) for row in rows if row["network"] == slot]
            assert sum(values) / 2 == pytest.approx(mean)


@pytest.mark.parametrize(("changes", "dice"), [({}, 32 / 33), ({"largest_component": "true"}, 1.0)])
def test_the_largest_component_alone_is_evaluated_where_the_plan_says_so(adopted, monkeypatch, changes, dice):
    """A mask of 16 pixels, and a prediction of these and of one far away: Dice 2 · 16/(16 + 17) = 32/33; without that one 1."""
    one, _ = adopted(method="fedavg", **changes)
    mask = torch.zeros(1, 32, 32)
    mask[:, 8:12, 8:12] = 1
    for sample in one.test:
        sample["mask"] = mask.clone()
    maps = torch.stack([mask] * len(one.test))
    maps[..., 31, 31] = 1
    given = [(maps, {"mask": torch.stack([sample["mask"] for sample in one.test])})]
    monkeypatch.setattr("feddp.stages.evaluate.predict", lambda network, samples: given)
    assert evaluate(one)["final"]["dice"]["mean"] == pytest.approx(dice)


def test_peers_are_evaluated_and_then_forgotten(adopted):
    """site-2's network as it was sent, rebuilt at site-1 from γ and ρ_2, on site-1's test images.

    Here γ says "nothing" everywhere (a bias of −50), and site-1's calibrated network, of another γ, "lesion" everywhere.
    """
    one, two = adopted()
    for site in (one, two):
        state = tensors(site, "start")
        site.store.write("start", state | {"head.bias": torch.full((1,), -50.0)})
    calibrate(one, {"site-2": personal(two)})
    one.store.write("calibrated", tensors(one, "calibrated") | {"head.bias": torch.full((1,), 50.0)})
    assert one.store.has("peers")
    found = evaluate(one)
    network = build_network(one.plan)
    network.load_state_dict(tensors(two, "start"))
    assert found["peers"].keys() == {"site-2"}
    means = {metric: summary["mean"] for metric, summary in found["peers"]["site-2"].items()}
    assert means == means_of(network, one.test)
    assert means["iou"] != found["final"]["iou"]["mean"]
    assert not one.store.has("peers")
    assert {row["network"] for row in rows_of(one)} == {"start", "calibrated"}


@pytest.fixture
def slices(plan_for, open_site, toy, tiny_root, tmp_path):
    """A site tuned from "lesion everywhere" to "nothing". Its test images: a and b of patient P, a full and a quarter mask
    (1024 and 256 pixels of 1024), and c of patient Q, half a mask; `said` is added to its dataset.json."""

    def make(**said) -> Site:
        data = shutil.copytree(tiny_root / "site-1", tmp_path / "data")
        rows = [line.split(",") for line in (data / "split.csv").read_text().split()[1:]]
        rows = [row for row in rows if row[2] == "test"] + [row for row in rows if row[2] != "test"]
        for row, (patient, pixels) in zip(rows, (("P", 1024), ("P", 256), ("Q", 512)), strict=False):
            mask = np.zeros(1024, np.uint8)
            mask[:pixels] = 1
            write_png(data / f"masks/{row[0]}.png", mask.reshape(32, 32))
            row[1:] = [patient, "test"]
        lines = [",".join(row) for row in (["image", "patient", "split"], rows[0], rows[2], rows[1], *rows[3:])]
        (data / "split.csv").write_text("\n".join(lines) + "\n")
        metadata = json.loads((data / "dataset.json").read_text())
        (data / "dataset.json").write_text(json.dumps(metadata | said))
        site = open_site(plan_for(network=toy, method="finetune"), data=data)
        state = site.network.state_dict() | {"head.weight": torch.zeros(1, 4, 1, 1)}
        for slot, bias in (("start", 50.0), ("tuned", -50.0)):
            site.store.write(slot, state | {"head.bias": torch.full((1,), bias)})
        return site

    return make


def test_slices_are_measured_by_case_too(slices):
    """Lesion everywhere. P, of 2048 voxels 1280 in its mask: Dice 2560/3328 = 10/13, IoU 5/8; Q: 1024/1536 = 2/3 and 1/2;
    mean Dice 28/39, half their difference 2/39 is the deviation; IoU 9/16 ± 1/16. The three images' Dice are 1, 2/5 and 2/3,
    mean 31/45. Nothing anywhere: 0."""
    site = slices(volumes="patient")
    found = evaluate(site)
    assert found["before_calibration"]["dice"]["mean"] == pytest.approx(31 / 45)
    before = found["volumes"]["before_calibration"]
    assert before == {
        "dice": pytest.approx({"mean": 28 / 39, "std": 2 / 39, "n": 2}),
        "iou": pytest.approx({"mean": 9 / 16, "std": 1 / 16, "n": 2}),
    }
    nothing = {"mean": 0.0, "std": 0.0, "n": 2}
    assert found["volumes"]["final"] == {"dice": nothing, "iou": nothing}
    rows = rows_of(site, "cases.csv")
    assert [(row["network"], row["case"]) for row in rows] == [(s, case) for s in ("start", "tuned") for case in ("P", "Q")]
    assert [float(row["dice"]) for row in rows] == pytest.approx([10 / 13, 2 / 3, 0, 0])
    assert len(rows_of(site)) == 6


def test_images_of_one_patient_are_no_volume_by_themselves(slices):
    site = slices()
    assert evaluate(site).keys() == {"before_calibration", "final", "peers"}
    assert not (site.store.folder / "cases.csv").exists()


def test_disc_and_cup_are_stored_and_summarized_apart(plan_for, open_site, toy, tiny_root, tmp_path, monkeypatch):
    """Disc everywhere, cup nowhere. Image a has a disc of 512 pixels of 1024 and in it a cup of 256; b a disc of 1024, no cup.

    Disc: Dice 1024/1536 = 2/3 and 1, mean 5/6 ± 1/6. Cup: 0 and, empty in both, 1, mean 1/2 ± 1/2. Means over classes: 1/3
    and 1, so 2/3 ± 1/3. The cup's distance at a is the diagonal, 32 √2. By case, both are one volume: the disc 3072/3584 =
    6/7, the cup 0 (256 of 2048 voxels are not found), mean 3/7. A peer with the same network has the same.
    """
    data = shutil.copytree(tiny_root / "site-1", tmp_path / "data")
    metadata = json.loads((data / "dataset.json").read_text()) | {"classes": ["disc", "cup"], "volumes": "patient"}
    (data / "dataset.json").write_text(json.dumps(metadata))
    stems = [row.image for row in SiteFolder.open(data).rows_of("test")]
    for stem, disc, cup in zip(stems, (512, 1024), (256, 0), strict=True):
        mask = np.zeros(1024, np.uint8)
        mask[:disc] = 1
        mask[:cup] = 2
        write_png(data / f"masks/{stem}.png", mask.reshape(32, 32))
    site = open_site(plan_for(network=toy, method="fedavg", classes=("disc", "cup")), data=data)
    head = {"head.weight": torch.zeros(2, 4, 1, 1), "head.bias": torch.tensor([50.0, -50.0])}
    site.store.write("start", site.network.state_dict() | head)
    monkeypatch.setattr("feddp.stages.evaluate.peer_networks", lambda site: {"site-2": tensors(site, "start")})
    found = evaluate(site)
    assert found["peers"] == {"site-2": found["final"]}
    third, half = pytest.approx({"mean": 2 / 3, "std": 1 / 3, "n": 2}), pytest.approx({"mean": 0.5, "std": 0.5, "n": 2})
    disc = pytest.approx({"mean": 5 / 6, "std": 1 / 6, "n": 2})
    final = found["final"]
    assert (final["dice"], final["dice_disc"], final["dice_cup"]) == (third, disc, half)
    assert final["assd_cup"]["mean"] == pytest.approx(16 * 2**0.5)
    assert tuple(final) == columns(METRICS, ("disc", "cup"))
    cases = {name: cell["mean"] for name, cell in found["volumes"]["final"].items() if name.startswith("dice")}
    assert cases == pytest.approx({"dice": 3 / 7, "dice_disc": 6 / 7, "dice_cup": 0})
    images = {row["image"]: (float(row["dice_disc"]), float(row["dice_cup"])) for row in rows_of(site)}
    assert images == {stems[0]: pytest.approx((2 / 3, 0)), stems[1]: (1, 1)}
    (case,) = rows_of(site, "cases.csv")
    assert (float(case["dice_disc"]), float(case["dice_cup"])) == pytest.approx((6 / 7, 0))
    # what a version that had means alone of peers left is kept: their networks are gone, nobody could measure them again
    found["peers"]["site-2"] = {metric: found["final"][metric] for metric in METRICS}
    site.keep_evaluation(found)
    assert evaluate(site) == found


def test_of_one_class_nothing_is_stored_twice(slices):
    site = slices(volumes="patient")
    found = evaluate(site)
    assert tuple(found["final"]) == METRICS
    header = (site.store.folder / "images.csv").read_text().splitlines()[0]
    assert header == "network,image,dice,iou,hd,hd95,assd,assd-medpy"
    assert (site.store.folder / "cases.csv").read_text().splitlines()[0] == "network,case,dice,iou"


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"channels": 1}, {"classes": ("disc", "cup")}, {"labels": "exclusive"}])
def test_a_folder_that_does_not_fit_the_job_is_refused(plan_for, open_site, toy, changes):
    with pytest.raises(FedDPError, match="site site-1: .*dataset.json"):
        open_site(plan_for(network=toy, **changes))


def test_an_empty_split_is_named(plan_for, open_site, toy, tiny_root, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(tiny_root / "site-1", data)
    table = data / "split.csv"
    table.write_text(table.read_text().replace(",val", ",train"))
    with pytest.raises(FedDPError, match=f"site site-1: .*split.csv has {STARVED}; add some, or .*: --set selection=test$"):
        open_site(plan_for(network=toy), data=data)
    # and where the test images choose, as in the paper, there is nothing missing
    site = open_site(plan_for(network=toy, selection="test"), data=data)
    assert (len(site.samples), len(site.validation)) == (10, 2)
    table.write_text(table.read_text().replace(",test", ",val"))
    with pytest.raises(FedDPError, match=r"site site-1: .*split.csv has no image in split test; add some$"):
        open_site(plan_for(network=toy), data=data)


def test_where_the_test_images_select_validation_images_are_trained_on(plan_for, open_site, toy):
    """8 and 2 images: 10 train, as in the papers, where train and val are one; 2 others select and test."""
    for selection, trained in (("val", ("train",)), ("test", ("train", "val"))):
        site = open_site(plan_for(network=toy, selection=selection), at=selection)
        stems = [row.image for split in trained for row in site.folder.rows_of(split)]
        assert [sample["stem"] for sample in site.samples] == stems
        assert len(stems) == {"val": 8, "test": 10}[selection]
        _, metrics = train(site, first(site), 0)
        assert metrics["samples"] == len(stems)
    assert [s["stem"] for s in site.validation] == [s["stem"] for s in site.test]
    assert not {s["stem"] for s in site.test} & set(stems)


@pytest.mark.parametrize("device", ["cuda:63", "gpu"])
def test_a_device_that_is_not_there_is_named(device, plan_for, open_site, toy):
    with pytest.raises(FedDPError, match=f"site site-1: device {device} cannot be used"):
        open_site(plan_for(network=toy), device=device)


# --- a network with batch normalisation -------------------------------------------------------------------------------


def test_a_convolutional_network_averages_its_statistics(plan_for, open_site, resnet):
    """8 images make 2 steps of 4 at site-1 and 1 step of 8 at site-2: counters 2 and 1.

    Weighed 3 : 1 their mean is 7/4, rounded 2 (cut off, 1). A running mean is (3 m_1 + m_2)/4.
    """
    plans = {name: plan_for(network=resnet, method="fedavg", batch=b) for name, b in (("site-1", 4), ("site-2", 8))}
    sites = {name: open_site(plan, name) for name, plan in plans.items()}
    sent = {name: train(site, first(site), 0)[0] for name, site in sites.items()}
    mean = average(sent, {"site-1": 3.0, "site-2": 1.0})
    counters = [name for name in mean if name.endswith("num_batches_tracked")]
    statistics = [name for name in mean if name.endswith("running_mean")]
    assert counters
    assert len(counters) == len(statistics)
    for name in counters:
        assert [sent[s][name].item() for s in EVEN] == [2, 1]
        assert mean[name].item() == 2
        assert mean[name].dtype == torch.int64
    for name in statistics:
        one, two = (sent[s][name] for s in EVEN)
        assert not one.equal(two)
        assert torch.allclose(mean[name], (3 * one + two) / 4, atol=1e-6)
    assert adopt(sites["site-1"], mean, 1).keys() == {"dice", "iou"}


def test_a_site_places_what_it_trains_and_chooses_with(plan_for, open_site, toy, monkeypatch):
    """Training and validation images are read in every round, test images in the evaluation alone. Where the GPU's memory was
    too small they are loaded anew, and no longer placed."""
    counts = []
    copied = lambda samples, device: counts.append((len(samples), device.type)) or [*samples]  # noqa: E731
    monkeypatch.setattr("feddp.stages.site.placed", copied)
    site = open_site(plan_for(network=toy))
    assert not site.leave_gpu(), "nothing lay there"
    site = open_site(plan_for(network=toy))
    before = site.samples, site.validation
    assert [len(samples) for samples in (*before, site.test)] == [8, 2, 2]
    assert counts == [(8, "cpu"), (2, "cpu")]
    assert site.leave_gpu()
    assert not site.leave_gpu(), "nothing is left there"
    assert not any(one is other for one, other in zip(before, (site.samples, site.validation), strict=True))
    assert [len(site.samples), len(site.validation), len(site.placed(site.test))] == [8, 2, 2]
    assert len(counts) == 2


def test_graphs_of_the_network_leave_the_gpu_with_the_images(open_site, plan_for, toy, monkeypatch):
    """They hold memory as well, so the task is worth another attempt where they alone lay there."""
    left = []
    monkeypatch.setattr("feddp.stages.site.leave", lambda network: left.append(network) or len(left) == 1)
    site = open_site(plan_for(network=toy))
    assert site.leave_gpu()
    assert not site.leave_gpu()
    assert left == [site.network] * 2


def test_the_calibration_places_its_maps(adopted, monkeypatch):
    """Else δ's maps would be collated on the CPU, and copied for each batch."""
    one, two = adopted()
    placed, trained = [], []
    monkeypatch.setattr(one, "placed", lambda samples: placed.extend(samples) or placed)
    monkeypatch.setattr("feddp.stages.calibrate.tuned", lambda *given: trained.append(given[-1]))
    calibrate(one, {"site-2": personal(two)})
    assert trained[0] is placed
    assert len(placed) == 8
    assert all("delta" in sample for sample in placed)
