"""A method of another package in FLARE's simulator."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file

from feddp.methods import METHODS
from feddp.run import session
from feddp.run.simulator import simulator
from support.docs_pages import blocks
from support.request import SITES, request_for

pytestmark = pytest.mark.simulator


def docs_package() -> tuple[str, str]:
    """The code of the docs' tutorial, and its entry point's line."""
    module, project = (block.text for block in blocks("docs/tutorials/own-method.md") if block.title)
    assert len(module.splitlines()) < 30
    return module, re.search(r'^\[project.entry-points."feddp.methods"\]\n(.*)$', project, re.MULTILINE)[1].replace('"', "")


def test_a_method_of_another_package_runs_by_its_name(tiny_root, plan_for, tmp_path, monkeypatch):
    """The tutorial's, as a package beside ours on every participant's path: a job with its name runs, without its code."""
    module, entry = docs_package()
    site = tmp_path / "site-packages"
    (site / "hospital_methods-1.0.dist-info").mkdir(parents=True)
    (site / "hospital_methods.py").write_text(module)
    info = site / "hospital_methods-1.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hospital-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[feddp.methods]\n{entry}\n")
    assert "pulled" not in METHODS
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    monkeypatch.delitem(vars(METHODS), "_others", raising=False)  # what this process has found so far
    try:
        assert "pulled" in list(METHODS)
        request = request_for(tiny_root, tmp_path / "run", plan_for(method="pulled", rounds=1, pull=0.5))
        results = session.run(request, simulator, "pulled")
    finally:
        vars(METHODS).pop("_others", None)
    assert set(results["sites"]) == set(SITES)
    job = next((tmp_path / "run/job").iterdir())
    assert "hospital" not in "".join(path.read_text() for path in job.rglob("*.json"))
    one, two = (load_file(tmp_path / "run/sites" / name / "network.safetensors") for name in SITES)
    own = {name for name in one if not torch.equal(one[name], two[name])}
    assert own
    assert own == {"segmentation_head.0.weight", "segmentation_head.0.bias"}
    assert json.loads((job / "meta.json").read_text())["name"] == "pulled"
