"""`feddp export --to bundle`: MONAI alone verifies and runs it, in a process that has no package of ours."""

import errno
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.bundle import ConfigWorkflow, verify_net_in_out
from PIL import Image

from feddp.export.bundle import INFERENCE, METADATA, MODEL, README, write
from feddp.networks import build
from feddp.networks.weights import save_network
from feddp.run.predict import predict
from support.docs_pages import commands_for

OUT, OUT_OF_BUNDLE = "exports/bundle", "../../masks"

# what MONAI's published schema (meta_schema_20240725.json of MONAI-extra-test-data 0.8.1) demands
TEXTS = {
    "schema",
    "version",
    "monai_version",
    "pytorch_version",
    "numpy_version",
    "task",
    "description",
    "authors",
    "copyright",
}
TENSOR = {"type": str, "format": str, "num_channels": int, "spatial_shape": list, "dtype": str, "value_range": list}
# MONAI's command line reads its arguments with fire, which is not installed here: a stand-in that reads `command --name value`,
# and does so in each of the folders in turn. An import of our package is an ImportError there
FIRE = """
import os, sys
sys.modules["feddp"] = None
def Fire():
    command, words = getattr(sys.modules["__main__"], sys.argv[1]), sys.argv[2:]
    for folder in os.environ["BUNDLES"].split(os.pathsep):
        os.chdir(folder)
        command(**{name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)})
    sys.stdout.flush()
    os._exit(0)  # at once: to take torch and MONAI apart takes a second more
"""
UNSEARCHED = "import gc; gc.disable()"  # MONAI's import would be searched hundreds of times


def made(labels, folder):
    """A bundle of FedLC's network, the hardest to trace, with two classes, and images that are not square."""
    channels = 3 if labels == "nested" else 1
    network = build("unet", channels, 2, seed=0, layers={"local_calibration": {"sites": 2}})
    texts = {"network": "unet", "channels": str(channels), "classes": '["disc", "cup"]', "labels": labels, "size": "32"}
    texts |= {"method": "fedlc", "site": "A", "layers": '{"local_calibration": {"sites": 2}}'}
    own = network.segmentation_head[0]
    network.calibrator.receive({1: {"weight": own.weight.detach() * 2, "bias": own.bias.detach()}})
    with torch.no_grad():
        logits = network.eval()(torch.randn(1, channels, 32, 32))
        network.calibrator.out.bias.sub_(logits[0].flatten(1).median(dim=1).values)
    save_network(folder / "network.safetensors", network.state_dict(), texts)
    (folder / "images").mkdir()
    images = np.random.default_rng(0).integers(0, 256, (2, 45, 38, channels), np.uint8)
    for name, pixels in zip(("a.png", "b.2.PNG"), images, strict=True):
        Image.fromarray(pixels.squeeze()).save(folder / "images" / name)
    assert write(folder / "network.safetensors", folder / OUT) == folder / OUT / INFERENCE
    return folder


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    return {labels: made(labels, tmp_path_factory.mktemp("bundle")) for labels in ("nested", "exclusive")}


@pytest.fixture(params=["nested", "exclusive"])
def bundle(request, bundles):
    return bundles[request.param]


@pytest.fixture(scope="module")
def said_by_monai(bundles, tmp_path_factory):
    """The commands of take-home.md, for both in one process."""
    (folder, command) = commands_for("test_bundle", "docs/how-to/take-home.md")
    at, beside = [root / folder.removeprefix("cd ") for root in bundles.values()], tmp_path_factory.mktemp("beside")
    (beside / "fire.py").write_text(FIRE)
    (beside / "sitecustomize.py").write_text(UNSEARCHED)
    words = [sys.executable, "-W", "ignore", *command.split()[1:]]
    env = os.environ | {"PYTHONPATH": str(beside), "BUNDLES": os.pathsep.join(map(str, at))}
    done = subprocess.run(words, cwd=at[0], env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_monai_runs_it_without_this_package(bundle, said_by_monai):
    """The same masks, to the pixel, as `feddp predict`."""
    predict(bundle / "network.safetensors", bundle / "images", bundle / "ours")
    assert said_by_monai.count(f"2 masks in {OUT_OF_BUNDLE}") == 2, "in each of the two"
    for name in ("a.png", "b.2.png"):
        theirs, ours = (np.asarray(Image.open(bundle / folder / name)) for folder in ("masks", "ours"))
        assert theirs.dtype == np.uint8
        assert (theirs.shape, theirs.tolist()) == ((45, 38), ours.tolist())
    assert len(np.unique(ours)) == 3


def test_monai_verifies_it(bundle):
    """The shapes and types of the network's input and output, and the properties that an inference workflow must have."""
    files = {"meta_file": str(bundle / OUT / METADATA), "config_file": str(bundle / OUT / INFERENCE)}
    root = str(bundle / OUT)
    verify_net_in_out("network_def", **files, device="cpu", any=40, bundle_root=root)
    wrong = {"_meta_::network_data_format::outputs::pred::num_channels": 1}
    with pytest.raises(ValueError, match="output channel number"):
        verify_net_in_out("network_def", **files, device="cpu", any=40, bundle_root=root, **wrong)
    workflow = ConfigWorkflow(**files, workflow_type="infer", logging_file=False, bundle_root=root)
    workflow.initialize()
    assert workflow.check_properties() == []


def test_its_metadata_has_what_the_published_schema_demands(bundle):
    metadata = json.loads((bundle / OUT / METADATA).read_text())
    assert all(isinstance(metadata[name], str) and metadata[name] for name in TEXTS)
    assert isinstance(metadata["required_packages_version"], dict)
    for tensor in (metadata["network_data_format"]["inputs"]["image"], metadata["network_data_format"]["outputs"]["pred"]):
        assert {name: type(tensor[name]) for name in TENSOR} == TENSOR
    assert metadata["network_data_format"]["outputs"]["pred"]["channel_def"] == {"0": "class disc", "1": "class cup"}
    assert "# Model card" in (bundle / OUT / README).read_text()


@pytest.mark.parametrize("name", ["$open(EVIL, 'w')", "@bundle_root", "%EVIL::x"])
def test_a_name_is_never_evaluated(toy, tmp_path, name):
    """MONAI runs what follows a $ and reads the file after a %; a network's file may name its class and its site so."""
    name = name.replace("EVIL", repr(str(tmp_path / "evil")) if name[0] == "$" else str(tmp_path / "evil"))
    texts = {"network": toy, "channels": "3", "classes": json.dumps([name]), "labels": "nested", "size": "32", "site": name}
    save_network(tmp_path / "n.safetensors", build(toy, 3, 1, seed=0).state_dict(), texts)
    write(tmp_path / "n.safetensors", tmp_path / "out")
    files = {"meta_file": str(tmp_path / "out" / METADATA), "config_file": str(tmp_path / "out" / INFERENCE)}
    workflow = ConfigWorkflow(**files, workflow_type="infer", logging_file=False, bundle_root=str(tmp_path / "out"))
    workflow.initialize()
    assert workflow.check_properties() == []
    parsed = workflow.parser.get_parsed_content("_meta_")
    assert parsed["network_data_format"]["outputs"]["pred"]["channel_def"] == {"0": f"class {name}"}
    assert not (tmp_path / "evil").exists()


def test_a_full_disk_ends_the_export_with_one_message(toy, tmp_path, feddp, monkeypatch):
    """Nothing is left, so that the same command writes the bundle later. The system refuses the TorchScript, the first file, as
    Python reports it; PyTorch's own writer would end the process, and this test with it, so a call of it counts as that."""
    texts = {"network": toy, "channels": "3", "classes": '["disc"]', "labels": "nested", "size": "32"}
    save_network(tmp_path / "n.safetensors", build(toy, 3, 1, seed=0).state_dict(), texts)
    command = ("export", "--network", tmp_path / "n.safetensors", "--to", "bundle", "--out", tmp_path / "out")
    refused = []

    def refuse(path, content):
        refused.append(path.parent)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def aborted(*_):
        raise RuntimeError("terminate called")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", refuse)
        patch.setattr(torch.jit.ScriptModule, "save", aborted)
        code, _, said = feddp(*command)
    models = tmp_path / "out/models"
    assert refused == [models]
    assert (code, said.splitlines()[-1]) == (
        2,
        f"feddp: {models}: model.ts was not written (No space left on device); free space on its disk",
    )
    assert not (tmp_path / "out").exists()
    assert feddp(*command)[0] == 0, "the control"


def test_its_network_does_not_say_where_it_was_made(bundle):
    with zipfile.ZipFile(bundle / OUT / MODEL) as archive:
        content = b"".join(map(archive.read, archive.namelist()))
    assert b".py\x94" not in content
    assert str(bundle).encode() not in content
    assert torch.__path__[0].encode() not in content
