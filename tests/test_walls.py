"""The job's filter and the site's guard, each alone: an executor that leaks, and what is left of its message's bytes.

Wall 1, the executor, is tested on the wire in test_simulator.py; wall 4, the server's check and its persistor, in
test_stage.py; the guard inside a site's own privacy.json, on a real federation, in test_poc.py.
"""

import copy

import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import make_reply
from nvflare.fuel.utils import fobs

from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.flare.filters import PrivateTensorGuard, StripPrivate
from feddp.flare.site import SiteComponent


class Engine:
    def __init__(self, component):
        self.component = component

    def get_component(self, name):
        return self.component if name == "site" else None


def context(component, task="train", consent=(), private=()):
    fl_ctx = FLContext()
    fl_ctx.get_engine = lambda *a, **k: Engine(component)
    fl_ctx.get_identity_name = lambda *a, **k: "hospital"
    fl_ctx.set_prop(FLContextKey.TASK_NAME, task)
    properties = {"data": "nowhere", "consent": list(consent), "private": list(private)}
    fl_ctx.set_prop(FLContextKey.SCOPE_PROPERTIES, properties)
    return fl_ctx


@pytest.fixture(scope="module")
def component(plan_for):
    return SiteComponent(plan_for().to_json())


@pytest.fixture(scope="module")
def state(component):
    """A whole trained state: every tensor holds values of its own."""
    generator = torch.Generator().manual_seed(1)
    return {n: torch.rand(v.shape, generator=generator) for n, v in component.network.state_dict().items()}


def leak(state, **scalars):
    return messages.pack(state, round=0, loss=1.0, **scalars)


def bytes_of(message):
    """The message as FLARE would serialise it, tensors inline."""
    messages.register_tensors()
    return fobs.dumps(message)


def test_the_jobs_filter_strips_what_an_executor_leaks(component, state):
    """Wall 2: names and values are gone from the bytes; the shared ones are there (the control), the input is as it was."""
    message = leak(state)
    before = copy.deepcopy(message)
    filtered = bytes_of(StripPrivate().process(message, context(component)))
    for name in component.partition.private:
        assert name.encode() not in filtered
        assert state[name].numpy().tobytes()[:64] not in filtered
        assert state[name].numpy().tobytes()[:64] in bytes_of(before)
    for name in component.partition.shared:
        assert name.encode() in filtered
        assert state[name].numpy().tobytes()[:64] in filtered
    kept, scalars = messages.unpack(message)
    assert kept.keys() == state.keys()
    assert scalars == {"round": 0, "loss": 1.0}


def test_the_jobs_filter_leaves_a_clean_result_alone(component, state):
    message = leak({name: state[name] for name in component.partition.shared})
    assert StripPrivate().process(message, context(component)) is message


def test_the_guard_stops_a_leak_and_says_so(component, state):
    """Wall 3: an ordinary exception, so FLARE answers TASK_RESULT_FILTER_ERROR and the other sites go on."""
    with pytest.raises(FedDPError, match="site hospital: task train tried to send 16 private tensors"):
        PrivateTensorGuard().process(leak(state), context(component))


def test_the_guard_lets_a_clean_result_pass(component, state):
    message = leak({name: state[name] for name in component.partition.shared})
    assert PrivateTensorGuard().process(message, context(component)) is message


def test_the_guard_keeps_what_the_hospital_never_shares(component, state):
    """The job's method shares the head; this hospital does not, whatever the job."""
    message = leak({name: state[name] for name in component.partition.shared})
    with pytest.raises(FedDPError, match=r"2 private tensors \(segmentation_head"):
        PrivateTensorGuard().process(message, context(component, private=["head"]))


@pytest.mark.parametrize("task", ["adopt", "tune", "calibrate", "evaluate", "anything"])
def test_the_guard_lets_no_tensor_out_of_other_tasks(component, state, task):
    name = component.partition.shared[0]
    with pytest.raises(FedDPError, match=f"task {task} tried to send tensors"):
        PrivateTensorGuard().process(leak({name: state[name]}), context(component, task))


def test_the_guard_asks_for_consent_before_the_exchange(component, state):
    message = leak({name: state[name] for name in component.partition.private})
    assert PrivateTensorGuard().process(message, context(component, "collect", consent=["calibration"])) is message
    with pytest.raises(FedDPError, match="does not consent"):
        PrivateTensorGuard().process(message, context(component, "collect"))


@pytest.mark.parametrize("text", ["patient 17", ["x"], None])
def test_the_guard_lets_no_text_out_among_the_scalars(component, text):
    with pytest.raises(FedDPError, match="among its scalars"):
        PrivateTensorGuard().process(messages.pack(loss=1.0, note={"deep": text}), context(component))


@pytest.mark.parametrize("kind", [StripPrivate, PrivateTensorGuard])
def test_an_error_reply_passes(kind, component):
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    assert kind().process(reply, context(component)) is reply


def test_without_a_policy_a_site_refuses(component):
    """FLARE accepts any scope where there is no privacy.json (design.md): this site does not."""
    fl_ctx = context(component)
    fl_ctx.set_prop(FLContextKey.SCOPE_PROPERTIES, None)
    with pytest.raises(FedDPError, match="site hospital: its privacy.json has no properties"):
        component.policy(fl_ctx)


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"device": "cpu"}, "does not say where the data lie"),
        ({"data": "x", "consents": True}, r"unknown properties \['consents'\]"),
        ({"data": "x", "consent": "yes"}, "consent is 'yes'"),
        ({"data": "x", "consent": ["everything"]}, "everything"),
        ({"data": "x", "private": "head"}, "private is 'head'"),
        ({"data": "x", "threads": "many"}, "threads is 'many'"),
    ],
)
def test_a_wrong_policy_is_refused_by_name(component, properties, message):
    fl_ctx = context(component)
    fl_ctx.set_prop(FLContextKey.SCOPE_PROPERTIES, properties)
    with pytest.raises(FedDPError, match=message):
        component.policy(fl_ctx)
