"""What FLARE's server takes for the name of a site that asks something, on FLARE's own agent and message runner."""

import time
from types import SimpleNamespace

import pytest
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message
from nvflare.private.aux_runner import AuxRunner
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.server_command_agent import ServerCommandAgent
from nvflare.private.fed.server.server_state import HotState

from feddp.flare.gate import ServerGate
from support.gated import JOB, SERVER, A, B, in_process

SERVER_JOB = f"{SERVER}.{JOB}"
TOKENS = {"token of a": Client(A, "token of a"), "token of b": Client(B, "token of b")}


@pytest.fixture
def asks(monkeypatch, tmp_path):
    """hospital-a asks, in the name and with the token that it gives; returns whom FLARE's server took it for."""
    with in_process(monkeypatch, tmp_path) as federation:
        taken = []

        def requested(client, fl_ctx):
            taken.append((client.name, fl_ctx.get_peer_context().get_identity_name()))
            return "", "", Shareable()

        def alive(topic, request, fl_ctx):
            taken.append(fl_ctx.get_peer_context().get_identity_name())
            return Shareable()

        def context():
            made = FLContext()
            made.set_prop(FLContextKey.RUNNER, SimpleNamespace(process_task_request=requested), private=True, sticky=False)
            made.get_engine = lambda: engine
            return made

        server = object.__new__(FederatedServer)
        server.server_state = HotState(ssid="ssid")
        server.client_manager = SimpleNamespace(clients=TOKENS)
        messages = AuxRunner(None)
        messages.topic_table["__job_heartbeat__"] = messages.topic_table["__task_check__"] = alive
        contexts = type("Context", (), {"__enter__": lambda self: context(), "__exit__": lambda self, *error: None})
        engine = SimpleNamespace(server=server, new_context=contexts, dispatch=messages.dispatch)

        def ask(channel, topic, name, token="token of a", gated=True):
            taken.clear()
            if gated:
                ServerGate()
            if SERVER_JOB not in federation.cells:
                server.cell = federation.cell(SERVER_JOB)
                ServerCommandAgent(engine, server.cell).start()
            content, said = Shareable(), FLContext()
            said.set_public_props({ReservedKey.IDENTITY_NAME: name})
            content.set_peer_context(said)
            content.set_peer_props({ReservedKey.IDENTITY_NAME: name})
            headers = {CellMessageHeaderKeys.TOKEN: token, CellMessageHeaderKeys.SSID: "ssid"}
            federation.stream(SERVER_JOB, channel, topic, content, origin=f"{A}.{JOB}", by=SERVER, **headers)
            deadline = time.monotonic() + 10
            while not (taken or federation.lines()) and time.monotonic() < deadline:
                time.sleep(0.02)  # FLARE answers streams in a thread
            return list(taken), federation.lines()

        yield ask


HEARTBEAT = ("aux_communication", "__job_heartbeat__")
CHECK = ("aux_communication", "__task_check__")
TASK = ("server_command", ServerCommandNames.GET_TASK)


def test_a_site_that_names_itself_is_heard(asks):
    assert asks(*HEARTBEAT, A) == ([A], [])
    assert asks(*CHECK, A) == ([A], [])
    assert asks(*TASK, A) == ([(A, A)], [])


@pytest.mark.parametrize(
    ("request_", "name", "token", "flares"),
    [
        (HEARTBEAT, B, "token of a", B),
        # each invented name wrote lines of its own into the run's progress, without end
        (CHECK, "invented", "token of a", "invented"),
        (TASK, B, "token of a", (A, B)),
        (TASK, A, "token of b", (B, A)),
        (TASK, None, "token of a", (A, None)),
    ],
)
def test_a_site_that_names_another_is_not(asks, request_, name, token, flares):
    assert asks(*request_, name, token, gated=False) == ([flares], []), "the control: FLARE believes it"
    taken, lines = asks(*request_, name, token)
    assert taken == []
    assert len(lines) == 1
    assert f"from {A}.{JOB}" in lines[0]
    assert "a site may send for itself only" in lines[0]


def test_a_request_is_refused_before_flare_has_stored_its_cell(monkeypatch, tmp_path):
    """FLARE's server starts its cell first, and remembers it afterwards."""
    with in_process(monkeypatch, tmp_path) as federation:
        ServerGate()
        server, content = object.__new__(FederatedServer), Shareable()
        server.cell = None
        content.set_peer_props({ReservedKey.IDENTITY_NAME: B})
        headers = {MessageHeaderKey.ORIGIN: f"{A}.{JOB}", MessageHeaderKey.CHANNEL: HEARTBEAT[0]}
        assert server.authentication_check(Message(headers, content), {}) == "a site may send for itself only"
        assert len(federation.lines()) == 1
