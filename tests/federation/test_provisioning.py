"""provisioning/: every command of the docs runs, kits hold exactly our policy, and `feddp kit check` finds each deviation."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from argparse import ArgumentParser
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID
from nvflare.apis.fl_constant import SystemComponents
from nvflare.fuel.sec.authz import AuthzContext, Person, parse_policy_config
from nvflare.lighter.provision import define_provision_parser, handle_provision
from nvflare.lighter.utils import Identity, generate_cert
from nvflare.security.security import COMMAND_CATEGORIES
from typer.testing import CliRunner

from feddp.cli import app
from feddp.data.check import check as data_check
from feddp.errors import FedDPError
from feddp.flare.configuration import SERVER_CLASSES, SITE_CLASSES
from feddp.flare.service import units
from feddp.kit.check import check
from feddp.kit.renew import forget
from feddp.provision import AT_SERVER, DEPLOYER, NOBODY, SitePolicyBuilder
from support import ROOT
from support.certificates import put, self_signed, signed
from support.docs_pages import blocks, commands_for
from support.tls import listening, mutual

pytestmark = pytest.mark.tools

FOLDER = ROOT / "provisioning"
# in the order in which they are typed
PAGES = (
    "docs/tutorials/first-real-site.md",
    "docs/how-to/provision.md",
    "docs/how-to/own-keys.md",
    "docs/how-to/containers.md",
)
PEOPLE = {"admin@consortium.org", "lead@consortium.org", "member@consortium.org"}
PEOPLE |= {f"admin@hospital-{letter}.org" for letter in "abcd"}
HOSPITALS = {f"hospital-{letter}" for letter in "abcd"}
SERVER = "server.example.org"
# a shell's `feddp` and `nvflare`, each a fork of one process: a new one would first import torch and FLARE
FORKED = """
coproc python -c '
import multiprocessing, os, sys, nvflare.cli, feddp.cli, feddp.kit.check
codes = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    sys.argv = line.rstrip().split("|")
    main = {"feddp": feddp.cli.main, "nvflare": nvflare.cli.main}[sys.argv[0]]
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(main()))
    child.start()
    child.join()
    print(child.exitcode, file=codes, flush=True)
'
forked() { local IFS="|" code; echo "$*" >&${COPROC[1]}; read -r code <&${COPROC[0]}; return "$code"; }
feddp() { forked feddp "$@"; }
nvflare() { forked nvflare "$@"; }
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_root):
    """What the docs' commands leave, run one after the other as they stand there; /data/site is a real site's folder."""
    folder = tmp_path_factory.mktemp("consortium") / "provisioning"
    (folder.parent / "kept").mkdir()

    def at_home(text):
        """The tutorial's rehearsal is provisioned as project.yml, and its images, which no kit here names, are few;
        test_deployment.py runs rehearsal.yml."""
        text = text.replace("rehearsal.yml", "project.yml").replace("--sites 4", "--sites 4 --images 12 --size 32")
        text = text.replace("/tmp/rehearsal", str(folder.parent / "rehearsal"))
        return text.replace("/data/site", str(tiny_root / "site-1")).replace(": /data/kept", f": {folder.parent / 'kept'}")

    shutil.copytree(FOLDER, folder)
    for path in folder.rglob("*.yml"):
        path.write_text(at_home(path.read_text()))
    commands = [at_home(line) for line in commands_for("test_provisioning", *PAGES)]
    assert len(commands) == 42
    ours = [line for line in commands if re.search(r"\b(feddp|nvflare) ", line) and not line.startswith(("echo", "#"))]
    assert not [line for line in ours if re.search(r"[|>&]|\$\(|^\w+=|^cd ", line)], "more than FORKED gives to a fork"
    env = {**os.environ, "HOME": str(folder.parent), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = "\n".join(["set -eu", "umask 022", FORKED, *commands, "exec {COPROC[1]}>&-", "wait"])
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture
def kit(made, tmp_path):
    """A copy of hospital-a's kit, to be spoilt."""
    return Path(shutil.copytree(made / "kits/feddp/prod_00/hospital-a", tmp_path / "kit"))


def said(kit: Path, *options: str) -> list[str]:
    """What `feddp kit check` prints; its exit code is 2 just where something is wrong."""
    done = CliRunner().invoke(app, ["kit", "check", "--offline", *options, str(kit)])
    lines = done.output.splitlines()
    assert done.exit_code == (0 if lines[0].endswith("may start") else 2), done.output
    return lines


def edit(kit: Path, name: str, change) -> None:
    """The hospital's own file, made from the one in force."""
    own = kit / "local" / name
    content = json.loads((own if own.exists() else own.with_name(f"{name}.default")).read_text())
    own.write_text(json.dumps(change(content) or content))


def local(kit: Path, name: str) -> dict:
    return json.loads((kit / "local" / name).read_text())


def pem(path: Path):
    return x509.load_pem_x509_certificate(path.read_bytes())


# what is provisioned


def test_there_is_a_kit_for_everyone(made):
    first, third = made / "kits/feddp/prod_00", made / "kits/feddp/prod_02"
    assert {path.name for path in first.iterdir()} == {SERVER} | HOSPITALS | PEOPLE
    assert {path.name for path in third.iterdir()} == {SERVER, "hospital-e"} | HOSPITALS | PEOPLE


def test_the_rehearsal_is_the_shipped_project_on_one_machine():
    """rehearsal.yml differs from project.yml in addresses, folders and GPUs, and in nothing else."""
    shipped, rehearsed = (yaml.safe_load((FOLDER / f"{name}.yml").read_text()) for name in ("project", "rehearsal"))
    server, own = shipped["participants"][0], rehearsed["participants"][0]
    assert (own.pop("default_host"), own.pop("storage")) == ("localhost", "/tmp/rehearsal-server")
    del server["storage"]
    hospitals = [[p for p in project["participants"] if p["type"] == "client"] for project in (shipped, rehearsed)]
    for number, (real, ours) in enumerate(zip(*hospitals, strict=True), 1):
        assert ours.pop("capacity") == {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0}
        assert ours["policy"].pop("data") == f"/tmp/rehearsal/site-{number}"
        del real["capacity"], real["policy"]["data"]
        assert real["policy"].pop("device", "cuda:0") == "cuda:0"
    assert rehearsed == shipped


def test_the_roles_are_in_the_certificates(made):
    def role(name):
        subject = pem(made / "kits/feddp/prod_00" / name / "startup/client.crt").subject
        return subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)[0].value

    assert role("admin@consortium.org") == "project_admin"
    assert role("lead@consortium.org") == "lead"
    assert role("member@consortium.org") == "member"
    assert {role(f"admin@{hospital}.org") for hospital in HOSPITALS} == {"org_admin"}


@pytest.mark.parametrize("where", ["kits/feddp/prod_00", "own/feddp/prod_00"])
def test_local_holds_our_policy_and_nothing_wider(made, tiny_root, where):
    """The allow-list is our jobs' classes to the letter; both ways of provisioning write the same."""
    for name, classes in ((SERVER, SERVER_CLASSES), ("hospital-a", SITE_CLASSES)):
        resources = local(made / where / name, "resources.json.default")
        assert resources["class_allow_list"] == sorted(classes.values())
        assert resources["class_list_enforcement_mode"] == "enforce"
        assert resources["allow_log_streaming"] is False
        assert not [c for c in resources["components"] if "logging" in c["path"]]
        assert [c["id"] for c in resources["components"] if c["path"] == DEPLOYER] == [SystemComponents.APP_DEPLOYER]
        assert resources.get("app_validator") == ({"path": AT_SERVER, "args": {}} if name == SERVER else None)
        rights = local(made / where / name, "authorization.json.default")["permissions"]
        assert {role: r.get("submit_job", "none") for role, r in rights.items()} == {
            "project_admin": "any",
            "lead": "any",
            "org_admin": "none",
            "member": "none",
        }
        assert {role: r.get("byoc", "none") for role, r in rights.items()} == dict.fromkeys(rights, "none")
        assert {role: r.get("operate", "none") for role, r in rights.items()} == {
            "project_admin": "o:site",
            "lead": "none",
            "org_admin": "o:site",
            "member": "none",
        }
    assert local(made / where / "hospital-a", "privacy.json") == {
        "scopes": [
            {
                "name": "feddp",
                "properties": {
                    "approve": [],  # no job, until the hospital has approved it
                    **{"data": str(tiny_root / "site-1"), "device": "cuda:0", "consent": ["calibration"]},
                },
                "task_result_filters": [{"path": "feddp.flare.filters.PrivateTensorGuard", "args": {}}],
            }
        ]
    }


@pytest.mark.parametrize("where", ["kits/feddp/prod_00", "own/feddp/prod_00"])
def test_every_kit_that_runs_something_has_its_units_and_no_persons_has(made, where):
    for name, kind in ((SERVER, "server"), ("hospital-a", "client")):
        texts = {path.name: path.read_text() for path in (made / where / name / "local").glob("*.service")}
        assert texts == units(kind, name)
    assert not [*(made / where / "lead@consortium.org").rglob("*.service")]


def test_gpus_and_their_memory_come_from_the_project_file(made):
    def manager(name):
        components = local(made / "kits/feddp/prod_00" / name, "resources.json.default")["components"]
        args = next(c["args"] for c in components if c["id"] == "resource_manager")
        return args["num_of_gpus"], args["mem_per_gpu_in_GiB"]

    assert (manager("hospital-a"), manager("hospital-c"), manager("hospital-d")) == ((1, 16), (1, 40), (0, 0))


@pytest.mark.parametrize("where", ["kits/feddp/prod_00", "own/feddp/prod_00"])
def test_the_server_keeps_jobs_in_its_own_storage(made, where):
    """And nothing in the machine's temporary folder, which FLARE's own server would share with every other."""
    path = made / where / SERVER / "local/resources.json.default"
    resources = local(made / where / SERVER, path.name)
    manager = next(c for c in resources["components"] if c["id"] == "job_manager")
    assert manager["args"] == {"uri_root": "/data/server/jobs", "job_store_id": "job_store"}
    assert resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] == "/data/server/snapshots"
    assert "/tmp/" not in path.read_text()


def test_a_storage_without_a_full_path_is_refused_before_anything_is_written():
    """The server would make it wherever its process happens to start."""
    server = SimpleNamespace(name=SERVER, get_prop={"storage": "data/server"}.get)
    project = SimpleNamespace(get_server=lambda: server)
    with pytest.raises(FedDPError, match=f"server {SERVER}: `storage` is data/server; write a full path"):
        SitePolicyBuilder().build(project, None)


def test_the_leads_own_request_makes_the_leads_kit(made):
    subject = pem(made / "own/feddp/prod_00/lead@consortium.org/startup/client.crt").subject
    assert subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)[0].value == "lead"
    assert said(made / "own/feddp/prod_00/lead@consortium.org")[0].endswith("lead@consortium.org of project feddp may start")


def test_renewal_makes_one_new_certificate_and_keeps_the_others(made):
    old, new = (made / "kits/feddp" / prod for prod in ("prod_00", "prod_01"))
    assert pem(old / "hospital-a/startup/client.crt") != pem(new / "hospital-a/startup/client.crt")
    for name in (HOSPITALS | PEOPLE) - {"hospital-a"}:
        assert pem(old / name / "startup/client.crt") == pem(new / name / "startup/client.crt")
    assert pem(old / "hospital-a/startup/rootCA.pem") == pem(new / "hospital-a/startup/rootCA.pem")


def test_a_renewal_of_an_own_key_changes_certificate_and_key_of_the_kit_in_use_alone(made):
    """FLARE's `package --force` would remove the kit, with what the site has written there."""
    used, renewed = (made / folder / "feddp/prod_00/hospital-a" for folder in ("own", "renewed"))
    with zipfile.ZipFile(made / "hospital-a.signed.zip") as signed:
        (name,) = [name for name in signed.namelist() if name.endswith("hospital-a.crt")]
        first = x509.load_pem_x509_certificate(signed.read(name))
    assert pem(used / "startup/client.crt") == pem(renewed / "startup/client.crt") != first
    assert (used / "startup/client.key").read_bytes() == (renewed / "startup/client.key").read_bytes()


def test_no_key_leaves_the_hospital(made):
    """Nothing that travels (request and signed zip) holds the key that the kit holds; nor has the office it."""
    key = (made / "requests/hospital-a/hospital-a.key").read_bytes()
    secret = b"".join(key.splitlines()[1:-1])[:200]
    for travelling in (made / "requests/hospital-a/hospital-a.request.zip", made / "hospital-a.signed.zip"):
        shutil.unpack_archive(travelling, made / "unpacked" / travelling.stem, "zip")
    files = [path for folder in ("unpacked", "ca") for path in (made / folder).rglob("*") if path.is_file()]
    assert len(files) >= 8
    assert not [path for path in files if secret in path.read_bytes().replace(b"\n", b"")]
    assert secret in key.replace(b"\n", b""), "the control"


def test_no_private_key_is_anybody_elses_to_read(made):
    """Under umask 022, in both ways, after renewal too: kits, the root, requests. The certificate of `ca` is the control."""
    keys = [path for path in made.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    assert {"cert.json", "server.key", "client.key", "rootCA.key"} <= {path.name for path in keys}
    assert not [path for path in keys if path.stat().st_mode & 0o077]
    assert (made / "ca/rootCA.pem").stat().st_mode & 0o044


def test_a_participant_that_nobody_knows_is_not_renewed(made):
    with pytest.raises(FedDPError, match="no certificate of hospital-x; it has those of .*hospital-a"):
        forget(made / "kits/feddp/state/cert.json", "hospital-x")


# the check


@pytest.mark.parametrize("name", [SERVER, "hospital-a", "lead@consortium.org"])
def test_a_kit_as_provisioned_may_start(made, name):
    assert said(made / "kits/feddp/prod_00" / name)[0].endswith(f"{name} of project feddp may start")


@pytest.mark.parametrize(("days", "words"), [((-9, -2), "expired on"), ((2, 9), "is not valid before")])
def test_a_certificate_out_of_its_time(made, kit, days, words):
    """From the project's own root and for the kit's own key: nothing else is wrong with it."""
    root = json.loads((made / "kits/feddp/state/cert.json").read_text())["root_pri_key"]
    own = load_pem_private_key((kit / "startup/client.key").read_bytes(), None)
    root = load_pem_private_key(root.encode(), None)
    put(kit / "startup/client.crt", signed("hospital-a", "feddp", own, root, days))
    (line,) = said(kit)
    assert line.startswith(f"{kit}/startup/client.crt: {words} ")


def test_a_certificate_that_ends_soon_may_start_and_is_warned_of(made, kit):
    root = json.loads((made / "kits/feddp/state/cert.json").read_text())["root_pri_key"]
    own = load_pem_private_key((kit / "startup/client.key").read_bytes(), None)
    by, until = load_pem_private_key(root.encode(), None), datetime.now(timezone.utc) + timedelta(days=5)
    identity = Identity("hospital-a", "hospital_a")
    soon = generate_cert(identity, Identity("feddp"), by, own.public_key(), not_valid_after=until)
    put(kit / "startup/client.crt", soon)
    first, line, root_line, *_ = said(kit)
    assert first.endswith("may start")
    assert re.fullmatch(
        r"warning: the certificate of hospital-a is valid until 20\d\d-\d\d-\d\d \d\d:\d\d UTC \(4 days left\)\. Have it"
        r" renewed \(docs/how-to/provision\.md, 'Renewal'\)\.",
        line,
    )
    assert re.fullmatch(r"the certificate of the root of project feddp is valid until .* UTC \(36\d\d days left\)", root_line)


def test_anothers_key(made, kit):
    shutil.copy(made / "kits/feddp/prod_00/hospital-b/startup/client.key", kit / "startup/client.key")
    assert said(kit) == [f"{kit}/startup/client.key: is not the key of client.crt. Restore the certificate's key."]


def test_anothers_certificate_and_key(made, kit):
    for name in ("client.key", "client.crt"):
        shutil.copy(made / "kits/feddp/prod_00/hospital-b/startup" / name, kit / "startup" / name)
    (line,) = said(kit)
    assert "belongs to hospital-b, but the kit to hospital-a" in line


def test_another_root_of_the_same_name(kit):
    put(kit / "startup/rootCA.pem", self_signed("feddp")[1])
    (line,) = said(kit)
    assert "client.crt: was not issued by rootCA.pem" in line


def test_another_projects_certificate(kit):
    """Its name and its key are right; the root that signed it is another's."""
    by, _ = self_signed("other")
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    put(kit / "startup/client.crt", signed("hospital-a", "other", key, by))
    put(kit / "startup/client.key", key=key)
    (line,) = said(kit)
    assert "client.crt: was not issued by rootCA.pem" in line


def test_a_fingerprint_that_is_none_is_named_and_not_the_kit(kit):
    for wrong in ("abcd", "SHA256:" + "x" * 64, "a" * 63):
        with pytest.raises(FedDPError, match=f"--fingerprint {wrong} is not a SHA-256, which has 64 hexadecimal digits"):
            check(kit, offline=True, fingerprint=wrong)


def test_another_projects_certificate_key_and_root(made, kit):
    """All three fit each other: the root's name gives it away, and where that is the same, the fingerprint."""
    fingerprint = "SHA256:" + pem(kit / "startup/rootCA.pem").fingerprint(hashes.SHA256()).hex(":").upper()
    assert said(kit, "--fingerprint", fingerprint)[0].endswith("may start")
    for project, options, words in (
        ("other", [], "is the root of project other, but the kit is of feddp"),
        ("feddp", ["--fingerprint", fingerprint], "is not the consortium's root"),
    ):
        by, root = self_signed(project)
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        put(kit / "startup/client.crt", signed("hospital-a", project, key, by))
        put(kit / "startup/client.key", key=key)
        put(kit / "startup/rootCA.pem", root)
        (line,) = said(kit, *options)
        assert words in line


@pytest.mark.parametrize("wrong", ["data: /data/site", ["data"]])
def test_a_policy_of_the_project_file_that_is_no_object_is_the_hospitals(tmp_path, wrong, monkeypatch, capfd):
    """`nvflare provision` in this process."""
    project = yaml.safe_load((FOLDER / "project.yml").read_text(encoding="utf-8"))
    next(each for each in project["participants"] if each["name"] == "hospital-b")["policy"] = wrong
    (tmp_path / "project.yml").write_text(yaml.safe_dump(project), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    parser = ArgumentParser()
    define_provision_parser(parser)
    with pytest.raises(SystemExit) as ended:
        handle_provision(parser.parse_args(["-p", "project.yml", "-w", "kits"]))
    assert ended.value.code
    words = f"site hospital-b: privacy.json's properties are {wrong!r}; write an object of names and values"
    assert words in "".join(capfd.readouterr())


def _second_scope(privacy):
    privacy["scopes"].append({**privacy["scopes"][0], "name": "research", "task_result_filters": []})


def _inwards(privacy):
    privacy["scopes"][0]["task_result_filters"][0]["direction"] = "in"


def _before_another(privacy):
    update = {"path": UPDATE_PRIVACY, "args": {"mechanism": {"path": PERCENTILE}}}
    privacy["scopes"][0]["task_result_filters"].append(update)


def _strange(privacy):
    privacy["scopes"][0]["task_result_filters"].insert(0, {"path": "some.filter.Noise"})


def _grant(role, **rights):
    return lambda a: a["permissions"].setdefault(role, {}).update(rights)


UPDATE_PRIVACY = "feddp.flare.update_privacy.UpdatePrivacy"
PERCENTILE = "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy"
STREAMER = {"id": "x", "path": "nvflare.app_common.logging.site_log_streamer.SiteLogStreamer", "args": {}}
BY_CLASS_PATH = {"id": "x", "class_path": STREAMER["path"]}  # FLARE's other words for the same
FED_EVENTS = {"id": "x", "path": "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent"}
BY_NAME = {"id": "x", "name": "SiteLogStreamer"}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("privacy.json", lambda p: p["scopes"][0].pop("task_result_filters") and None, "scope feddp does not apply the guard"),
        ("privacy.json", _inwards, "scope feddp does not apply the guard"),
        ("privacy.json", _before_another, f"scope feddp has {UPDATE_PRIVACY} after the guard"),
        ("privacy.json", _strange, "of some.filter.Noise, which is not a reviewed class"),
        ("privacy.json", lambda p: p["scopes"][0]["task_result_filters"][0].update(disabled=True), "does not apply the guard"),
        ("privacy.json", _second_scope, "scope research does not apply the guard"),
        ("privacy.json", lambda p: p.update(scopes=[]), "has no scope feddp"),
        ("privacy.json", lambda p: p["scopes"][0]["properties"].update(consent="all"), "privacy.json's consent is 'all'"),
        ("privacy.json", lambda p: p["scopes"][0]["properties"].update(data="/nowhere"), "/nowhere: is not a site's folder"),
        ("privacy.json", lambda p: p["scopes"][0]["properties"].update(data=5), "privacy.json's data is 5; write the path"),
        ("privacy.json", lambda p: p["scopes"][0].update(properties=["data"]), "privacy.json's properties are ['data']"),
        ("authorization.json", lambda a: a["permissions"]["lead"].update(byoc="any"), "lets lead bring code"),
        ("authorization.json", lambda a: a["permissions"]["lead"].update(byoc=["not n:eve@x.org"]), "lets lead bring code"),
        ("authorization.json", lambda a: a["permissions"]["lead"].update({"server-predeployed-flwr": "any"}), "lets lead"),
        ("authorization.json", lambda a: a["permissions"]["lead"].pop("configure_job_log") and None, "lets lead bring code"),
        (
            "authorization.json",
            lambda a: a["permissions"]["member"].pop("show_errors") and None,
            "lets member read a site's errors",
        ),
        ("authorization.json", lambda a: a["permissions"]["org_admin"].update(call="o:site"), "lets org_admin call into"),
        ("authorization.json", _grant("member", submit_job="any"), "gives member more than a kit does (submit_job: 'any')"),
        (
            "authorization.json",
            _grant("lead", shell_commands="o:site"),
            "gives lead more than a kit does (shell_commands: 'o:s",
        ),
        ("authorization.json", _grant("org_admin", cat="any"), "gives org_admin more than a kit does (cat: 'any')"),
        (
            "authorization.json",
            _grant("org_admin", restart=["o:site", "r:lead"]),
            "more than a kit does (restart: ['o:site', 'r",
        ),
        ("authorization.json", _grant("lead", abort_job=["not n:eve@x.org"]), "more than a kit does (abort_job: ['not n:eve"),
        ("authorization.json", _grant("guest", cat="any"), "gives guest more than a kit does (cat: 'any')"),
        ("authorization.json", lambda a: a.pop("permissions") and None, "has no permissions"),
        ("resources.json", lambda r: r["class_allow_list"].append("nvflare."), "allows nvflare., which is not a reviewed"),
        ("resources.json", lambda r: r["class_allow_list"].append("*"), "allows *, which is not a reviewed class"),
        ("resources.json", lambda r: r.pop("class_allow_list") and None, "FLARE's own, broader list applies"),
        ("resources.json", lambda r: r.update(class_list_enforcement_mode="warn"), "does not enforce the allow-list"),
        ("resources.json", lambda r: r["components"].pop(0) and None, "lacks the component private_files"),
        ("resources.json", lambda r: r.update(allow_log_streaming=True), "lets jobs stream the site's log"),
        ("resources.json", lambda r: r["components"].append(STREAMER), f"of {STREAMER['path']}, which is not a reviewed"),
        ("resources.json", lambda r: r["components"].append(BY_CLASS_PATH), "x without a `path` that names its class"),
        ("resources.json", lambda r: r["components"].append(FED_EVENTS), f"of {FED_EVENTS['path']}, which is not"),
        ("resources.json", lambda r: r["components"].append(BY_NAME), "component x without a `path` that names its class"),
    ],
)
def test_a_policy_below_the_minimum_is_one_line(kit, name, change, words):
    """The hospital's own file counts, beside the untouched default."""
    edit(kit, name, change)
    (line,) = said(kit)
    assert words in line
    assert line.endswith(".")


def test_a_hospital_may_give_fewer_rights(kit):
    """None of view's commands to members, aborting to the submitter alone, no restart; a role without any right."""
    for grant in (_grant("member", view="no"), _grant("project_admin", abort_job="N:Submitter"), _grant("guest", view="none")):
        edit(kit, "authorization.json", grant)
    edit(kit, "authorization.json", _grant("org_admin", restart=["none"], cat=["o:site"]))
    assert said(kit)[0].endswith("may start")


@pytest.mark.parametrize("rights", ["any", {"*": "any", **dict.fromkeys(NOBODY, "none")}])
def test_a_role_for_which_all_is_allowed_may_bring_code_too(kit, rights):
    """FLARE's own default for project_admin is "any": every right follows from it. It asks for `*` before the right itself."""
    edit(kit, "authorization.json", lambda a: a["permissions"].update(project_admin=rights))
    policy, _ = parse_policy_config(local(kit, "authorization.json"), COMMAND_CATEGORIES)
    assert policy.evaluate("hospital-a.org", AuthzContext("byoc", Person("eve", "x", "project_admin")))[0], "FLARE's word"
    assert [re.search(r"\((.*?):", line)[1] for line in said(kit)] == list(NOBODY)


def test_jobs_that_nobody_signed(kit):
    """FLARE's default, which startup/fed_client.json may change."""
    path = kit / "startup/fed_client.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"require_signed_jobs": False}))
    assert said(kit) == [f"{path}: accepts unsigned jobs. Remove require_signed_jobs."]


def test_a_streamer_in_a_file_of_its_own_is_found(kit):
    (kit / "local/x__j_resources.json").write_text(json.dumps({"components": [STREAMER]}))
    (line,) = said(kit)
    assert line.startswith(f"{kit}/local/x__j_resources.json: is not a file of a kit")


@pytest.mark.parametrize("name", ["privacy.json", "resources.json.default", "authorization.json.default"])
def test_a_missing_policy(kit, name):
    (kit / "local" / name).unlink()
    (line,) = said(kit)
    assert line.startswith(f"{kit}/local/{name}: is missing")


def test_a_filter_of_the_hospitals_own_stands_before_the_guard(kit):
    """The docs': FLARE's percentile on what training changed, then the guard."""
    (shown,) = [block.text for block in blocks("docs/how-to/it-administrator.md") if "UpdatePrivacy" in block.text]
    edit(kit, "privacy.json", lambda p: p["scopes"][0].update(json.loads(shown)))
    assert said(kit)[0].endswith("may start")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"path": "feddp.flare.update_privacy.UpdatePrivacie"}, "UpdatePrivacie, which is not a reviewed class"),
        ({"path": UPDATE_PRIVACY, "args": {"mechanism": {"path": PERCENTILE, "args": {"percentil": 9}}}}, "FLARE cannot build"),
        ({"path": PERCENTILE}, "it would treat weights as differences. Put it into feddp.flare.update_privacy.UpdatePrivacy"),
    ],
)
def test_a_filter_that_would_end_every_job(kit, entry, words):
    edit(kit, "privacy.json", lambda p: p["scopes"][0]["task_result_filters"].insert(0, entry))
    (line,) = said(kit)
    assert words in line


def test_a_spoilt_policy_is_to_be_corrected_and_no_new_kit_asked_for(kit):
    (kit / "local/privacy.json").write_text('{"scopes": [}')
    (line,) = said(kit)
    assert line.endswith("Correct it, or restore the provisioned file.")


def test_every_deviation_is_said_at_once(kit):
    edit(kit, "resources.json", lambda r: r.update(allow_log_streaming=True, class_list_enforcement_mode="warn"))
    (kit / "local/privacy.json").unlink()
    (kit / "startup/client.key").unlink()
    assert len(said(kit)) == 4


def test_the_data_are_checked(kit, tiny_root, tmp_path):
    data = Path(shutil.copytree(tiny_root / "site-1", tmp_path / "data"))
    next((data / "images").iterdir()).unlink()
    edit(kit, "privacy.json", lambda p: p["scopes"][0]["properties"].update(data=str(data)))
    assert said(kit) == [str(problem) for problem in data_check(data)] != []


@pytest.fixture
def on_its_machine(kit):
    """The kit, for a machine without a GPU."""
    edit(kit, "privacy.json", lambda p: p["scopes"][0]["properties"].update(device="cpu"))
    edit(
        kit,
        "resources.json",
        lambda r: next(c for c in r["components"] if "num_of_gpus" in c["args"])["args"].update(num_of_gpus=0),
    )
    return kit


def test_a_server_of_the_project_is_reached_or_not(made, on_its_machine):
    server = made / "kits/feddp/prod_00" / SERVER
    with listening(mutual(on_its_machine, server), on_its_machine):
        found = check(on_its_machine)
    assert found.problems == []
    assert [seen.whose for seen in found.certificates] == ["hospital-a", "the root of project feddp", f"the server {SERVER}"]
    (problem,) = check(on_its_machine)[1]
    assert re.search(r"the server 127\.0\.0\.1:\d+ does not answer", str(problem))
    assert check(on_its_machine, offline=True)[1] == []


def test_a_person_reaches_the_server_too(made, tmp_path):
    """A person's kit names server and address in another file, under other words."""
    lead = Path(shutil.copytree(made / "kits/feddp/prod_00/lead@consortium.org", tmp_path / "lead"))
    path = lead / "startup/fed_admin.json"
    for own, words in ((SERVER, []), ("hospital-b", [f"shows the certificate of hospital-b, but the kit names {SERVER}"])):
        with listening(mutual(lead, made / "kits/feddp/prod_00" / own), None) as port:
            said = json.loads(path.read_text())
            said["admin"] |= {"host": "127.0.0.1", "port": port}
            path.write_text(json.dumps(said))
            problems = [str(problem) for problem in check(lead)[1]]
        assert len(problems) == len(words)
        assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_another_participant_of_the_project_is_not_the_server(made, on_its_machine):
    """Its certificate is of the project's root too; the control is the server's own, above."""
    with listening(mutual(on_its_machine, made / "kits/feddp/prod_00/hospital-b"), on_its_machine):
        (problem,) = check(on_its_machine)[1]
    assert f"shows the certificate of hospital-b, but the kit names {SERVER}" in str(problem)


def test_a_server_that_is_not_the_projects_is_told_apart(made, on_its_machine):
    """Another consortium's, which shows its own certificate; one that takes only its own; and something that speaks no TLS."""
    server, stranger = made / "kits/feddp/prod_00" / SERVER, made / "own/feddp/prod_00" / SERVER
    for context, words in (
        (mutual(stranger, stranger), "is not of this project (self-signed certificate in certificate chain"),
        (
            mutual(stranger, server),
            "refuses this kit's certificate (unknown ca). Ask the consortium whether this kit is its newest",
        ),
        (None, "the server"),
    ):
        with listening(context, on_its_machine):
            (problem,) = check(on_its_machine)[1]
            assert words in str(problem)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is not there is looked for")
def test_a_gpu_that_is_not_there(made, kit):
    """As project.yml is shipped; FLARE's client would start again and again, without a word in its log."""
    with listening(mutual(kit, made / "kits/feddp/prod_00" / SERVER), kit):
        capacity, device = check(kit)[1]
    assert "has num_of_gpus 1, but this machine has 0" in str(capacity)
    assert "scope feddp: device cuda:0 cannot be used" in str(device)


def test_a_folder_that_is_no_kit(tmp_path):
    with pytest.raises(FedDPError, match="holds no startup kit"):
        check(tmp_path)
