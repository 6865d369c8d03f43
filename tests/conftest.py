"""What several tests need: two synthetic sites, a plan for them, and a network small enough to train in milliseconds."""

import gc
import os
import shutil
from dataclasses import fields
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch
import typer.main
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.utils.config_service import ConfigService
from torch import nn

from benchmarks.small import narrow_resnet, shallow
from feddp import networks
from feddp.data.folder import SiteFolder
from feddp.data.synthesize import synthesize
from feddp.networks import NETWORKS
from feddp.partition import HEAD, QUERY
from feddp.plan.schema import Plan
from feddp.stages.site import Site
from feddp.training.store import Store
from support import CAPTURE
from support.captured import Capture
from support.command import ended
from support.order import LONGEST
from support.remembered import load, never_written
from support.site import FlareSite

PLAN = {
    "method": "feddp",
    "network": "pvt_v2_b0-fpn",
    "channels": 3,
    "classes": ("lesion",),
    "labels": "nested",
    "size": 32,
    "rounds": 2,
    "sites": ("site-1", "site-2"),
}
SETTINGS = {"batch": 4, "calibration_epochs": 1}


def pytest_collection_modifyitems(items):
    """The longest files first, in their order; the others stay as they were found."""
    place = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_collection():
    """Thousands of tests are found without a search for what refers to itself."""
    gc.disable()


def pytest_collection_finish():
    """The search leaves out all modules and tests, which stay until the process ends, and comes more seldom than usual."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_sessionfinish():
    """At the end of the process packages look for leaks in what they left."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _apart(tmp_path_factory):
    """Tests read and write nobody's home, and one thread is theirs: the sums of two threads may differ in the last bit.

    FLARE's decomposers first, as in each of its processes: a Shareable serialised before them is given one that drops what it
    holds, until the process ends, and no console of this process could log in.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        torch.set_num_threads(1)
        flare_decomposers.register()
        patch.setattr("feddp.stages.site.load", load)
        # tests build the same few networks by turns, more than the two that a process of a run keeps
        patch.setattr(networks, "_template", lru_cache(maxsize=24)(networks._template.__wrapped__))
        # a command's parser is made once, not at each of its calls: of all commands, a twentieth of a second
        parser = cache(typer.main.get_command)
        for caller in ("typer.main.get_command", "typer.testing._get_command"):
            patch.setattr(caller, parser)
        yield


@pytest.fixture(scope="module", autouse=True)
def _unconfigured():
    """FLARE keeps what a kit sets in this process until its end: no file's tests begin with the settings of another's."""
    ConfigService.reset()
    CommConfigurator.reset()


@pytest.fixture(autouse=True)
def _algorithms():
    """A site on the CPU asks torch for deterministic algorithms, for the whole process; nothing may switch gradients off so."""
    yield
    torch.set_deterministic_debug_mode("default")
    enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert enabled, "gradients are switched off for the whole process"


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory):
    """site-1 and site-2, each of 12 images of 32 x 32: 8 to train on, 2 to validate, 2 to test. Read it, do not write."""
    root = tmp_path_factory.mktemp("tiny")
    synthesize(root, sites=2, images=12, size=32)
    return never_written(root)


@pytest.fixture(scope="session")
def few_root(tmp_path_factory):
    """The same of 8 images each: 4 to train on, 2 to validate, 2 to test."""
    root = tmp_path_factory.mktemp("few")
    synthesize(root, sites=2, images=8, size=32)
    return never_written(root)


@pytest.fixture(scope="session")
def plan_for():
    """Makes the plan of a small run on `tiny_root`; what is no field of Plan is a setting."""
    own = {field.name for field in fields(Plan)}

    def make(**changes) -> Plan:
        given = {name: changes.pop(name) for name in own & changes.keys()}
        heads = {"heads_epochs": 1} if given.get("method") == "fedlc" else {}
        settings = SETTINGS | heads | changes | given.pop("settings", {})
        return Plan(**(PLAN | given), settings=settings)

    return make


@pytest.fixture
def open_site(plan_for, tiny_root, tmp_path):
    """Opens a site of `tiny_root` as a new process would; `at` is where its store lies, what else is given is the plan's."""

    def open(name="site-1", at=None, **plan) -> Site:
        return Site(name, SiteFolder.open(tiny_root / name), plan_for(**plan), Store(tmp_path / (at or name)))

    return open


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    """For federations and workers that are started after it."""
    root = tmp_path_factory.mktemp("capture")
    made = Capture(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDP_CAPTURE", str(made.folder))
        patch.setenv("FEDDP_MODULES", str(made.modules))
        patch.setenv("PYTHONPATH", str(CAPTURE), prepend=os.pathsep)
        yield made
    shutil.rmtree(root)


class Toy(nn.Module):
    """Per pixel: a query, a normalisation, dropout, a head. Private under FedDP: `q.weight` and `q.bias`."""

    roles = {QUERY: ("q",), HEAD: ("head",)}

    def __init__(self, channels: int, classes: int, pretrained: bool = False):
        super().__init__()
        self.q = nn.Conv2d(channels, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Conv2d(4, classes, 1)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.q(x)))))


@pytest.fixture
def toy(monkeypatch) -> str:
    """The name of a toy network, known to plans while the test runs."""
    monkeypatch.setitem(NETWORKS, "toy", Toy)
    return "toy"


@pytest.fixture
def pvt(monkeypatch) -> str:
    """The name of the default network with few channels and a block in each stage, known to plans while the test runs."""
    monkeypatch.setitem(NETWORKS, "pvt", shallow)
    return "pvt"


@pytest.fixture
def resnet(monkeypatch) -> str:
    """The name of a ResNet with few channels under the FPN of resnet18-fpn, known to plans while the test runs."""
    monkeypatch.setitem(NETWORKS, "resnet", narrow_resnet)
    return "resnet"


@pytest.fixture
def empty_figures(monkeypatch):
    """Figures are made and saved, and stay empty: to place and draw what is in one takes a tenth of a CPU-second and more."""
    monkeypatch.setattr("matplotlib.figure.Figure.draw", lambda figure, renderer: None)


@pytest.fixture
def feddp(capsys):
    """Runs a command in this process; returns its exit code, stdout and stderr."""

    def call(*arguments):
        code = ended(["feddp", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def hospital(toy, tmp_path, tiny_root, plan_for):
    """Makes a hospital in a job of a toy network, with FLARE's auditor on a file of the hospital's."""
    AuditService.close()
    AuditService.initialize(str(tmp_path / "audit.txt"))

    def make(method="feddp", plan=None, data=None, **policy) -> FlareSite:
        policy = {"consent": ["calibration"], "min_images": 2, "std_images": 1} | policy
        return FlareSite(plan or plan_for(network=toy, method=method), tmp_path, data=data or tiny_root / "site-1", **policy)

    yield make
    AuditService.close()
