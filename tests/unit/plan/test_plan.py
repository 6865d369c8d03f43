"""A plan: what it reads, what it refuses, and what follows from it."""

import json
import re
from dataclasses import fields

import pytest

from feddp.adaptation import fitting
from feddp.errors import FedDPError
from feddp.methods import METHODS
from feddp.plan.resolve import build_network, exchanged, partition_of
from feddp.plan.schema import BEHAVIOUR, Federation, Plan, behaviour_of
from feddp.training.settings import Calibration, Heads, Training, Tuning, key

# another choice than the default, for settings that are words
CHOICES = {
    "loss": "dice",
    "selection": "test",
    "precision_compute": "bfloat16",
    "aggregation": "samples",
    "start": "best",
    "delta": "std",
    "pfedme_eta": 0.01,
    "ema": 0.5,
    "tau": 0.5,
    "perturbed_weight": 0.5,
    "perturbed_above": 0.5,
    "pfedme_beta": 0.5,
    "apfl_alpha": 0.25,
    "private": "head,calibrator",
    "mask": "literal",
    "normalise": "scale",
    "precision": "float16",
}
GROUPS = (
    Training,
    Federation,
    Tuning,
    Calibration,
    Heads,
    fitting.Settings,
    *dict.fromkeys(METHODS[name].Hyper for name in METHODS),
)
BOUNDED = [(group, f) for group in GROUPS for f in fields(group) if type(f.default) in (int, float)]
EVERY = [(method, name) for method in METHODS for name in Plan.known_settings(method)]


def another(name, default):
    """A legal value that is not the default."""
    if name in CHOICES:
        return CHOICES[name]
    return not default if isinstance(default, bool) else type(default)(default + 1)


def groups(plan):
    return plan.training, plan.federation, plan.tuning, plan.calibration, plan.heads, plan.hyper


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "finetune", "stages": ("train", "tune", "calibrate"), "seed": 7, "weights": "5a" * 32},
        {"classes": ("disc", "cup"), "private": "query,head", "lambda": "0.1", "augment": "false", "lr": 0.5},
    ],
)
def test_json_gives_the_same_plan_back(plan_for, changes):
    plan = plan_for(**changes)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert groups(again) == groups(plan)


def test_json_leaves_out_what_is_empty(plan_for):
    data = Plan(
        method="fedavg", network="resnet18-fpn", channels=1, classes=("a",), labels="nested", size=32, rounds=1
    ).to_json()
    assert data == {
        "method": "fedavg",
        "network": "resnet18-fpn",
        "channels": 1,
        "classes": ["a"],
        "labels": "nested",
        "size": 32,
        "rounds": 1,
        "seed": 0,
        "stages": ["train"],
        "behaviour": BEHAVIOUR,
    }


def test_settings_are_typed_and_defaults_dropped(plan_for):
    """batch=6, lr=0.001, λ=1, 20 epochs and augmentation are the defaults, in whatever type they come."""
    same = {"batch": "6", "lr": "0.001", "lambda": 1, "augment": "True", "calibration_epochs": 20.0, "private": None}
    assert plan_for(settings=same).settings == {}
    given = {"batch": "2", "lr": "1e-2", "lambda": "0", "augment": "FALSE", "calibration_epochs": 3.0, "private": "query,head"}
    read = plan_for(settings=given).settings
    assert read == {
        "batch": 2,
        "lr": 0.01,
        "lambda": 0.0,
        "augment": False,
        "calibration_epochs": 3,
        "private": ("query", "head"),
    }
    assert {name: type(value) for name, value in read.items()} == {
        "batch": int,
        "lr": float,
        "lambda": float,
        "augment": bool,
        "calibration_epochs": int,
        "private": tuple,
    }


@pytest.mark.parametrize(("method", "name"), EVERY)
def test_every_setting_is_reached_by_its_name(plan_for, method, name):
    default = Plan.known_settings(method)[name]
    value = another(name, default)
    plan = plan_for(method=method, sites=("A", "B", "C"), settings={name: str(value)})  # three, for median and norm_factor
    reached = [
        getattr(group, attribute) for group in groups(plan) for attribute in (name, f"{name}_") if hasattr(group, attribute)
    ]
    assert reached == [tuple(value.split(",")) if name == "private" else value]
    assert plan.settings[name] == reached[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "fedsgd"}, "unknown method 'fedsgd'"),
        ({"network": "vgg"}, "unknown network 'vgg'"),
        ({"rounds": 0}, "rounds=0"),
        ({"seed": -1}, "seed=-1"),
        ({"size": 33}, "size=33"),
        ({"size": 0}, "size=0"),
        ({"momentum": 0.9}, "unknown setting 'momentum'"),
        ({"lambda_": 0.5}, "unknown setting 'lambda_'"),
        ({"loss": "focal"}, "loss='focal' is not one of dice_ce, dice"),
        ({"selection": "train"}, "selection='train'"),
        ({"precision_compute": "float16"}, "precision_compute='float16' is not one of float32, bfloat16"),
        ({"aggregation": "krum"}, "aggregation='krum' is not one of uniform, samples, median, trimmed"),
        ({"method": "fednova", "aggregation": "median"}, "aggregation=median: fednova needs uniform or samples"),
        ({"method": "apfl", "apfl_alpha": 1.5}, "apfl_alpha=1.5: at most 1; lower apfl_alpha"),
        ({"method": "iop_fl", "tau": 1.5}, "tau=1.5: at most 1; lower tau"),
        ({"method": "pflfe", "ema": 1.5}, "ema=1.5: at most 1; lower ema"),
        ({"aggregation": "median"}, "aggregation=median needs 3 sites, but there are 2; name more sites, or leave it out"),
        ({"aggregation": "trimmed", "norm_factor": 3}, "aggregation=trimmed needs 3 sites"),
        ({"method": "fedavg", "norm_factor": 3}, "norm_factor=3.0 needs 3 sites, but there are 2"),
        ({"method": "fedprox", "prox_mu": -1}, "prox_mu=-1.0"),
        ({"norm_factor": 0.5}, "norm_factor=0.5 would refuse half of the sites"),
        ({"norm_factor": -3}, "norm_factor=-3.0"),
        ({"start": "first"}, "start='first'"),
        ({"delta": "mean"}, "delta='mean'"),
        ({"lr": "-0.1"}, "lr=-0.1"),
        ({"lr": 0}, "lr=0"),
        ({"lr": "nan"}, "lr=nan"),
        ({"batch": 0}, "batch=0"),
        ({"clip": 0}, "clip=0"),
        ({"min_sites": 0}, "min_sites=0"),
        ({"tune_epochs": 0}, "tune_epochs=0"),
        ({"calibration_lr": -1}, "calibration_lr=-1"),
        ({"weight_decay": -0.5}, "weight_decay=-0.5"),
        ({"lambda": "-2"}, "lambda=-2"),
        ({"lambda": "nan"}, "lambda=nan"),
        ({"lr": "fast"}, "lr='fast' cannot be read as float"),
        ({"batch": "2.5"}, "batch='2.5' cannot be read as int"),
        ({"batch": 2.5}, "batch=2.5 cannot be read as int"),
        ({"batch": float("inf")}, "batch=inf cannot be read as int"),
        ({"lr": None}, "lr=None cannot be read as float"),
        ({"augment": "maybe"}, "augment='maybe' cannot be read as bool"),
        ({"stages": ("calibrate", "train")}, "stages calibrate, train"),
        ({"stages": ("train", "calibrate", "tune")}, "stages train, calibrate, tune"),
        ({"stages": ("train", "train")}, "stages train, train"),
        ({"stages": ("tune",)}, "stages tune"),
        ({"stages": ("train", "prune")}, "stages train, prune"),
        ({"method": "feddg", "stages": ("train", "spectra")}, "stages train, spectra: expected"),
        ({"method": "fedavg", "stages": ("spectra", "train")}, "fedavg does not use spectra"),
        ({"method": "feddg", "spectra": 0}, "spectra=0"),
    ],
)
def test_a_bad_value_is_named(plan_for, changes, message):
    with pytest.raises(FedDPError) as raised:
        plan_for(**changes)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"sites": ("A", "B", "C")},
        {"sites": ()},  # not known yet
        {"method": "local"},
        {"method": "centralized"},
        {"private": "all"},
    ],
)
def test_robust_rules_are_taken_where_they_may_work_or_have_nothing_to_combine(plan_for, changes):
    plan = plan_for(**{"aggregation": "median", "norm_factor": 3} | changes)
    assert (plan.federation.aggregation, plan.federation.norm_factor) == ("median", 3.0)


@pytest.mark.parametrize(("method", "name"), [("apfl", "apfl_alpha"), ("iop_fl", "tau"), ("pflfe", "ema")])
def test_the_bound_of_a_weight_is_its_field_s(plan_for, method, name):
    """From where the reference takes it; 1 itself is a weight."""
    (found,) = (f for f in fields(METHODS[method].Hyper) if f.name == name)
    assert found.metadata["most"] == 1
    assert getattr(plan_for(method=method, settings={name: "1"}).hyper, name) == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch", "٤"),  # 4 in Arabic digits, which int() reads
        ("lr", "１e-3"),  # a full-width 1, which float() reads
        ("batch", "1_0"),
        ("batch", " 4 "),
        ("lr", "1e-3\n"),
        ("lr", b"1"),
        ("batch", bytearray(b"4")),
        ("batch", True),
        ("lr", False),
        ("batch", [4]),
        ("lr", {}),
        ("augment", 1),
        ("augment", []),
        ("augment", "ＴＲＵＥ"),
        ("loss", ["dice"]),
        ("loss", {"dice": 1}),
        ("private", {"query": 1}),
        ("private", True),
    ],
)
def test_what_only_resembles_a_value_is_refused(plan_for, name, value):
    with pytest.raises(FedDPError, match=f"{name}=.* cannot be read as"):
        plan_for(settings={name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"channels": True},
        {"rounds": True},
        {"size": "٦٤"},
        {"weights": "٤" * 64},
        {"method": []},
        {"classes": [["lesion"]]},
        {"seed": 10**5000},
        {"settings": {"lr": 10**5000}},
        {"settings": {"batch": -(10**5000)}},
        {"settings": {"batch": "9" * 100_000}},
        {"settings": {"x" * 100_000: 1}},
    ],
)
def test_a_refusal_of_an_absurd_entry_is_short(plan_for, changes):
    """Python cannot print 10^5000, and a message must not be as long as the entry that it refuses."""
    with pytest.raises(FedDPError) as raised:
        plan_for(**changes)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("data", [[], None, "plan", 7])
def test_a_plan_that_is_no_object_is_refused(data):
    with pytest.raises(FedDPError, match="the job's plan is .*, not an object"):
        Plan.from_json(data)


def test_lambda_may_be_zero_and_is_told_so(plan_for):
    """λ = 0 is the control of IGC, so a refusal must not ask for more than 0."""
    assert plan_for(**{"lambda": 0}).calibration.lambda_ == 0
    with pytest.raises(FedDPError, match="lambda=-1.0 must be a number of at least 0"):
        plan_for(**{"lambda": -1})


def test_json_with_a_wrong_key_is_refused(plan_for):
    data = plan_for().to_json()
    with pytest.raises(FedDPError, match=r"unknown keys \['patience'\] and lacks \[\]"):
        Plan.from_json(data | {"patience": 4})
    with pytest.raises(FedDPError, match="sites=4 is not a list of names"):
        Plan.from_json(data | {"sites": 4})
    with pytest.raises(FedDPError, match="behaviour=None is not a whole number"):
        Plan.from_json(data | {"behaviour": None})
    del data["rounds"], data["size"]
    with pytest.raises(FedDPError, match=r"unknown keys \[\] and lacks \['rounds', 'size'\]"):
        Plan.from_json(data)


@pytest.mark.parametrize(
    ("method", "stages"),
    [
        ("local", ("train",)),
        ("fedavg", ("train",)),
        ("finetune", ("train", "tune")),
        ("feddp", ("train", "calibrate")),
    ],
)
def test_a_method_brings_its_stages(plan_for, method, stages):
    assert plan_for(method=method).stages == stages
    assert plan_for(method=method, stages=("train", "tune", "calibrate")).stages == ("train", "tune", "calibrate")


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"method": "feddp"}, "last"),
        ({"method": "finetune"}, "last"),
        ({"method": "fedavg"}, "best"),
        ({"method": "feddp", "stages": ("train",)}, "best"),
        ({"method": "fedavg", "stages": ("train", "calibrate")}, "last"),
        ({"method": "feddp", "start": "best"}, "best"),
        ({"method": "fedavg", "start": "last"}, "last"),
        ({"method": "fedavg", "start": "auto"}, "best"),
        ({"method": "feddg"}, "best"),  # what comes before the rounds is no later stage
        ({"method": "feddg", "stages": ("spectra", "train", "calibrate")}, "last"),
    ],
)
def test_stage_1_hands_on_the_last_round_to_a_stage_and_else_the_best(plan_for, changes, start):
    assert plan_for(**changes).start == start


@pytest.mark.parametrize(
    ("changes", "private"),
    [
        ({}, ("q.weight", "q.bias")),
        ({"private": "head"}, ("head.weight", "head.bias")),
        ({"private": ["query", "head"]}, ("q.weight", "q.bias", "head.weight", "head.bias")),
        ({"private": "none"}, ()),
        ({"method": "fedavg"}, ()),
        ({"method": "fedavg", "private": "query"}, ("q.weight", "q.bias")),
    ],
)
def test_a_setting_overrides_what_the_method_keeps_private(plan_for, toy, changes, private):
    plan = plan_for(network=toy, **changes)
    assert partition_of(plan, build_network(plan)).private == private


def test_an_unknown_private_role_is_named(plan_for, toy):
    plan = plan_for(network=toy, private="query,neck")
    with pytest.raises(FedDPError, match="'neck'"):
        partition_of(plan, build_network(plan))


def test_peers_exchange_what_is_private_and_after_a_tuning_everything(plan_for, toy):
    """γ is known to all and the private tensors complete it; a local tuning changes the shared ones too."""
    plan = plan_for(network=toy)
    network = build_network(plan)
    partition = partition_of(plan, network)
    assert exchanged(plan, partition) == ("q.weight", "q.bias")
    tuned = plan_for(network=toy, stages=("train", "tune", "calibrate"))
    assert sorted(exchanged(tuned, partition)) == sorted(network.state_dict())


def test_the_seed_alone_decides_the_common_start(plan_for, toy):
    def start(seed):
        return build_network(plan_for(network=toy, seed=seed)).state_dict()["q.weight"]

    assert start(1).equal(start(1))
    assert not start(1).equal(start(2))


@pytest.mark.parametrize(("group", "field"), BOUNDED, ids=[f"{group.__name__}.{field.name}" for group, field in BOUNDED])
def test_a_setting_made_in_python_is_held_to_its_bound(group, field):
    """Not only one that a job's JSON gives. The message names the bound."""
    most = field.metadata["most"]
    beyond = type(field.default)(2 * most)
    with pytest.raises(
        FedDPError, match=f"^{key(field.name)}={re.escape(str(beyond))}: at most {re.escape(f'{most:.15g}')}; lower"
    ):
        group(**{field.name: beyond})


def test_head_calibration_has_settings_of_its_own(plan_for):
    """Whatever is set of the one calibration leaves the other's settings alone."""
    plan = plan_for(method="fedlc", heads_epochs=3, heads_lr=0.01, calibration_epochs=5, calibration_lr=0.02)
    assert (plan.heads.heads_epochs, plan.heads.heads_lr) == (3, 0.01)
    assert (plan.calibration.calibration_epochs, plan.calibration.calibration_lr) == (5, 0.02)


@pytest.mark.parametrize(("method", "behaviour"), [("feddp", 3), ("feddp", 5), ("feddp", 0), ("fedoap", 4)])
def test_a_plan_for_another_behaviour_is_refused(plan_for, method, behaviour):
    """An equal plan of another version trains on other images or gives other results: nobody approved that. FedOAP has changed
    alone, so a plan of the former one is refused, and others are not."""
    with pytest.raises(FedDPError, match=f"behaviour={behaviour}: the plan was made for another version .*export the job anew"):
        plan_for(method=method, behaviour=behaviour)
    assert plan_for().to_json()["behaviour"] == 4
    assert plan_for(method="fedoap").to_json()["behaviour"] == 5


def test_a_change_of_a_method_counts_for_those_that_build_on_it(monkeypatch):
    """pFLFE has changed once and FC-pFLFE, which builds on it, twice more: 3 + 1 and 3 + 1 + 2."""
    assert issubclass(METHODS["fc_pflfe"], METHODS["pflfe"])
    monkeypatch.setattr(METHODS["pflfe"], "changed", 1, raising=False)
    monkeypatch.setattr(METHODS["fc_pflfe"], "changed", 2, raising=False)
    assert (behaviour_of("pflfe"), behaviour_of("fc_pflfe"), behaviour_of("feddp")) == (5, 7, 4)
