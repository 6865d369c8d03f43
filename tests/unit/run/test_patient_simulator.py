"""The limit of FLARE's simulator for the start of a site's process: ours reaches FLARE's code, and where it is not enough, the
message says what to do."""

import inspect
from argparse import Namespace
from types import SimpleNamespace

import pytest
from nvflare.private.fed.app.simulator.simulator_runner import SimulatorClientRunner, SimulatorRunner

from feddp.run.patient_simulator import LIMIT, STARTS, PatientSimulator
from feddp.run.session import SLOW_START, _first_error


def test_the_limit_reaches_the_code_that_waits(monkeypatch, tmp_path):
    """FLARE's own setup leaves no variables; its runner of clients reads the limit from them, and its default is 60."""

    def setup(self):
        self.args = Namespace(set=[], workspace=str(tmp_path))
        return True

    monkeypatch.setattr(SimulatorRunner, "setup", setup)
    limits = []
    for kind in (SimulatorRunner, PatientSimulator):
        simulator = kind("job", str(tmp_path))
        assert simulator.setup() is True
        limits.append(SimulatorClientRunner("", simulator.args, [], None, None, None).kv_list.get(LIMIT, 60))
    assert limits == [60, STARTS]
    assert f'self.kv_list.get("{LIMIT}"' in inspect.getsource(SimulatorClientRunner.run), "FLARE renamed its limit"


def test_a_process_that_did_not_start_is_recognised(tmp_path):
    """By the words of FLARE's own code, among other lines with errors; the control is a log without them."""

    class Clock(SimulatorClientRunner):
        def __init__(self):
            """Nothing but what is called here."""

    log = tmp_path / "simulator.log"
    with pytest.raises(RuntimeError) as never:
        Clock()._create_connection(open_port=1, timeout=-1)
    running = SimpleNamespace(progress=tmp_path / "none", store=lambda site: tmp_path, log=log)
    log.write_text(f"ERROR - first\nERROR - run_client_thread error: RuntimeError: {never.value}\n")
    assert _first_error(running, ["site-1"], tmp_path) == SLOW_START
    log.write_text("ERROR - first\n")
    assert _first_error(running, ["site-1"], tmp_path) == "ERROR - first"
