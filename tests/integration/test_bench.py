"""`feddp bench`: every benchmark that needs no federation runs once with tiny sizes; what the others compute from events is
tested on events made by hand."""

import argparse
import functools
import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import feddp as package
from benchmarks import (
    aggregate,
    calibration,
    common,
    gpu_agree,
    gpu_protocol,
    gpu_sites,
    gpu_speed,
    gpu_stages,
    gpu_steps,
    local,
    loop,
    practice,
    round,
    start,
    watch,
)
from benchmarks.exact import Exact
from benchmarks.leak import invert
from benchmarks.small import FEW, narrow_resnet
from feddp.data import loading
from feddp.errors import FedDPError, InputError
from feddp.files import append_event
from feddp.methods import OWN
from feddp.methods.base import LOCAL_STAGES
from feddp.networks import DEFAULT, NETWORKS
from feddp.partition import HEAD, QUERY
from feddp.plan.resolve import build_network, partition_of
from feddp.training import metrics
from feddp.training.loop import adamw
from feddp.training.settings import Training, from_settings
from support import ROOT
from support.command import ended
from support.docs_pages import commands_for, text_of

NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in ("__init__", "common"))


@pytest.fixture
def bench(feddp):
    """Runs a benchmark in this process; returns the JSON lines that it printed."""

    def run(*arguments):
        code, out, err = feddp("bench", *arguments)
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    return run


class Now:
    """A process or a pool of `multiprocessing` whose work is done here, at once. What it is given travels all the same."""

    def __init__(self, *number, target=None, args=(), **limits):
        self.target, self.args = target, args

    def start(self):
        sender, *given = self.args
        self.target(sender, *pickle.loads(pickle.dumps(given)))

    def kill(self):
        pass

    def join(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def starmap(self, work, given, **sizes):
        return [work(*each) for each in pickle.loads(pickle.dumps(given))]

    def imap(self, work, given):
        return map(work, pickle.loads(pickle.dumps(given)))


@pytest.fixture
def here(monkeypatch):
    """A benchmark's own processes are this one: a new one imports torch first, and gpu_sites shows that it does."""
    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Now, Pool=Now)
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": context}.get)


# --- the command ---------------------------------------------------------------------------------------------------------


def test_without_a_name_they_are_listed(feddp):
    code, out, _ = feddp("bench")
    assert code == 0
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}
    assert sorted(lines) == NAMES
    assert all(line.endswith(".") for line in lines.values())


@pytest.mark.parametrize("name", NAMES)
def test_each_has_options_of_its_own(feddp, name):
    """The command gives --help on, and a wrong option is an error of the benchmark."""
    assert feddp("bench", name, "--help")[0] == 0
    code, _, err = feddp("bench", name, "--pears", "3")
    assert code == 2
    assert f"feddp bench {name}: error: " in err


def test_a_wrong_name_is_one_message(feddp):
    code, _, err = feddp("bench", "nonesuch")
    assert code == 2
    assert err.startswith("feddp: unknown benchmark 'nonesuch'; known: aggregate, ")


def test_an_installed_package_has_none(feddp, monkeypatch, tmp_path):
    monkeypatch.setattr(package, "__file__", str(tmp_path / "site-packages/feddp/__init__.py"))
    code, _, err = feddp("bench", "loop")
    assert code == 2
    assert "has no benchmarks: they are not installed; run this command in a checkout of FedDP" in err


# of a command on the page: options that make it short
TINY = {
    "loop": ("--size", "32", "--images", "6", "--pairs", "1"),
    "calibration": ("--size", "32", "--images", "6", "--pairs", "1"),
    "sealing": ("--pairs", "1"),
    "inference": ("--methods", "feddp", "--size", "32", "--batch", "2", "--pairs", "1"),
}


def test_what_the_page_says_works(feddp, toy):
    """Every command of speed.md, on a toy network."""
    commands = [line.split()[1:] for line in commands_for("test_bench", "docs/results/speed.md")]
    assert len(commands) > 3
    for words in commands:
        code, _, err = feddp(*words, *((*TINY[words[1]], "--network", toy) if words[1:] else ()))
        assert code == 0, err


def test_the_page_explains_each():
    assert [name for name in NAMES if f"`{name}`" not in text_of("docs/results/speed.md")] == []


def test_watch_ends_with_the_run(monkeypatch, tmp_path, capsys):
    """Or says that there is none. A run's process is seen once, and 61 s later no more."""
    clock = [0.0]
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 61))
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watch, "processes_below", lambda out: [])
    with pytest.raises(InputError, match="has no run: no process of one was found for 60 s; start it with --env poc first"):
        watch.main([str(tmp_path)])
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=3 * 2**20, shared=2**20))
    monkeypatch.setattr(watch, "kind_of", lambda process: "server")
    monkeypatch.setattr(watch, "processes_below", lambda out: [process] if clock[0] < 200 else [])
    watch.main([str(tmp_path)])
    assert capsys.readouterr().out == ""


# --- what they share -----------------------------------------------------------------------------------------------------


def test_pairs_take_turns_and_every_second_turn_runs_backwards():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "ab"}
    seconds = common.interleaved("", 3, calls)
    assert "".join(called) == "ab" + "ab" + "ba" + "ab"  # the first two are not counted
    assert [len(values) for values in seconds.values()] == [3, 3]


def test_a_ratio_is_the_median_of_the_pairs():
    """Pairs 2/1, 3/1, 9/1, 4/1, 10/2: sorted 2, 3, 4, 5, 9; the quartiles are the 2nd and the 4th of five. The ratio of the
    medians, 4 and 1, is another pair's."""
    found = common.ratio([2, 3, 9, 4, 10], [1, 1, 1, 1, 2])
    assert found == {"median": 4, "low": 3, "high": 5}
    assert common.ratio([3], [2]) == {"median": 1.5, "low": 1.5, "high": 1.5}


def test_a_process_that_dies_harms_no_other(monkeypatch):
    """One is killed, one answers (SIGCONT does nothing to it), and one stops for ever, and is ended with its caller. Forked:
    a new process would first import torch."""
    forked = multiprocessing.get_context("fork")
    monkeypatch.setattr(common.multiprocessing, "get_context", {"spawn": forked}.get)
    calls = {"stops": (signal.SIGSTOP,), "dies": (signal.SIGKILL,), "lives": (signal.SIGCONT,)}
    answers = common.apart(signal.raise_signal, calls, 3, 600)
    found = dict([next(answers), next(answers)])
    assert found == {"dies": {"error": "its process ended with exit code -9, without an answer"}, "lives": None}
    assert len(multiprocessing.active_children()) == 1
    answers.close()
    assert multiprocessing.active_children() == []


def test_a_process_that_takes_too_long_is_ended():
    assert list(common.apart(time.sleep, {"sleeps": (600,)}, 1, 0.1)) == [("sleeps", {"error": "no answer within 0.1 s"})]
    assert multiprocessing.active_children() == []


def test_a_line_is_json_whatever_its_figures(capsys):
    """JSON has no NaN and no infinity."""
    common.line("x", {"deviation": float("nan"), "seconds": [1.5, -float("inf")], "nested": {"a": float("inf")}})
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert (found["deviation"], found["seconds"], found["nested"]) == ("nan", [1.5, "-inf"], {"a": "inf"})


def test_the_versions_are_those_of_imported_packages(monkeypatch):
    monkeypatch.setattr(common.sys, "modules", {"torch": torch, "json": json})
    (found,) = common.versions().items()
    assert found == ("torch", version("torch"))


# --- each, once ----------------------------------------------------------------------------------------------------------


def paired(found, over, under):
    """The benchmark's ratio, from the seconds that it printed."""
    return common.ratio(found["seconds"][over], found["seconds"][under])


def test_loop(bench, toy):
    (found,) = bench("loop", "--network", toy, "--size", 32, "--images", 6, "--pairs", 2)
    assert found["ratio"] == paired(found, "ours", "bare")
    assert found["machine"]["torch"]


@pytest.mark.parametrize("size", ["8", "33", "0", "2048", "x"])
@pytest.mark.parametrize("name", ["inference", "loop", "practice"])
def test_a_size_that_no_plan_has_is_refused(feddp, name, size):
    """The networks halve their input five times: 32 or a multiple."""
    code, out, err = feddp("bench", name, "--size", size)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"feddp bench {name}: error: argument --size: {size} is not a multiple of 32 from 32 to 1024"


def test_the_bare_loop_may_compute_in_another_type(bench, toy, monkeypatch):
    computed = []
    monkeypatch.setattr(loop, "ours", lambda *given: computed.append(("ours", given[-1].precision_compute)))
    monkeypatch.setattr(loop, "bare", lambda *given, compute: computed.append(("bare", compute)))
    for words in ((), ("--against", "float32")):
        (found,) = bench("loop", "--network", toy, "--size", 32, "--images", 6, "--pairs", 1, "--compute", "bfloat16", *words)
        assert found["compute"] == "bfloat16"
        assert computed[-2:] == [("ours", "bfloat16"), ("bare", found["against"])]
    assert [compute for name, compute in computed if name == "bare"] == ["bfloat16"] * 2 + ["float32"] * 2


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_bare_loop_computes_what_ours_does(resnet, monkeypatch, compute):
    """Without dropout, and with the order and the symmetries that ours drew, an epoch ends with the same network."""
    training = from_settings(Training, {**common.computing(compute), "batch": "2", "clip": "0.01"})
    samples, drawn, collated = common.images(4, 32), [], loading._collated

    def seen(samples, order, batch, symmetries, device):
        drawn.append((torch.tensor(order), symmetries))
        return collated(samples, order, batch, symmetries, device)

    def trained(epoch, **more):
        torch.manual_seed(0)
        network = gpu_agree.still(resnet, 3, 1).eval()  # it has batch normalisation: an epoch must set it to train
        loss = epoch(network, adamw(network, training.lr, training.weight_decay), samples, training, **more)
        return loss, network.state_dict()

    monkeypatch.setattr(loading, "_collated", seen)
    loss, weights = trained(loop.ours)
    ((order, symmetries),) = drawn
    assert symmetries.any(dim=0).all(), "each symmetry is there"
    coins = iter([column for part in symmetries.split(2) for column in part.T])
    monkeypatch.setattr(torch, "randperm", lambda number: order)
    monkeypatch.setattr(torch, "rand", lambda *shape: 1 - next(coins).float().reshape(shape))  # below 0.5: this symmetry
    found, others = trained(loop.bare, compute=compute)
    assert next(coins, None) is None, "all are used"
    assert found == pytest.approx(loss, rel=1e-6)
    assert {name for name in weights if not torch.allclose(weights[name], others[name], rtol=1e-5, atol=1e-7)} == set()


def test_practice(bench, toy):
    (found,) = bench("practice", "--network", toy, "--size", 32, "--stored", 32, "--images", 12, "--pairs", 2)
    assert found["ratio"] == {"ours": paired(found, "plain practice", "ours")}
    for side, number in (("ours", 2), ("plain practice", 3)):
        parts = [values for name, values in found["parts"].items() if name.startswith(side)]
        assert len(parts) == number
        # a turn has its parts, rounded to a millionth of a second, and next to nothing between them
        assert all(turn / 2 < sum(each) < turn + 1e-5 for turn, *each in zip(found["seconds"][side], *parts, strict=True))


def test_practice_measures_graphs_beside_ours(bench, toy, monkeypatch):
    """There are none on a CPU; that the settings ask for them is all that can be seen here."""
    asked, real = [], practice.ours

    def ours(network, optimizer, samples, training):
        asked.append(training.cuda_graphs)
        return real(network, optimizer, samples, training)

    monkeypatch.setattr(practice, "ours", ours)
    (found,) = bench("practice", "--network", toy, "--size", 32, "--stored", 32, "--images", 12, "--pairs", 1, "--graphs")
    assert sorted(asked) == [False, False, True, True]  # a turn that is not counted, and one that is
    assert found["ratio"] == {side: paired(found, "plain practice", side) for side in ("ours", "ours, CUDA graphs")}


def test_drawn_images_have_the_size_that_was_asked_for():
    """Drawn with 96 pixels: every fourth pixel of a mask of 384 is the mask of 96."""
    (large,), (small,) = common.images(1, 384), common.images(1, 96)
    assert large["image"].shape == (3, 384, 384)
    assert torch.equal(large["mask"][:, ::4, ::4], small["mask"])
    assert large["mask"].unique().tolist() == [0, 1]


def test_practice_measures_no_distances(bench, toy, monkeypatch):
    """Neither side: our round measures Dice and IoU alone."""
    monkeypatch.setattr(metrics, "_distances", lambda predicted, truth: pytest.fail("a distance was measured"))
    bench("practice", "--network", toy, "--size", 32, "--stored", 32, "--images", 12, "--pairs", 1)


def test_calibration(bench, toy):
    """Its loop compares the losses; 20 epochs of δ at every batch, over δ once and 20 epochs with it."""
    (found,) = bench("calibration", "--network", toy, "--size", 32, "--images", 6, "--pairs", 1, "--peers", 2)
    (once,), (epoch,), (every,) = found["peers"]["2"]["seconds"].values()
    assert found["peers"]["2"]["ratio"]["median"] == pytest.approx(20 * every / (once + 20 * epoch), abs=1e-4)


def test_calibration_notices_unequal_losses(toy, monkeypatch):
    """With a loss that is always 1."""
    monkeypatch.setattr(
        calibration, "at_every_batch", lambda own, name, peers, loss: lambda logits, batch: logits.mean() * 0 + 1
    )
    with pytest.raises(FedDPError, match="the losses differ"):
        calibration.compared(common.images(6, 32), toy, 2, 1)


def test_aggregate(bench, here):
    """A contribution is γ in float32: 5,165,793 parameters and the buffers, 19 MiB and more. The peak is not looked at here."""
    (found,) = bench("aggregate", "--sites", 2, "--turns", 1)
    (row,) = found["turns"]
    assert row["contributions"] == 2
    assert 5_165_793 * 4 / 2**20 < row["MiB each"] < 21


def test_a_row_of_aggregate_has_the_medians_of_its_turns():
    """Three turns of 4 and 16 contributions: the medians of 5, 1, 3 and of 10, 70, 60."""
    found = [(4, 5.0), (16, 10.0), (4, 1.0), (16, 70.0), (4, 3.0), (16, 60.0)]
    assert aggregate.medians(found, 2) == [(4, 3.0), (16, 60.0)]


def test_sealing(bench, toy):
    """The toy's queries: 3 · 4 weights and 4 biases of 4 bytes. A further recipient is a slot more in the header."""
    (found,) = bench("sealing", "--network", toy, "--recipients", 1, 3, "--pairs", 1)
    assert found["tensors"] == (3 * 4 + 4) * 4
    one, three = (found["recipients"][number]["beside"] for number in "13")
    # hexadecimal digits of a fingerprint, the handshake's key, and HPKE's own public key, a key of 32 bytes and a tag of 16
    slot = 64 + 64 + 2 * (32 + 32 + 16)
    assert 2 * slot < three - one < 2 * (slot + 100)


def test_inference(bench, toy):
    """FedDP's network has FedAvg's parameters."""
    (found,) = bench("inference", "--network", toy, "--methods", "feddp", "--size", 32, "--batch", 2, "--pairs", 1)
    networks = found["networks"]
    assert list(networks) == ["fedavg, 1", "feddp, 1", "fedavg, 2", "feddp, 2"]
    assert networks["fedavg, 1"]["parameters"] == networks["feddp, 1"]["parameters"]


def test_messages(bench, toy):
    """Half precision halves what is float32; the toy's counter of its normalisation stays int64, 8 bytes of its
    (3·4 + 4 + 4·4 + 4·1 + 1)·4 + 8 = 156."""
    options = "--rounds", 1, "--sites", 2, "--images", 12, "--size", 32, "--seeds", 0
    (found,) = bench("messages", "--method", "fedavg", "--network", toy, *options)
    nbytes = found["bytes"]
    assert nbytes["float16"]["train"] / nbytes["float32"]["train"] == (148 / 2 + 8) / 156
    assert [len(values) for values in found["dice"].values()] == [1, 1]


class Flat(nn.Module):
    """The gradient of its query's weight is the image, times that of its bias."""

    roles = {QUERY: ("q",), HEAD: ("head",)}

    def __init__(self, channels: int, classes: int, pretrained: bool = False):
        super().__init__()
        self.q, self.head = nn.Conv2d(channels, 1, 32), nn.Conv2d(1, classes, 1)

    def forward(self, x):
        return self.head(self.q(x)).expand(-1, -1, *x.shape[2:])


def test_inversion_finds_what_is_sent_and_nothing_else(bench, monkeypatch):
    """Flat's image is found where its query is shared. Where it is private, the rest's gradients are a few numbers: what is
    found is noise, of unit variance as the image, so that its squared error is 2 (1 - r) with r near 0."""
    monkeypatch.setitem(NETWORKS, "flat", Flat)
    options = "--images", 1, "--trained", 6, "--iterations", 100, "--epochs", 0, "--sent", "gradient", "--network", "flat"
    *each, found = bench("inversion", "--methods", "fedavg", "feddp", *options)
    assert [one["method"] for one in each] == ["fedavg", "feddp"]
    shared, private = (found["attacks"][f"0 epochs, gradient, {method}"][0] for method in ("fedavg", "feddp"))
    assert shared["mse"] < 0.05
    assert shared["correlation"] > 0.97
    assert private["mse"] == pytest.approx(2 * (1 - private["correlation"]), abs=1e-3)
    assert abs(private["correlation"]) < 0.2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--epochs", 0, -3), "-3 is not a whole number of at least 0"),
        (("--epochs", 1.5), "1.5 is not a whole number of at least 0"),
        (("--tv", -1), "--tv -1.0: a weight is at least 0"),
        (("--tv", "nan"), "--tv nan: a weight is at least 0"),
        (("--trained", 2, "--images", 3), "2 training images, but --images 3 are attacked; give fewer"),
    ],
)
def test_what_no_attack_can_be_made_of_is_refused(feddp, words, message):
    code, _, err = feddp("bench", "inversion", *words)
    assert code == 2
    assert message in err


def test_the_attacker_has_the_starts_private_tensors(toy, plan_for):
    """After an epoch at the site: the shared tensors are the site's, the private ones those of the start."""
    plan = plan_for(method="feddp", network=toy)
    made, start = invert.attack_on(plan, common.images(6, 32), 1), build_network(plan).state_dict()
    victim, known = made.victim.state_dict(), made.known.state_dict()
    private = set(partition_of(plan, made.victim).private)
    assert private == {"q.weight", "q.bias"}
    for name, value in known.items():
        assert value.equal(start[name] if name in private else victim[name])
    assert not victim["q.weight"].equal(start["q.weight"])
    assert set(made.shared) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}  # no buffers


def test_a_step_of_adamw_sends_the_gradients_signs(toy, plan_for):
    """Its first step is lr g / (|g| + 1e-8), and the decay is taken away: lr times the sign, to the rounding of a weight."""
    made = invert.attack_on(plan_for(method="fedavg", network=toy), common.images(6, 32), 0)
    sample = common.images(1, 32)[0]
    for step, gradient in zip(made.sent(sample, "step"), made.sent(sample, "gradient"), strict=True):
        large = gradient.abs() > 1e-5
        assert step[large] == pytest.approx(1e-3 * gradient.sign()[large], abs=2e-6)
    assert large.any()


def test_the_errors_of_an_attack():
    """A constant 1 too much: MSE 1, the range of -1 to 1 is 2, so 10 log10(4) = 6.02 dB; the correlation is 1."""
    truth = torch.tensor([[[[-1.0, 1.0], [0.0, 0.5]]]])
    found = invert.errors(truth + 1, truth)
    assert found == pytest.approx({"mse": 1, "psnr": 6.0206, "correlation": 1}, abs=1e-4)


def test_local_divides_by_the_first(bench, monkeypatch):
    """Whole runs are played, 2 s each, but 1 s for two processes. What an environment's name brings along is typed."""
    typed, clock = [], [0.0]

    def run(data, out, *words):
        typed.append(words[: words.index("--method")])
        clock[0] += 1 if "--threads" in typed[-1] else 2

    monkeypatch.setattr(local, "run", run)
    monkeypatch.setattr(common.time, "perf_counter", lambda: clock[0])
    (found,) = bench("local", "--envs", "local --threads 2", "sim", "--sites", 2, "--images", 6, "--pairs", 2)
    once = [("local",), ("local", "--threads", "2"), ("sim",)]
    assert typed == [*once, *reversed(once)]
    assert {where: ratio["median"] for where, ratio in found["ratio"].items()} == {
        "local": 1,
        "local --threads 2": 0.5,
        "sim": 1,
    }


# --- what needs a GPU, on the CPU ----------------------------------------------------------------------------------------


def test_gpu_agree(bench, toy):
    gradients, rounds = bench("gpu_agree", "--device", "cpu", "--methods", "feddp", "--network", toy)
    assert (gradients["compared"], gradients["network"]) == ("gradients", toy)
    assert 0 < gradients["logits"] == gradients["logits by graphs"] == gradients["logits of the CPU"] < 2**-20
    assert gradients["gradient"] == gradients["gradient of the CPU"] < 2**-20
    assert gradients["deviation"] == max(1 / 4, gradients["gradient"] * 2**8)
    assert (rounds["compared"], rounds["name"], rounds["deviation"]) == ("rounds", "feddp", 0)
    assert rounds["operations"] > 1000, "the sites' training is among them"
    assert {gradients["outcome"], rounds["outcome"]} == {"agrees"}


@pytest.mark.parametrize(
    ("deviation", "sensitivity", "outcome"),
    [
        (0.001, 0.0, "agrees"),
        (0.0011, 0.001, "disagrees"),
        (0.0011, 0.0011, "not decided"),
        (float("nan"), 0.0, "disagrees"),
        (float("nan"), 1.0, "disagrees"),
        (0.5, float("nan"), "disagrees"),
    ],
)
def test_what_a_deviation_shows(deviation, sensitivity, outcome):
    """The CPU's own deviation, after a change in the last places, excuses one that is as large."""
    assert gpu_agree.outcome(deviation, 0.001, sensitivity) == outcome


@pytest.fixture
def played(monkeypatch):
    """Rounds of gpu_agree that are not run: both sites' networks end 1 above their start. test_gpu_agree runs them."""

    def rounds(plan, first, data, out, device):
        return {site: {name: value + 1 for name, value in first.items()} for site in plan.sites}

    monkeypatch.setattr(gpu_agree, "after_rounds", rounds)
    monkeypatch.setattr(gpu_agree, "exactly", lambda call: (call(), {"cpu": 1}))


def test_gradients_that_are_not_those_of_double_precision_disagree(feddp, toy, played, monkeypatch):
    """Float32 whose logits are a ten-thousandth larger: some hundred times the rounding of a few products."""
    real = gpu_agree.replayed
    monkeypatch.setattr(gpu_agree, "replayed", lambda *given, **named: lambda images: real(*given, **named)(images) * 1.0001)
    code, out, _ = feddp("bench", "gpu_agree", "--device", "cpu", "--methods", "feddp", "--network", toy)
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 2
    assert {line["compared"]: line["outcome"] for line in found} == {"gradients": "disagrees", "rounds": "agrees"}
    assert found[0]["logits by graphs"] == pytest.approx(1e-4, rel=0.01)


def exactly(computed, *given):
    """What a computation returns with exact operations, and in double precision, rounded to float32."""
    with Exact() as exact:
        found = computed(*given)
    assert exact.counted["cpu"] > 0
    return found, computed(*(value.double() for value in given)).float()


def test_exact_operations_round_once():
    """A sum of 10,000 tenths of which float32 loses some places; the product and the sum are two operations."""
    tenths = torch.full((10_000,), 0.1).cumsum(0).flip(0)
    found, wanted = exactly(torch.sum, tenths)
    assert found.dtype is torch.float32
    assert found.equal(wanted)
    spectrum, _ = exactly(lambda values: torch.fft.fft(values).abs(), tenths)
    assert spectrum.dtype is torch.float32


def test_exact_operations_widen_a_type_that_is_named_but_not_an_optimisers_steps():
    """Softmax of these values in float32 is not that of double precision; CUDA's fused AdamW reads its steps as float32."""
    seen = {}

    class Below(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.setdefault(func._schema.name, (args, kwargs))
            return func(*args, **(kwargs or {}))

    values = torch.linspace(-3, 3, 1000)
    found, wanted = exactly(lambda given: torch.softmax(given, 0, dtype=given.dtype), values)
    assert found.equal(wanted)
    assert not torch.softmax(values, 0).equal(wanted)
    value = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([value], lr=0.1, fused=True)
    value.grad = torch.ones(2)
    with Below(), Exact():
        optimizer.step()
    (parameters, *_, steps), _ = seen["aten::_fused_adamw_"]
    assert (parameters[0].dtype, steps[0].dtype) == (torch.float64, torch.float32)


def test_exact_operations_leave_types_views_and_places_alone():
    """In place, the tensor itself changes; a view shares its memory; other types are as they were."""
    with Exact() as exact:
        values, whole = torch.ones(2, 3), torch.arange(3)
        assert values.add_(1.5) is values
        assert values.tolist() == [[2.5] * 3] * 2
        values.t_()
        values[0][0] = 7
        assert values.shape == (3, 2)
        assert values[0, 0] == 7
        assert whole.sum().dtype is torch.int64
        assert values.double().sum().dtype is torch.float64
        assert torch.softmax(values, 0, dtype=torch.float32).dtype is torch.float32
    assert set(exact.counted) == {"cpu"}


def test_exact_operations_move_running_statistics_and_every_part_of_an_optimiser():
    """As float32 does, to its last places: by hand the running mean is 0.1 times the batch's mean, 0.1 · 1.5."""
    norm = nn.BatchNorm1d(1)
    with Exact():
        norm(torch.tensor([[1.0], [2.0]]))
    assert norm.running_mean.item() == pytest.approx(0.15)
    assert norm.running_var.item() == pytest.approx(0.9 + 0.1 * 0.5)
    ends = []
    for context in (Exact(), nullcontext()):
        value = nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer = torch.optim.AdamW([value], lr=0.1, fused=True)
        with context:
            for _ in range(3):
                optimizer.zero_grad()
                value.square().sum().backward()
                optimizer.step()
        ends.append((value.detach(), optimizer.state[value]["exp_avg_sq"], optimizer.state[value]["step"]))
    assert ends[0][2] == ends[1][2] == 3
    assert all(torch.allclose(one, other, rtol=1e-6) for one, other in zip(*ends, strict=True))
    assert not ends[0][0].equal(torch.tensor([1.0, -2.0]))


@pytest.mark.parametrize("method", OWN)
def test_gpu_agree_has_a_network_for_each_method(method, monkeypatch, tiny_root):
    """Its private rule selects tensors of it, as a run requires. The networks have few channels and a block in each stage."""
    less = FEW | {"depths": (1, 1, 1, 1)}
    few = {gpu_agree.USUAL: functools.partial(NETWORKS[gpu_agree.USUAL], **less), "resnet18-fpn": narrow_resnet}
    monkeypatch.setitem(NETWORKS, gpu_agree.STILL, few[gpu_agree.FITTING.get(method, gpu_agree.USUAL)])
    plan, first = gpu_agree.plan_of(method, tiny_root, "cpu")
    assert set(partition_of(plan, build_network(plan)).shared) <= set(first)


def test_gpu_agree_takes_fewer_inner_steps_where_a_method_has_them(tiny_root, monkeypatch):
    monkeypatch.setitem(NETWORKS, gpu_agree.STILL, NETWORKS[gpu_agree.USUAL])
    assert gpu_agree.plan_of("pfedme", tiny_root, "cpu")[0].settings["inner_steps"] == 1
    assert "inner_steps" not in gpu_agree.plan_of("fedavg", tiny_root, "cpu")[0].settings


@pytest.mark.parametrize(("moves", "outcome"), [(False, "disagrees"), (True, "not decided")])
def test_gpu_agree_notices_a_device_that_computes_otherwise(feddp, toy, played, monkeypatch, moves, outcome):
    """By weights ten times as large; unless the CPU's own, from a start that is hardly another one, are so too."""
    monkeypatch.setattr(gpu_agree, "gradients", lambda device: {"deviation": 0.0})
    real = gpu_agree.after_rounds

    def wrong(plan, first, data, out, device):
        found = real(plan, first, data, out, device)
        large = {name: value * 10 if value.is_floating_point() else value for name, value in found["site-1"].items()}
        return found | ({"site-1": large} if out.name == "device" or (moves and out.name == "near") else {})

    monkeypatch.setattr(gpu_agree, "after_rounds", wrong)
    code, out, err = feddp("bench", "gpu_agree", "--device", "cpu", "--methods", "fedavg", "--network", toy)
    found = json.loads(out.splitlines()[-1])
    assert found["outcome"] == outcome
    assert (found["sensitivity"] >= found["deviation"]) == moves
    assert code == (0 if moves else 2)
    assert moves or "cpu and the CPU were not found to agree in fedavg (disagrees);" in err.splitlines()[-1]


def test_what_is_moved_for_a_methods_sensitivity():
    """One value in 2^12 by 2^-22 of itself; of 2^20 values 256 ± 16, so between 176 and 336 (five deviations)."""
    first = {"weight": torch.ones(2**20), "count": torch.tensor(3)}
    found = gpu_agree.moved(first)
    larger = found["weight"] - 1
    assert 176 < (larger > 0).sum() < 336
    assert set(larger.unique().tolist()) == {0.0, 2.0**-22}
    assert found["count"] is first["count"]


def test_gpu_agree_does_not_count_on_operations_that_it_has_not_seen(monkeypatch, toy, played, tiny_root, tmp_path):
    """A run whose sites compute elsewhere, in a process of their own, would compare float32."""
    monkeypatch.setattr(gpu_agree, "exactly", lambda call: (call(), {}))
    monkeypatch.setitem(NETWORKS, gpu_agree.STILL, NETWORKS[toy])
    with pytest.raises(FedDPError, match="no exact operation on cpu was counted"):
        gpu_agree.after_both("cpu", "fedavg", tiny_root, tmp_path)


def test_gpu_agree_goes_on_after_a_method_that_fails(feddp, toy, monkeypatch):
    """SiloBN, whose rule selects nothing in the default network: FedAvg is still compared, and the last line names SiloBN."""
    monkeypatch.setattr(gpu_agree, "FITTING", {"silobn": DEFAULT})
    monkeypatch.setattr(gpu_agree, "USUAL", toy)
    monkeypatch.setattr(gpu_agree, "gradients", lambda device: {"deviation": 0.0})  # those of every network
    code, out, err = feddp("bench", "gpu_agree", "--device", "cpu", "--methods", "silobn", "fedavg")
    *_, failed, other = map(json.loads, out.splitlines())
    assert (failed["name"], failed["outcome"]) == ("silobn", "failed")
    assert failed["error"].startswith("InputError: ")
    assert (other["name"], other["deviation"]) == ("fedavg", 0)
    assert code == 2
    assert "agree in silobn (failed);" in err.splitlines()[-1]
    assert f"| silobn | {DEFAULT} |  | 0.001 | failed |" in err


def test_gpu_agree_in_several_processes(feddp, here):
    """Each method's line, as it is known; a network that does not exist is the error of each."""
    words = "--device", "cpu", "--processes", 2, "--network", "nonesuch", "--methods", "fedbn"
    code, out, err = feddp("bench", "gpu_agree", *words)
    lines = list(map(json.loads, out.splitlines()))
    failed = {("gradients of nonesuch", "failed"), ("fedbn", "failed")}
    assert {(line["name"], line["outcome"]) for line in lines} == failed
    assert all(line["error"].startswith("InputError: unknown network 'nonesuch'") for line in lines)
    assert code == 2
    assert "gradients of nonesuch (failed)" in err.splitlines()[-1]
    assert "fedbn (failed)" in err.splitlines()[-1]


def test_gpu_speed(bench, toy):
    """The toy's arithmetic, two operations for a product and its sum: 32² pixels, convolutions 3 to 4 and 4 to 1. The backward
    pass has the products twice more, except for the first layer's input, which needs no gradient."""
    tiny = "--size", 32, "--batches", 2, "--seconds", 0, "--matrix", 8, "--copied", 1
    found = bench("gpu_speed", "--device", "cpu", "--network", toy, "--computes", "float32", *tiny)
    kinds = "training, images on the CPU", "training", "training, CUDA graphs", "inference"
    assert [line["measured"] for line in found] == ["copy", "matrix", *kinds]
    from_cpu, training, _, inference = found[2:]
    assert from_cpu["flop"] == training["flop"]
    assert inference["flop"] == 2 * 2 * 32**2 * (3 * 4 + 4)
    assert training["flop"] == 3 * inference["flop"] - 2 * 2 * 32**2 * 3 * 4
    assert training["images_per_second"] == pytest.approx(2 / training["seconds"])
    # 29 parameters, two images of three channels, two maps, of 4 bytes each
    assert inference["least_bytes"] == 4 * (29 + 2 * 3 * 32**2 + 2 * 32**2)
    assert inference["of_bandwidth"] == pytest.approx(
        inference["least_bytes"] / inference["seconds"] / found[0]["bytes_per_second"]
    )


def test_gpu_speed_takes_its_bounds_from_the_fastest_call_and_its_rates_from_the_median(bench, toy, monkeypatch):
    """Calls of 4, 1, 2 and 8 s: the fastest 1 s, the median 3 s. A copy of 1 MiB reads and writes 2^21 bytes; a product of
    matrices of side 8 has 2 · 8³ = 1024 operations. The epoch of 8 images is four batches of 2, so a batch takes 3/4 s."""
    monkeypatch.setattr(gpu_speed, "timed", lambda *_: [4.0, 1.0, 2.0, 8.0])
    tiny = "--size", 32, "--batches", 2, "--matrix", 8, "--copied", 1
    copy, matrix, *ours = bench("gpu_speed", "--device", "cpu", "--network", toy, "--computes", "float32", *tiny)
    assert copy["bytes_per_second"] == 2**21
    assert matrix["flop_per_second"] == 1024
    assert [line["seconds"] for line in ours] == [0.75] * 4


def test_gpu_speed_counts_convolutions_in_groups():
    """8 channels, each with its 3 × 3 weights, on 16² pixels, and both gradients: three times 2 · 16² · 8 · 9 operations."""
    image = torch.zeros(1, 8, 16, 16, requires_grad=True)
    layer = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8)
    with gpu_speed.counting() as counter:
        layer(image).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 16**2 * 8 * 9


def test_what_gpu_speed_counts_as_kept_is_freed():
    """By hand: the image, 3 · 32² values of 4 bytes, and the ReLU's output, 4 · 32², which the ReLU itself saves."""
    network, outputs = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 1, 1)), []
    network[1].register_forward_hook(lambda _, given, output: outputs.append(weakref.ref(output)))
    assert gpu_speed.kept(network, torch.zeros(1, 3, 32, 32), torch.float32) == 4 * (3 + 4) * 32**2
    gc.collect()
    assert outputs[0]() is None


def test_gpu_speed_trains_with_the_images_where_it_says(bench, toy, monkeypatch):
    """The first of the four measures a site without its images on the GPU."""
    given = []
    monkeypatch.setattr(gpu_speed, "placed", lambda samples, device: [{**sample, "stem": "placed"} for sample in samples])
    for name in ("training", "inference"):
        real = getattr(gpu_speed, name)

        @functools.wraps(real)
        def measured(*words, real=real, **more):
            given.append(words[-1][0]["stem"])
            return real(*words, **more)

        monkeypatch.setattr(gpu_speed, name, measured)
    tiny = "--size", 32, "--batches", 2, "--seconds", 0, "--matrix", 8, "--copied", 1
    bench("gpu_speed", "--device", "cpu", "--network", toy, "--computes", "float32", *tiny)
    assert given == ["image-0", "placed", "placed", "placed"]


def test_gpu_speed_says_that_the_autocast_of_inference_is_its_own(bench, toy):
    tiny = "--size", 32, "--batches", 2, "--seconds", 0, "--matrix", 8, "--copied", 1
    found = bench("gpu_speed", "--device", "cpu", "--network", toy, "--computes", "float32", "bfloat16", *tiny)
    labels = {line["measured"] for line in found if line["measured"].startswith("inference")}
    assert labels == {"inference", "inference under an autocast of the benchmark, which predict does not have"}


def test_gpu_speed_keeps_no_batch_of_its_predictions(bench, toy, monkeypatch):
    """When a batch is asked for, the maps of at most one earlier one are there: the caller's, as it is of any loop."""
    alive, most = weakref.WeakSet(), []

    def predict(network, samples, batch):
        for _ in range(0, len(samples), batch):
            most.append(len(alive))
            maps = torch.zeros(batch, 1, 32, 32)
            alive.add(maps)
            yield maps, {"image": maps}
            del maps

    monkeypatch.setattr(gpu_speed, "predict", predict)
    tiny = "--size", 32, "--batches", 2, "--seconds", 0, "--matrix", 8, "--copied", 1
    bench("gpu_speed", "--device", "cpu", "--network", toy, "--computes", "float32", *tiny)
    assert len(most) == 1 + 4 + 4  # one batch to count, then four twice
    assert max(most) == 1


SITES = {"device": "cpu", "compute": "float32", "network": "toy", "images": 6, "size": 32, "seconds": 0.01, "graphs": False}


def test_gpu_sites_measures_a_site(toy):
    """One of them, in this process."""
    found = gpu_sites.trained(0, threading.Barrier(1), SITES)
    assert found["rate"] > 0


@pytest.mark.parametrize("graphs", [False, True])
def test_gpu_sites_trains_with_the_settings_of_graphs(toy, monkeypatch, graphs):
    asked = []
    monkeypatch.setattr(gpu_sites, "fit_epoch", lambda *given, seed: asked.append(given[4].cuda_graphs))
    gpu_sites.trained(0, threading.Barrier(1), SITES | {"graphs": graphs})
    assert set(asked) == {graphs}


def test_gpu_sites_adds_up_what_each_trains(monkeypatch):
    """3 and 4 images per second are 7; each site's figures stay beside the sum."""
    answers = {"site 1 of 2": {"rate": 3.0, "in_use": 10}, "site 2 of 2": {"rate": 4.0, "in_use": 20}}
    monkeypatch.setattr(gpu_sites, "apart", lambda work, calls, *limits: ((name, answers[name]) for name in calls))
    assert gpu_sites.together(2, SITES) == {"rate": 7.0, "each": {"rate": [3.0, 4.0], "in_use": [10, 20]}}


def test_gpu_sites_prints_one_site_before_it_tries_several(feddp, monkeypatch):
    """So that its figure is there if the GPU's memory is too little for all of them; the message says why and where."""

    def apart(work, calls, processes, seconds):
        for name in calls:
            yield name, {"rate": 2.0} if processes == 1 else {"error": "OutOfMemoryError: CUDA out of memory"}

    monkeypatch.setattr(gpu_sites, "apart", apart)
    code, out, err = feddp("bench", "gpu_sites", "--device", "cpu")
    (alone,) = map(json.loads, out.splitlines())
    assert (alone["measured"], alone["rate"]) == ("alone", 2)
    assert code == 2
    assert err == "feddp: site 1 of 4 failed, the others were ended: OutOfMemoryError: CUDA out of memory\n"


def test_gpu_sites_says_what_a_sites_process_met(feddp):
    """In a new process, to which the barrier travels."""
    code, out, err = feddp("bench", "gpu_sites", "--device", "cpu", "--network", "nonesuch", "--seconds", 600)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("feddp: site 1 of 1 failed, the others were ended: InputError: unknown network")


def test_gpu_steps_begins_with_the_same_gradient_in_every_way(bench, pvt):
    """On a CPU there are no graphs. Another layout has another order of sums; torch.compile takes minutes here. What follows
    the gradient, and how long it takes, is not tested."""
    ways = [way for way in gpu_steps.WAYS if "compile" not in way]
    tiny = "--size", 64, "--batches", 2, "--computes", "float32", "--seconds", 0.01, "--ways", *ways
    found = bench("gpu_steps", "--device", "cpu", "--network", pvt, *tiny)
    assert [line["way"] for line in found] == ways
    assert [line["gradient_error"] for line in found] == [0, 0, *2 * [pytest.approx(0, abs=1e-4)]]


def test_gpu_steps_sees_a_way_that_computes_otherwise(bench, pvt, monkeypatch):
    """Logits times 2 have another gradient."""
    monkeypatch.setitem(gpu_steps.WAYS, "one by one", (torch.contiguous_format, lambda network, *_: lambda x: 2 * network(x)))
    tiny = "--size", 64, "--batches", 2, "--computes", "float32", "--seconds", 0.01, "--ways", "one by one"
    (found,) = bench("gpu_steps", "--device", "cpu", "--network", pvt, *tiny)
    assert found["gradient_error"] > 0.1


def test_gpu_stages_runs_what_comes_after_the_rounds(bench, toy, here):
    (found,) = bench("gpu_stages", "--device", "cpu", "--methods", "finetune", "--size", 32, "--network", toy)
    assert (found["run"], found["stages"], found["outcome"]) == ("finetune", ["train", "tune"], "runs")
    assert found["seconds"] > 0


def test_gpu_stages_has_every_later_stage_and_workers(feddp, monkeypatch):
    """A run that fails is named last; the others have their lines."""
    asked = {}

    def apart(work, calls, processes, seconds):
        for name, (*_, method, threads) in calls.items():
            asked[name] = (method, threads)
            yield name, {"error": "RuntimeError: no"} if method == "fedlc" else {"seconds": 1.0}

    monkeypatch.setattr(gpu_stages, "apart", apart)
    code, out, err = feddp("bench", "gpu_stages", "--device", "cpu")
    one = {name: (name, 1) for name in ("fedbabu", "feddp", "fedlc", "fedoap", "finetune")}
    assert asked == one | {"feddp with 2 workers": ("feddp", 2)}
    lines = list(map(json.loads, out.splitlines()))
    assert {stage for line in lines for stage in line["stages"]} == {"train", *LOCAL_STAGES}
    assert [line["run"] for line in lines if line["outcome"] != "runs"] == ["fedlc"]
    assert code == 2
    assert err.splitlines()[-1] == "feddp: fedlc failed on cpu; the lines above say why"


def test_gpu_protocol_runs_the_product(bench, toy, here, monkeypatch):
    """What it types is run here; the tests below start a program."""

    def started(command, stdout):
        code = ended(command[2:])  # after `python -m`
        return SimpleNamespace(poll=lambda: code, kill=lambda: None, wait=lambda: code)

    monkeypatch.setattr(gpu_protocol, "subprocess", SimpleNamespace(Popen=started))
    options = "--images", 12, 12, "--rounds", 1, "--calibration-epochs", 1, "--size", 32, "--network", toy
    found = bench("gpu_protocol", "--device", "cpu", *options)[-1]
    assert found["finished"]
    assert not found["extrapolated"]
    assert found["rounds_measured"] == 1
    assert found["published"] == "30 minutes on an NVIDIA 3090: theirs, not measured here"


@pytest.fixture
def protocol(feddp, tmp_path, monkeypatch):
    """Runs gpu_protocol with a program in place of Python, which is given the run's folder; returns code, lines and stderr."""

    def run(program, *options):
        tool = tmp_path / "python"
        tool.write_text(f"#!{sys.executable}\nimport signal, sys, time\nfrom pathlib import Path\n{program}\n")
        tool.chmod(0o755)
        monkeypatch.setattr(gpu_protocol, "sys", SimpleNamespace(executable=tool))
        monkeypatch.setattr(gpu_protocol, "LOOK", 0.01)
        monkeypatch.setattr(gpu_protocol, "synthesize_site", "".format)  # draws nothing, in the pool's process
        code, out, err = feddp("bench", "gpu_protocol", "--device", "cpu", "--images", 12, "--size", 32, *options)
        return code, list(map(json.loads, out.splitlines())), err

    return run


def test_gpu_protocol_asks_for_what_it_is_told_to(protocol, tmp_path):
    protocol(f"Path({str(tmp_path / 'words')!r}).write_text(' '.join(sys.argv))", "--threads", 4, "--graphs")
    words = (tmp_path / "words").read_text()
    assert all(word in words for word in ("--threads 4", "--set=cuda_graphs=true", "--set=precision_compute=float32"))


def test_gpu_protocol_that_completes_no_round_has_failed(protocol):
    """Its program ignores SIGINT, as one that a shell started in the background, and SIGTERM."""
    deaf = "for sent in (signal.SIGINT, signal.SIGTERM): signal.signal(sent, signal.SIG_IGN)\ntime.sleep(600)"
    started = time.monotonic()
    code, (found,), err = protocol(deaf, "--seconds", 0.1)
    assert time.monotonic() - started < 300
    assert (found["rounds_measured"], found["finished"]) == (0, False)
    assert code == 2
    assert err == "feddp: the run completed no round in 0.1 s: nothing was measured; give more --seconds\n"


def test_gpu_protocol_prints_every_few_rounds(protocol):
    """Three rounds and then four more, each with time to see them, and the end."""
    writes = """
out = Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir()
for rounds in (3, 4):
    with open(out / "progress.jsonl", "a") as file:
        file.write('{"event": "round", "time": 0, "seconds": 2}\\n' * rounds)
    time.sleep(3)
"""
    code, lines, err = protocol(writes)
    assert code == 0, err
    assert [line["rounds_measured"] for line in lines] == [3, 7, 7]
    assert all(line["covers"].startswith("the rounds alone") for line in lines)


def test_gpu_protocol_whose_run_fails_has_failed(protocol):
    code, (found,), err = protocol("sys.exit(3)")
    assert code == 2
    assert err == "feddp: the run ended with exit code 3 after 0 rounds; its messages are above\n"


def test_gpu_protocol_extrapolates_from_the_median(tmp_path):
    """After one round 200 times its 9 s; after two 9 + 199 · 5 = 1004; then the median of the others, of 2, 7 and 3 s at last:
    9 + 5 + 198 · 3 = 608."""
    expected = [(9, 1800), (5, 1004), (2, 410), (4.5, 905), (3, 608)]
    for number, seconds in enumerate((9.0, 5.0, 2.0, 7.0, 3.0), 1):
        append_event(tmp_path / "progress.jsonl", "round", seconds=seconds)
        found = gpu_protocol.extrapolated(tmp_path, 200)
        assert found["rounds_measured"] == number
        assert (found["seconds_per_round"], found["all_rounds_seconds"]) == expected[number - 1]
        assert found["extrapolated"]


FAKE = """#!/usr/bin/env bash
[ "$2" = feddp ] || exit 0
echo "| a table of $4 |"
echo "{\\"called\\": \\"$4\\", \\"words\\": \\"$*\\"}"
[ "$4" != gpu_speed ] || exit 7
"""


@pytest.fixture
def gpu_sh(tmp_path):
    """Runs the script with the wheels of these names, and an interpreter that writes a line for what it was called with and
    fails in one step; returns what ended, and the lines of gpu.jsonl, each of which must be JSON."""

    def run(*wheels, **env):
        tool = tmp_path / "python"
        tool.write_text(FAKE)
        tool.chmod(0o755)
        (tmp_path / "wheels").mkdir(exist_ok=True)
        for name in wheels:
            (tmp_path / "wheels" / name).touch()
        command = ["bash", str(ROOT / "benchmarks/gpu.sh"), str(tmp_path / "wheels"), str(tmp_path / "out")]
        done = subprocess.run(
            command, env={**os.environ, "PYTHON": str(tool)} | env, capture_output=True, text=True, check=False
        )
        written = tmp_path / "out/gpu.jsonl"
        return done, [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []

    return run


def test_gpu_sh_runs_every_step_and_says_which_failed(gpu_sh):
    done, lines = gpu_sh("rich-15.0.0-py3-none-any.whl")
    assert done.returncode == 1, done.stderr
    steps = "gpu_agree", "gpu_speed", "practice", "gpu_sites", "gpu_stages", "gpu_protocol"
    assert [line["called"] for line in lines if "called" in line] == [*steps]
    (failed,) = [line for line in lines if "exit" in line]
    assert (failed["benchmark"], failed["exit"]) == ("gpu_speed", 7)
    assert "| a table of practice |" in done.stdout


def test_gpu_sh_gives_each_step_options_that_it_has(gpu_sh, monkeypatch):
    """The interpreter above takes any; here each benchmark's own parser reads them, and nothing more is done."""
    read = []

    class Read(Exception):
        pass

    def parse_args(parser, words):
        read.append(parser.parse_known_args(words)[1])  # what it does not know; a wrong value ends the test
        raise Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    _, lines = gpu_sh()
    for line in lines:
        if "called" in line:
            with pytest.raises(Read):
                import_module(f"benchmarks.{line['called']}").main(line["words"].split()[4:])
    assert read == [[]] * 6


def test_gpu_sh_keeps_tables_in_the_log(gpu_sh, tmp_path):
    gpu_sh()
    assert "| a table of practice |" in (tmp_path / "out/gpu.log").read_text().splitlines()


def test_gpu_sh_leaves_time_for_the_protocol(gpu_sh):
    """After 445 of 540 s, 90 s are the last step's, and the 5 s before it are too few for any other. It gets
    540 - 445 - 20 = 75 s, less what passed since. Bash takes the first value of its clock from the environment."""
    _, lines = gpu_sh(SECONDS="445")
    assert [line["called"] for line in lines if "called" in line] == ["gpu_protocol"]
    assert [line["exit"] for line in lines if "exit" in line] == [124] * 5
    assert 40 < int(lines[-1]["words"].split("--seconds ")[1]) <= 75


def test_gpu_sh_adds_nothing_to_an_earlier_run(gpu_sh):
    _, lines = gpu_sh()
    done, after = gpu_sh()
    assert done.returncode == 2
    assert done.stderr.endswith("/out holds the figures of an earlier run; name another folder\n")
    assert after == lines


@pytest.mark.parametrize("name", ["torch-2.15.0", "torchvision-0.29.2", "nvidia_cublas-13.1.0", "triton-3.9.0"])
def test_gpu_sh_refuses_a_wheel_that_would_hide_the_machines_torch(gpu_sh, name):
    wheel = f"{name}-cp312-cp312-manylinux_2_28_x86_64.whl"
    done, lines = gpu_sh("rich-15.0.0-py3-none-any.whl", wheel)
    assert done.returncode == 2
    assert lines == []
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"gpu.sh: {wheel} would hide the machine's own; remove the wheels of torch")


# imports what the benchmarks import, early and late, where every other distribution's modules are absent
SHORT = """
import sys
from importlib.metadata import packages_distributions
listed = set(sys.argv[1:])
for module, owners in packages_distributions().items():
    if not listed & {owner.lower().replace("_", "-") for owner in owners}:
        sys.modules[module] = None
from feddp.lean import postpone_compiler; postpone_compiler()  # as the command does
import benchmarks.gpu_agree, benchmarks.gpu_speed, benchmarks.gpu_sites, benchmarks.gpu_stages
import benchmarks.practice, benchmarks.gpu_protocol
import feddp.pages.run_page, matplotlib.backends.backend_svg  # the report at the end of a run
import feddp.cli, feddp.run.local, monai.metrics, monai.losses, segmentation_models_pytorch, timm
import os; os._exit(0)  # at once: to take torch apart takes a second more
"""


@functools.cache
def complaint(listed: frozenset[str]) -> str:
    """What a process says that cannot import the benchmarks with these distributions alone."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "custom")))}
    done = subprocess.run([sys.executable, "-c", SHORT, *listed], env=env, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def closure(*names):
    """The distributions that these need, themselves too."""
    found, new = set(), set(names)
    while new:
        found |= new
        asked = [Requirement(line) for name in new for line in requires_of(name)]
        new = {one.name.lower() for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})} - found
    return {name.replace("_", "-") for name in found}


def requires_of(name):
    try:
        return requires(name) or []
    except PackageNotFoundError:  # of another platform
        return []


def packages_of_gpu_sh():
    """What the header's command downloads: the first two lines, and all."""
    header = (ROOT / "benchmarks/gpu.sh").read_text().split("requirements.lock) \\\n")[1].split("\n#\n")[0]
    lines = [line.strip("#\\ ").split() for line in header.splitlines()]
    return lines[0] + lines[1], sum(lines, [])


@pytest.mark.parametrize(
    ("at", "there"),
    [(0, ("torch", "torchvision", "timm", "scipy", "psutil", "threadpoolctl", "typer")), (1, ("torch", "torchvision"))],
)
def test_the_packages_of_gpu_sh_suffice(at, there):
    """They and what the machine has import the benchmarks; torch is not among them, and the lock file has all of them."""
    listed = packages_of_gpu_sh()[at]
    assert "monai" in listed
    assert [name for name in listed if name.startswith(("torch", "nvidia", "triton"))] == []
    locked = {line.split("==")[0] for line in text_of("requirements.lock").splitlines() if "==" in line}
    assert set(listed) <= locked
    assert complaint(frozenset((*listed, *closure(*there), "feddp"))) == ""


# --- what federations' events say ----------------------------------------------------------------------------------------


def test_where_a_round_goes():
    """Asked at 10; A computes 2 s until 12.625, offers its answer at 12.75, and the server has it at 13; B computes 4 s and
    answers at 15.5; the round ends at 16, with 0.2 s for the mean and 0.1 s for the checkpoint; the next request is at 16.25.

    To A 12.625 − 2 − 10 = 0.625, until its offer 0.125, from A 0.25. The last answer takes 15.5 − 10 − 4 = 1.5 beyond the
    slowest site's compute, 0.5 more than A's. Of the last 0.5 s of the round 0.2 are the server's look. These sum to the
    round's 6 less 4. Then 0.25."""

    def answer(site, time, seconds, done):
        scalars = {"seconds": seconds}
        return {"event": "answer", "task": "train", "site": site, "time": time, "scalars": scalars, "done": done}

    events = [
        {"event": "ask", "task": "train", "time": 10.0},
        {"event": "computed", "site": "A", "time": 12.75},
        answer("A", 13.0, 2.0, 12.625),
        {"event": "computed", "site": "B", "time": 15.0},
        answer("B", 15.5, 4.0, 14.75),
        {"event": "round", "time": 16.0, "combining": 0.2, "saving": 0.1},
        {"event": "ask", "task": "train", "time": 16.25},
    ]
    found = list(round.where(events).values())
    assert found == pytest.approx([0.625, 0.125, 0.25, 0.5, 0.2, 0.2, 0.1, 0.25])
    assert sum(found[:-1]) == pytest.approx(6 - 4)


def test_a_run_s_start_up_and_the_slowest_sites_compute():
    """The command began at 100, the first request to train is at 112: 12 s. Round 1: 2 and 3 s; round 2: 5 and 4 s. In all
    12 + 3 + 5 = 20. A run that took 25 s took 1.25 of it. Answers to other tasks do not count."""

    def answer(task, seconds):
        return {"event": "answer", "task": task, "scalars": {"seconds": seconds}}

    ask = {"event": "ask", "task": "train", "time": 112.0}
    events = [{"event": "ask", "task": "initial", "time": 111.0}, ask, answer("train", 2.0), answer("train", 3.0)]
    events += [ask | {"time": 116.0}, answer("train", 5.0), answer("train", 4.0), answer("evaluate", 9.0)]
    assert local.least(events, began=100.0) == 20
    assert common.ratio([25.0], [local.least(events, began=100.0)])["median"] == 1.25


def test_a_stock_round_beyond_compute():
    """Round 0: from 1 (A, the first) to 8 (B, the first of round 1) are 7 s; A computes 3 s, B 4 s, so 3 s are beyond."""
    sites = {
        "A": [{"started": 1.0, "time": 4.0}, {"started": 9.0, "time": 11.0}],
        "B": [{"started": 2.0, "time": 6.0}, {"started": 8.0, "time": 12.0}],
    }
    assert round.beyond(sites) == [3.0]


def test_a_start_ends_at_the_sites_first_step():
    """Site B's process is looked at until 5, the server's until 4, when A begins. B's CPU-seconds at 5, a third of the way from
    4.5 to 6: 3 + (9 - 3) / 3 = 5. The server's at 4, a sixth of the way from 3.9 to 4.5: 2 + (3 - 2) / 6 = 2.2. A process
    that has ended at 4.5 has its last look's, and one that begins at 6 no row."""
    looks = [
        start.Seen(time, who, "worker_process", cpu, rss, rss / 2)
        for who in ("B", "localhost")
        for time, cpu, rss in ((1.0, 0.5, 100.0), (3.9, 2.0, 300.0), (4.5, 3.0, 200.0), (6.0, 9.0, 900.0))
    ]
    looks += [start.Seen(4.5, "B", "ended", 0.7, 40.0, 20.0), start.Seen(6.0, "B", "later", 0.1, 10.0, 5.0)]
    rows = start.until(looks, {"A": 4.0, "B": 5.0})
    assert rows == [
        ("B", "ended", 0.7, 40, 20),
        ("B", "worker_process", 5.0, 300, 150),
        ("localhost", "worker_process", 2.2, 300, 150),
    ]


def test_a_run_s_seconds_are_those_of_the_sites_own_logs(tmp_path):
    """A and B send 2.0 and 0.1 s of 1.96 and 0.14; the round takes 2.5 s, so 0.54 are beyond the slowest site's compute, and
    not 0.5. Other tasks, and what a site keeps to itself, stay as they are."""
    answers = [("A", "train", {"seconds": 2.0, "loss": 1.0}), ("B", "train", {"seconds": 0.1}), ("A", "score", {"dice": 0.3})]
    for site, task, scalars in answers:
        append_event(tmp_path / "progress.jsonl", "answer", site=site, task=task, round=1, phase=0, scalars=scalars)
    append_event(tmp_path / "progress.jsonl", "round", round=1, seconds=2.5, beyond_compute=0.5)
    (tmp_path / "results.json").write_text(json.dumps({"sites": {"A": {}, "B": {}}}))
    for site, seconds in (("A", 1.96), ("B", 0.14)):
        (tmp_path / "sites" / site).mkdir(parents=True)
        log = tmp_path / "sites" / site / "record.jsonl"
        append_event(log, "train", round=0, phase=0, seconds=seconds, seconds_loading=0.01, loss=1.04)
    *found, end = common.events_of(tmp_path)
    assert [event["scalars"] for event in found] == [{"seconds": 1.96, "loss": 1.0}, {"seconds": 0.14}, {"dice": 0.3}]
    assert end["beyond_compute"] == pytest.approx(0.54)
    own = common.own_trainings(tmp_path)
    assert own["B", 1, 0]["seconds_loading"] == 0.01
    assert [event.get("done") for event in found] == [own["A", 1, 0]["time"], own["B", 1, 0]["time"], None]
