"""The job's filter and the site's guard, each alone: an executor that leaks, and what is left of its message's bytes.

Wall 1, the executor, is tested on the wire in test_simulator.py; wall 4, the server's check and its persistor, in
test_stage.py; the guard inside a site's own privacy.json, on a real federation, in test_deployment.py.
"""

import copy

import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey, ReturnCode

from feddp import protocol
from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.flare.filters import PrivateTensorGuard, StripPrivate
from feddp.flare.site import SiteComponent
from feddp.plan.resolve import head_names
from support.site import bytes_of, context


@pytest.fixture(scope="module")
def component(plan_for):
    return SiteComponent(plan_for().to_json())


@pytest.fixture(scope="module")
def state(component):
    """A whole trained state: every tensor holds values of its own."""
    generator = torch.Generator().manual_seed(1)
    return {n: torch.rand(v.shape, generator=generator) for n, v in component.expected.network.state_dict().items()}


def leak(state, **scalars):
    return messages.pack(state, round=0, samples=8.0, **scalars)


def test_the_jobs_filter_strips_what_an_executor_leaks(component, state):
    """Wall 2: names and values are gone from the bytes; the shared ones are there (the control), the input is as it was."""
    message = leak(state)
    before = copy.deepcopy(message)
    filtered = bytes_of(StripPrivate().process(message, context(component)))
    for name in component.expected.partition.private:
        assert name.encode() not in filtered
        assert state[name].numpy().tobytes()[:64] not in filtered
        assert state[name].numpy().tobytes()[:64] in bytes_of(before)
    for name in component.expected.partition.shared:
        assert name.encode() in filtered
        assert state[name].numpy().tobytes()[:64] in filtered
    kept, scalars = messages.unpack(message)
    assert kept.keys() == state.keys()
    assert scalars == {"round": 0, "samples": 8.0}


def test_the_jobs_filter_leaves_a_clean_result_alone(component, state):
    message = leak({name: state[name] for name in component.expected.partition.shared})
    assert StripPrivate().process(message, context(component)) is message


def test_the_guard_stops_a_leak_and_says_so(component, state):
    """Wall 3: an ordinary exception, so FLARE answers TASK_RESULT_FILTER_ERROR and the other sites go on."""
    with pytest.raises(FedDPError, match="site hospital: task train tried to send 16 tensors that may not leave"):
        PrivateTensorGuard().process(leak(state), context(component))


def test_the_guard_lets_a_clean_result_pass(component, state):
    shared = {name: state[name] for name in component.expected.partition.shared}
    tensors, scalars = messages.unpack(PrivateTensorGuard().process(leak(shared), context(component)))
    assert tensors.keys() == shared.keys()
    assert all(torch.equal(tensors[name], shared[name]) for name in shared)
    assert scalars == {"round": 0, "samples": 8.0}


def _riding(state, component, **extra):
    message = leak({name: state[name] for name in component.expected.partition.shared} | extra)
    message["beside"] = "patient 17"
    message.set_header("note", "patient 18")
    return message


def test_nothing_rides_along_with_a_result(component, state):
    """What is beside the tensors and the numbers, in the message or in its headers, stays at the site."""
    sent = bytes_of(PrivateTensorGuard().process(_riding(state, component), context(component)))
    assert b"patient" not in sent
    assert b"patient 17" in bytes_of(_riding(state, component)), "the control"


@pytest.mark.parametrize("value", [torch.zeros(3), b"pixels", "text"])
def test_the_guard_knows_every_name_that_may_leave(component, state, value):
    """An unknown name is not private by any rule, and is stopped all the same."""
    with pytest.raises(FedDPError, match=r"1 tensors that may not leave \(renamed"):
        PrivateTensorGuard().process(_riding(state, component, renamed=value), context(component))


def test_only_a_tensor_passes_under_a_tensors_name(component, state):
    name = component.expected.partition.shared[3]
    with pytest.raises(FedDPError, match="which is not a plain tensor"):
        PrivateTensorGuard().process(_riding(state, component, **{name: b"pixels"}), context(component))


def test_the_guard_keeps_what_the_hospital_never_shares(component, state):
    """The job's method shares the head; this hospital does not, whatever the job."""
    message = leak({name: state[name] for name in component.expected.partition.shared})
    with pytest.raises(FedDPError, match=r"2 tensors that may not leave \(segmentation_head"):
        PrivateTensorGuard().process(message, context(component, private=["head"]))
    given = messages.pack({name: state[name] for name in component.expected.partition.private}, consent=True)
    with pytest.raises(FedDPError, match="16 tensors that may not leave"):
        PrivateTensorGuard().process(given, context(component, "collect", consent=["calibration"], private=["query"]))


@pytest.mark.parametrize("private", [["query"], ["norm", "affinity_query"]])
def test_a_network_without_what_the_hospital_keeps_private_is_refused(plan_for, private):
    """A convolutional network has no query, so the rule would stop nothing of it: neither its executors nor the guard take such
    a job. The controls: without the rule its whole network leaves, and a rule that it has tensors for is no obstacle."""
    resnet = SiteComponent(plan_for(network="resnet18-fpn", method="fedavg").to_json())
    message = leak(dict(resnet.expected.network.state_dict()))
    lacking = f"its policy keeps {private[-1]} private, but the job's resnet18-fpn has no such tensor"
    for asked in (resnet.context, lambda fl_ctx: PrivateTensorGuard().process(message, fl_ctx)):
        with pytest.raises(FedDPError, match=lacking):
            asked(context(resnet, private=private))
    whole = messages.unpack(PrivateTensorGuard().process(message, context(resnet)))[0]
    assert whole.keys() == resnet.expected.network.state_dict().keys()
    assert resnet.context(context(resnet, private=["norm"])).policy.private == ("norm",)


@pytest.mark.parametrize("task", ["adopt", "tune", "calibrate", "evaluate", "anything"])
def test_the_guard_lets_no_tensor_out_of_other_tasks(component, state, task):
    name = component.expected.partition.shared[0]
    with pytest.raises(FedDPError, match=f"task {task} tried to send 1 tensors"):
        PrivateTensorGuard().process(leak({name: state[name]}), context(component, task))


def test_the_guard_asks_for_consent_before_the_exchange(component, state):
    message = messages.pack({name: state[name] for name in component.expected.partition.private}, consent=True)
    sent = PrivateTensorGuard().process(message, context(component, "collect", consent=["calibration"]))
    assert set(messages.unpack(sent)[0]) == set(component.expected.partition.private)
    with pytest.raises(FedDPError, match="does not consent"):
        PrivateTensorGuard().process(message, context(component, "collect"))


@pytest.mark.parametrize("text", ["patient 17", ["x"], None])
def test_the_guard_lets_no_text_out_among_the_scalars(component, text):
    with pytest.raises(FedDPError, match="among its scalars"):
        PrivateTensorGuard().process(messages.pack(loss=1.0, final={"dice": {"mean": text}}), context(component))
    with pytest.raises(FedDPError, match="'Jane Doe' among its scalars"):
        PrivateTensorGuard().process(messages.pack(**{"Jane Doe": 1.0}), context(component))


def test_the_guard_lets_a_volumes_means_out_and_no_case(component, tiny_root):
    """Beside the means of images, those of cases; a case by its name, or its name as a text, never."""
    summary = {"dice": {"mean": 0.5, "std": 0.1, "n": 2}, "iou": {"mean": 0.4, "std": 0.1, "n": 2}}
    volumes = {"before_calibration": summary, "final": summary}
    policy = {"data": str(tiny_root / "site-1"), "min_images": 1, "std_images": 1}  # one case, of two slices
    sent = PrivateTensorGuard().process(messages.pack(volumes=volumes), context(component, "evaluate", **policy))
    assert messages.unpack(sent)[1] == {"volumes": volumes}
    for leak in ({"Case07": 0.5}, {"final": {"Case07": summary["dice"]}}):
        with pytest.raises(FedDPError, match="'Case07' among its scalars"):
            PrivateTensorGuard().process(messages.pack(volumes=leak), context(component, "evaluate"))
    with pytest.raises(FedDPError, match="a str among its scalars"):
        PrivateTensorGuard().process(messages.pack(volumes="Case07"), context(component, "evaluate"))


@pytest.mark.parametrize("kind", [StripPrivate, PrivateTensorGuard])
def test_an_error_reply_carries_its_code_and_nothing_else(kind, component, state):
    """Were it passed on as it is, an executor could send anything by saying that it failed."""
    reply = leak(state)
    reply.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    sent = kind().process(reply, context(component))
    assert sent.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    name = component.expected.partition.private[0]
    assert state[name].numpy().tobytes()[:64] not in bytes_of(sent)


def test_without_a_policy_a_site_refuses(component):
    """FLARE accepts any scope where there is no privacy.json (design.md): this site does not."""
    fl_ctx = context(component)
    fl_ctx.set_prop(FLContextKey.SCOPE_PROPERTIES, None)
    fl_ctx.set_prop(FLContextKey.SIMULATE_MODE, False)
    with pytest.raises(FedDPError, match="site hospital: its privacy.json has no properties"):
        component.context(fl_ctx)


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"device": "cpu"}, "does not name the data folder"),
        ({"data": "x", "consents": True}, r"unknown properties \['consents'\]"),
        ({"data": "x", "consent": "yes"}, "consent is 'yes'"),
        ({"data": "x", "consent": ["everything"]}, "everything"),
        ({"data": "x", "private": "head"}, "private is 'head'"),
        ({"data": "x", "recipients": "B"}, "recipients is 'B'"),
        ({"data": "x", "senders": "B"}, "senders is 'B'; write a list of sites, or leave it out"),
        ({"data": "x", "senders": None}, "senders is None"),
        ({"data": "x", "threads": "many"}, "threads is 'many'"),
        ({"data": "x", "threads": True}, "threads is True"),
        ({"data": "x", "min_images": 0}, "min_images is 0; write a number of images, at least 1"),
        ({"data": "x", "min_images": "5"}, "min_images is '5'"),
        ({"data": "x", "spectra": -1}, "spectra is -1; write a number of mean spectra, at least 0"),
        ({"data": "x", "methods": ["feddp", "magic"]}, r"methods is \['feddp', 'magic'\]; write a list of apfl, centralized"),
        ({"data": "x", "methods": "feddp"}, "methods is 'feddp'"),
        ({"data": "x", "consent": [["calibration"]]}, "consent is"),
        ({"data": "x", "networks": ["vgg"]}, r"networks is \['vgg'\]; write a list of pvt_v2_b0-fpn"),
        ({"data": "x", "approve": "all"}, "approve is 'all'; write \"any\", or a list"),
        ({"data": "x", "approve": [{"job": "feddp", "plan": "0d5a"}]}, "which `feddp kit approve JOB_FOLDER KIT` writes"),
        ({"data": "x", "tensors": "any"}, "tensors is 'any'; write a list of SHA-256"),
        ({"data": "x", "bounds": {"epochs": 3}}, r"bounds is \{'epochs': 3\}; write values for min_sites, batch"),
        ({"data": "x", "bounds": {"batch": "4"}}, "bounds: batch is '4'; write a whole number"),
        ({"data": "x", "bounds": {"batch": True}}, "bounds: batch is True; write a whole number"),
        ({"data": "x", "bounds": {"lr": float("nan")}}, "bounds: lr is nan; write a number"),
        ({"data": "x", "bounds": {"lr": float("inf")}}, "bounds: lr is inf; write a number"),
        ({"data": "x", "bounds": {"augment": 1}}, "bounds: augment is 1; write true or false"),
        ({"data": "x", "bounds": {"losses": ["mse"]}}, r"bounds: losses is \['mse'\]; write a list of dice_ce, dice"),
    ],
)
def test_a_wrong_policy_is_refused_by_name(component, properties, message):
    fl_ctx = context(component)
    fl_ctx.set_prop(FLContextKey.SCOPE_PROPERTIES, properties)
    with pytest.raises(FedDPError, match=message):
        component.context(fl_ctx)


def test_the_guard_lets_a_head_pass_with_consent_and_nothing_else_of_fedlc(plan_for):
    """FedLC's exchange: of the private tensors the segmentation head's two; HC's own and the embedding stay."""
    component = SiteComponent(plan_for(method="fedlc").to_json())
    values = component.expected.network.state_dict()
    head = {name: values[name] for name in head_names(component.expected.network)}
    given = context(component, task=protocol.COLLECT_HEADS, consent=["calibration"])
    assert messages.unpack(PrivateTensorGuard().process(messages.pack(head, consent=True), given))[0].keys() == head.keys()
    with pytest.raises(FedDPError, match="does not consent"):
        PrivateTensorGuard().process(messages.pack(head, consent=True), context(component, task=protocol.COLLECT_HEADS))
    for name in ("calibrator.out.weight", "embedding.one_hot", "encoder.model.patch_embed.proj.weight"):
        with pytest.raises(FedDPError, match="1 tensors that may not leave"):
            PrivateTensorGuard().process(messages.pack(head | {name: values[name]}, consent=True), given)
    with pytest.raises(FedDPError, match="2 tensors that may not leave"):
        PrivateTensorGuard().process(messages.pack(head), context(component, task="train", consent=["calibration"]))
