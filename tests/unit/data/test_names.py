"""A name that FLARE, a command or a table takes for something else is refused wherever a site is named."""

import os
import re
from types import SimpleNamespace

import pytest
from nvflare.apis.job_def import SERVER_SITE_NAME
from nvflare.apis.utils.format_check import type_pattern_mapping
from nvflare.fuel.f3.cellnet.fqcn import CLIENT_API_ATTACH_LEAF_PREFIX
from nvflare.fuel.flare_api.api_spec import TargetType
from nvflare.fuel.utils.admin_name_utils import new_admin_client_name
from nvflare.lighter.entity import Project
from nvflare.private.fed.app.deployer.simulator_deployer import SimulatorDeployer
from nvflare.utils.job_launcher_utils import _LAUNCHER_SPEC_DEFAULT_KEY

from feddp.adaptation.choices import GLOBAL
from feddp.adaptation.request import AdaptationRequest
from feddp.compare.scores import AVERAGE
from feddp.data.check import check
from feddp.data.names import RESERVED, fault, suggested
from feddp.data.synthesize import synthesize
from feddp.errors import InputError
from feddp.jobs.folder import federation_of
from feddp.plan.schema import Plan
from feddp.provision import SitePolicyBuilder
from feddp.run.options import Options
from feddp.run.poc import SERVER as POC
from feddp.tracking.curves import MEAN

JOB = "0d2c1f2e-1111-4222-8333-444455556666"
METADATA = {"channels": 3, "classes": ("lesion",), "labels": "nested"}
WRONG = [
    *RESERVED,
    "Server",
    "LOCALHOST",
    "Simulator_Server",
    "CON",
    "NaN",
    "_admin_x",
    "-x",
    "_x",
    "a.b",
    "server.x",
    "@ALL",
    "a/b",
    "ü",
    "",
]


def test_what_flare_and_the_tables_call_something_else_is_reserved():
    """By their own constants, so that a new FLARE which renames its server is seen here."""
    deployer = SimulatorDeployer()
    deployer.open_ports = [1, 2]
    simulated = deployer._create_simulator_server_config("x", 1)["name"]
    theirs = {SERVER_SITE_NAME, TargetType.ALL, _LAUNCHER_SPEC_DEFAULT_KEY, simulated}
    ours = {POC, GLOBAL, MEAN, AVERAGE.lower()}
    assert theirs | ours <= RESERVED.keys()
    assert fault(new_admin_client_name())
    assert fault(f"{CLIENT_API_ATTACH_LEAF_PREFIX}1")


@pytest.mark.parametrize("name", WRONG)
def test_such_a_name_is_refused_with_one_that_is_taken(name):
    assert fault(name).startswith(f"{name!r} is no name of a site")
    assert fault(suggested(name)) is None
    assert re.match(type_pattern_mapping["client"], suggested(name))


@pytest.mark.parametrize(
    "name", ["hospital-a", "A", "9", "site_1", "serverless", "Localhost-2", "x" * 64, "MEAN_1", "client", "com10", "nando"]
)
def test_the_controls(name):
    assert fault(name) is None


def provisioned(*sites: str, server="fl.example.org", people: tuple[str, ...] = (), name="feddp", **properties):
    project = Project(name, "x")
    project.set_server(server, "consortium", properties)
    for site in sites:
        project.add_client(site, "hospital", {})
    for person in people:
        project.add_admin(person, "consortium", {"role": "lead"})
    builder, context = SitePolicyBuilder(), SimpleNamespace()
    return lambda: [builder.initialize(project, context), builder.build(project, context)]


@pytest.fixture(autouse=True)
def umask():
    """Provisioning sets the process's, which here is that of all tests."""
    os.umask(before := os.umask(0o077))
    yield
    os.umask(before)


def planned(*sites: str):
    return lambda: Plan("fedavg", "pvt_v2_b0-fpn", size=32, rounds=1, sites=sites, **METADATA)


@pytest.mark.parametrize("name", ["simulator_server", "localhost", "Global", "_admin_1"])
@pytest.mark.parametrize(
    "named",
    [
        lambda name: planned(name, "b"),
        lambda name: lambda: Plan.from_json(planned("a", "b")().to_json() | {"sites": [name, "b"]}),
        lambda name: lambda: Options("fedavg").plan(METADATA, ["b", name]),
        lambda name: lambda: AdaptationRequest(name, ("b",), JOB),
        lambda name: lambda: AdaptationRequest("b", (name, "c"), JOB),
        lambda name: provisioned(name),
    ],
    ids=["plan", "a job's plan", "run, job and recipe", "newcomer", "donor", "provisioning"],
)
def test_wherever_a_site_is_named(named, name):
    with pytest.raises(InputError, match=f"{name}. is no name of a site.*; call the site, for example, {suggested(name)}$"):
        named(name)()


@pytest.mark.parametrize(
    "named",
    [
        planned("A", "a"),
        lambda: AdaptationRequest("a", ("A", "b"), JOB),
        provisioned("A", "a"),
        provisioned("Fl-Server", server="fl-server"),
        provisioned("flhost", host_names=["FLhost"]),
        provisioned("flhost", default_host="flHost"),
        provisioned("a", people=("x@y.org", "X@y.org")),
    ],
)
def test_two_names_that_differ_in_case_only(named):
    """A disk of Windows or macOS gives them one folder, and nobody reads a certificate's name with its case."""
    with pytest.raises(InputError, match="differ(s)? in (more than )?case"):
        named()


@pytest.mark.parametrize("name", ["a/b", "..", "a\nb", "x" * 65, "Übung", ""])
def test_a_project_whose_name_is_no_folders_or_certificates(name):
    """FLARE would make kits below another folder, or such as no check takes."""
    with pytest.raises(InputError, match="is no name of a project.*; correct `name` in the project file"):
        provisioned("a", name=name)()


@pytest.mark.parametrize("key", ["fed_learn_port", "admin_port"])
@pytest.mark.parametrize("port", [0, -1, 2**16, "8002", True, 8002.0])
def test_a_port_that_is_none(key, port):
    with pytest.raises(InputError, match=f"`{key}` is {port!r}; write a whole number from 1 to 65535"):
        provisioned("a", **{key: port})()


def test_the_control_of_provisioning_goes_on_to_write_the_servers_files():
    with pytest.raises(AttributeError, match="get_local_dir"):
        provisioned("a", "b", people=("x@y.org",), name="my project 1", fed_learn_port=65535, admin_port=1)()


def test_folders_of_data(tmp_path):
    """Before a run, and when a job is exported from them."""
    synthesize(tmp_path, sites=2, images=12, size=32)
    (tmp_path / "site-1").rename(tmp_path / "SITE-2")
    (problem,) = check(tmp_path)
    assert str(problem) == f"{tmp_path / 'site-2'}: differs from site SITE-2 in case only. Give one of them another name."
    (tmp_path / "SITE-2").rename(tmp_path / "simulator_server")
    (problem,) = check(tmp_path)
    assert problem.what == (
        "'simulator_server' is no name of a site: it is the server's name in FLARE's simulator, where its files lie beside the"
        " sites'"
    )
    with pytest.raises(InputError, match="simulator_server. is no name of a site"):
        federation_of(tmp_path)
