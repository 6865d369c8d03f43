"""One malicious site of four, in one process: the mean follows it, the robust rules and the norm's bound do not."""

import json
import threading

import pytest
import torch

from feddp.data.synthesize import synthesize
from feddp.errors import ContributionError, InputError
from feddp.flare.context import SiteContext
from feddp.flare.kept import kept_below
from feddp.flare.policy import SitePolicy
from feddp.stages import train
from feddp.stages.memory import ServerMemory
from feddp.stages.site import Site
from feddp.stages.tensors import Expected
from support.poisoned import Poisoned

SITES = ("site-1", "site-2", "site-3", "site-4")
HONEST, MALICIOUS = SITES[:3], SITES[3]
LARGE = "times 1000", "sign flipped"  # the attacks whose norm is above an honest one
DEFENCES = {"median": {"aggregation": "median"}, "trimmed": {"aggregation": "trimmed"}, "norm": {"norm_factor": 3.0}}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    root = tmp_path_factory.mktemp("four")
    synthesize(root, sites=4, images=12, size=32)
    return root


@pytest.fixture
def federation(toy, plan_for, four, tmp_path, monkeypatch):
    """Runs FedAvg for two rounds, or as many as `changes` say; returns γ, the progress's events and the last contributions.

    `absent` are sites of the plan that never join.
    """

    # no other defence than the one that a test names; the server of this stage alone knows no bound either
    monkeypatch.setattr(Site, "require_near", lambda *_: None)

    def run(attack, sites=SITES, absent=(), **changes):
        plan = plan_for(**{"method": "fedavg", "network": toy, "sites": sites, "min_sites": 3, "start": "last"} | changes)
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        contexts = {}
        for name in [name for name in sites if name not in absent]:
            policy = SitePolicy.of(
                name, SitePolicy.admitting(plan) | {"data": str(four / name), "seed": "plan"}, simulated=True
            )
            contexts[name] = SiteContext(name, "job", Expected(plan), None, policy, kept_below(folder / name), simulated=True)
        server = Poisoned(
            ServerMemory(plan, "job", folder, folder / "kept", folder), contexts, threading.Event(), folder / "log"
        )
        server.malicious, server.attack = MALICIOUS, attack
        train.serve(server)
        events = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
        return server.memory.load("shared_latest")[0], events

    return run


def flat(state):
    return torch.cat([value.flatten().double() for value in state.values() if value.is_floating_point()])


@pytest.fixture(scope="module")
def learned():
    """What the honest sites learn: filled once."""
    return {}


@pytest.fixture
def honest(federation, learned):
    """γ² of four honest sites and of three."""
    for sites in (SITES, HONEST):
        if sites not in learned:
            learned[sites] = federation("none", sites)[0]
    return learned[SITES], learned[HONEST]


@pytest.mark.parametrize("attack", LARGE)
def test_the_mean_follows_a_malicious_site(federation, honest, attack):
    """γ² of four honest sites has some norm d from γ² of three. With a contribution of the norm N times 1000, the mean is
    off by about 250 N; with a flipped one, by about N/2. Both are far more than d."""
    four, alone = map(flat, honest)
    broken = flat(federation(attack)[0])
    assert (broken - alone).norm() > 10 * (four - alone).norm()


@pytest.mark.parametrize("attack", LARGE)
@pytest.mark.parametrize("defence", DEFENCES)
def test_a_defence_keeps_what_the_honest_sites_learn(federation, honest, attack, defence):
    """Robust rules stay as near to the three honest sites' γ² as four honest sites do, within a factor of 3."""
    four, alone = map(flat, honest)
    kept = flat(federation(attack, **DEFENCES[defence])[0])
    assert (kept - alone).norm() <= 3 * (four - alone).norm()


@pytest.mark.parametrize("attack", LARGE)
def test_a_refused_norm_leaves_the_honest_sites_bits_and_is_in_the_progress(federation, honest, attack):
    _, alone = honest
    kept, events = federation(attack, norm_factor=3)
    assert all(kept[name].equal(value) for name, value in alone.items())
    refused = [(event["site"], event["task"], event["round"]) for event in events if event["event"] == "refused"]
    assert refused == [(MALICIOUS, "train", 1), (MALICIOUS, "train", 2)]
    reason = next(event["reason"] for event in events if event["event"] == "refused")
    assert reason.startswith(f"site {MALICIOUS}: its tensors changed by ")
    assert "norm_factor=3 times the median norm" in reason


def test_a_refused_norm_counts_against_min_sites(federation):
    with pytest.raises(ContributionError, match=f"train: 3 of 4 sites .* min_sites=4. site {MALICIOUS}: its tensors changed"):
        federation("times 1000", norm_factor=3, min_sites=4)


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_each_number_stays_between_the_honest_ones(federation, rule, monkeypatch):
    """Of four values with one malicious one, the highest and the lowest are left out: the two others are each honest, or have
    honest values on both sides."""
    seen = []
    combine = train.combine

    def noted(rule, sent, weights):
        mean = combine(rule, sent, weights)
        seen.append(({site: dict(tensors) for site, tensors in sent.items()}, mean))
        return mean

    monkeypatch.setattr(train, "combine", noted)
    federation("times 1000", aggregation=rule, rounds=1)
    sent, mean = seen[0]
    for name, value in mean.items():
        honest = torch.stack([sent[site][name] for site in HONEST])
        assert (value >= honest.amin(0)).all()
        assert (value <= honest.amax(0)).all()


@pytest.mark.parametrize("defence", DEFENCES)
def test_two_sites_cannot_outvote_one(federation, defence):
    """Neither in a plan of two sites nor where only two of three answer."""
    with pytest.raises(InputError, match="needs 3 sites, but there are 2"):
        federation("none", SITES[:2], **DEFENCES[defence], min_sites=2)
    with pytest.raises(ContributionError, match="2 contributions .* need 3; start the other sites again"):
        federation("none", SITES[:3], absent=SITES[2:], **DEFENCES[defence], min_sites=2)
