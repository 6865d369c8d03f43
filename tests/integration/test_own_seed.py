"""A site's own part of the seed: what it draws, nobody who knows the plan can say; what all must agree on stays the plan's."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey

from feddp import protocol
from feddp.adaptation.request import AdaptationRequest
from feddp.data.folder import SiteFolder
from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.flare.kept import SECRET, files_of, secret_of
from feddp.flare.policy import SitePolicy
from feddp.flare.workspace import kept
from feddp.plan.resolve import build_network
from feddp.run.options import Options, run_here
from feddp.stages import spectra
from feddp.stages.adapt import _seeded
from feddp.stages.site import Site
from feddp.stages.train import adopt, train
from feddp.stages.tune import tune
from feddp.training.loop import batches
from feddp.training.seeds import seed_of
from feddp.training.store import Store

ONE, OTHER = "1" * 64, "2" * 64


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.fixture
def plan_for(plan_for, pvt):
    """On narrow layers: what the sites draw does not depend on how many numbers they train."""
    return lambda **changes: plan_for(**({"network": pvt} | changes))


@pytest.fixture
def open_site(plan_for, tiny_root, tmp_path):
    """Opens site-1 as a new process would, with a secret; every call has files of its own, unless `at` says where they lie."""
    calls = iter(range(100))

    def open(secret="", at=None, job="", **plan):
        store = Store(tmp_path / (at or str(next(calls))))
        return Site("site-1", SiteFolder.open(tiny_root / "site-1"), plan_for(**plan), store, secret=secret, run=job)

    return open


def first(site):
    return site.partition.split(build_network(site.plan).state_dict())[0]


@pytest.mark.parametrize("method", ["ttt", "feddg", "pflfe"])
def test_what_is_trained_follows_from_secret_and_plan(open_site, method):
    """The same secret, the same bits, in another process too; another secret, other bits; the start is the plan's alone."""
    sent, networks = {}, {}
    for name, secret in (("none", ""), ("one", ONE), ("again", ONE), ("other", OTHER)):
        site = open_site(secret, method=method)
        if method == "feddg":
            spectra.keep(site, {"site-2": spectra.given(open_site(method=method), 2)})
        networks[name] = site.copy()
        sent[name] = train(site, first(site), 0)[0]
    assert same(sent["one"], sent["again"])
    assert all(same(networks["none"], network) for network in networks.values())
    for name in ("none", "other"):
        assert not same(sent["one"], sent[name])


@pytest.mark.parametrize("augment", [True, False])
def test_order_augmentation_and_dropout_are_drawn_from_it(open_site, toy, monkeypatch, augment):
    """What the loop is given as its seed, and the order of images that follows from it: not what the plan's seed says."""
    seen = []

    def spy(samples, batch, seed, augment, device=None):
        parts = list(batches(samples, batch, seed, augment, device))
        if seed is not None:
            seen.append([stem for part in parts for stem in part["stem"]])
        return iter(parts)

    monkeypatch.setattr("feddp.training.loop.batches", spy)
    orders, losses = [], []
    for secret in ("", ONE, OTHER):
        site = open_site(secret, network=toy, augment=augment)
        losses.append(train(site, first(site), 0)[1]["loss"])
        orders.append(seen[-1])
    by_plan = seed_of(seed_of(site.plan.seed, "site-1", 0, 0), "order")
    known = [stem for part in batches(site.samples, site.plan.training.batch, by_plan, False) for stem in part["stem"]]
    assert orders[0] == known, "the control: without a secret, the plan's seed says the order"
    assert orders[1] != known != orders[2] != orders[1]
    assert len(set(losses)) == 3


def test_dropout_alone_differs(open_site, toy):
    """One batch of all eight images, not turned: the order of a batch has no part in its mean, but for the last digits."""
    losses = []
    for secret in ("", ONE):
        site = open_site(secret, network=toy, batch=8, augment=False)
        losses.append(train(site, first(site), 0)[1]["loss"])
    assert abs(losses[0] - losses[1]) > 1e-4
    plain = []
    for secret in ("", ONE):
        site = open_site(secret, network=toy, batch=8, augment=False)
        site.network.drop.p = 0.0
        plain.append(train(site, first(site), 0)[1]["loss"])
    assert plain[0] == pytest.approx(plain[1], abs=1e-6), "the control"


def test_the_tunings_at_home_are_drawn_from_it(open_site, toy):
    """From the same network, in the store of each."""
    ends = []
    for secret in ("", ONE, ONE):
        site = open_site(secret, network=toy, method="finetune", tune_epochs=1, tune_lr=0.1)
        adopt(site, first(site), 0)
        tune(site)
        ends.append(site.network.state_dict())
    site = open_site(network=toy, method="finetune", tune_epochs=1, tune_lr=0.1)
    seeds = [site.seed("tuned"), open_site(ONE, network=toy).seed("tuned")]
    assert seeds == [(0, "site-1", "tuned"), (ONE, "", 0, "site-1", "tuned")]
    assert same(ends[1], ends[2])


def test_which_patients_are_a_group_is_drawn_from_it(open_site):
    """Two groups of two of four patients, which six draws tell apart; with the plan's seed alone a lead knows which."""

    def drawn(secret):
        given = spectra.given(open_site(secret, method="feddg", spectra=4), 2)
        return str(given["amplitude"].tolist())

    assert drawn("") == drawn("")
    found = [drawn(str(digit) * 64) for digit in (*range(8), *range(8))]
    assert found[:8] == found[8:]
    assert len(set(found)) > 1, "the chance that eight draws are alike is 6 ** -7"


def test_a_killed_process_goes_on_to_the_same_bits(open_site, toy):
    one, two = open_site(ONE, network=toy), None
    gamma = first(one)
    wanted = train(one, train(one, gamma, 0)[0], 1)[0]
    for round in range(2):
        two = open_site(ONE, at="resumed", network=toy)
        torch.manual_seed(99)
        gamma, _ = train(two, gamma, round)
    assert same(gamma, wanted)


# --- at a real site -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hospital(hospital, plan_for, toy):
    return partial(hospital, plan=plan_for(network=toy, rounds=3))


def trained(hospital, round=0):
    answer = hospital.executed(protocol.TRAIN, hospital.shared, round=round, phase=0)
    return messages.unpack(answer)[0]


def test_a_policy_says_own_unless_it_says_plan(hospital, open_site, toy):
    """Of the same site and plan: by default the secret that its workspace holds, with "plan" a plain loop's bits."""
    site = hospital()
    mine = trained(site)
    secret = (site.folder / "feddp/site.secret").read_text()
    plain = open_site(network=toy, rounds=3)
    assert not same(mine, train(plain, first(plain), 0)[0])
    known = open_site(secret, job="job", network=toy, rounds=3)
    assert same(mine, train(known, first(known), 0)[0])
    assert same(trained(hospital(seed="plan").submitted(site.plan, seed="plan")), train(plain, first(plain), 0)[0])


@pytest.mark.parametrize("how", ["plan", "simulated"])
def test_where_the_plan_decides_no_secret_is_drawn(hospital, how, open_site, toy):
    site = hospital(**{"seed": "plan"} if how == "plan" else {})
    if how == "simulated":
        site.fl_ctx.set_prop(FLContextKey.SIMULATE_MODE, True)
    plain = open_site(network=toy, rounds=3)
    assert same(trained(site), train(plain, first(plain), 0)[0])
    assert not (site.folder / "feddp/site.secret").exists()


def test_the_secret_is_the_sites_for_all_jobs_and_in_no_file_of_theirs(hospital, caplog):
    """Drawn once, 64 digits, its owner's alone; another process reads the same. After training, adoption and evaluation it is
    in no other file of the workspace, in no log line, and in nothing that the guard sends."""
    caplog.set_level(0)
    before = os.umask(0o022)
    try:
        site = hospital()
        gamma = trained(site)
    finally:
        os.umask(before)
    path = site.folder / "feddp/site.secret"
    secret = path.read_text()
    assert (len(secret), len(set(secret)) > 4, path.stat().st_mode & 0o777) == (64, True, 0o600)
    site.submitted(site.plan)
    trained(site, 1)
    adopt(site.open(), gamma, 1)
    sent = site.sends(protocol.EVALUATE, site.executed(protocol.EVALUATE))
    assert path.read_text() == secret
    others = [other.read_bytes() for other in site.folder.rglob("*") if other.is_file() and other != path]
    assert len(others) > 5
    assert not any(secret.encode() in content or bytes.fromhex(secret) in content for content in others)
    assert secret not in caplog.text
    assert secret not in str(sent)


@pytest.mark.parametrize("content", ["", "secret", ONE + "\n", "G" * 64])
def test_a_secret_that_is_none_is_named(tmp_path, content):
    (tmp_path / "site.secret").write_text(content)
    with pytest.raises(FedDPError, match="secret does not hold 64 hexadecimal digits; remove it"):
        secret_of(tmp_path)
    (tmp_path / "site.secret").unlink()
    assert secret_of(tmp_path) == secret_of(tmp_path)


def test_processes_that_ask_at_once_get_one_secret(tmp_path):
    command = "from pathlib import Path; from feddp.flare.kept import secret_of; print(secret_of(Path('feddp')))"
    run = [sys.executable, "-c", command]
    jobs = [subprocess.Popen(run, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {job.communicate(timeout=300)[0].strip() for job in jobs} == {(tmp_path / "feddp/site.secret").read_text()}


def test_no_job_is_called_like_the_secret(hospital):
    """A server may give a job any id: its folder would lie where the secret does."""
    site = hospital()
    with pytest.raises(FedDPError, match="'site.secret' is not a job's id"):
        files_of(kept(site.fl_ctx), SECRET)
    assert files_of(kept(site.fl_ctx), "secret").name == "secret"


def test_two_jobs_of_one_seed_draw_in_other_orders(open_site, toy):
    """Else a batch of one image less, in a second job of the same seed, leaves out a known image and nothing else: the
    difference of the two means is that image's. One job in two processes draws the same."""
    one, again, other = (open_site(ONE, job=job, network=toy, rounds=3) for job in ("a", "a", "b"))
    assert one.seed("order") == again.seed("order") != other.seed("order")
    assert same(train(one, first(one), 0)[0], train(again, first(again), 0)[0])
    assert not same(train(one, first(one), 0)[0], train(other, first(other), 0)[0])


def test_every_job_is_given_the_means_of_the_same_groups(open_site):
    """Means of many groups would give each patient's own otherwise, by equations. Another secret draws others."""
    given = [spectra.given(open_site(s, job=j, method="feddg", seed=n, spectra=2), 2) for s, j, n in SPECTRA_OF]
    assert same(given[0], given[1])
    assert not same(given[0], given[2])


SPECTRA_OF = ((ONE, "a", 0), (ONE, "b", 1), (OTHER, "a", 0))


def test_a_newcomer_s_draws_are_its_own():
    """The noise and the first routers come from the settings' seed, which a job says."""
    asked = AdaptationRequest("N", ("A",), "job", "routing", {"seed": 7, "epochs": 3}).request
    assert _seeded(asked, "") == asked
    own = _seeded(asked, ONE)
    assert own.settings.seed == seed_of(ONE, 7)
    assert replace(own, settings=replace(own.settings, seed=7)) == asked
    assert _seeded(asked, OTHER) != own


@pytest.mark.parametrize("wrong", ["", "mine", 1, None, ["own"]])
def test_a_seed_of_nobodys_is_refused(wrong):
    with pytest.raises(FedDPError, match="site x: privacy.json's seed is .*; write own or plan"):
        SitePolicy.of("x", {"data": "/d", "seed": wrong}, simulated=False)
    assert SitePolicy.of("x", {"data": "/d"}, simulated=False).seed == "own"


def test_a_run_on_this_machine_is_the_plans(tiny_root, tmp_path, monkeypatch):
    """So that a POC's bits are the simulator's."""
    seen = []
    monkeypatch.setattr("feddp.run.options.session.run", lambda request, *_, **__: seen.append(request.policies))
    for env in ("sim", "poc"):
        run_here(tiny_root, tmp_path / env, Options("fedavg", rounds=1, size=32), env)
    assert [policy["seed"] for policies in seen for policy in policies.values()] == ["plan"] * 4
