"""Which plans a hospital's policy takes, approved or not; and which no plan may be."""

import re
from dataclasses import fields
from functools import partial

import pytest
import torch

from feddp.data.loading import batches
from feddp.errors import FedDPError
from feddp.flare.bounds import Bounds
from feddp.flare.policy import SitePolicy
from feddp.kit.approve import read_job
from feddp.methods import METHODS
from feddp.plan.schema import Plan
from feddp.run.options import Options
from feddp.stages.train import train
from support import ROOT
from support.site import FlareSite

REQUIRED = {"channels": 3, "classes": ("lesion",), "labels": "nested"}
SITES = ("site-1", "site-2", "site-3")
SHA = "a" * 64
# a lead's job that takes an image in one step, once its tensors make a network write it there (issue 10, 2)
SINGLE = {"lr": 40, "batch": 1, "loss": "dice", "min_sites": 1, "rounds": 1}


def policy(**properties) -> SitePolicy:
    return SitePolicy.of("hospital", {"data": "x"} | properties, simulated=False)


@pytest.fixture
def usual(plan_for):
    """A plan within the bounds, and changes to it."""
    return lambda **changes: plan_for(**{"sites": SITES, "min_sites": 3} | changes)


@pytest.mark.parametrize("method", METHODS)
def test_every_methods_published_defaults_are_within_the_default_bounds(method):
    plan = Options(method=method, rounds=200, size=384).plan(REQUIRED, ["a", "b", "c", "d"])
    policy(approve="any").accept("hospital", plan)
    assert plan.federation.min_sites == 3


@pytest.mark.parametrize("folder", sorted((ROOT / "jobs").iterdir()), ids=lambda path: path.name)
def test_the_committed_jobs_are_within_the_default_bounds(folder):
    meta, job = read_job(folder)
    assert meta["name"] == folder.name
    assert policy().problems(job.plan) == []


def test_ordinary_jobs_count_with_three_sites_or_all_of_fewer():
    plans = {count: Options().plan(REQUIRED, [f"s{n}" for n in range(count)]) for count in (1, 2, 3, 9)}
    assert {count: plan.federation.min_sites for count, plan in plans.items()} == {1: 1, 2: 2, 3: 3, 9: 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_sites": 2}, "min_sites=2 is below its lower bound 3"),
        ({"sites": SITES[:2], "min_sites": 2}, "min_sites=2 is below"),
        ({"sites": SITES[:2]}, "the number of sites=2 is below its lower bound 3"),
        ({"batch": 3}, "batch=3 is below its lower bound 4"),
        ({"lr": 0.011}, "lr=0.011 is above its upper bound 0.01"),
        ({"tune_lr": 0.02}, "tune_lr=0.02 is above its upper bound 0.01"),
        ({"calibration_lr": 0.02}, "calibration_lr=0.02 is above"),
        ({"method": "fedlc", "heads_lr": 1}, "heads_lr=1.0 is above"),
        ({"clip": 1.5}, "clip=1.5 is above its upper bound 1.0"),
        ({"weight_decay": 0.2}, "weight_decay=0.2 is above its upper bound 0.1"),
        ({"local_epochs": 6}, "local_epochs=6 is above its upper bound 5"),
        ({"method": "fedrep", "head_epochs": 6}, "head_epochs=6 is above its upper bound 5"),
        ({"method": "pfedme", "inner_steps": 6}, "inner_steps=6 is above its upper bound 5"),
        ({"rounds": 1001}, "rounds=1001 is above its upper bound 1000"),
        ({"method": "fedlc", "heads_epochs": 1001}, "heads_epochs=1001 is above its upper bound 1000"),
        ({"calibration_epochs": 1001}, "calibration_epochs=1001 is above its upper bound 1000"),
        ({"augment": False}, "augment=false, but its bounds require augmentation"),
    ],
)
def test_beyond_a_bound_no_approval_helps(usual, changes, message):
    """The refusal names setting, value, bound and remedy. Widened by the hospital, the same bound takes the plan."""
    plan = usual(**changes)
    for approve in ("any", [{"job": "x", "plan": plan.digest()}]):
        with pytest.raises(FedDPError, match=f"^site hospital: {re.escape(message)}.*in the bounds of privacy.json"):
            policy(approve=approve).accept("hospital", plan)
    policy(**SitePolicy.admitting(plan)).accept("hospital", plan)
    policy(approve="any").accept("hospital", usual())


@pytest.mark.parametrize(
    ("bounds", "name", "message"),
    [
        ({"lr": 1e-5}, "lr", "lr=0.001 is above its upper bound 1e-05"),
        ({"lr": 5e-4}, "heads_lr", "heads_lr=0.001 is above its upper bound 0.0005"),
        ({"clip": 0.5}, "clip", "clip=1.0 is above its upper bound 0.5"),
        ({"rounds": 10}, "heads_epochs", "heads_epochs=20 is above its upper bound 10"),
    ],
)
def test_a_setting_that_the_plan_leaves_at_its_default_is_held_to_the_bounds(bounds, name, message):
    """The plan does not hold it, so what counts is what it is by default: (Wang et al., TMI 2024) has a rate of 1e-3 and one
    epoch a round; FedLC's heads have 1e-3 and 20 epochs."""
    plan = Options(method="fedlc", rounds=2).plan(REQUIRED, SITES)
    assert name not in plan.settings, "the control"
    assert any(problem.startswith(message) for problem in Bounds.of("hospital", bounds).problems(plan))
    assert Bounds().problems(plan) == []


UPPER = ("lr", "clip", "weight_decay", "local_epochs", "rounds", "movement", "statistics")


@pytest.mark.parametrize("name", UPPER)
def test_a_bound_that_would_refuse_every_job_is_none(plan_for, name):
    """Where a plan cannot have 0, no plan is within a largest value of 0."""
    try:
        plan_for(**{name: 0})
    except FedDPError:
        with pytest.raises(FedDPError, match=f"^site hospital: privacy.json's bounds: {name}=0 refuses every job; write a "):
            policy(bounds={name: 0})
    else:
        assert getattr(policy(bounds={name: 0}).bounds, name) == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"batch": 3}, "batch=3 is below its lower bound 4 (the change made by a step over few images reveals them)"),
        ({"epochs": 1001}, "epochs=1001 is above its upper bound 1000"),
        ({"lr": 0.02}, "lr=0.02 is above its upper bound 0.01"),
    ],
)
def test_an_adaptation_is_held_to_the_bounds_whoever_approved_it(usual, setting, message):
    """Just within them it is taken: four images a step, 1000 epochs, a rate of 0.01."""
    plan, within = usual(), {"batch": 4, "epochs": 1000, "lr": 0.01}
    request = {"newcomer": "N", "donors": ["site-1"], "job": "j", "settings": within}
    beyond = request | {"settings": within | setting}
    own = policy(approve=[{"job": "x", "plan": plan.digest(each)} for each in (request, beyond)])
    with pytest.raises(FedDPError, match=f"^site hospital: {re.escape(message)}.*in the bounds of privacy.json"):
        own.accept("hospital", plan, beyond)
    own.accept("hospital", plan, request)


def test_a_loss_or_a_network_that_the_hospital_does_not_take(usual):
    for own, message in (
        ({"bounds": {"losses": ["dice"]}}, "loss=dice_ce is not among the losses of its bounds, dice"),
        ({"networks": ["resnet18-fpn"]}, "resnet18-fpn, but the job uses pvt_v2_b0-fpn; add it to `networks`"),
    ):
        with pytest.raises(FedDPError, match=message):
            policy(approve="any", **own).accept("hospital", usual())
    policy(approve="any", bounds={"losses": ["dice"]}).accept("hospital", usual(loss="dice"))


def test_only_the_plan_that_was_approved_is_taken(usual):
    plan = usual()
    line = {"job": "x", "plan": plan.digest()}
    policy(approve=[line]).accept("hospital", plan)
    for own, other in (([], plan), ([line], usual(seed=1)), ([line], usual(lr=0.002))):
        with pytest.raises(FedDPError, match="its administrator has not approved plan"):
            policy(approve=own).accept("hospital", other)
    with pytest.raises(FedDPError, match="has not approved"):
        policy().accept("hospital", plan)  # what privacy.json leaves out is not given
    request = {"newcomer": "N", "donors": ["site-1"], "job": "j"}
    with pytest.raises(FedDPError, match="has not approved plan"):  # the model that it brings is within no bound
        policy(approve="any").accept("hospital", plan, request)
    with pytest.raises(FedDPError, match="has not approved"):
        policy(approve=[line]).accept("hospital", plan, request)
    policy(approve=[{"job": "x", "plan": plan.digest(request)}]).accept("hospital", plan, request)


def test_the_digest_is_of_the_plan_whoever_wrote_it_down(usual):
    """Of the JSON, sorted, without spaces: known to shasum. Every entry counts, and the order of none."""
    plan = usual()
    assert Plan.from_json(dict(reversed(plan.to_json().items()))).digest() == plan.digest()
    changes = ({"rounds": 3}, {"seed": 1}, {"size": 64}, {"method": "fedavg"}, {"sites": (*SITES, "d")}, {"clip": 0.5})
    assert len({plan.digest(), *(usual(**change).digest() for change in changes)}) == len(changes) + 1


def test_initial_tensors_are_taken_by_their_hash_alone(usual):
    plan = usual()
    object.__setattr__(plan, "weights", SHA)
    with pytest.raises(FedDPError, match=f"brings initial tensors \\({SHA}\\).*add their SHA-256 to `tensors`"):
        policy(approve="any").accept("hospital", plan)
    with pytest.raises(FedDPError, match="brings initial tensors"):
        policy(approve="any", tensors=["b" * 64]).accept("hospital", plan)
    policy(approve="any", tensors=["b" * 64, SHA]).accept("hospital", plan)


# the job that took an image


site_of = partial(FlareSite, admits=False)


def steps_of(site) -> list[int]:
    """How many images each step of a round is over."""
    seen = []
    hook = site.network.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])) if module.training else None)
    train(site, site.partition.split(site.copy())[0], 0)
    hook.remove()
    return seen


def test_no_step_is_over_a_single_image_whatever_is_approved(plan_for, toy, tiny_root, tmp_path):
    """The job of finding 2 asks the job process of a hospital that approves anything, and gets no network to train; the control
    is a hospital that widened its bounds to it, where every step is over one image."""
    plan = plan_for(network=toy, method="fedavg", sites=SITES, **SINGLE)
    site = site_of(plan, tmp_path / "a", data=tiny_root / "site-1", approve="any")
    with pytest.raises(FedDPError, match="min_sites=1 is below"):
        site.open()
    for one in ("batch", "lr", "min_sites"):  # each alone is enough
        alone = plan_for(network=toy, method="fedavg", sites=SITES, **{"min_sites": 3, "rounds": 1, one: SINGLE[one]})
        site = site_of(alone, tmp_path / "a", data=tiny_root / "site-1", approve="any")
        with pytest.raises(FedDPError, match=f"{one}="):
            site.open()
    wide = FlareSite(plan, tmp_path / "b", data=tiny_root / "site-1")
    assert steps_of(wide.open()) == [1] * 8, "the control"
    usual = plan_for(network=toy, method="fedavg", sites=SITES, min_sites=3)
    usual = site_of(usual, tmp_path / "c", data=tiny_root / "site-1", approve="any")
    assert steps_of(usual.open()) == [4, 4]


@pytest.mark.parametrize("images", range(4, 30))
def test_within_the_bounds_the_smallest_step_is_over_two_images(images):
    """A last batch of one image is left out (`feddp.data.loading`)."""
    samples = [{"image": torch.zeros(1, 2, 2), "stem": str(n)} for n in range(images)]
    for batch in range(Bounds().batch, 12):
        assert min(len(part["stem"]) for part in batches(samples, batch, seed=1, augment=False)) >= 2


def test_a_site_with_too_few_images_for_a_step_trains_on_none(plan_for, toy, tiny_root, tmp_path):
    """8 training images; the hospital wants a step over 9."""
    plan = plan_for(network=toy, method="fedavg", sites=SITES, min_sites=3, batch=16)
    site = site_of(plan, tmp_path, data=tiny_root / "site-1", approve="any", bounds={"batch": 9})
    with pytest.raises(FedDPError, match="site site-1: it has 8 training images, but its bounds require at least 9 per step"):
        site.open()
    site = site_of(plan, tmp_path, data=tiny_root / "site-1", approve="any", bounds={"batch": 8})
    assert steps_of(site.open()) == [8]


# no plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 10**15}, "rounds=1000000000000000: at most 100000; lower rounds"),
        ({"size": 3 * 10**8}, "size=300000000: at most 1024"),
        ({"channels": 10**6}, "channels=1000000: at most 16"),
        ({"channels": 0}, "channels=0, 1 classes: a network needs"),
        ({"classes": ()}, "channels=3, 0 classes: a network needs"),
        ({"classes": tuple(map(str, range(256)))}, "the number of classes=256: at most 255"),
        ({"sites": tuple(map(str, range(1001)))}, "the number of sites=1001: at most 1000"),
        ({"seed": 2**63}, "seed=9223372036854775808: at most"),
        ({"seed": -(2**63)}, "at most"),
        ({"seed": True}, "seed=True is not a whole number"),
        ({"local_epochs": 10**12}, "local_epochs=1000000000000: at most 1000"),
        ({"lr": 1e300}, "lr=1e\\+300: at most 100"),
        ({"batch": 10**12}, "batch=1000000000000: at most 4096"),
        ({"lr": True}, "lr=True cannot be read as float"),
        ({"rounds": "3"}, "rounds='3' is not a whole number"),
        ({"augment": 1}, "augment=1 cannot be read as bool"),
        ({"loss": ["dice"]}, "cannot be read as str"),
        ({"private": [{"path": "x"}]}, "must have at most 64 letters"),
        ({"private": "query," * 1001}, "cannot be read as"),
        ({"labels": "both"}, "labels='both' is unknown; choose one of nested, exclusive"),
        ({"sites": ("a" * 65, "b")}, "must have at most 64"),
        ({"sites": ("{$HOME}", "b")}, "sites '{\\$HOME}' must have at most 64"),
        ({"classes": ("a\nb",)}, "must have at most 64 letters"),
    ],
)
def test_an_absurd_plan_is_none(plan_for, changes, message):
    with pytest.raises(FedDPError, match=message):
        plan_for(**changes)


NUMERIC = [
    (method, name)
    for method in METHODS
    for name, default in Plan.known_settings(method).items()
    if isinstance(default, int | float) and not isinstance(default, bool)
]


@pytest.mark.parametrize(("method", "name"), NUMERIC)
def test_every_number_of_every_method_has_a_largest_value(plan_for, method, name):
    with pytest.raises(FedDPError, match=f"{name}=1.*e?.*: at most .*; lower {name}"):
        plan_for(method=method, **{name: 10**18})


def test_every_bound_is_written_down():
    """In the docs' list of what a privacy.json may hold, which says what each means."""
    text = (ROOT / "docs/reference/policy.md").read_text(encoding="utf-8")
    for field in fields(Bounds):
        assert f"`{field.name}`" in text, field.name
