"""The train stage with FLARE's own communicator: it keeps nothing of a finished task, and a task sent again is noted."""

import gc
import threading
import time
import weakref
from contextlib import contextmanager

import pytest
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.signal import Signal

from feddp.files import PROGRESS, read_events
from feddp.flare import messages
from feddp.flare.controller import StageController
from feddp.flare.persistor import SharedTensorPersistor
from support.server import SITES, Engine, good

ROUNDS = 5


@pytest.fixture
def no_cycles_collected():
    gc.disable()
    yield
    gc.enable()


def test_the_tensors_of_a_finished_round_are_freed_at_once(toy, plan_for, tmp_path, monkeypatch, no_cycles_collected):
    """A task and its clients' tasks name each other. The collector of cycles would free them, but it waits until the process
    has many more objects than at its start: dozens of rounds.

    Noted are the tensors of every message, γ and contributions alike. Those of the last task may still be in use.
    """
    packed = []
    pack = messages.pack

    def noted(tensors=None, **scalars):
        packed.append([weakref.ref(value) for value in (tensors or {}).values()])
        return pack(tensors, **scalars)

    monkeypatch.setattr(messages, "pack", noted)
    plan = plan_for(method="fedavg", network=toy, rounds=ROUNDS, min_sites=3, sites=SITES)
    with served(plan, tmp_path) as (stage, running, communicator):
        while running.is_alive():
            for site in SITES:
                _answered(communicator, site)
            time.sleep(0.01)
        alive = [any(ref() is not None for ref in refs) for refs in packed if refs]
    assert stage.memory.round == ROUNDS
    trained = ROUNDS * (1 + len(SITES))  # each round's γ, in one message for all sites, and the contributions
    assert len(alive) > trained
    assert not any(alive[:trained])


def test_a_site_that_was_started_again_is_named(toy, plan_for, tmp_path):
    """It fetches the task that it has already, and FLARE sends it again. The screen says why the round takes long."""
    plan = plan_for(method="fedavg", network=toy, rounds=1, min_sites=3, sites=SITES)
    with served(plan, tmp_path) as (stage, running, communicator):
        while stage.memory.round == 0 and not _fetched(communicator, "B"):
            time.sleep(0.01)
        while running.is_alive():
            for site in SITES:
                _answered(communicator, site)
            time.sleep(0.01)
    again = [(event["site"], event["task"]) for event in read_events(tmp_path / PROGRESS) if event["event"] == "again"]
    assert again == [("B", "train")]


@contextmanager
def served(plan, folder):
    """The train stage in a thread, with FLARE's own communicator, to which a test speaks as the sites do."""
    engine = Engine(folder, SITES, SharedTensorPersistor(plan.to_json()))
    contexts = FLContextManager(engine=engine, identity_name="server", job_id="job", public_stickers={}, private_stickers={})
    engine.new_context, engine.fire_event = contexts.new_context, lambda event, fl_ctx: None
    stage, communicator = StageController("train"), WFCommServer()
    stage.set_communicator(communicator)
    with engine.new_context() as fl_ctx:
        fl_ctx.set_prop(FLContextKey.SECURE_MODE, False)  # as in the simulator: nobody signs notes
        communicator.initialize_run(fl_ctx)
        stage.start_controller(fl_ctx)
        running = threading.Thread(target=stage.control_flow, args=(Signal(), fl_ctx))
        running.start()
        yield stage, running, communicator
        running.join()
        communicator.finalize_run(fl_ctx)


def _fetched(communicator, site):
    with communicator._engine.new_context() as fl_ctx:
        return communicator.process_task_request(Client(site, site), fl_ctx)[0]


def _answered(communicator, site):
    """Fetches a site's task, if it has one, and submits the answer."""
    client = Client(site, site)
    with communicator._engine.new_context() as fl_ctx:  # FLARE makes one for every request
        name, id, task = communicator.process_task_request(client, fl_ctx)
    if name:
        tensors, scalars = messages.unpack(task)
        given = {name: value.clone() for name, value in tensors.items()}
        numbers = messages.unpack(good(site, name, {}, scalars))[1]
        with communicator._engine.new_context() as fl_ctx:
            communicator.process_submission(client, name, id, messages.pack(given, **numbers), fl_ctx)
