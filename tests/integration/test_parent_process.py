"""What a participant's long-lived process imports: the network's libraries belong to the processes of jobs."""

import json
import subprocess
import sys

from feddp.flare.policy import SitePolicy
from feddp.jobs.folder import export
from feddp.kit.components import REVIEWED
from feddp.sealing.kit import CLIENT, SERVER

NETWORKS = ("torch", "torchvision", "timm", "monai", "segmentation_models_pytorch", "scipy", "numpy")
# builds every class of ours that a kit's resources.json names, and admits a job at both sides
SCRIPT = """
import json, sys
from importlib import import_module
from pathlib import Path
said = json.load(sys.stdin)
for path in said["classes"]:
    module, name = path.rsplit(".", 1)
    getattr(import_module(module), name)
from feddp.flare.admission import AdmittedApp
from feddp.flare.job_folder import CLIENT, read_folder
from feddp.flare.policy import SitePolicy
folder = Path(said["folder"])
assert AdmittedApp().validate(str(folder / "app_server")) == ("", {})
job = read_folder(CLIENT, folder / "app_client")
SitePolicy.of("site-1", said["policy"], simulated=False).accept("site-1", job.plan, job.asked)
print(json.dumps([name for name in said["networks"] if name in sys.modules]))
"""


def imported(script, given=""):
    """Runs a script in a new process; returns what it prints last, as JSON."""
    done = subprocess.run([sys.executable, "-c", script], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_participants_own_process_admits_jobs_without_the_networks_libraries(plan_for, tmp_path, tiny_root):
    """torch, timm and MONAI take seconds and half a gigabyte, which a hospital's process would hold for months.

    With torch as the control: the same script in which it is imported names it.
    """
    plan = plan_for(sites=("site-1", "site-2", "site-3"), min_sites=3)
    folder = export(plan, tmp_path / "job")
    ours = {path for side in (CLIENT, SERVER) for path in REVIEWED[side] if path.startswith("feddp.")}
    assert len(ours) > 5
    policy = SitePolicy.admitting(plan) | {"data": str(tiny_root / "site-1")}
    said = json.dumps({"classes": sorted(ours), "folder": str(folder), "policy": policy, "networks": NETWORKS})

    assert imported(SCRIPT, said) == []
    assert "torch" in imported("import torch\n" + SCRIPT, said)


def test_kits_are_made_without_the_networks_libraries():
    """Each `nvflare provision` and each federation of `--env poc` imports our builder, and would wait for torch."""
    script = f"import json, sys, feddp.provision\nprint(json.dumps([name for name in {NETWORKS} if name in sys.modules]))"
    assert imported(script) == []
