"""The network that a job brings: named in the plan by its SHA-256, handed over before anything else, checked by every site."""

import hashlib
import json
import struct
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import make_reply
from nvflare.apis.workspace import Workspace
from safetensors.torch import load_file

from feddp import protocol
from feddp.compare.efficiency import traffic
from feddp.files import WEIGHTS
from feddp.flare import messages
from feddp.flare.persistor import SharedTensorPersistor
from feddp.jobs import folder as jobs
from feddp.networks.weights import fingerprint, read_network, save_network
from feddp.plan.schema import Plan
from feddp.run import session
from feddp.run.local import local
from feddp.run.options import Options
from feddp.stages.evaluate import evaluate
from support.brought import brought_by
from support.driven import drive
from support.request import SITES, request_for
from support.server import SITES as ABC
from support.server import Run, good


def same(one, other):
    return one.keys() == other.keys() and all(value.equal(other[name]) for name, value in one.items())


# --- the fingerprint -------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_names_types_shapes_and_bytes():
    """By hand: sorted by name, each a header in JSON with its length in eight bytes before it, then the numbers as memory holds
    them, four bytes each for 1 and −2, eight for each of two zeros."""
    state = {"b": torch.zeros(2, dtype=torch.int64), "a": torch.tensor([[1.0, -2.0]])}
    wanted = b""
    parts = (('["a", "torch.float32", [1, 2]]', struct.pack("<2f", 1, -2)), ('["b", "torch.int64", [2]]', bytes(16)))
    for header, content in parts:
        wanted += struct.pack(">Q", len(header)) + header.encode() + content
    assert fingerprint(state) == hashlib.sha256(wanted).hexdigest()


def test_the_fingerprint_is_of_nothing_else(tmp_path):
    """Not of order, strides or file; half precision and single numbers have one too."""
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3), "c": torch.ones(2, dtype=torch.bfloat16)}
    strided = {"c": state["c"], "a": torch.arange(6.0).reshape(2, 3).t().contiguous().t(), "b": state["b"]}
    assert not strided["a"].is_contiguous()
    save_network(tmp_path / "x.safetensors", state, {"note": "anything"})
    assert fingerprint(state) == fingerprint(strided) == fingerprint(read_network(tmp_path / "x.safetensors")[0])


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(2, 3), "b": torch.tensor([1.0])},
        {"a": torch.zeros(3, 2), "b": torch.tensor(1.0)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.tensor(1.0)},
        {"a": torch.zeros(2, 3), "c": torch.tensor(1.0)},
        {"a": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "b": torch.tensor(1.0 + 2**-23)},
    ],
    ids=["shape", "transposed", "type", "name", "missing", "the last bit"],
)
def test_other_tensors_have_another_fingerprint(other):
    assert fingerprint(other) != fingerprint({"a": torch.zeros(2, 3), "b": torch.tensor(1.0)})


# --- the server ------------------------------------------------------------------------------------------------------


def answers(site, task, tensors, scalars):
    if task in (protocol.INITIAL, protocol.INTRODUCE_SPECTRA):
        return messages.pack(**({} if task == protocol.INITIAL else {"consent": False}))
    if task in (protocol.COLLECT_SPECTRA, protocol.TAKE_SPECTRA):
        return messages.pack(consent=False)
    return good(site, task, tensors, scalars, values=dict.fromkeys(ABC, 0))


@pytest.fixture
def server(plan_for, toy, tmp_path):
    """Runs stages of a job that brings a network; `edit` is what its file holds instead, and `named` by its plan too."""
    number = count()

    def run(*stages, answer=answers, edit=lambda state: state, named=False, **plan):
        state, wanted = brought_by(plan_for(network=toy, sites=tuple(ABC), rounds=1, **plan))
        state, folder = edit(state), tmp_path / str(next(number))
        save_network(folder / "config" / WEIGHTS, state, {})
        wanted = replace(wanted, weights=fingerprint(state)) if named else wanted
        return state, Run(folder, wanted, ABC, answer).run(*(stages or ("train",)))

    return run


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_whole_network_is_handed_to_every_site_before_the_first_round(server, precision):
    """In float32 whatever the rounds travel in, private tensors included; γ^0 is its shared part. The toy has 37 floating
    numbers (16 of the query, 16 of the normalisation, 5 of the head) and a counter of 8 bytes: 156 bytes for a site, of which
    the rounds, without the query, take 92, or 50 in half precision. Stage 1's traffic holds both."""
    state, run = server(precision=precision, start="last")
    assert run.panics == []
    assert [(task, sites) for task, sites, _ in run.sent] == [("initial", ABC), ("train", ABC), ("adopt", ABC)]
    sent = [messages.unpack(message)[0] for _, _, message in run.sent]
    assert same(sent[0], state)
    assert same(sent[1], {name: value for name, value in state.items() if not name.startswith("q.")})
    asked = {event["task"]: event["bytes"] for event in run.progress("ask")}
    shared = 92 if precision == "float32" else 50
    assert asked == {"initial": dict.fromkeys(ABC, 156)} | dict.fromkeys(("train", "adopt"), dict.fromkeys(ABC, shared))
    events = [json.loads(line) for line in (run.folder / "progress.jsonl").read_text().splitlines()]
    assert traffic(events) == (3 * 156 + 3 * 3 * shared, 0)  # the network out, γ^0 out, contributions in, γ^1 out


def test_a_job_without_initial_tensors_hands_nothing_over(plan_for, toy, tmp_path):
    run = Run(tmp_path, plan_for(network=toy, sites=tuple(ABC), rounds=1, start="last"), ABC, answers).run("train")
    assert [task for task, _, _ in run.sent] == ["train", "adopt"]


def test_it_is_handed_over_once_before_the_stage_that_comes_first(server):
    """FedDG's exchange of spectra is before the rounds."""
    _, run = server("spectra", "train", method="feddg", start="last")
    assert run.panics == []
    tasks = [task for task, _, _ in run.sent]
    assert tasks.index("initial") == 0 < tasks.index("collect_spectra") < tasks.index("train")
    assert tasks.count("initial") == 1


def test_the_server_starts_no_job_whose_file_is_not_the_plans(server):
    _, run = server(edit=lambda state: state | {"head.bias": state["head.bias"] + 1})
    (said,) = run.panics
    assert f"{WEIGHTS}: tensors of SHA-256" in said
    assert run.sent == []


@pytest.mark.parametrize("config_folder", ["config", ""])
def test_the_server_finds_it_in_kits_of_either_way(plan_for, toy, tmp_path, config_folder):
    """In a kit of `nvflare package` FLARE knows no name of the folder `config`, and its own word for the path leaves it out."""
    for name in ("startup", "local"):
        (tmp_path / name).mkdir()
    workspace = Workspace(str(tmp_path), "server", config_folder)
    state, plan = brought_by(plan_for(network=toy))
    save_network(tmp_path / "job/app_server/config" / WEIGHTS, state, {})
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.CURRENT_RUN, "job", private=False)
    fl_ctx.get_engine = lambda *a, **k: SimpleNamespace(get_workspace=lambda: workspace)
    assert same(SharedTensorPersistor(plan.to_json()).memory(fl_ctx).brought(), state)
    assert (Path(workspace.get_app_config_dir("job")) / WEIGHTS).exists() == bool(config_folder), "the control"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: {name: value for name, value in state.items() if name != "q.bias"}, "q.bias is missing"),
        (lambda state: state | {"pixels": torch.zeros(3)}, "pixels is not expected"),
        (lambda state: state | {"q.bias": torch.zeros(5)}, "q.bias is (5,)"),
        (lambda state: state | {"q.bias": torch.full((4,), float("nan"))}, "q.bias holds values that are not finite"),
    ],
)
def test_a_plan_that_names_what_is_no_network_is_refused_too(server, edit, message):
    """The fingerprint is right: whoever wrote the plan had these tensors."""
    _, run = server(edit=edit, named=True)
    (said,) = run.panics
    assert message in said
    assert run.sent == []


def test_the_answer_to_it_is_empty_and_a_site_that_refuses_costs_itself(server):
    def said(site, task, tensors, scalars):
        if task == protocol.INITIAL and site == "A":
            return messages.pack({"q.bias": torch.zeros(4)})
        if site == "B" and task in ("initial", "train", "adopt"):
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        return answers(site, task, tensors, scalars)

    _, run = server(answer=said, start="last", min_sites=1)
    assert run.panics == []
    refused = {(event["site"], event["task"]): event["reason"] for event in run.progress("refused")}
    assert "sent 1 tensors where numbers were asked for" in refused["A", "initial"]
    assert refused.keys() == {("A", "initial"), ("B", "initial"), ("B", "train"), ("B", "adopt")}
    assert "initial: 1 of 3 sites answered well" in server(answer=said, start="last")[1].panics[0]


# --- a site ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def site(hospital, plan_for, toy):
    """A site of a job that brings a network, with that network; at this rate nothing trained moves."""
    state, plan = brought_by(plan_for(network=toy, lr=1e-30))
    return hospital().submitted(plan), state


def last_words(made):
    return json.loads((made.store.folder / "record.jsonl").read_text().splitlines()[-1])["message"]


def test_a_site_starts_from_what_it_was_handed_private_tensors_included(site):
    made, state = site
    assert made.sends(protocol.INITIAL, made.executed(protocol.INITIAL, state)) == ({}, {})
    shared, private = made.component.expected.partition.split(state)
    sent, _ = messages.unpack(made.executed(protocol.TRAIN, shared, round=0, phase=0))
    assert all(sent[name].equal(shared[name]) for name in ("head.weight", "head.bias"))
    assert same(made.store.load_state(1).private, private)
    own = made.component.expected
    assert not same(private, own.partition.split(own.network.state_dict())[1]), "not the seed's"
    assert same(load_file(made.store.folder / "initial.safetensors"), state)


@pytest.mark.parametrize("task", ["train", "adopt", "introduce"])
def test_a_site_that_missed_it_says_so_and_never_starts_from_the_seed(site, task):
    made, state = site
    shared = made.component.expected.partition.split(state)[0]
    refused = made.executed(task, shared, round=0, phase=0)
    assert refused.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert last_words(made).startswith("site site-1: the job starts from initial tensors, and this site was absent")
    assert not list(made.store.folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state | {"q.bias": state["q.bias"] + 1}, "site-1 was sent: tensors of SHA-256"),
        (lambda state: {name: value for name, value in state.items() if name[0] != "q"}, "q.bias is missing"),
        (lambda state: state | {"pixels": torch.zeros(3)}, "pixels is not expected"),
        (lambda state: state | {"q.bias": torch.zeros(5)}, "q.bias is (5,)"),
        (lambda state: state | {"q.bias": state["q.bias"].double()}, "q.bias is (4,) torch.float64"),
        (lambda state: state | {"q.bias": torch.full((4,), float("inf"))}, "q.bias holds values that are not finite"),
        (lambda state: state | {"q.bias": b"code"}, "q.bias is a bytes, not a tensor"),
        (lambda state: {}, "wrong tensor names"),
    ],
)
def test_a_site_takes_no_other_network_than_the_plans(site, edit, message):
    """Before or after the right one: what it starts from stays."""
    made, state = site
    for before in (False, True):
        if before:
            made.executed(protocol.INITIAL, state)
        answer = made.executed(protocol.INITIAL, edit(state))
        assert answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
        assert message in last_words(made)
        assert made.store.has("initial") == before
    assert same(made.store.read("initial")[0], state)


def test_a_job_that_says_nothing_of_initial_tensors_gets_none_in(hospital, toy):
    made = hospital()
    state = made.component.expected.network.state_dict()
    assert made.executed(protocol.INITIAL, state).get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "but the job's plan has no initial tensors" in last_words(made)
    assert not made.store.has("initial")


@pytest.mark.parametrize(
    ("policy", "message"), [({"methods": ["fedavg"]}, "accepts the methods: fedavg"), ({"private": ["key"]}, "keeps key")]
)
def test_the_policy_is_asked_before_anything_is_kept(site, policy, message):
    made, state = site
    made.submitted(made.component.plan, **policy)
    assert made.executed(protocol.INITIAL, state).get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert message in last_words(made)
    assert not made.store.has("initial")


def test_nothing_leaves_with_the_answer(site):
    made, state = site
    made.stopped(protocol.INITIAL, messages.pack(state), "task initial tried to send 9 tensors that may not leave")
    made.stopped(protocol.INITIAL, messages.pack(round=17), "'round' among its scalars")


# --- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_with_weights_is_the_plain_loop_to_the_bit(tiny_root, plan_for, tmp_path):
    """FedDP's, whose private tensors come from there too. The plain loop's sites forget after every task: what one was handed
    is on its disk. (FLARE's run of it, with a new process for every task, is in test_simulator.py.)"""
    state, plan = brought_by(plan_for(method="feddp", rounds=1, stages=("train",), start="last"))
    request = replace(request_for(tiny_root, tmp_path / "run", plan), initial=state)
    results = session.run(request, local, "feddp")
    assert results["weights"] == fingerprint(state)
    for name, site in drive(plan, tiny_root, tmp_path / "plain", initial=state, fresh=True).items():
        assert same(load_file(tmp_path / "run/sites" / name / "network.safetensors"), site.store.read(site.latest())[0])
        assert results["sites"][name]["final"] == evaluate(site)["final"]
    assert set(results["sites"]) == set(SITES)


def test_the_command_line_names_what_it_read(plan_for, toy, tmp_path, tiny_root):
    """`--weights FILE`: the plan says the fingerprint of the tensors that `initial` gives; another file, another plan."""
    sites, metadata = jobs.federation_of(tiny_root)
    plans = []
    for seed in (0, 1):
        file = tmp_path / f"{seed}.safetensors"
        save_network(file, brought_by(plan_for(network=toy, seed=seed))[0], {})
        options = Options("feddp", 1, network=toy, size=32, weights=str(file))
        plans.append(options.plan(metadata, sites))
        assert plans[-1].weights == fingerprint(options.initial(plans[-1])) == fingerprint(load_file(file))
    assert plans[0] != plans[1] == Plan.from_json(json.loads(json.dumps(plans[1].to_json())))
    assert Options("feddp", 1, network=toy, size=32).plan(metadata, sites).weights == ""
