"""A site answers the tasks of its job's stages, whatever a server asks; what would leave in others its guard stops too."""

import pytest
import torch

from feddp.adaptation.request import AdaptationRequest
from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.protocol import TASKS, Sent, tasks_of
from support.site import FlareSite

ADAPTS = AdaptationRequest("site-2", ("site-1",), "earlier", "average").to_json()
# the plan's stages, the request, the job's stages
JOBS = {
    "training": (("train",), None, ("ready", "train", "evaluate")),
    "both stages": (("train", "calibrate"), None, ("ready", "train", "calibrate", "evaluate")),
    "adaptation": (("train",), ADAPTS, ("ready", "adapt")),
}
STRANGE = [(job, task) for job, (_, _, stages) in JOBS.items() for task in TASKS if task not in tasks_of(stages)]


@pytest.fixture
def site_of(toy, plan_for, tiny_root, tmp_path):
    def make(job: str) -> FlareSite:
        stages, adapts, _ = JOBS[job]
        plan, consent = plan_for(network=toy, stages=stages), ["calibration", "spectra", "outside"]
        return FlareSite(plan, tmp_path, simulated=True, request=adapts, data=tiny_root / "site-1", consent=consent)

    return make


@pytest.mark.parametrize(("job", "task"), STRANGE)
def test_a_task_of_another_stage_is_not_answered(job, task, site_of):
    site = site_of(job)
    answer = site.executed(task, site.shared, round=0, phase=0, epoch=1)
    assert answer.get_return_code() != "OK"
    assert site.last_error() == f"site site-1: task {task} belongs to no stage of this job; it was not answered"
    assert not list(site.store.folder.glob("*.safetensors"))


@pytest.mark.parametrize(("job", "task"), [(job, task) for job, task in STRANGE if TASKS[task].tensors is not Sent.NONE])
def test_no_tensor_leaves_in_a_task_of_another_stage(job, task, site_of):
    """An executor that leaks the whole network, or exactly the tensors that the task would send in a job that has it."""
    site, sent = site_of(job), TASKS[task].tensors
    expected = site.component.expected
    whole = expected.network.state_dict()
    own = {} if sent is Sent.AMPLITUDES else {name: whole[name] for name in expected.names(sent)}
    for tensors in (whole, own or {"amplitude": torch.ones(1, 3, 3, 3)}):
        with pytest.raises(FedDPError, match="tensors that may not leave"):
            site.sends(task, messages.pack(tensors, consent=True))
