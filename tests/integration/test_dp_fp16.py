"""A hospital's privacy filter on what training changed, and half-precision messages, each with our other filters around it.

Filters run as FLARE runs them: a scope that FLARE builds of a privacy.json, chains that an exported job names, and
`apply_filters`, which a site calls with both. A run in half precision is in test_simulator.py, without privacy: the simulator
applies no site's filters.
"""

import json
import math
import sys
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
import torch
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils import fobs
from nvflare.private.fed.app.fl_conf import create_privacy_manager

from feddp import protocol
from feddp.data.loading import steps_in_an_epoch
from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.flare.configuration import SERVER_CLASSES, SITE_CLASSES
from feddp.flare.precision import HalfPrecision
from feddp.flare.site import SiteComponent
from feddp.jobs import folder as jobs
from feddp.methods.aggregation import Spec
from feddp.plan.schema import MOVEMENT
from feddp.protocol import Sent
from feddp.stages.movement import Reach
from feddp.stages.server import nbytes
from feddp.stages.tensors import Expected
from feddp.stages.train import train
from support import ROOT
from support.site import FlareSite, context

PAGE = (ROOT / "docs/how-to/it-administrator.md").read_text(encoding="utf-8")
GUARD = {"path": "feddp.flare.filters.PrivateTensorGuard"}
FLARES = "nvflare.app_common.filters"
PERCENTILE = f"{FLARES}.percentile_privacy.PercentilePrivacy"
SVT = f"{FLARES}.svt_privacy.SVTPrivacy"
STEP = 2.0**-10  # changes are multiples of it, so every sum and difference of the derivations is exact


def on_update(path, **args):
    """The entry of a privacy.json, as the docs have it."""
    return {"path": "feddp.flare.update_privacy.UpdatePrivacy", "args": {"mechanism": {"path": path, "args": args}}}


@pytest.fixture
def scope(tmp_path):
    """The scope that FLARE builds of a privacy.json with these filters on results, in their order."""

    def build(*filters):
        (tmp_path / "local").mkdir(exist_ok=True)
        content = {"scopes": [{"name": "feddp", "properties": {"data": "x"}, "task_result_filters": list(filters)}]}
        (tmp_path / "local/privacy.json").write_text(json.dumps(content))
        (tmp_path / "startup").mkdir(exist_ok=True)
        return create_privacy_manager(Workspace(str(tmp_path)), names_only=False).get_scope("feddp")

    return build


@pytest.fixture
def toy_site(plan_for, toy):
    """A component whose network shares 37 floating numbers (batch normalisation's running ones too) and a counter."""
    return SiteComponent(plan_for(network=toy, method="fedavg").to_json())


def answered(component, scope, sent, received, task=protocol.TRAIN, filters=None, **scalars):
    """What leaves the site when its executor answers with `sent` to a task that brought `received`."""
    fl_ctx = context(component, task, consent=["calibration"])
    fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope)
    fl_ctx.set_prop(messages.RECEIVED, received, private=True, sticky=False)
    message = sent if isinstance(sent, Shareable) else messages.pack(sent, **(scalars or {"round": 0, "samples": 1.0}))
    return apply_filters("task_result_filters", message, fl_ctx, filters or {}, task, FilterKey.OUT)


def changed(component):
    """γ^t; γ_k, whose i-th number (from 1, in state_dict's order) lies i steps from γ^t's, by turns above and below; and a
    counter that went from 0 to 5."""
    received = {name: value.clone() for name, value in component.expected.network.state_dict().items()}
    sent, i = {}, 0
    for name, value in received.items():
        if not value.is_floating_point():
            sent[name] = value + 5
            continue
        value.copy_((value * 1024).round() / 1024)
        steps = torch.arange(i + 1, i + 1 + value.numel()).reshape(value.shape)
        sent[name] = value + STEP * torch.where(steps % 2 == 0, steps, -steps)
        i += value.numel()
    assert i == 37
    return received, sent


def steps_between(received, sent):
    """Of the 37 numbers, in order: by how many steps they differ."""
    changes = [(sent[name] - value).flatten() for name, value in received.items() if value.is_floating_point()]
    return [round(change / STEP, 6) for change in torch.cat(changes).tolist()]


def sign(i):
    return 1 if i % 2 == 0 else -1


# privacy of the update


def test_percentile_by_hand(toy_site, scope):
    """|changes| are 1..37 steps. Their 75th percentile is the value at index 0.75 * 36 = 27 of the sorted ones: 28 steps.

    What is strictly below is not sent: the 27 smallest. The others are clipped at gamma, 32 steps: 28..32 stay, 33..37 are 32.
    """
    received, sent = changed(toy_site)
    chain = scope(on_update(PERCENTILE, percentile=75, gamma=32 * STEP), GUARD)
    tensors, scalars = messages.unpack(answered(toy_site, chain, sent, received))
    assert steps_between(received, tensors) == [sign(i) * min(i, 32) if i >= 28 else 0 for i in range(1, 38)]
    assert tensors["norm.num_batches_tracked"].item() == 5
    assert scalars == {"round": 0, "samples": 1.0}
    Spec.of(received, tuple(received)).check("the server", tensors)
    assert steps_between(received, sent) == [sign(i) * i for i in range(1, 38)], "the input is as it was"


def test_what_the_filter_leaves_alone_is_sent_to_the_bit(toy_site, scope):
    """At percentile 0 with a large gamma nothing is dropped or clipped: any float32 values come back as they were."""
    generator = torch.Generator().manual_seed(3)
    state = toy_site.expected.network.state_dict()
    received = {n: torch.randn(v.shape, generator=generator).to(v.dtype) for n, v in state.items()}
    sent = {n: (1e-3 * torch.rand(v.shape, generator=generator)).to(v.dtype) for n, v in received.items()}
    chain = scope(on_update(PERCENTILE, percentile=0, gamma=100.0), GUARD)
    tensors, _ = messages.unpack(answered(toy_site, chain, sent, received))
    assert all(torch.equal(tensors[name], sent[name]) for name in sent)


def test_svt_sends_its_fraction_and_no_more_than_gamma(toy_site, scope):
    """fraction 0.5 of 37 numbers: ceil(18.5) = 19. With budgets so large that the noise is below 1e-6 steps, exactly the 19
    that reach tau (18.5 steps) are chosen: 19..37, clipped at gamma, 32 steps."""
    received, sent = changed(toy_site)
    budgets = {"epsilon": 1e12, "epsilon_release": 1e12}
    svt = on_update(SVT, fraction=0.5, gamma=32 * STEP, tau=18.5 * STEP, replace=False, **budgets)
    tensors, scalars = messages.unpack(answered(toy_site, scope(svt, GUARD), sent, received))
    assert steps_between(received, tensors) == [sign(i) * min(i, 32) if i >= 19 else 0 for i in range(1, 38)]
    assert tensors["norm.num_batches_tracked"].item() == 5
    assert scalars == {"round": 0, "samples": 1.0}, "FLARE's account of the budget stays at the site"


def test_svt_adds_noise_that_nobody_seeds(toy_site, scope):
    """Changes of nothing, all sent: what leaves is noise, another each time, of the scale that FLARE's docstring gives,
    2 gamma n / epsilon_release = 2 * 2 * 37 / 148 = 1: a Laplace variable's mean size is its scale. Over 40 answers of 37
    numbers the mean lies within 5 standard errors (1 / sqrt(1480)) of it; but for running_var, which is held above 0."""
    received, _ = changed(toy_site)
    chain = scope(on_update(SVT, fraction=1.0, gamma=2.0, tau=0.0, replace=False, epsilon_release=148.0), GUARD)
    answers = [messages.unpack(answered(toy_site, chain, received, received))[0] for _ in range(40)]
    assert not any(torch.equal(answers[0]["q.weight"], other["q.weight"]) for other in answers[1:])
    noise = torch.cat([(a[n] - received[n]).abs().flatten() for a in answers for n in a if n not in NOT_PLAIN])
    assert noise.mean().item() == pytest.approx(1.0, abs=5 / math.sqrt(len(noise)))
    lowest = torch.cat([answer["norm.running_var"] for answer in answers]).min().item()
    assert lowest == 0.0, "some noise went below, and was held"


NOT_PLAIN = ("norm.running_var", "norm.num_batches_tracked")


def test_what_svts_defaults_spend(plan_for, scope):
    """FLARE's own account of a round of FedDP's network, as the docs say: epsilon, and noise_var for each number sent."""
    component = SiteComponent(plan_for().to_json())
    shared = component.expected.partition.split(component.expected.network.state_dict())[0]
    chain = scope(on_update(SVT), GUARD)
    answered(component, chain, shared, shared)
    (ours, _) = chain.task_result_filters[FilterKey.OUT]
    numbers = sum(value.numel() for value in shared.values())
    spent = ours.mechanism.get_privacy_spent()
    assert spent == pytest.approx(0.1 + 0.1 * math.ceil(0.1 * numbers), rel=1e-9)
    assert f"ε = {spent:,.1f} a round on FedDP's {numbers:,} shared numbers" in PAGE


@pytest.mark.parametrize(("scale", "movement", "refused"), [(1 / 60, 1, False), (10, 1, True), (10, 600, False)])
def test_noise_counts_as_movement(plan_for, toy, scope, scale, movement, refused):
    """Laplace noise of scale b exceeds the bound B = movement · lr · steps with probability e^(−B/b), so of n numbers none does
    but in n · e^(−B/b) of the contributions. Of these 37: at B = 60 b, which a larger `movement` restores, in 37 · e^−60, none
    that anybody will see; at b = 10 B each of the 29 that are no running statistics stays below with 1 − e^−0.1 = 0.095."""
    component = SiteComponent(plan_for(network=toy, method="fedavg", movement=movement * MOVEMENT).to_json())
    received, _ = changed(component)
    usual = MOVEMENT * component.plan.training.lr * 2
    release = {"gamma": 1e-6, "epsilon_release": 2 * 1e-6 * 37 / (scale * usual)}
    chain = scope(on_update(SVT, fraction=1.0, tau=0.0, replace=False, **release), GUARD)
    sent = messages.unpack(answered(component, chain, received, received))[0]
    beyond = Reach(component.expected, 2).beyond(received, sent)
    assert (beyond is not None) == refused


def test_what_noise_the_page_says_is_within_the_bound():
    """FedDP's n at fraction 0.1, and a hospital of 33 images: 6 steps of 6 images, lr 0.001."""
    n, bound, scale = math.ceil(0.1 * 4_972_257), MOVEMENT * 0.001 * steps_in_an_epoch(33, 6), 2 * 1e-5 / 0.1
    assert f"{n:,}" in PAGE
    assert 0.0009 < n * math.exp(-20) < 0.0011
    assert 1 - (1 - math.exp(-13)) ** n == pytest.approx(2 / 3, abs=0.02)
    assert bound == pytest.approx(0.044, abs=5e-4)
    assert bound / scale == pytest.approx(219)
    assert 20 * 9.9 / (bound / MOVEMENT) == pytest.approx(33_000)


def test_training_neither_seeds_nor_draws_from_numpys_generator(open_site, toy):
    """Else a job's seed, which everyone knows, would tell the noise."""
    site = open_site(network=toy, method="fedavg")
    before = np.random.get_state()
    train(site, site.partition.split(site.copy())[0], 0)
    after = np.random.get_state()
    assert before[2] == after[2]
    assert np.array_equal(before[1], after[1])
    np.random.random()
    assert np.random.get_state()[2] != after[2] or not np.array_equal(np.random.get_state()[1], after[1]), "the control"


def test_the_guard_after_it_still_stops_a_private_tensor(plan_for, toy, scope):
    """FedDP's queries in a training result. Even where the task brought them too, so that there is a difference to filter."""
    component = SiteComponent(plan_for(network=toy).to_json())
    received, sent = changed(component)
    chain = scope(on_update(PERCENTILE, percentile=75, gamma=1.0), GUARD)
    with pytest.raises(FedDPError, match=r"train tried to send 2 tensors that may not leave \(q.bias"):
        answered(component, chain, sent, received)
    shared = component.expected.partition.split(received)[0]
    with pytest.raises(FedDPError, match=r"the result has 2 tensors that the task did not bring \(q.bias"):
        answered(component, chain, sent, shared)
    control = answered(component, chain, component.expected.partition.split(sent)[0], shared)
    assert messages.unpack(control)[0].keys() == shared.keys()


def test_other_tasks_and_errors_pass_as_they_are(plan_for, toy, scope):
    component = SiteComponent(plan_for(network=toy).to_json())
    _, sent = changed(component)
    personal = {name: sent[name] for name in component.expected.partition.private}
    chain = scope(on_update(SVT), GUARD)
    tensors, _ = messages.unpack(answered(component, chain, personal, None, protocol.COLLECT, consent=True))
    assert tensors.keys() == {"q.weight", "q.bias"}
    assert all(torch.equal(tensors[name], personal[name]) for name in personal)
    assert messages.unpack(answered(component, chain, {}, None, protocol.ADOPT, round=2))[1] == {"round": 2}
    reply = answered(component, chain, make_reply(ReturnCode.EXECUTION_EXCEPTION), None)
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION


@pytest.mark.parametrize(
    ("mechanism", "spoil", "words"),
    [
        (on_update(PERCENTILE, gamma=0.0), lambda s, r: None, "PercentilePrivacy filtered nothing; correct its args"),
        (on_update(PERCENTILE, percentile=101), lambda s, r: None, "PercentilePrivacy filtered nothing"),
        (on_update(PERCENTILE), lambda s, r: s["q.weight"].fill_(math.nan), "q.weight holds values that are not finite"),
        (on_update(PERCENTILE), lambda s, r: s.update({"q.bias": torch.zeros(1)}), r"q.bias is \(1,\) torch.float32, expected"),
        (on_update(PERCENTILE), lambda s, r: r.clear(), "the result has 9 tensors that the task did not bring"),
    ],
)
def test_what_cannot_be_filtered_is_not_sent(toy_site, scope, mechanism, spoil, words):
    """FLARE's own filter lets all pass where its arguments are out of range, and SVT would look for ever for numbers in NaN."""
    received, sent = changed(toy_site)
    spoil(sent, received)
    with pytest.raises(FedDPError, match=words):
        answered(toy_site, scope(mechanism, GUARD), sent, received)


def test_a_mechanism_is_a_filter_of_flares(scope):
    with pytest.raises(Exception, match="not a filter; give it its own `path` and `args`"):
        scope({"path": "feddp.flare.update_privacy.UpdatePrivacy", "args": {"mechanism": "svt"}})


def test_flares_filter_without_ours_clips_the_weights_and_the_guard_stops_it(toy_site, scope):
    """Why there is UpdatePrivacy: PercentilePrivacy takes our messages' weights for differences, and counters for floats."""
    received, sent = changed(toy_site)
    alone = {"path": PERCENTILE, "args": {"percentile": 0, "gamma": STEP}}
    weights = messages.unpack(answered(toy_site, scope(alone), sent, received))[0]
    assert max(weights[n].abs().max().item() for n in sent if sent[n].ndim) == STEP
    with pytest.raises(FedDPError, match="num_batches_tracked is .* torch.float32, expected"):
        answered(toy_site, scope(alone, GUARD), sent, received)


def test_the_difference_is_to_what_the_executor_was_given(plan_for, toy, tiny_root, tmp_path, scope):
    """A round of a real site. At percentile 100 the largest change alone is sent: one number of the network."""
    plan = plan_for(network=toy, method="fedavg")
    site = FlareSite(plan, tmp_path / "site", simulated=True, data=tiny_root / "site-1")
    received = {name: value.clone() for name, value in site.component.expected.network.state_dict().items()}
    answer = site.executed(protocol.TRAIN, received, round=0, phase=0)
    trained = messages.unpack(answer)[0]
    assert sum((trained[n] != received[n]).sum().item() for n in trained) > 30
    site.fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope(on_update(PERCENTILE, percentile=100, gamma=100.0), GUARD))
    leaving = apply_filters("task_result_filters", answer, site.fl_ctx, {}, protocol.TRAIN, FilterKey.OUT)
    sent, scalars = messages.unpack(leaving)
    floating = [name for name in sent if sent[name].is_floating_point()]
    (name,) = [name for name in floating if not torch.equal(sent[name], received[name])]
    assert (sent[name] != received[name]).sum() == 1
    largest = max((trained[n].double() - received[n].double()).abs().max().item() for n in floating)
    assert (sent[name].double() - received[name].double()).abs().max().item() == largest
    assert torch.equal(sent["norm.num_batches_tracked"], trained["norm.num_batches_tracked"])
    assert scalars["samples"] == 8


# half precision


def chains(job, side):
    """The filters that an exported job puts on each task at one end, as FLARE keys them."""
    config = json.loads((job / f"app_{side}/config/config_fed_{side}.json").read_text())
    out = {"server": "task_data_filters", "client": "task_result_filters"}[side]
    found = {"task_data_filters": {}, "task_result_filters": {}}
    for name, chain in found.items():
        for entry in config.get(name, []):
            built = [getattr(import_module(path.rsplit(".", 1)[0]), path.rsplit(".", 1)[1])() for path in paths(entry)]
            direction = FilterKey.OUT if name == out else FilterKey.IN
            chain.update({task + FilterKey.DELIMITER + direction: built for task in entry["tasks"]})
    return found


def paths(entry):
    return [f["path"] for f in entry["filters"]]


@pytest.fixture
def half_job(plan_for, toy, tmp_path):
    """An exported job of FedDP in half precision, and its plan."""
    plan = plan_for(network=toy, precision="float16")
    return plan, jobs.export(plan, tmp_path / "job")


def through(job, side, name, message, component, task=protocol.TRAIN, scope=None):
    direction = {"server": ("task_data_filters", FilterKey.OUT), "client": ("task_result_filters", FilterKey.OUT)}
    direction = direction[side][1] if direction[side][0] == name else FilterKey.IN
    fl_ctx = context(component, task)
    fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope)
    return apply_filters(name, message, fl_ctx, chains(job, side)[name], task, direction)


def test_a_job_in_half_precision_names_its_filters_at_both_ends(half_job, plan_for, toy, tmp_path):
    """On what the rounds send and on training's results; last at the site, behind StripPrivate. Every class is on the lists."""
    _, job = half_job
    assert {k: [type(f).__name__ for f in v] for chain in chains(job, "client").values() for k, v in chain.items()} == {
        **{f"{task}/in": ["HalfPrecision"] for task in ("train", "score", "adopt")},
        "train/out": ["StripPrivate", "HalfPrecision"],
    }
    assert {k: [type(f).__name__ for f in v] for chain in chains(job, "server").values() for k, v in chain.items()} == {
        **{f"{task}/out": ["HalfPrecision"] for task in ("train", "score", "adopt")},
        "train/in": ["HalfPrecision"],
    }
    assert "feddp.flare.precision.HalfPrecision" in set(SITE_CLASSES.values()) & set(SERVER_CLASSES.values())
    plain = jobs.export(plan_for(network=toy), tmp_path / "plain")
    assert "HalfPrecision" not in "".join(path.read_text() for path in plain.rglob("*.json")), "the control"
    with pytest.raises(FedDPError, match="precision='float8' is not one of float32, float16"):
        plan_for(precision="float8")


def test_a_result_travels_in_half_and_arrives_as_its_float16_values(half_job, scope):
    """Site policy (privacy, guard), the job's filters, the wire, the server's filter, the server's check: in FLARE's order."""
    messages.register_tensors()
    plan, job = half_job
    component = SiteComponent(plan.to_json())
    received, sent = (component.expected.partition.split(state)[0] for state in changed(component))
    fl_ctx = context(component)
    fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope(on_update(PERCENTILE, percentile=0, gamma=20 * STEP), GUARD))
    fl_ctx.set_prop(messages.RECEIVED, received, private=True, sticky=False)
    filters = chains(job, "client")["task_result_filters"]
    message = messages.pack(sent, round=0, seconds=1 / 3)
    leaving = apply_filters("task_result_filters", message, fl_ctx, filters, protocol.TRAIN, FilterKey.OUT)
    travelling, _ = messages.unpack(leaving)
    assert {name: value.dtype for name, value in travelling.items() if value.dtype != torch.float16} == {
        "norm.num_batches_tracked": torch.int64
    }
    spec = Expected(plan).spec(Sent.SHARED)
    with pytest.raises(FedDPError, match="float16, expected"):
        spec.check("site-1", travelling)
    arrived = through(job, "server", "task_result_filters", fobs.loads(fobs.dumps(leaving)), component)
    tensors, scalars = messages.unpack(arrived)
    spec.check("site-1", tensors)
    assert scalars == {"round": 0, "seconds": 0.3}  # the guard rounds
    assert tensors["norm.num_batches_tracked"].item() == 5
    for name in received:
        if received[name].is_floating_point():
            filtered = received[name] + (sent[name] - received[name]).clamp(-20 * STEP, 20 * STEP)
            assert torch.equal(tensors[name], filtered.half().float())


def test_a_task_in_half_precision_is_half_as_many_bytes(plan_for, half_job):
    """PVT's 4,972,257 shared numbers: 4 bytes each and 2 in the messages, beside names and framing, the same in both."""
    messages.register_tensors()
    _, job = half_job
    component = SiteComponent(plan_for().to_json())
    shared = component.expected.partition.split(component.expected.network.state_dict())[0]
    task = messages.pack(shared, round=0, phase=0)
    task.set_header("task", "kept")
    halved = through(job, "server", "task_data_filters", task, component)
    sizes = [len(fobs.dumps(message)) for message in (task, halved)]
    numbers = sum(value.numel() for value in shared.values())
    assert numbers == 4_972_257
    assert abs(sizes[0] - sizes[1] - 2 * numbers) < 0.001 * numbers
    assert sizes[0] - 4 * numbers < 0.02 * numbers
    assert halved.get_header("task") == "kept"
    arrived, scalars = messages.unpack(through(job, "client", "task_data_filters", fobs.loads(fobs.dumps(halved)), component))
    assert scalars == {"round": 0, "phase": 0}
    assert all(torch.equal(arrived[name], shared[name].half().float()) for name in shared)
    assert all(value.dtype == torch.float32 for value in messages.unpack(task)[0].values()), "the next site gets the same"
    assert nbytes(shared, half=True) == 2 * numbers == Spec.of(shared, tuple(shared)).halved.nbytes
    assert nbytes(shared, half=False) == 4 * numbers


def test_only_float32_is_narrowed_and_other_tasks_are_not(half_job):
    """Sealed bytes, counters, and what a consenting site gives for the calibration, pass as they are."""
    plan, job = half_job
    component = SiteComponent(plan.to_json())
    others = {"bytes": torch.arange(9, dtype=torch.uint8), "count": torch.tensor(2**40), "wide": torch.rand(3).double()}
    sent, _ = messages.unpack(through(job, "server", "task_data_filters", messages.pack(others), component))
    assert all(torch.equal(sent[name], others[name]) and sent[name].dtype == others[name].dtype for name in others)
    personal = messages.pack({"q.bias": torch.rand(4)}, consent=True)
    assert through(job, "client", "task_result_filters", personal, component, protocol.COLLECT) is personal


def test_what_float16_cannot_hold_is_not_sent(half_job, toy_site):
    """65504 is its largest; 65519 still rounds to it, 65520 to infinity. An infinite value is the server's to refuse."""
    _, job = half_job

    def sent(value):
        message = messages.pack({"a": torch.tensor([1.0, value])})
        return messages.unpack(through(job, "server", "task_data_filters", message, toy_site))[0]["a"].tolist()

    assert sent(65519.0) == [1.0, 65504.0]
    assert sent(math.inf) == [1.0, math.inf]
    with pytest.raises(FedDPError, match="a holds 65520, beyond float16's range; export the job with precision=float32"):
        sent(65520.0)
    error = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    assert HalfPrecision().process(error, context(toy_site)) is error


def test_flares_quantizer_gives_the_same_bits_and_takes_no_counter(half_job, toy_site, monkeypatch):
    """Why there is HalfPrecision. FLARE's module imports names of bitsandbytes that its float16 never calls: empty ones do."""
    stub = ModuleType("bitsandbytes.functional")
    for name in ("quantize_4bit", "quantize_blockwise", "dequantize_4bit", "dequantize_blockwise", "QuantState"):
        setattr(stub, name, None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", stub)
    for name in ("quantizer", "dequantizer", "ada_quant"):
        monkeypatch.delitem(sys.modules, f"nvflare.app_opt.pt.quantization.{name}", raising=False)
    quantizer = import_module("nvflare.app_opt.pt.quantization.quantizer").ModelQuantizer("float16")
    weights = {"a": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    theirs = messages.unpack(quantizer.process(messages.pack(weights), context(toy_site)))[0]
    _, job = half_job
    ours = messages.unpack(through(job, "server", "task_data_filters", messages.pack(weights), toy_site))[0]
    assert torch.equal(ours["a"], theirs["a"])
    assert ours["a"].dtype == theirs["a"].dtype == torch.float16
    for other in (torch.tensor(3), torch.zeros(3, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="Invalid source data type: u?int"):
            quantizer.quantization(weights | {"count": other}, context(toy_site))
