"""FedLC's stage of exchanged heads, at two sites after a round of stage 1."""

import math
import shutil

import pytest
import torch

from benchmarks.small import shallow
from feddp.data.folder import SiteFolder
from feddp.errors import FedDPError
from feddp.methods.aggregation import average
from feddp.networks import NETWORKS
from feddp.networks.weights import load_personal
from feddp.plan.resolve import build_network
from feddp.stages import heads
from feddp.stages.calibrate import calibrate, personal
from feddp.stages.evaluate import evaluate
from feddp.stages.site import Site
from feddp.stages.train import adopt, train
from feddp.training.calibration import with_inconsistency
from feddp.training.loop import fit_epoch, predict
from feddp.training.store import Store

EVEN = {"site-1": 1.0, "site-2": 1.0}
HEAD = {"segmentation_head.0.weight", "segmentation_head.0.bias"}


@pytest.fixture(scope="module", autouse=True)
def _shallow():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETWORKS, "pvt", shallow)
        yield


def plan_of(plan_for, **changes):
    return plan_for(method="fedlc", network="pvt", **({"rounds": 1, "heads_epochs": 3, "heads_lr": 0.01} | changes))


@pytest.fixture(scope="module")
def stage_1(plan_for, tiny_root, tmp_path_factory):
    """The two sites' files after a round and its adoption. Copy it, do not write."""
    folder, plan = tmp_path_factory.mktemp("fedlc"), plan_of(plan_for)
    sites = [Site(name, SiteFolder.open(tiny_root / name), plan, Store(folder / name)) for name in EVEN]
    gamma = sites[0].partition.split(sites[0].network.state_dict())[0]
    gamma = average({site.name: train(site, gamma, 0)[0] for site in sites}, EVEN)
    for site in sites:
        adopt(site, gamma, 1)
    torch.set_deterministic_debug_mode("default")
    return folder


@pytest.fixture
def open_sites(stage_1, plan_for, tiny_root, tmp_path):
    """Opens both sites after stage 1, as new processes would; `at` is where their files lie."""

    def open(at="run", **changes) -> list[Site]:
        if not (tmp_path / at).exists():
            shutil.copytree(stage_1, tmp_path / at)
        plan = plan_of(plan_for, **changes)
        return [Site(name, SiteFolder.open(tiny_root / name), plan, Store(tmp_path / at / name)) for name in EVEN]

    return open


@pytest.fixture
def ious(monkeypatch):
    """Makes the validation IoUs of the stage be these, the start's first."""

    def make(*values):
        scores = iter(values)
        monkeypatch.setattr("feddp.stages.site.mean_scores", lambda *_: {"iou": next(scores), "dice": 0.0})

    return make


def epoch_of(sites, epoch):
    """One epoch of all `sites`, as the server leads it; returns the exchanged heads and what the sites answered."""
    given = {site.name: heads.head(site, epoch) for site in sites}
    peers = {name: {other: head for other, head in given.items() if other != name} for name in given}
    return given, [heads.calibrate(site, peers[site.name], epoch) for site in sites]


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def part(state, names):
    return {name: state[name] for name in names}


def slot(site, name):
    return site.store.read(name)[0]


def test_heads_are_exchanged_anew_at_every_epoch(open_sites):
    """The heads given at epoch e are those after epoch e − 1, the first are stage 1's; a site calibrates by exactly those.
    Head and calibrator change in every epoch; the body never, to the bit."""
    sites = open_sites()
    now = [slot(site, "start") for site in sites]
    body = sites[0].partition.shared
    for epoch in (1, 2, 3):
        given, answers = epoch_of(sites, epoch)
        assert [len(answer.losses) for answer in answers] == [epoch, epoch]
        for k, site in enumerate(sites):
            assert same(given[site.name], part(now[k], HEAD))
            after = site.copy()
            peer = given[sites[1 - k].name]
            assert after["calibrator.weights"][1 - k].equal(peer["segmentation_head.0.weight"])
            assert after["calibrator.biases"][1 - k].equal(peer["segmentation_head.0.bias"])
            assert after["calibrator.known"].tolist() == [k == 1, k == 0]
            assert same(part(after, body), part(now[k], body))
            for name in (*HEAD, "calibrator.out.weight", "calibrator.out.bias"):
                assert not after[name].equal(now[k][name])
            now[k] = after
    assert not same(part(now[0], HEAD), part(now[1], HEAD))


@pytest.mark.parametrize(
    ("scores", "best"),
    [((0.5, 0.4, 0.7, 0.6), 2), ((0.9, 0.4, 0.5, 0.3), 2), ((0.1, 0.2, 0.2, 0.1), 1), ((0.1, 0.2, 0.2, 0.3), 3)],
)
def test_the_best_epoch_is_kept(open_sites, ious, scores, best):
    """Be it worse than the start, whose network has no calibrated head. An equal score keeps the earlier epoch's."""
    site = open_sites()[0]
    ious(*scores)
    states = [slot(site, "start")]
    for epoch in (1, 2, 3):
        answer = heads.calibrate(site, {}, epoch)
        states.append(site.copy())
    assert (answer.scores, answer.best) == (list(scores), best)
    assert same(slot(site, "heads"), states[best])
    assert not any(same(states[best], state) for epoch, state in enumerate(states) if epoch != best)


def test_the_heads_have_a_learning_rate_of_their_own(open_sites, monkeypatch):
    """SGD in AdamW's place, on a loss whose gradient by each bias of the head is 1: two steps take 2 · heads_lr = 0.08 off."""
    site = open_sites(heads_lr=0.04, lr=7.0)[0]
    monkeypatch.setattr("feddp.stages.site.adamw", lambda network, lr, _: torch.optim.SGD(network.parameters(), lr=lr))
    site.method.loss = lambda site, logits, batch: site.network.segmentation_head[0].bias.sum()
    before = slot(site, "start")["segmentation_head.0.bias"]
    heads.calibrate(site, {}, 1)
    torch.testing.assert_close(site.copy()["segmentation_head.0.bias"], before - 0.08)


def test_epochs_go_on_from_each_other(open_sites, monkeypatch):
    """8 samples in batches of 4 are 2 steps: AdamW counts 2, 4, 6. Every epoch draws anew, and none as the round before."""
    seeds = []

    def spy(*given):
        seeds.append(given[5])
        return fit_epoch(*given)

    monkeypatch.setattr("feddp.stages.round.fit_epoch", spy)
    site = open_sites()[0]
    train(site, site.partition.split(build_network(site.plan).state_dict())[0], 0)
    for epoch in (1, 2, 3):
        heads.calibrate(site, {}, epoch)
        history = site.store.load_state(1 + epoch).optimizer
        assert {value.item() for name, value in history.items() if name.endswith("/step")} == {2 * epoch}
        assert {name.split(".")[0] for name in history} == {"segmentation_head", "calibrator"}
    assert len(set(seeds)) == 4


def test_a_fresh_process_and_an_epoch_that_comes_again_give_the_same_bits(open_sites):
    """One process for both epochs; a process for each step; and the second epoch twice, then both once more."""
    sites = open_sites("one")
    answers = [epoch_of(sites, epoch) for epoch in (1, 2)]
    wanted = [(slot(site, "state_00003"), slot(site, "heads")) for site in sites]

    def check(epoch):
        fresh = open_sites("fresh")
        given, found = epoch_of(fresh, epoch)
        assert all(same(given[name], answers[epoch - 1][0][name]) for name in EVEN)
        assert found == answers[epoch - 1][1]

    for epoch in (1, 2, 2, 1, 2):
        torch.manual_seed(epoch)
        check(epoch)
    for site, (state, network) in zip(open_sites("fresh"), wanted, strict=True):
        assert same(slot(site, "state_00003"), state)
        assert same(slot(site, "heads"), network)


def test_a_head_that_is_none_is_left_out_and_the_others_are_used(plan_for, stage_1, tiny_root, tmp_path):
    """Of site-2's and site-3's heads the latter is NaN: the epoch ends in the bits of one with site-2's alone."""
    ends, told = [], {}
    for at, more in (("alone", {}), ("both", {"site-3": math.nan})):
        shutil.copytree(stage_1, tmp_path / at)
        one, two = (Site(n, SiteFolder.open(tiny_root / n), plan_of(plan_for), Store(tmp_path / at / n)) for n in EVEN)
        given = heads.head(two, 1)
        bad = {site: {name: value * factor for name, value in given.items()} for site, factor in more.items()}
        heads.calibrate(one, {"site-2": given} | bad, 1, told.__setitem__)
        ends.append(slot(one, "heads"))
    assert same(*ends)
    assert [*told] == ["site-3"]
    assert "site site-3: segmentation_head.0.weight holds values that are not finite" in str(told["site-3"])


@pytest.mark.parametrize(
    ("peers", "message"),
    [
        (lambda head: {"site-2": head | {"extra": torch.zeros(1)}}, "site site-2: .*extra is not expected"),
        (lambda head: {"site-2": {n: v for n, v in head.items() if "bias" not in n}}, "site site-2: .*bias is missing"),
        (lambda head: {"site-2": {n: v[:, :1] if v.ndim > 1 else v for n, v in head.items()}}, "site site-2: .*weight is"),
        (lambda head: {"site-2": {n: v * math.inf for n, v in head.items()}}, "site site-2: .*not finite"),
        (lambda head: {"site-9": head}, "site site-9 is not among the job's sites site-1, site-2"),
    ],
    ids=["extra", "missing", "shape", "infinite", "unknown site"],
)
def test_a_peer_s_wrong_head_is_named(open_sites, peers, message):
    one, two = open_sites()
    with pytest.raises(FedDPError, match=message):
        heads.calibrate(one, peers(heads.head(two, 1)), 1)
    assert one.store.load_state(9).round == 1


def test_a_saved_network_predicts_on_its_own(open_sites, ious):
    """From its file alone, the peers' heads among its tensors: to the bit what the site's network says."""
    ious(0.1, 0.2)
    one, two = open_sites()
    heads.calibrate(one, {"site-2": heads.head(two, 1)}, 1)
    wanted = [maps for maps, _ in predict(one.network, one.test)]
    for name, equal in (("heads", True), ("start", False)):
        network = load_personal(one.store.folder / f"{name}.safetensors")
        assert network.calibrator.active == equal
        assert all(maps.equal(other) == equal for (maps, _), other in zip(predict(network, one.test), wanted, strict=True))


def test_igc_after_the_exchange_rebuilds_the_peer_s_network(open_sites, ious, monkeypatch):
    """Head and calibrator are all that differs from the common start, so they are what is given; the rebuilt network is the
    peer's to the bit, with the peer's place among the sites and the heads it had received."""
    sites = one, two = open_sites(stages=("train", "heads", "calibrate"), heads_epochs=1)
    ious(*(0.1, 0.2) * 2)
    epoch_of(sites, 1)
    assert personal(two).keys() == set(two.partition.private)
    seen = []

    def spy(network, peers, *rest):
        seen.append(peers)
        return with_inconsistency(network, peers, *rest)

    monkeypatch.setattr("feddp.stages.calibrate.with_inconsistency", spy)
    tuned = calibrate(one, {"site-2": personal(two)})
    assert same(seen[0]["site-2"], slot(two, "heads"))
    assert seen[0]["site-2"]["embedding.one_hot"].tolist() == [0, 1]
    assert len(tuned.losses) == 1
    assert evaluate(one)["peers"].keys() == {"site-2"}
