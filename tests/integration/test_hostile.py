"""Jobs of allowed classes that try to carry a hospital's images and words out, past the guard of its privacy.json.

What the guard stops is said in the site's audit file. What no inspection can stop, values under a right name and of a right
shape, stands here as a test of what passes. Fed events and log streams need a class that no site allows (test_deployment.py).
"""

import io
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.private.admin_defs import Message
from nvflare.private.defs import SysCommandTopic, new_cell_message
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.shell_cmd import ShellCommandProcessor
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.security.security import FLAuthorizer

from feddp import protocol
from feddp.data.folder import SiteFolder
from feddp.data.loading import load
from feddp.flare import messages
from feddp.networks.weights import fingerprint
from feddp.plan.resolve import build_network
from feddp.provision import AUTHORIZATION
from feddp.training.seeds import seed_of
from support.site import CELL, NUMBERS, SUMMARY, TABLES, bytes_of


@pytest.fixture
def pixels(tiny_root):
    """An image of the site's, (3, 32, 32)."""
    return load(SiteFolder.open(tiny_root / "site-1"), "train", 32)[0]["image"]


def nan_of(image, like):
    """NaNs whose 22 free bits hold two pixels each, in the shape of `like`."""
    codes = (image.flatten()[: like.numel()] * 255).to(torch.int32).clamp(0, 255).reshape(like.shape)
    return (codes | 0x7FC00000).view(torch.float32)


class Carrier(torch.Tensor):
    """A tensor that brings its own code and attributes."""


HOSTILE = {
    "an extra tensor": ("train", lambda s, x: messages.pack(s | {"pixels": x}, **NUMBERS), r"not leave \(pixels"),
    "a private tensor": (
        "train",
        lambda s, x: messages.pack(s | {"q.weight": torch.ones(4, 3, 1, 1)}, **NUMBERS),
        r"not leave \(q.weight",
    ),
    "a part of the tensors": ("train", lambda s, x: messages.pack({"norm.bias": s["norm.bias"]}, **NUMBERS), "is missing"),
    "a larger tensor": ("train", lambda s, x: messages.pack(s | {"norm.bias": x}, **NUMBERS), r"norm.bias is \(3, 32, 32\)"),
    "a wider type": ("train", lambda s, x: messages.pack(s | {"norm.bias": s["norm.bias"].double()}, **NUMBERS), "float64"),
    "pixels in NaNs": (
        "train",
        lambda s, x: messages.pack(s | {"norm.bias": nan_of(x, s["norm.bias"])}, **NUMBERS),
        "norm.bias holds values that are not finite",
    ),
    "a negative variance": (
        "train",
        lambda s, x: messages.pack(s | {"norm.running_var": -s["norm.running_var"]}, **NUMBERS),
        "norm.running_var holds -1, but a running variance is from 0 to 65504; nothing was sent; if .*lower lr",
    ),
    "a weight that means nothing": (
        "train",
        lambda s, x: messages.pack(s | {"norm.bias": s["norm.bias"] + 1e9}, **NUMBERS),
        "norm.bias holds 1e.09, but a weight is from -65504 to 65504",
    ),
    "a negative counter": (
        "train",
        lambda s, x: messages.pack(s | {"norm.num_batches_tracked": s["norm.num_batches_tracked"] - 1}, **NUMBERS),
        "norm.num_batches_tracked holds -1, but a counter is from 0",
    ),
    "a tensor with code": (
        "train",
        lambda s, x: messages.pack(s | {"norm.bias": s["norm.bias"].as_subclass(Carrier)}, **NUMBERS),
        "norm.bias, which is not a plain tensor",
    ),
    "a sparse tensor": (
        "train",
        lambda s, x: messages.pack(s | {"norm.bias": s["norm.bias"].to_sparse()}, **NUMBERS),
        "norm.bias, which is not a plain tensor",
    ),
    "bytes for a tensor": ("train", lambda s, x: messages.pack(s | {"norm.bias": b"pixels"}, **NUMBERS), "not a plain tensor"),
    "a name of two lines": ("train", lambda s, x: messages.pack(s | {"a\n[E:1]b": x}, **NUMBERS), "not leave"),
    "a text": ("train", lambda s, x: messages.pack(s, **NUMBERS | {"loss": "patient 17"}), r"a str among its scalars \(loss"),
    "a list": ("train", lambda s, x: messages.pack(s, **NUMBERS | {"loss": x.flatten().tolist()}), "a list among its scalars"),
    "a table for a number": ("train", lambda s, x: messages.pack(s, **NUMBERS | {"loss": CELL}), "a dict among its scalars"),
    "a tensor for a number": ("train", lambda s, x: messages.pack(s, **NUMBERS | {"loss": x}), "a Tensor among its scalars"),
    "an image in an int": (
        "train",
        lambda s, x: messages.pack(s, **NUMBERS | {"samples": int.from_bytes(x.numpy().tobytes(), "big")}),
        r"a number of \d{5} bits among its scalars \(samples",
    ),
    "a NaN": ("train", lambda s, x: messages.pack(s, **NUMBERS | {"loss": math.nan}), r"not finite among its scalars \(loss"),
    "a name": ("train", lambda s, x: messages.pack(s, **NUMBERS, Jane_Doe=1.0), "'Jane_Doe' among its scalars"),
    "another task's number": ("train", lambda s, x: messages.pack(s, **NUMBERS, final=SUMMARY), "'final' among its scalars"),
    "the guard's own word": ("train", lambda s, x: messages.pack(s, **NUMBERS, withheld=17), "'withheld' among its scalars"),
    "tensors of another task": ("evaluate", lambda s, x: messages.pack(s, **TABLES), "may not leave"),
    "a task of no plan's": ("validate", lambda s, x: messages.pack(s, loss=1.0), "task validate tried to send 7 tensors"),
    "a number of no task's": ("validate", lambda s, x: messages.pack(loss=1.0), "'loss' among its scalars"),
    "a head, which FedDP never gives": (
        "collect_heads",
        lambda s, x: messages.pack({name: s[name] for name in ("head.weight", "head.bias")}, consent=True),
        "2 tensors that may not leave",
    ),
    "a row an image": (
        "evaluate",
        lambda s, x: messages.pack(**TABLES | {"final": {"image-003": CELL}}),
        "'image-003' among its scalars",
    ),
    "a row an image, among the peers": (
        "evaluate",
        lambda s, x: messages.pack(**TABLES | {"peers": {"image-003": SUMMARY}}),
        "'image-003' among its scalars",
    ),
    "a deeper table": (
        "evaluate",
        lambda s, x: messages.pack(**TABLES | {"final": {"dice": {"mean": {"mean": 0.5}}}}),
        r"a dict among its scalars \(mean",
    ),
}


def clean(task, shared):
    """What a task of ours sends."""
    return messages.pack(shared, **NUMBERS) if task == "train" else messages.pack(**TABLES if task == "evaluate" else {})


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_smuggler_is_stopped_and_audited(kind, hospital, pixels):
    """And, as the control, the same task's clean result passes unchanged, without a line in the audit file."""
    site = hospital()
    task, smuggle, match = HOSTILE[kind]
    site.stopped(task, smuggle(site.shared, pixels), match)
    lines = site.audited()
    tensors, scalars = site.sends(task, clean(task, site.shared))
    assert scalars == messages.unpack(clean(task, site.shared))[1]
    assert all(torch.equal(value, site.shared[name]) for name, value in tensors.items())
    assert len(tensors) == (7 if task == "train" else 0)
    assert site.audited() == lines


def test_a_return_code_of_words_is_stopped(hospital):
    site = hospital()
    reply = messages.pack()
    reply.set_return_code("patient 17")
    site.stopped("train", reply, "a return code that is not FLARE's")
    reply.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    passed = site.guarded("train", reply)
    assert passed.get_return_code() == ReturnCode.EXECUTION_EXCEPTION


def test_what_is_no_message_of_ours_is_audited_without_its_words(hospital):
    """An error of Python's may hold anything: the audit line names its kind alone."""
    site = hospital()
    with pytest.raises(AttributeError):
        site.guarded("train", "patient 17")
    assert site.audited()[-1].endswith("[egress guard stopped: AttributeError]")


def test_metadata_stays_at_the_site(hospital):
    """Headers, what lies beside the tensors in the message, and in the DXO: all is written anew."""
    site = hospital()

    def message():
        made = messages.pack(site.shared, **NUMBERS)
        made["beside"] = "patient 17"
        made.set_header("note", "patient 18")
        made.set_header("cookie_jar", {"patient": 19})
        return made

    sent = bytes_of(site.guarded("train", message()))
    assert b"patient" not in sent
    assert b"norm.bias" in sent
    assert all(word in bytes_of(message()) for word in (b"patient 17", b"patient 18", b"cookie_jar")), "the control"


def test_nothing_larger_is_behind_a_tensor(hospital, pixels):
    """A shared tensor that is four values of an image's storage: what leaves has a storage of its own, of four values."""
    site = hospital()
    storage = pixels.flatten().clone()
    narrow = storage[8:12]
    narrow.note = "patient 17"
    rest = storage[100:120].numpy().tobytes()
    tensors, _ = site.sends("train", messages.pack(site.shared | {"norm.bias": narrow}, **NUMBERS))
    sent = tensors["norm.bias"]
    assert torch.equal(sent, narrow)
    assert (sent.untyped_storage().nbytes(), narrow.untyped_storage().nbytes()) == (16, 3 * 32 * 32 * 4)
    assert not hasattr(sent, "note")
    pickled = [io.BytesIO(), io.BytesIO()]
    for value, file in zip((sent, narrow), pickled, strict=True):
        torch.save(value, file)
    assert [rest in file.getvalue() for file in pickled] == [False, True], "with the control"
    assert rest not in bytes_of(messages.pack(tensors, **NUMBERS))


# --- a job's plan -----------------------------------------------------------------------------------------------------------


def test_a_plan_that_declares_nothing_private_does_not_widen_the_policy(hospital):
    """FedAvg shares the queries. A hospital that never does stops it, and one that takes FedDP alone does not even train."""
    site = hospital("fedavg", private=["query"])
    site.stopped("train", messages.pack(site.shared, **NUMBERS), r"2 tensors that may not leave \(q.bias")
    site = hospital("fedavg", methods=["feddp", "fedbn"])
    refusal = "its policy accepts the methods: feddp, fedbn, but the job uses fedavg"
    site.stopped("train", messages.pack(site.shared, **NUMBERS), refusal)
    answer = site.executed(protocol.TRAIN, site.shared, round=0, phase=0)
    assert answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert f"[A:train#?][task failed: site site-1: {refusal}" in site.audited()[-1]
    assert not list(site.store.folder.glob("*.safetensors")), "nothing was trained"
    for accepting in ({"methods": ["fedavg"]}, {}):
        site = hospital("fedavg", **accepting)
        assert site.sends("train", messages.pack(site.shared, **NUMBERS))[0].keys() == site.shared.keys()


def test_a_job_may_ask_for_so_many_spectra_and_no_more(hospital, plan_for, toy):
    site = hospital("feddg", consent=["spectra"], spectra=4, min_images=1)
    amplitude = {"amplitude": torch.ones(2, 3, 3, 3)}
    refusal = "asks for 16 mean spectra, but its policy allows at most 4"
    site.stopped("collect_spectra", messages.pack(amplitude, consent=True), refusal)
    answer = site.executed(protocol.COLLECT_SPECTRA)
    assert answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    site.submitted(plan_for(method="feddg", network=toy, spectra=4))
    site.fl_ctx.set_prop(FLContextKey.SIMULATE_MODE, True)  # in the clear: test_sealed_stage.py has this exchange sealed
    given, _ = messages.unpack(site.executed(protocol.COLLECT_SPECTRA))
    assert len(given["amplitude"]) == 2, "four patients here, and two are the fewest of a group"
    assert site.sends("collect_spectra", messages.pack(given, consent=True))[0].keys() == {"amplitude"}
    site = hospital("feddg", consent=[], spectra=0)  # gives none, whatever is asked: it trains as in FedAvg
    assert site.sends("collect_spectra", messages.pack(consent=False)) == ({}, {"consent": False})


def test_a_job_that_claims_another_s_state_is_refused(hospital, plan_for, toy):
    """A server may give a job any id. FedAvg under the id of a FedDP run would have its private tensors for shared ones."""
    site = hospital()
    trained = site.executed(protocol.TRAIN, site.shared, round=0, phase=0)
    shared = messages.unpack(trained)[0]
    before = {path.name: path.read_bytes() for path in site.store.folder.glob("*.safetensors")}
    assert set(site.store.load_state(1).private) == {"q.weight", "q.bias"}
    for claim in ({"method": "fedavg"}, {"private": "head"}, {"seed": 1}):
        site.submitted(plan_for(network=toy, **claim))
        answer = site.executed(protocol.TRAIN, site.shared, round=1, phase=0)
        assert answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
        key = {"private": "settings"}.get(next(iter(claim)), next(iter(claim)))
        assert f"belongs to a run with {key}=" in site.audited()[-1]
        assert {path.name: path.read_bytes() for path in site.store.folder.glob("*.safetensors")} == before
    site.submitted(plan_for(network=toy))  # the control: its own job goes on
    answer = site.executed(protocol.TRAIN, shared, round=1, phase=0)
    assert messages.unpack(answer)[0].keys() == shared.keys()


def test_tensors_of_nobody_s_plan_are_not_served(hospital):
    """What a folder held before it said whose it is."""
    site = hospital()
    site.store.write("state_00001", {"private/q.weight": torch.zeros(1)}, round="1")
    answer = site.executed(protocol.TRAIN, site.shared, round=1, phase=0)
    assert answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "holds tensors but no plan.json" in site.audited()[-1]


# --- what inspection cannot stop: for the threat model ------------------------------------------------------------------------


def test_passes_private_values_under_a_shared_name_of_their_shape(hospital):
    """The guard sees names, shapes and finite values. That a value is a private tensor's, it cannot tell."""
    site = hospital()
    private = torch.tensor([0.11, 0.22, 0.33, 0.44])
    tensors, _ = site.sends("train", messages.pack(site.shared | {"norm.bias": private}, **NUMBERS))
    assert torch.equal(tensors["norm.bias"], private)


def test_passes_pixels_inside_a_shared_tensor(hospital, pixels):
    """As many as the tensor has values, at every round."""
    site = hospital()
    inside = pixels[0, 0, :4].clone()
    tensors, _ = site.sends("train", messages.pack(site.shared | {"norm.bias": inside}, **NUMBERS))
    assert torch.equal(tensors["norm.bias"], inside)


@pytest.mark.parametrize("seed", ["plan", "own"])
def test_passes_a_number_of_every_training_image_in_a_running_variance(hospital, plan_for, toy, tiny_root, seed):
    """What training itself leaves in a shared tensor is not free of single images: the job says how large a batch is, and its
    seed says which image is in it. With batches of one, r' = 0.9 r + 0.1 var(q(image)) for one image after another; q, which
    the server sent, adds an image's first two channels. So 8 rounds are 8 equations in 8 images' variances, where the policy
    leaves the order to the plan's seed; where it is the site's own, they are the wrong equations. The job brings q, which the
    hospital has approved: from another start, the site refuses it."""
    plan = plan_for(network=toy, method="fedavg", batch=1, lr=1e-30, rounds=8, augment=False)
    state = build_network(plan).state_dict()
    state["q.weight"].zero_()[0, :2] = 1
    state["q.bias"].zero_()
    site = hospital(seed=seed).submitted(plan)
    gamma = {name: state[name] for name in site.shared}
    assert site.executed(protocol.TRAIN, gamma, round=0, phase=0).get_return_code() == messages.SHARED_REFUSED
    site = hospital(seed=seed, tensors=[fingerprint(state)]).submitted(replace(plan, weights=fingerprint(state)), "job-2")
    assert site.executed(protocol.INITIAL, state).get_return_code("") == ""
    images = [sample["image"] for sample in load(SiteFolder.open(tiny_root / "site-1"), "train", 32)]
    lines, sums = [], []
    for t in range(len(images)):
        answer = site.executed(protocol.TRAIN, gamma, round=t, phase=0)
        sums.append(site.sends("train", answer)[0]["norm.running_var"][0].item() - 0.9 ** len(images))  # it began at 1
        order = np.random.default_rng(seed_of(seed_of(site.plan.seed, "site-1", t, 0), "order")).permutation(len(images))
        lines.append([0.1 * 0.9 ** (len(images) - 1 - order.tolist().index(i)) for i in range(len(images))])
    found = np.linalg.solve(np.array(lines), np.array(sums))
    wanted = [(image[0] + image[1]).var().item() for image in images]
    assert max(wanted) - min(wanted) > 0.1
    assert (found == pytest.approx(wanted, abs=1e-3)) == (seed == "plan")


def test_passes_fifty_bits_inside_a_known_number(hospital):
    """A count is an int of 53 bits at most. A loss keeps three digits, and its power of ten."""
    site = hospital()
    for hidden, left in ((0.123456789012345, 0.123), (1.23456e300, 1.23e300)):
        assert site.sends("train", messages.pack(site.shared, **NUMBERS | {"loss": hidden}))[1]["loss"] == left
    assert site.sends("train", messages.pack(site.shared, **NUMBERS | {"samples": 2**53}))[1]["samples"] == 2**53
    site.stopped("train", messages.pack(site.shared, **NUMBERS | {"samples": 2**53 + 1}), "a number of 54 bits")


@pytest.fixture
def rights(monkeypatch):
    """Those of a hospital's kit, in force in this process."""
    monkeypatch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("hospital_a", AUTHORIZATION))


def test_passes_a_changed_server_that_asks_for_a_file(rights, hospital, tmp_path):
    """FLARE 2.9's client takes its server's word for whether a right is to be looked up, and the file may be the kit's own key.
    The control is what an unchanged server sends where the lead asks for the same. Both are in the audit file."""
    site = hospital()
    (tmp_path / "client.key").write_text("the key")
    engine = SimpleNamespace(new_context=FLContext, fire_event=lambda event, fl_ctx: None)
    agent = FedAdminAgent("admin_agent", SimpleNamespace(register_request_cb=lambda **_: None), engine)
    agent.register_processor(ShellCommandProcessor())

    def asked(**headers):
        request = Message(SysCommandTopic.SHELL, f"cat {tmp_path / 'client.key'}")
        request.set_headers(headers)
        return agent._dispatch_request(new_cell_message({}, request)).payload.body

    lead = {"user_name": "lead@consortium.org", "user_org": "consortium", "user_role": "lead"}
    assert "not authorized" in asked(require_authz="true", admin_command="cat", **lead)
    assert asked() == "the key"
    assert ["[A:sys.shell]" in line for line in site.audited()] == [True, True]


def test_passes_a_changed_server_that_calls_a_submitter_super(rights):
    """A role that FLARE 2.9's authorizer has for its own tests, and to which all is allowed, whatever the site's
    authorization.json says: code too. People's roles stand in certificates; who submitted a job, the server says."""
    brings_code = {AppValidationKey.BYOC: True}
    for role in (*AUTHORIZATION["permissions"], "no role"):
        assert AppAuthzService.authorize_app_info(brings_code, "x@y", "y", role) == (False, "BYOC not permitted")
    assert AppAuthzService.authorize_app_info(brings_code, "x@y", "y", "super") == (True, "")
