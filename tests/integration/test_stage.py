"""The controllers: what the server asks, what it accepts, what it refuses, and from which round stage 2 starts."""

import json
import re
import threading
import time
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply

from feddp.adaptation.models import plan_of
from feddp.files import read_results
from feddp.flare import controller, messages, streams, transfers
from feddp.protocol import Sent
from feddp.reporting.page import table, write_markdown
from feddp.training.columns import METRICS
from support.server import SITES, SUMMARY, Run, good


@pytest.fixture
def plan_for(plan_for, pvt):
    """No site trains here: the server adds, sends and saves networks of narrow layers with the default network's names."""
    return lambda **changes: plan_for(**({"network": pvt} | changes))


def test_the_mean_is_the_same_bits_in_any_order_of_arrival(tmp_path, plan_for):
    """Offsets 0.1, 0.2 and 0.4 on float32 weights do not add up associatively; six orders, one result."""
    results = []
    for i, order in enumerate((["A", "B", "C"], ["C", "A", "B"], ["B", "C", "A"], ["C", "B", "A"])):
        folder = tmp_path / str(i)
        folder.mkdir()
        run = Run(folder, plan_for(rounds=1), SITES, lambda *a: good(*a, values={"A": 0.1, "B": 0.2, "C": 0.4}), order)
        run.run("train")
        results.append(run.memory.load("shared_latest")[0])
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in results[0])


def test_the_rounds_mean_by_hand(tmp_path, plan_for):
    """Sites that add 1, 2 and 6 to what they receive: after two rounds γ² = γ⁰ + 2·(1+2+6)/3 = γ⁰ + 6."""
    run = Run(tmp_path, plan_for(rounds=2), SITES, lambda *a: good(*a, values={"A": 1.0, "B": 2.0, "C": 6.0}))
    run.run("train")
    first = run.memory.first()
    last, round = run.memory.load("shared_latest")
    assert round == 2
    for name in first:
        torch.testing.assert_close(last[name], first[name] + 6)


def test_all_sites_are_sent_the_same_task(tmp_path, plan_for):
    """One FLARE task with every site as its target, and nobody's copy: the message is the same object for all."""
    run = Run(tmp_path, plan_for(rounds=1), SITES, good).run("train")
    trains = [(targets, data) for task, targets, data in run.sent if task == "train"]
    assert [targets for targets, _ in trains] == [SITES]


def _edited(edit):
    """Site B's contribution, edited."""

    def answer(site, task, tensors, scalars):
        result = good(site, task, tensors, scalars)
        if site == "B" and task == "train":
            sent, numbers = messages.unpack(result)
            return edit(dict(sent), dict(numbers))
        return result

    return answer


@pytest.mark.parametrize("factor", [0.0, 3.0])
def test_one_negative_variance_costs_its_sender_the_round_alone(tmp_path, plan_for, toy, factor):
    """All add 1 to what they receive, and B has one running variance of −9 instead of 2. The mean of the four would be
    (2 + 2 + 2 − 9)/4 < 0, where every honest network gives NaN. It is no outlier: the changes of 21 numbers have the norm
    √21 = 4.6, B's √(20 + 10²) = 11.0, below 3 · 4.6. (`norm_factor` needs three contributions beside B's.)"""
    sites = [*SITES, "D"]

    def answer(site, task, tensors, scalars):
        reply = good(site, task, tensors, scalars, values=dict.fromkeys(sites, 1))
        if (site, task) != ("B", "train"):
            return reply
        sent, numbers = messages.unpack(reply)
        variances = sent["norm.running_var"].clone()
        variances[0] = -9
        return messages.pack({**sent, "norm.running_var": variances}, **numbers)

    plan = plan_for(network=toy, rounds=2, norm_factor=factor, sites=tuple(sites))
    run = Run(tmp_path, plan, sites, answer).run("train")
    assert run.panics == []
    refused = run.progress("refused")
    assert [(event["site"], event["round"]) for event in refused] == [("B", 1), ("B", 2)]
    assert "norm.running_var holds -9, but a running variance is from 0 to 65504" in refused[0]["reason"]
    assert run.memory.load("shared_latest")[0]["norm.running_var"].tolist() == [3.0] * 4


def _first(tensors):
    return next(name for name, value in tensors.items() if value.ndim == 4)


def _header(key, value):
    """The answer with a header of a type of its own."""

    def edit(tensors, scalars):
        message = messages.pack(tensors, **scalars)
        message.set_header(key, value)
        return message

    return edit


def _kind(value):
    def edit(tensors, scalars):
        message = messages.pack(tensors, **scalars)
        message["DXO"]["kind"] = value
        return message

    return edit


REFUSED = {
    "missing": (lambda t, s: messages.pack({n: v for n, v in t.items() if n != _first(t)}, **s), "is missing"),
    "extra": (lambda t, s: messages.pack({**t, "intruder": torch.zeros(1)}, **s), "intruder is not expected"),
    "private": (
        lambda t, s: messages.pack({**t, "encoder.model.stages_0.blocks.0.attn.q.weight": torch.zeros(32, 32)}, **s),
        "attn.q.weight is not expected",
    ),
    "mis-shaped": (lambda t, s: messages.pack({**t, _first(t): torch.zeros(2, 2)}, **s), "is (2, 2)"),
    "type": (lambda t, s: messages.pack({**t, _first(t): t[_first(t)].half()}, **s), "torch.float16"),
    "nan": (lambda t, s: messages.pack({**t, _first(t): t[_first(t)] * float("nan")}, **s), "not finite"),
    "a weight that means nothing": (
        lambda t, s: messages.pack({**t, _first(t): t[_first(t)] + 1e9}, **s),
        "but a weight is from -65504 to 65504",
    ),
    "stale": (lambda t, s: messages.pack(t, **{**s, "round": 7}), "is for round 7, this is round 0"),
    "error": (lambda t, s: make_reply(ReturnCode.EXECUTION_EXCEPTION), "EXECUTION_EXCEPTION"),
    "numbers": (lambda t, s: messages.pack(t, **{**s, "samples": float("nan")}), "samples is nan, not a finite number"),
    "no seconds": (lambda t, s: messages.pack(t, round=0, phase=0, loss=1.0, samples=3), "seconds is None"),
    "no samples": (lambda t, s: messages.pack(t, **{**s, "samples": 0}), "0 training samples"),
    "unreadable": (lambda t, s: Shareable(), "cannot be read as tensors and scalars"),
    "silence": (lambda t, s: None, "no answer"),
    # FLARE's own comparisons raise errors of any type for these
    "names of two types": (lambda t, s: messages.pack({**t, 1: torch.zeros(1), "zz": torch.zeros(1)}, **s), "is not a text"),
    "names of bytes": (lambda t, s: messages.pack({name.encode(): value for name, value in t.items()}, **s), "is not a text"),
    "a tensor as content type": (_header(ReservedHeaderKey.CONTENT_TYPE, torch.zeros(2)), "cannot be read as tensors"),
    "an array as return code": (_header(ReservedHeaderKey.RC, np.zeros(2)), "ended with a code that FLARE does not have"),
    "an array as kind": (_kind(np.zeros(2)), "cannot be read as tensors"),
    "a text as kind": (_kind("x" * 10**6), "a message has the kind 'xxxx"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_bad_contribution_is_refused_named_and_the_round_goes_on(kind, tmp_path, plan_for):
    """Wall 4, and bad input: B's contribution does not count; the mean of A (+1) and C (+3) is γ⁰ + 2."""
    edit, reason = REFUSED[kind]
    values = {"A": 1.0, "C": 3.0}

    def answer(site, task, tensors, scalars):
        return _edited(edit)(site, task, tensors, scalars) if site == "B" else good(site, task, tensors, scalars, values)

    run = Run(tmp_path, plan_for(rounds=1, min_sites=2), SITES, answer).run("train")
    assert run.panics == []
    refused = [e for e in run.progress("refused") if e["task"] == "train"]
    assert [e["site"] for e in refused] == ["B"]
    assert "site B" in refused[0]["reason"]
    assert reason in refused[0]["reason"]
    assert len(refused[0]["reason"]) < 400
    first, (last, _) = run.memory.first(), run.memory.load("shared_latest")
    for name in first:
        torch.testing.assert_close(last[name], first[name] + 2)


def test_too_few_good_contributions_end_the_run_and_name_the_sites(tmp_path, plan_for):
    edit, _ = REFUSED["nan"]
    run = Run(tmp_path, plan_for(rounds=1, min_sites=3), SITES, _edited(edit)).run("train")
    assert len(run.panics) == 1
    assert "site B" in run.panics[0]
    assert "min_sites=3" in run.panics[0]
    assert not (tmp_path / "shared_latest.safetensors").exists()


@pytest.mark.parametrize(("start", "round"), [("auto", 3), ("last", 3), ("best", 1)])
def test_stage_two_starts_from_one_round(start, round, tmp_path, plan_for):
    """Validation IoU 0.9 after round 1, 0.2 and 0.3 after rounds 2 and 3: the best round is 1, the last is 3.

    Every site adds 1 a round, so γ of round r is γ⁰ + r: the sites adopt round `round` with exactly that γ, and the rule
    that is the default (Algorithm 1) is the last.
    """
    adopted = []

    def answer(site, task, tensors, scalars):
        if task == "adopt":
            adopted.append((scalars["round"], tensors))
        return good(site, task, tensors, scalars, dict.fromkeys(SITES, 1.0), {1: 0.9, 2: 0.2, 3: 0.3})

    run = Run(tmp_path, plan_for(rounds=3, start=start), SITES, answer).run("train")
    assert run.memory.best_round == 1
    assert run.memory.start_round == round
    last_round, tensors = adopted[-1]
    assert last_round == round
    first = run.memory.first()
    for name in first:
        torch.testing.assert_close(tensors[name], first[name] + round)


def test_the_best_round_so_far_is_told_so_that_its_state_is_kept(tmp_path, plan_for):
    keeps = []

    def answer(site, task, tensors, scalars):
        if task == "train" and site == "A":
            keeps.append(scalars.get("keep"))
        return good(site, task, tensors, scalars, ious={1: 0.9, 2: 0.2, 3: 0.3})

    Run(tmp_path, plan_for(rounds=4), SITES, answer).run("train")
    assert keeps == [None, None, 1, 1]  # round 1's score is known after the second round


def test_the_persistor_will_not_write_a_private_tensor(tmp_path, plan_for):
    """Wall 4's second half, on its own: nothing is written, the name is said."""
    run = Run(tmp_path, plan_for(), SITES, good)
    shared = run.memory.first()
    name = run.memory.expected.partition.private[0]
    with pytest.raises(Exception, match="not shared") as error:
        run.memory.save({**shared, name: torch.zeros(1)}, 1)
    assert name in str(error.value)
    assert not list(tmp_path.glob("*.safetensors"))


# --- stage 2 ----------------------------------------------------------------------------------------------------------


def calibrating(consent, received):
    """Sites of which those in `consent` give their personal tensors, filled with their own number. All use what they
    receive, and measure those networks."""

    def answer(site, task, tensors, scalars):
        if task == "collect":
            spec = received["spec"].tensors
            number = float(SITES.index(site))
            given = {n: torch.full(shape, number, dtype=dtype) for n, (shape, dtype) in spec.items()} if site in consent else {}
            return messages.pack(given, consent=site in consent)
        if task == "calibrate":
            received[site] = tensors
            return messages.pack(loss=1.0, iou_before=0.5, iou=0.6, epoch=1)
        if task == "evaluate":
            peers = dict.fromkeys((key.split("/")[0] for key in received.get(site, {})), SUMMARY)
            return messages.pack(before_calibration=SUMMARY, final=SUMMARY, peers=peers)
        return good(site, task, tensors, scalars)

    return answer


@pytest.mark.parametrize(
    ("consent", "peers"),
    [
        (["A", "B", "C"], {"A": ["B", "C"], "B": ["A", "C"], "C": ["A", "B"]}),
        (["A", "C"], {"A": ["C"], "B": [], "C": ["A"]}),
        (["A"], {"A": [], "B": [], "C": []}),
        ([], {"A": [], "B": [], "C": []}),
    ],
)
def test_personal_tensors_go_once_to_consenting_sites_and_to_no_other(consent, peers, tmp_path, plan_for):
    """Each site receives exactly its consenting peers' tensors, filled with the peer's number, and never its own."""
    received = {}
    run = Run(tmp_path, plan_for(), SITES, calibrating(consent, received))
    received["spec"] = run.memory.expected.spec(Sent.PERSONAL)
    run.run("calibrate", "evaluate")
    assert run.panics == []
    assert [task for task, _, _ in run.sent] == ["collect", "calibrate", "calibrate", "calibrate", "evaluate"]
    for site in SITES:
        assert {key.split("/")[0] for key in received[site]} == set(peers[site])
        for key, value in received[site].items():
            assert (value == SITES.index(key.split("/")[0])).all()
    results = json.loads((tmp_path / "results.json").read_text())
    for site in SITES:
        expected = {"calibrated": bool(peers[site]), "peers": len(peers[site]), "tuned": True}
        assert results["sites"][site]["calibration"] == expected
    without = {site: "does not consent" for site in SITES if site not in consent}
    assert results.get("without") == ({"calibration": without} if without else None)
    for site in SITES:
        said = f"{site} took no part in the exchange for calibration: it does not consent."
        assert (said in write_markdown(results)) == (said in table(results).caption) == (site in without)


@pytest.mark.parametrize(("method", "secure", "said"), [("feddp", True, True), ("feddp", False, False), ("fedavg", True, None)])
def test_results_say_whether_what_was_exchanged_was_sealed(method, secure, said, tmp_path, plan_for):
    """And nothing of it where a method exchanges nothing."""
    run = Run(tmp_path, plan_for(method=method), SITES, good, secure=secure).run("evaluate")
    results = json.loads((run.folder / "results.json").read_text())
    assert results.get("sealed") is said
    for site in results["sites"].values():
        site.get("calibration", {})["peers"] = 2
    text = write_markdown(results)
    assert ("went encrypted from site to site" in text, "went in the clear" in text) == (said is True, said is False)


def test_heads_are_exchanged_at_every_epoch_among_consenting_sites(tmp_path, plan_for):
    """FedLC, three epochs. A's head is 10 e before epoch e, B's 10 e + 1; C does not consent: it neither gives nor gets.

    At epoch e A receives B's, all 10 e + 1, and B receives A's, all 10 e: nothing of an epoch before.
    """
    received = []

    def answer(site, task, tensors, scalars):
        if task == "collect_heads":
            number = 10.0 * scalars["epoch"] + SITES.index(site)
            given = {n: torch.full(shape, number) for n, (shape, _) in spec.tensors.items()} if site != "C" else {}
            return messages.pack(given, consent=site != "C")
        assert task == "calibrate_heads"
        received.append((scalars["epoch"], site, {key: value.unique().tolist() for key, value in tensors.items()}))
        return messages.pack(loss=1.0, iou_before=0.5, iou=0.6, epoch=1)

    run = Run(tmp_path, plan_for(method="fedlc", heads_epochs=3), SITES, answer)
    spec = run.memory.expected.spec(Sent.HEADS)
    assert set(spec.tensors) == {"segmentation_head.0.weight", "segmentation_head.0.bias"}
    run.run("heads")
    assert run.panics == []
    wanted = []
    for e in (1, 2, 3):
        for site, peer in (("A", "B"), ("B", "A"), ("C", None)):
            values = {f"{peer}/{name}": [10.0 * e + SITES.index(peer)] for name in spec.tensors} if peer else {}
            wanted.append((e, site, values))
    assert received == wanted
    assert run.memory.peers == {"A": ["B"], "B": ["A"], "C": []}
    assert run.memory.without == {"calibration": {"C": "does not consent"}}


def test_the_method_aggregates(tmp_path, plan_for):
    """pFedMe with β = 1/2 at sites that add 1, 2 and 6: γ¹ = γ⁰/2 + (γ⁰ + 3)/2 = γ⁰ + 1.5."""
    plan = plan_for(method="pfedme", rounds=1, pfedme_beta=0.5)
    run = Run(tmp_path, plan, SITES, lambda *a: good(*a, values={"A": 1.0, "B": 2.0, "C": 6.0})).run("train")
    first, (last, _) = run.memory.first(), run.memory.load("shared_latest")
    for name in first:
        torch.testing.assert_close(last[name], first[name] + 1.5)


def test_fednova_steps_beyond_the_mean_with_parameters_alone(tmp_path, plan_for, toy):
    """A sends γ⁰ + 1 after 8 samples in batches of 4, B γ⁰ + 2 after 16, C γ⁰ + 9 after 24: τ = 2, 4 and 6, τ_eff = 4.

    Parameters: γ⁰ + 4 · (1/2 + 2/4 + 9/6)/3 = γ⁰ + 10/3; FedAvg would add 4. Buffers take the mean alone: the weights 1/2, 1/4
    and 1/6 have the sum 11/12, so (1/2 + 2/4 + 9/6)/(11/12) = 30/11. The step, 11/9, would make −0.1 of a variance of 1 whose
    mean is 0.1.
    """
    samples = {"A": 8.0, "B": 16.0, "C": 24.0}

    def answer(site, task, tensors, scalars):
        result = good(site, task, tensors, scalars, values={"A": 1.0, "B": 2.0, "C": 9.0})
        if task != "train":
            return result
        sent, numbers = messages.unpack(result)
        sent = {name: sent[name].to(value.dtype) for name, value in tensors.items()}
        return messages.pack(sent, **{**numbers, "samples": samples[site]})

    run = Run(tmp_path, plan_for(method="fednova", network=toy, rounds=1), SITES, answer).run("train")
    assert run.panics == []
    first, (last, _) = run.memory.first(), run.memory.load("shared_latest")
    assert {name for name in first if name.startswith("norm.")} > {"norm.weight", "norm.running_mean", "norm.running_var"}
    for name, value in first.items():
        added = 10 / 3 if name.rpartition(".")[2] in ("weight", "bias") else 30 / 11
        torch.testing.assert_close(last[name], value + added if value.is_floating_point() else torch.tensor(round(added)))


@pytest.mark.parametrize(("method", "phases"), [("pflfe", 2), ("fc_pflfe", 1)])
def test_pflfe_aggregates_twice_a_round_and_fc_pflfe_once(method, phases, tmp_path, plan_for):
    """Two rounds at sites that add 1, 2 and 6, the mean 3 to γ at each aggregation: γ² = γ⁰ + 2 · phases · 3.

    In bytes: an encoder to each site and one from it, at each; and one more to each when it is adopted. The first answer of
    the second round scores the first; the second phase scores nothing.
    """
    run = Run(
        tmp_path, plan_for(method=method, rounds=2, start="last"), SITES, lambda *a: good(*a, values=dict(A=1.0, B=2.0, C=6.0))
    )
    run.run("train")
    assert run.panics == []
    size = run.memory.expected.spec(Sent.SHARED).nbytes
    asked = [event for event in run.progress("ask") if event["task"] == "train"]
    assert [(e["round"], e["phase"]) for e in asked] == [(r, p) for r in (1, 2) for p in range(phases)]
    assert all(event["bytes"] == dict.fromkeys(SITES, size) for event in asked)
    answers = [event for event in run.progress("answer") if event["task"] == "train"]
    assert sum(event["bytes"] for event in answers) == 2 * phases * 3 * size
    assert {(e["round"], e["phase"]) for e in answers if "iou" in e["scalars"]} == {(2, 0)}
    assert [event["round"] for event in run.progress("round")] == [1, 2]
    first, (last, round) = run.memory.first(), run.memory.load("shared_latest")
    assert round == 2
    for name in first:
        torch.testing.assert_close(last[name], first[name] + 6.0 * phases)


def test_an_answer_of_another_phase_is_refused(tmp_path, plan_for):
    def answer(site, task, tensors, scalars):
        result = good(site, task, tensors, scalars)
        if (site, task, scalars.get("phase")) == ("B", "train", 1):
            sent, numbers = messages.unpack(result)
            return messages.pack(sent, **{**numbers, "phase": 0})
        return result

    run = Run(tmp_path, plan_for(method="pflfe", rounds=1), SITES, answer).run("train")
    assert [e["reason"] for e in run.progress("refused")] == [
        "site B: its answer is for round 0, phase 0, this is round 0, phase 1"
    ]


def test_a_site_whose_calibration_failed_is_not_called_calibrated(tmp_path, plan_for):
    received = {}
    answer = calibrating(SITES, received)

    def failing(site, task, tensors, scalars):
        if (site, task) == ("B", "calibrate"):
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        return answer(site, task, tensors, scalars)

    run = Run(tmp_path, plan_for(), SITES, failing)
    received["spec"] = run.memory.expected.spec(Sent.PERSONAL)
    run.run("calibrate", "evaluate")
    sites = json.loads((tmp_path / "results.json").read_text())["sites"]
    assert sites["B"]["calibration"] == {"calibrated": False, "peers": 0, "tuned": False}
    assert sites["A"]["calibration"] == {"calibrated": True, "peers": 2, "tuned": True}


def test_calibration_after_a_method_without_personal_tensors_has_no_peers(tmp_path, plan_for):
    """FedAvg's networks are the same everywhere: there is nothing to exchange and nothing to disagree on."""
    received = {}
    run = Run(tmp_path, plan_for(method="fedavg", stages=("train", "calibrate")), SITES, calibrating(SITES, received))
    received["spec"] = run.memory.expected.spec(Sent.PERSONAL)
    run.run("calibrate")
    assert run.memory.peers == {"A": [], "B": [], "C": []}


def test_a_lost_site_is_not_waited_for_again(tmp_path, plan_for):
    """It gave no sign of life; the next tasks and workflows go to the others."""

    def answer(site, task, tensors, scalars):
        return None if site == "B" else good(site, task, tensors, scalars)

    run = Run(tmp_path, plan_for(method="fedavg", rounds=1, sites=SITES), SITES, answer)
    run.gone = {"B"}
    run.run("train", "evaluate")
    assert run.panics == []
    assert [targets for _, targets, _ in run.sent] == [SITES, *[["A", "C"]] * (len(run.sent) - 1)]
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["sites"]) == {"A", "C"}
    assert results["missing"] == {"B": "site B was lost at train"}


def test_a_site_that_is_back_is_asked_again(tmp_path, plan_for):
    """B is silent in the first round and gives a sign of life before the second."""

    def answer(site, task, tensors, scalars):
        if site == "C" and task == "train":
            run.gone = set() if scalars["round"] else {"B"}
            if scalars["round"]:
                run.heard["B"] = time.monotonic()
        silent = site == "B" and task == "train" and not scalars["round"]
        return None if silent else good(site, task, tensors, scalars)

    run = Run(tmp_path, plan_for(method="fedavg", rounds=3), SITES, answer)
    run.gone = {"B"}
    run.run("train", "evaluate")
    assert run.panics == []
    trained = [targets for task, targets, _ in run.sent if task == "train"]
    assert trained == [SITES, ["A", "C"], SITES]
    assert [event["site"] for event in run.progress("returned")] == ["B"]
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["sites"]) == set(SITES)
    assert results["missed"] == {"B": 2}
    assert "B took no part in 2 rounds of 3" in write_markdown(results)


def test_a_silent_site_is_waited_for_where_too_few_others_answered(tmp_path, plan_for, monkeypatch):
    """Three are needed: the server waits GONE seconds, not SILENT, and then ends the run with the site's name."""
    monkeypatch.setattr(controller, "GONE", 0.3)
    monkeypatch.setattr(controller, "SILENT", 0.1)

    def answer(site, task, tensors, scalars):
        return None if site == "B" else good(site, task, tensors, scalars)

    run = Run(tmp_path, plan_for(method="fedavg", rounds=1, min_sites=3), SITES, answer)
    run.open = {"B"}
    started = time.monotonic()
    run.run("train")
    assert time.monotonic() - started > 0.3
    assert "site B: no answer to train" in run.panics[0]


def _meanwhile(act, seconds: float) -> None:
    """Acts again and again for so long, in the background."""

    def acting():
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            act()
            time.sleep(0.01)

    threading.Thread(target=acting, daemon=True).start()


def _without_b(site, task, tensors, scalars):
    return None if site == "B" else good(site, task, tensors, scalars)


def test_what_moves_on_a_site_s_line_is_a_sign_of_life(tmp_path, plan_for, monkeypatch):
    """B's process says nothing, as its words wait behind tensors, which move for 0.6 s; SILENT is 0.2 s."""
    monkeypatch.setattr(controller, "SILENT", 0.2)
    monkeypatch.setattr(streams, "_MOVED", {})
    run = Run(tmp_path, plan_for(method="fedavg", rounds=1), SITES, _without_b)
    run.gone = {"B"}
    began = time.monotonic()
    _meanwhile(lambda: streams._count("B.job", back=1), 0.6)
    run.run("train")
    assert time.monotonic() - began > 0.6
    assert [event["site"] for event in run.progress("refused")] == ["B"]


def test_a_task_that_does_not_reach_a_living_site_ends_in_a_line(tmp_path, plan_for, monkeypatch):
    """A line that passes signs of life, and of the task 100 kB in its first moments: B is waited for GONE = 0.6 s more, and
    the two others, which the round needs, are enough."""
    monkeypatch.setattr(controller, "GONE", 0.6)
    monkeypatch.setattr(controller, "LOOK", 0.02)
    monkeypatch.setattr(transfers, "SLOW", 0.3)
    monkeypatch.setattr(streams, "_MOVED", {})
    run = Run(tmp_path, plan_for(method="fedavg", rounds=1), SITES, _without_b)
    run.open, asked = {"B"}, run.broadcast

    def broadcast(*args, **kwargs):
        asked(*args, **kwargs)
        streams._count("B.job", to=100_000)
        _meanwhile(lambda: run.heard.update(B=time.monotonic()), 1.5)

    run.broadcast = broadcast
    run.run("train")
    assert run.panics == []
    (event,) = [event for event in run.progress("refused") if event["task"] == "train"]
    assert event["site"] == "B"
    assert re.match(
        r"site B: no answer to train; 0\.1 MB of 0\.7 MB at \d\.\d\d Mbit/s of the task reached it in \d seconds?, nothing in"
        r" the last \d seconds?; its line must let messages of this size through$",
        event["reason"],
    )
    told = run.progress("transfer")
    assert {event["site"] for event in told} == {"B"}
    assert (told[0]["way"], told[0]["moved"]) == ("to", 100_000)


def test_a_task_that_ends_while_its_tensors_move_says_what_the_line_needs(tmp_path, plan_for, monkeypatch):
    """B has 20 s for its task, of which 100 kB have come when FLARE ends it. It needs γ twice, there and back, in 20 s."""
    monkeypatch.setattr(streams, "_MOVED", {})
    run = Run(tmp_path, plan_for(method="fedavg", rounds=1, task_timeout=20), SITES, _without_b)
    asked = run.broadcast

    def broadcast(task, *args, **kwargs):
        asked(task, *args, **kwargs)
        if task.name == "train":
            streams._count("B.job", to=100_000)

    run.broadcast = broadcast
    run.run("train")
    assert run.panics == []
    (event,) = [event for event in run.progress("refused") if event["task"] == "train"]
    gamma = sum(value.nbytes for value in run.memory.first().values())
    need = f"for task_timeout=20 its line needs more than {2 * gamma * 8 / 1e6 / 20:.2g} Mbit/s; raise one of the two"
    assert event["reason"].startswith("site B: no answer to train; 0.1 MB of 0.7 MB at ")
    assert event["reason"].endswith(need)
    assert run.memory.lost == {}


@pytest.mark.parametrize(("tries", "waits"), [(controller.TRIES - 1, True), (controller.TRIES, False)])
def test_a_site_whose_answers_cannot_be_read_is_lost_for_one_task(tmp_path, plan_for, monkeypatch, tries, waits):
    """Of B's answers to the first round that many came and could not be read: the round goes on without B, at once or after B
    was silent for 3 s. B lives, and is asked again in the second."""
    failed = Counter({"B": 7})  # before
    monkeypatch.setattr(controller, "SILENT", 3.0)
    monkeypatch.setattr(controller, "unread", failed.copy)

    def answer(site, task, tensors, scalars):
        if (site, task, scalars.get("round")) != ("B", "train", 0):
            return good(site, task, tensors, scalars)
        failed["B"] += tries
        run.heard["B"] = time.monotonic()
        return None

    run = Run(tmp_path, plan_for(method="fedavg", rounds=2), SITES, answer)
    run.open, asked = {"B"}, run.broadcast

    def broadcast(task, fl_ctx, targets, min_responses):
        asked(task, fl_ctx, targets, min_responses)
        if len(run.sent) == 1:
            run.open = set()

    run.broadcast = broadcast
    started = time.monotonic()
    run.run("train")
    assert not waits or time.monotonic() - started > 3.0
    assert run.panics == []
    trained = [targets for task, targets, _ in run.sent if task == "train"]
    assert trained == [SITES, ["A", "C"] if waits else SITES]
    assert [(e["site"], e["reason"]) for e in run.progress("refused")] == [("B", "site B: no answer to train")]


def test_a_job_whose_site_cannot_be_read_and_is_needed_ends(tmp_path, plan_for, monkeypatch):
    failed = Counter()
    monkeypatch.setattr(controller, "unread", failed.copy)

    def answer(site, task, tensors, scalars):
        failed["B"] += controller.TRIES * (site == "B")
        return None if site == "B" else good(site, task, tensors, scalars)

    run = Run(tmp_path, plan_for(method="fedavg", rounds=1, min_sites=3), SITES, answer)
    run.open = {"B"}
    run.run("train")
    assert "2 of 3 sites answered well" in run.panics[0]
    assert "site B: no answer to train" in run.panics[0]


@pytest.mark.parametrize("final", [None, {}, {**dict.fromkeys(METRICS, {"mean": float("nan"), "std": 0, "n": 1})}])
def test_an_evaluation_that_lacks_a_number_is_refused_and_said(final, tmp_path, plan_for):
    def answer(site, task, tensors, scalars):
        if (site, task) == ("B", "evaluate"):
            return messages.pack(before_calibration=SUMMARY, final=final, peers={})
        return good(site, task, tensors, scalars)

    run = Run(tmp_path, plan_for(method="fedavg", rounds=1, sites=SITES), SITES, answer).run("train", "evaluate")
    assert run.panics == []
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["missing"] == {"B": "site B did not evaluate"}
    assert "**B is missing**" in write_markdown(results)


@pytest.mark.parametrize("method", ["fedavg", "virtual_class"])
def test_a_site_that_never_joined_is_missing_and_the_plan_read_back_is_the_approved_one(method, tmp_path, plan_for):
    """D is planned and did not approve the job, which ran with the three others. Virtual classes: 2 classes, background
    included, times 4 sites are 8; of three sites there would be 6."""
    plan = plan_for(method=method, rounds=1, sites=(*SITES, "D"), min_sites=3)
    run = Run(tmp_path, plan, SITES, good).run("train", "evaluate")
    assert run.panics == []
    results = read_results(tmp_path)
    assert list(results["sites"]) == SITES
    assert results["missing"].keys() == {"D"}
    assert results["missing"]["D"].startswith("site D took no part in the job")
    assert "**D is missing**: site D took no part" in write_markdown(results)
    read = plan_of(tmp_path, results)
    assert read.digest() == plan.digest()
    assert read.layers == ({"virtual_classes": plan.layers["virtual_classes"]} if method == "virtual_class" else {})
    if method == "virtual_class":
        assert read.layers["virtual_classes"]["virtual"] == 8


def evaluating(volumes):
    """Sites that answer the evaluation with the volumes that `volumes` has for them."""

    def answer(site, task, tensors, scalars):
        if task == "evaluate":
            more = {"volumes": volumes[site]} if site in volumes else {}
            return messages.pack(before_calibration=SUMMARY, final=SUMMARY, peers={}, **more)
        return good(site, task, tensors, scalars)

    return answer


def cases(dice, iou=0.5, n=2):
    return {"dice": {"mean": dice, "std": 0.1, "n": n}, "iou": {"mean": iou, "std": 0.0, "n": n}}


@pytest.mark.parametrize("some", [SITES, ["A", "B"]])
def test_volumes_are_averaged_and_shown_where_every_site_has_them(some, tmp_path, plan_for):
    """Case Dice 0.2, 0.4 and 0.9 at the end: average 0.5 ± 0.29439; two of three sites make no average and no table."""
    values = {"A": 0.2, "B": 0.4, "C": 0.9}
    volumes = {site: {"before_calibration": cases(0.1), "final": cases(values[site])} for site in some}
    Run(tmp_path, plan_for(method="fedavg", rounds=1), SITES, evaluating(volumes)).run("train", "evaluate")
    results = json.loads((tmp_path / "results.json").read_text())
    assert {site: found["volumes"] for site, found in results["sites"].items() if "volumes" in found} == volumes
    assert ("volumes" in results["average"]) == (some == SITES)
    text = write_markdown(results)
    assert ("By case" in text) == (some == SITES)
    if some == SITES:
        assert results["average"]["volumes"]["final"]["dice"] == pytest.approx({"mean": 0.5, "std": 0.29439, "n": 3}, abs=1e-5)
        table = text[text.index("By case") :].splitlines()
        heads = [f"{metric} {column}" for metric in ("Dice (%)", "IoU (%)") for column in (*SITES, "Average")]
        assert table[2] == "| | " + " | ".join(heads) + " |"
        dice = ["20.00 ± 10.00", "40.00 ± 10.00", "90.00 ± 10.00", "50.00 ± 29.44"]
        assert table[5] == "| final | " + " | ".join([*dice, *["50.00 ± 0.00"] * 4]) + " |"


@pytest.mark.parametrize(
    "volumes", [1.0, {}, {"final": cases(0.5)}, {"before_calibration": cases(0.5), "final": {"dice": cases(0.5)["dice"]}}]
)
def test_volumes_that_lack_a_number_are_refused(volumes, tmp_path, plan_for):
    run = Run(tmp_path, plan_for(method="fedavg", rounds=1, sites=SITES), SITES, evaluating({"B": volumes}))
    assert run.run("train", "evaluate").panics == []
    assert json.loads((tmp_path / "results.json").read_text())["missing"] == {"B": "site B did not evaluate"}


def test_the_control_collects_nothing(tmp_path, plan_for):
    """λ = 0 needs no peer, so no personal tensor is asked for."""
    received = {}
    run = Run(tmp_path, plan_for(**{"lambda": 0}), SITES, calibrating(SITES, received))
    received["spec"] = run.memory.expected.spec(Sent.PERSONAL)
    run.run("calibrate")
    assert [task for task, _, _ in run.sent] == ["calibrate"] * 3


def test_results_say_what_was_run_and_average_the_sites_means(tmp_path, plan_for):
    """Dice means 0.2, 0.4 and 0.9: average 0.5, population std sqrt((0.09 + 0.01 + 0.16) / 3) = 0.2943920."""
    dice = {"A": 0.2, "B": 0.4, "C": 0.9}

    def answer(site, task, tensors, scalars):
        if task == "evaluate":
            summary = {**SUMMARY, "dice": {"mean": dice[site], "std": 0.1, "n": 4}}
            return messages.pack(before_calibration=SUMMARY, final=summary, peers={})
        return good(site, task, tensors, scalars)

    run = Run(tmp_path, plan_for(rounds=1, method="fedavg"), SITES, answer).run("train", "evaluate")
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["method"], results["network"], results["seed"], results["rounds"]) == ("fedavg", "pvt", 0, 1)
    assert results["sites"]["B"]["final"]["dice"] == {"mean": 0.4, "std": 0.1, "n": 4}
    assert results["average"]["final"]["dice"]["mean"] == pytest.approx(0.5)
    assert results["average"]["final"]["dice"]["std"] == pytest.approx(0.2943920, abs=1e-6)
    assert run.progress("done")


class Late(Run):
    """Sites answer in a thread of their own; FLARE ends a task when it looks, here only when it is told to."""

    def broadcast(self, task, fl_ctx, targets, min_responses):
        self.open, self.task = set(targets), task  # nothing ends the task but a look
        self.thread = threading.Timer(0.2, super().broadcast, (task, fl_ctx, targets, min_responses))
        self.thread.start()

    def check_tasks(self):
        self.thread.join()
        self.task.completion_status = TaskCompletionStatus.OK


def test_a_request_ends_at_the_last_answer_and_not_at_a_look(tmp_path, plan_for, monkeypatch):
    """The server and FLARE's monitor would look again after a minute; two rounds and three requests end at once."""
    monkeypatch.setattr(controller, "POLL", 60.0)
    run, started = Late(tmp_path, plan_for(rounds=2), SITES, good), time.monotonic()
    run.run("train")
    assert time.monotonic() - started < 30
    assert run.panics == []
    assert len(run.progress("round")) == 2


def test_flare_ends_a_task_when_it_is_told_to():
    """FLARE's own communicator: `check_tasks` ends a broadcast that its last site has answered, without its monitor."""
    communicator = WFCommServer(task_check_period=60.0)
    communicator._engine = SimpleNamespace(new_context=lambda: nullcontext(FLContext()))
    ended = []
    task = Task("train", Shareable(), result_received_cb=lambda **_: None)
    task.task_done_cb = lambda task, fl_ctx: ended.append(task.completion_status)
    communicator.broadcast(task, FLContext(), targets=["A"], min_responses=1)
    task.client_tasks.append(ClientTask(Client("A", "token"), task))
    communicator._client_task_map[task.client_tasks[0].id] = task.client_tasks[0]
    communicator.check_tasks()
    assert ended == []
    task.client_tasks[0].result_received_time = 1.0
    communicator.check_tasks()
    assert ended == [TaskCompletionStatus.OK]
