"""What a consortium does on the first day, on provisioned kits: FedDP from the admin console to the table; and who is refused,
where, and with which words. One federation for all tests."""

import io
import json
import re
import shlex
import shutil
import socket
import ssl
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.fuel.flare_api.api_spec import InvalidJobDefinition
from rich.console import Console as Screen
from safetensors.torch import load_file

from feddp.jobs import folder as jobs
from feddp.kit.approve import Approval
from feddp.kit.check import check
from feddp.networks.header import outline
from feddp.plan.schema import Plan
from feddp.provision import DEPLOYER
from feddp.reporting.page import table
from feddp.sealing.envelope import MAGIC
from feddp.training.store import Store
from support.captured import NOTHING, those_in, value_of
from support.certificates import put, self_signed, signed
from support.deployment import HOSPITALS, LEAD, NEWCOMER, SERVER, TUTORIAL, approved, decided, deployment, until
from support.docs_pages import blocks_for, commands_for
from support.driven import drive

pytestmark = pytest.mark.poc

CONSENTING = HOSPITALS[:3]  # to the calibration exchange
STUDY = "study"  # a scope that hospital-d lacks
STUDYING = "hospital-a", "hospital-b", "hospital-d"
SHORT = {"--rounds 2": "--rounds 2 --set batch=4 --set min_sites=2"}  # jobs that go on without two of the four
WIDGETS = ("widgets.convert_to_fed_event.ConvertToFedEvent", "logging.job_log_streamer.JobLogStreamer")
WITHOUT = HOSPITALS[3]  # has taken the admission out of its kit, so that what stands behind it is seen
KEY = "startup/client.key"
FILTER = "nvflare.app_common.filters.exclude_vars.ExcludeVars"
OAEP = padding.OAEP(padding.MGF1(SHA256()), SHA256(), label=None)
AT_SERVER = "nvflare.app_common.widgets.validation_json_generator.ValidationJsonGenerator"


def blocks(kind: str) -> list[list[str]]:
    """The commands of docs/tutorials/first-real-site.md that need a running federation, by block."""
    return [block.text.splitlines() for block in blocks_for("test_deployment", TUTORIAL) if block.kind == kind]


def typed(line: str, folder: Path, job: str = "") -> str:
    """A line of the tutorial, for this federation: its folder, settings for few images, a job's id."""
    assert ("JOB_ID" in line) <= bool(job), line
    for old, new in {"$PWD": str(folder), "JOB_ID": job, **SHORT}.items():
        line = line.replace(old, new)
    return line


STARTING, EXPORT, APPROVING, SUBMITTING, STOPPING = blocks("bash")
(CONSOLE,) = blocks("console")


@pytest.fixture(scope="module")
def federation(tmp_path_factory, capture):
    """hospital-a to -c have a second scope, with the same guard, and hospital-a more images that a mean must be over there;
    hospital-b takes FedDP alone in the first; hospital-d keeps its queries, consents to nothing, and has no admission. All take
    jobs for two hospitals, as one of four is to fail."""
    with deployment(tmp_path_factory.mktemp("deployment")) as made:
        for hospital in HOSPITALS[:3]:
            path = made.kits / hospital / "local/privacy.json"
            (scope,) = json.loads(path.read_text())["scopes"]
            other = json.loads(json.dumps(scope | {"name": STUDY}))
            if hospital == "hospital-a":
                other["properties"]["min_images"] = 9  # it has 8 to test, and 8 to validate
            if hospital == "hospital-b":
                scope["properties"]["methods"] = ["feddp"]
            path.write_text(json.dumps({"scopes": [scope, other]}))
        for hospital in HOSPITALS:
            decided(made.kits / hospital, bounds={"min_sites": 2})
        assert [check(made.kits / name, offline=True)[1] for name in (SERVER, *HOSPITALS, LEAD)] == [[]] * 6
        resources = json.loads((made.kits / WITHOUT / "local/resources.json.default").read_text())
        resources["components"] = [c for c in resources["components"] if c["path"] != DEPLOYER]
        (made.kits / WITHOUT / "local/resources.json").write_text(json.dumps(resources))
        for line in EXPORT:
            made.feddp(typed(line, made.folder))
        made.up()
        yield made


def configured(folder: Path, app: str, side: str, change) -> None:
    path = folder / app / f"config/config_fed_{side}.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def described(folder: Path, **changes) -> None:
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def progress(folder: Path, event: str, task: str) -> dict[str, dict]:
    events = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    return {e["site"]: e for e in events if e["event"] == event and e.get("task") == task}


# FedDP, from the console


@pytest.fixture(scope="module")
def unapproved(federation):
    """FedDP's job, submitted before any hospital has approved it."""
    id = federation.session.submit_job(str(federation.folder / "jobs/feddp"))
    return id, federation.finished(id)


def test_a_job_that_no_hospital_has_approved_runs_nowhere(federation, unapproved):
    """The lead reads why. At hospital-d, which has no admission, the job process would have refused it."""
    id, meta = unapproved
    assert meta["status"] == "FINISHED:FAILED_TO_RUN"
    plan = plan_of(federation.folder / "jobs/feddp").digest()
    for hospital in HOSPITALS[:3]:
        (said,) = [line for line in meta["job_deploy_detail"] if line.startswith(f"{hospital}: ")]
        assert f"site {hospital}: its administrator has not approved plan {plan[:12]} (feddp)" in said
        assert "feddp kit approve JOB_FOLDER KIT" in federation.refused(hospital, id)
        assert not (federation.kits / hospital / id).exists()


def plan_of(folder: Path) -> Plan:
    client = json.loads((folder / "app_client/config/config_fed_client.json").read_text())
    return Plan.from_json(client["components"][0]["args"]["plan"])


@pytest.fixture(scope="module")
def feddp(federation, unapproved, capture):
    """What the tutorial's console lines show, by command, and the job's id; the table is there before it is downloaded. The
    hospitals approve it while they run."""
    for line in APPROVING:
        assert "approved in" in federation.feddp(typed(line, federation.folder))
    shown, job = {}, ""
    with capture, federation.console() as console:
        shown["login"] = console.welcome
        for line in CONSOLE:
            command = line.split()[0]
            if "JOB_ID" in line and "get_job_meta" not in shown:
                assert federation.finished(job)["status"] == "FINISHED:COMPLETED", federation.log(SERVER)[-3000:]
            shown[command] = console(typed(line, federation.folder, job))
            if command == "submit_job":
                job = re.search(r"Submitted job: (\S+)", shown[command])[1]
        assert not console.process.isalive() or console.process.wait() == 0
    return job, shown


def test_the_lead_submits_feddp_from_the_console(feddp):
    job, shown = feddp
    assert "Trying to login" in shown["login"]
    assert all(hospital in shown["check_status"] for hospital in HOSPITALS)
    assert job in shown["list_jobs"]
    assert '"status": "FINISHED:COMPLETED"' in shown["get_job_meta"]
    assert "content downloaded to" in shown["download_job"]


def test_the_downloaded_results_are_the_table(federation, feddp):
    """hospital-d consents to nothing: it is tuned alone, the others with two peers each."""
    job, _ = feddp
    results = json.loads((federation.kits / LEAD / "transfer" / job / "workspace/results.json").read_text())
    assert set(results["sites"]) == set(HOSPITALS)
    for site in results["sites"].values():
        assert site["final"]["dice"]["n"] == 8, "18 patients of two images; a fifth of them, rounded, is 4"
        assert 0 <= site["final"]["dice"]["mean"] <= 1
    peers = {name: site["calibration"]["peers"] for name, site in results["sites"].items()}
    assert peers == dict(zip(HOSPITALS, (2, 2, 2, 0), strict=True))
    screen = Screen(width=120, file=io.StringIO())
    screen.print(table(results))
    assert all(name in screen.file.getvalue() for name in (*HOSPITALS, "Average"))


def test_jobs_lie_in_the_servers_own_storage(federation, feddp):
    assert (federation.folder.parent / "server/jobs" / feddp[0]).is_dir()


# what its sites exchanged


def recorded(federation, hospital: str, job: str, event: str, part: str) -> list:
    """What a hospital's own record says of an event."""
    lines = (federation.store(hospital, job) / "record.jsonl").read_text().splitlines()
    return [line[part] for line in map(json.loads, lines) if line["event"] == event]


def test_what_is_exchanged_is_sealed_and_changes_no_bit(federation, feddp, tmp_path):
    """Results and the hospitals' own records say that it was; the networks are those of a plain loop over the same sites, with
    the secrets that they drew, in which nothing is sealed and hospital-d takes no part in the exchange."""
    job, _ = feddp
    assert json.loads((federation.kits / LEAD / "transfer" / job / "workspace/results.json").read_text())["sealed"] is True
    for hospital in HOSPITALS:
        peers = [peer for peer in CONSENTING if peer != hospital]
        assert recorded(federation, hospital, job, "seal", "recipients") == ([peers] if hospital in CONSENTING else [])
        assert recorded(federation, hospital, job, "open", "senders") == ([peers] if hospital in CONSENTING else [])
    plan = plan_of(federation.folder / "jobs/feddp")
    secrets = {hospital: (federation.kits / hospital / "feddp/site.secret").read_text() for hospital in HOSPITALS}
    assert len(set(secrets.values())) == 4
    data = federation.folder.parent / "data"
    sites = drive(plan, data, tmp_path, tuple(HOSPITALS), silent=("hospital-d",), secrets=secrets, job=job)
    for hospital, site in sites.items():
        own, wanted = load_file(federation.store(hospital, job) / "calibrated.safetensors"), site.store.read("calibrated")[0]
        assert own.keys() == wanted.keys()
        assert all(torch.equal(own[key], wanted[key]) for key in own)


def test_no_personal_value_passes_the_server_and_its_keys_open_no_envelope(federation, feddp, capture):
    """Of every frame that the server's process got and sent, tensor downloads too: γ's values are there (the control), and
    three envelopes, none from or for hospital-d; no value of a private tensor is. An envelope's key is wrapped for the
    handshakes, which were seen too; no kit's key, the recipients' among them, opens what was recorded (version 1: it does)."""
    job, _ = feddp
    frames = capture.frames()
    for hospital in HOSPITALS:
        state = load_file(federation.store(hospital, job) / "start.safetensors")
        private = {value_of(value) for name, value in state.items() if ".attn.q." in name}
        shared = {value_of(value) for name, value in state.items() if ".attn.q." not in name} - {NOTHING}
        assert len(private) == 16
        assert len(shared) > 50
        some = set(list(shared)[:20])
        assert those_in(frames, private | some) == some
    envelopes = [frames[match.start() : match.start() + 2**16] for match in re.finditer(re.escape(MAGIC), frames)]
    headers = [json.loads(e[24 : 24 + int.from_bytes(e[8:16], "big")]) for e in envelopes]
    assert {(h["sender"], *sorted(h["recipients"])) for h in headers} == {
        (sender, *(peer for peer in CONSENTING if peer != sender)) for sender in CONSENTING
    }
    keys = {name: (federation.kits / name / KEY).read_bytes() for name in CONSENTING}
    keys[SERVER] = (federation.kits / SERVER / "startup/server.key").read_bytes()
    for name, slot in [item for header in headers for item in header["recipients"].items()]:
        wrapped = bytes.fromhex(slot["key"])
        assert len(wrapped) == 32 + 32 + 16, "HPKE's own public key, the envelope's key, a tag"
        assert f'"site": "{name}", "job": "{job}", "exchange": "calibration", "key": "{slot["handshake"]}"'.encode() in frames
        for pem in keys.values():
            with pytest.raises(ValueError, match=r"[Cc]iphertext|[Dd]ecryption"):
                load_pem_private_key(pem, None).decrypt(wrapped, OAEP)
    assert len({slot["handshake"] for header in headers for slot in header["recipients"].values()}) == len(CONSENTING)


# before a long run


def test_a_canary_of_two_rounds_times_every_hospitals_links(federation, feddp):
    """The whole network but the queries goes both ways: 4,972,257 numbers of four bytes. What its rounds gave is kept."""
    pair = HOSPITALS[:2]
    plan = replace(plan_of(federation.folder / "jobs/feddp"), rounds=50, size=32, sites=tuple(pair))
    approved(jobs.export(plan, federation.folder / "jobs/feddp_lgg"), *(federation.kits / name for name in pair))
    (line,) = commands_for("test_deployment", "docs/how-to/lead.md")
    before = {folder.name for folder in (federation.kits / LEAD / "transfer").iterdir()}
    said = federation.shell(line.replace("kits/lead", "kits/feddp/prod_00/lead"))
    numbers = r"19\.9 MB to the site in (\S+) s, 19\.9 MB back in (\S+) s; the site worked (\S+) s$"
    found = re.findall(rf"^(hospital-.): {numbers}", said, re.MULTILINE)
    assert [site for site, *_ in found] == pair
    round = float(re.search(r"^round 2 took (\S+) s; 50 such rounds", said, re.MULTILINE)[1])
    assert all(sum(map(float, seconds)) <= round + 0.2 for _, *seconds in found), "four numbers, rounded to tenths"
    job = re.search(r"^job (\S+) was ended; export the job again with --resume \1 ", said, re.MULTILINE)[1]
    assert federation.session.get_job_meta(job)["status"] == "FINISHED:ABORTED"
    assert {folder.name for folder in (federation.kits / LEAD / "transfer").iterdir()} == before
    assert int(outline(federation.store(SERVER, job) / "shared_latest.safetensors")[1]["round"]) >= 2
    assert all(Store(federation.store(name, job)).latest() >= 2 for name in pair)


# `nvflare job`, with a job that two hospitals' policies forbid


@pytest.fixture(scope="module")
def fedavg(federation):
    """What the tutorial's lines print, by command, and the job's id; on smaller images, as no queries are private."""
    said, job = {}, ""
    for line in SUBMITTING:
        words = shlex.split(line)
        run = federation.feddp if words[0] == "feddp" else federation.shell
        text = run(typed(line, federation.folder, job).replace("--size 64", "--size 32"))
        said[words[2] if words[0] == "nvflare" or words[1] == "kit" else "export"] = text
        job = job or (re.search(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text) or [""])[0]
    return job, said


def test_the_lead_submits_without_the_console(federation, fedavg):
    job, said = fedavg
    assert list(said) == ["export", "approve", "submit", "list", "wait", "meta", "download"]
    assert job in said["list"]
    assert "FINISHED:COMPLETED" in said["meta"]
    assert json.loads((federation.folder / "results" / job / "workspace/results.json").read_text())["method"] == "fedavg"


def test_what_a_hospital_keeps_private_stops_fedavg_there_and_the_others_go_on(federation, fedavg):
    """Its audit file says so in one line a round, with the task and the number of tensors, and no value."""
    job, _ = fedavg
    workspace = federation.folder / "results" / job / "workspace"
    refused = progress(workspace, "refused", "train")
    assert set(refused) == {"hospital-d"}
    assert "TASK_RESULT_FILTER_ERROR" in refused["hospital-d"]["reason"]
    stopped = "egress guard stopped: site hospital-d: task train tried to send 16 tensors that may not leave"
    assert stopped in federation.log("hospital-d", job)
    line = rf"\[J:{job}\]\[A:train#[^]]*\]\[{stopped} \([a-z]\S+, \.\.\.\); nothing was sent\]$"
    assert [bool(re.search(line, said)) for said in federation.audited("hospital-d", job)] == [True, True]
    for hospital in ("hospital-a", "hospital-c"):
        assert hospital in progress(workspace, "answer", "train")
        assert federation.audited(hospital, job) == []


def test_a_method_that_a_hospital_does_not_take_is_not_deployed_there(federation, fedavg, feddp):
    """FedDP, which it takes, ran there in the same scope; and the hospital could not have approved this one."""
    job, said = fedavg
    words = "site hospital-b: its policy accepts the methods: feddp, but the job uses fedavg; add it to `methods`"
    assert words in said["meta"]
    assert words in federation.refused("hospital-b", job)
    assert not federation.store("hospital-b", job).exists()
    assert list(federation.store("hospital-b", feddp[0]).glob("*.safetensors")), "the control"
    approval = Approval.of(federation.folder / "jobs/fedavg", federation.kits / "hospital-b")
    assert words.endswith(approval.problems[0].split(";")[0] + "; add it to `methods`")


# refused at the console


@pytest.mark.parametrize("person", ["member@consortium.org", "admin@hospital-a.org"])
def test_who_may_not_submit(federation, person):
    with federation.console(person) as console:
        assert all(hospital in console("check_status server") for hospital in HOSPITALS), "the control: to look is allowed"
        said = console(f"submit_job {federation.folder}/jobs/feddp")
    assert f"user '{person}' is not authorized for 'submit_job'" in said
    assert "Submitted" not in said


def test_an_org_admin_rules_at_home_and_nowhere_else(federation, feddp):
    """The control of every refusal is the same command at its own hospital, but for the restart, which would cost a minute."""
    person = "admin@hospital-a.org"
    with federation.console(person) as console:
        assert f"user '{person}' is not authorized for 'report_resources'" in console("report_resources client hospital-b")
        assert "not authorized" not in console("report_resources client hospital-a")
        for command in ("tail {} log.txt", "ls {}", "sys_info client {}"):  # its own machine has a shell
            for hospital in ("hospital-a", "hospital-b"):
                assert f"{command.split()[0]} is not answered by any site" in console(command.format(hospital))
        for command in ("restart", "shutdown"):
            assert f"user '{person}' is not authorized for '{command}'" in console(f"{command} client hospital-b")
        assert f"user '{person}' is not authorized for 'disable_client'" in console("disable_client hospital-b")
        assert f"user '{person}' is not authorized for 'abort_job'" in console(f"abort_job {feddp[0]}")
        assert f"user '{person}' is not authorized for 'download_job'" in console(f"download_job {feddp[0]}")
    assert "hospital-b" in federation.joined()


def test_nobody_has_a_site_build_what_a_logs_configuration_names(federation, feddp):
    """With FLARE's own authorization it would be code, of the lead's in a job of his own (test_commands.py)."""
    for person, command in (
        (LEAD, f"configure_job_log {feddp[0]} client hospital-a INFO"),
        ("admin@consortium.org", f"configure_job_log {feddp[0]} client hospital-a INFO"),
    ):
        with federation.console(person) as console:
            assert f"user '{person}' is not authorized for '{command.split()[0]}'" in console(command)
    with federation.console("admin@hospital-a.org") as console:  # FLARE's server leaves this one to the site
        assert "configure_site_log is not answered by any site" in console("configure_site_log client hospital-a INFO")


def test_the_lead_touches_no_hospitals_machine(federation):
    with federation.console() as console:
        for command in ("restart client hospital-a", "tail server log.txt"):
            assert f"user '{LEAD}' is not authorized for '{command.split()[0]}'" in console(command)
        assert "tail is not answered by any site" in console("tail hospital-a log.txt")
        for command in ("cells", "route hospital-a"):  # FLARE gives them to every console, without a right
            assert f"Undefined command {command.split()[0]}" in console(command)
    with federation.console("admin@consortium.org") as console:  # the one role to which FLARE's server grants it
        assert "report_env is not answered by any site" in console("report_env hospital-a")


# hostile jobs, submitted by the lead


@pytest.fixture(scope="module")
def hostile(federation, feddp, fedavg, tmp_path_factory):
    """Submits them all, then waits for each: {name: (id, meta data at the end)}. Each is the approved FedAvg, altered."""
    root = tmp_path_factory.mktemp("hostile")
    shipped = federation.folder / "jobs/fedavg"

    def job(name: str, side: str, change) -> Path:
        folder = Path(shutil.copytree(shipped, root / name))
        configured(folder, f"app_{side}", side, change)
        described(folder, name=name)
        return folder

    def filtered(config: dict) -> None:
        config["task_result_filters"][0]["filters"].append({"path": FILTER})

    def added(path: str):
        return lambda config: config["components"].append({"id": "x", "path": path})

    made = [job(path.rsplit(".", 1)[1], "client", added(f"nvflare.app_common.{path}")) for path in WIDGETS]
    made += [job("filter", "client", filtered), job("server", "server", added(AT_SERVER))]
    made.append(job("renamed", "client", _one_task_more))
    behind = {"min_clients": 1, "deploy_map": {"app_server": ["server"], "app_client": [WITHOUT]}}
    made.append(job("behind-widget", "client", added(f"nvflare.app_common.{WIDGETS[0]}")))
    described(made[-1], **behind)
    made.append(jobs.export(replace(plan_of(shipped), seed=2), root / "behind-unapproved"))
    described(made[-1], **behind)
    made.append(jobs.export(replace(plan_of(shipped), seed=1, sites=STUDYING), root / STUDY, STUDY))
    approved(made[-1], *(federation.kits / hospital for hospital in STUDYING[:2]))
    ids = {folder.name: federation.session.submit_job(str(folder)) for folder in made}
    return {name: (id, federation.finished(id)) for name, id in ids.items()}


def _one_task_more(config: dict) -> None:
    """The executor answers another stage's task too."""
    config["executors"][0]["tasks"].insert(4, "tune")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((path.rsplit(".", 1)[1], "components[1] is") for path in WIDGETS),
        ("filter", "task_result_filters[0].filters[1] is"),
        ("renamed", "executors[0].tasks[4] is"),
    ],
)
def test_what_the_export_does_not_write_is_deployed_at_no_hospital(federation, hostile, name, place):
    """FLARE's own ways past a result filter, a filter after the guard, an executor under another task's name. The plan is one
    that two of the hospitals have approved."""
    id, meta = hostile[name]
    assert meta["status"] == "FINISHED:FAILED_TO_RUN"
    for hospital in HOSPITALS[:3]:
        (said,) = [line for line in meta["job_deploy_detail"] if line.startswith(f"{hospital}: ")]
        assert f"config_fed_client.json: {place}" in said
        assert federation.refused(hospital, id).endswith(f"{said.split('NVFLARE_ERROR: ')[1]}]")
        assert not (federation.kits / hospital / id).exists()


def test_the_server_deploys_no_app_of_its_own_but_what_the_export_writes(federation, hostile):
    id, meta = hostile["server"]
    assert meta["status"] == "FINISHED:FAILED_TO_RUN"
    (said,) = meta["job_deploy_detail"]
    assert said.startswith("server: config_fed_server.json: components[1] is ")


@pytest.mark.parametrize("app", ["app_client", "app_server"])
def test_nobody_brings_code(federation, tmp_path, app):
    """FLARE's server would accept it, and look at code where it is deployed; a `meta.conf` it would parse by HOCON."""
    folder = Path(shutil.copytree(federation.folder / "jobs/fedavg", tmp_path / "code"))
    described(folder, name="code")
    (folder / app / "custom").mkdir()
    (folder / app / "custom/mine.py").write_text("print('hello')\n")
    with pytest.raises(InvalidJobDefinition, match="meta.json: byoc is True, but the export writes no such key"):
        federation.session.submit_job(str(folder))
    (folder / "meta.json").rename(folder / "meta.conf")
    with pytest.raises(InvalidJobDefinition, match="PYHOCON is not accepted; write JSON"):
        federation.session.submit_job(str(folder))


def test_behind_the_admission_a_class_off_the_hospitals_list_is_not_loaded(federation, hostile):
    """At a hospital that took the admission out; no task reaches it. The list has none of the classes tried above. As a filter
    and as an executor: test_allow_list.py."""
    path, (id, meta) = f"nvflare.app_common.{WIDGETS[0]}", hostile["behind-widget"]
    assert f"{WITHOUT}: OK" in meta["job_deploy_detail"], "the control"
    assert meta["status"] == "FINISHED:ABNORMAL"
    assert re.search(rf"Component '{re.escape(path)}' at config path '[^']*' is not in allow_list", federation.log(WITHOUT, id))
    assert not (federation.kits / WITHOUT / "feddp" / id).exists()
    listed = json.loads((federation.kits / WITHOUT / "local/resources.json").read_text())["class_allow_list"]
    tried = [*(f"nvflare.app_common.{widget}" for widget in WIDGETS), FILTER]
    assert [entry for entry in listed if any(f"{one}.".startswith(f"{entry}.") for one in tried)] == []


def test_behind_the_admission_an_unapproved_plan_gets_no_answer(federation, hostile):
    """The job's process asks the policy again, at every task."""
    id, meta = hostile["behind-unapproved"]
    assert f"{WITHOUT}: OK" in meta["job_deploy_detail"], "the control"
    assert meta["status"] != "FINISHED:COMPLETED"
    lines = federation.audited(WITHOUT, id)
    assert lines
    assert all(f"[task failed: site {WITHOUT}: its administrator has not approved plan" in line for line in lines)
    assert not list(federation.store(WITHOUT, id).glob("*.safetensors"))


def test_a_hospital_without_the_jobs_scope_refuses_and_the_others_go_on(federation, hostile):
    id, meta = hostile[STUDY]
    assert meta["status"] == "FINISHED:COMPLETED"
    assert sorted(meta["job_deploy_detail"]) == [
        "hospital-a: OK",
        "hospital-b: OK",
        f"hospital-d: NVFLARE_ERROR: privacy scope '{STUDY}' is not allowed",
        "server: OK",
    ]
    assert set(progress(federation.results(id), "answer", "train")) == set(STUDYING[:2])


def test_means_over_too_few_images_are_withheld_from_the_results(federation, hostile):
    """hospital-a's policy of this scope wants 9 images, and it tests on 8, as hospital-b does, whose numbers are there."""
    id, _ = hostile[STUDY]
    sites = json.loads((federation.results(id) / "results.json").read_text())["sites"]
    assert sites["hospital-a"] == {"withheld": 9}
    assert sites["hospital-b"]["final"]["dice"]["n"] == 8
    withheld = [line for line in federation.audited("hospital-a", id) if "[A:evaluate#" in line]
    assert len(withheld) == 1
    assert re.search(r"\[egress guard withheld .*\bfinal\b.*: measured over fewer than 9 images or cases\]$", withheld[0])
    assert federation.audited("hospital-b", id) == []


# a hospital joins later, and who comes with a wrong kit


def test_what_a_participant_writes_is_its_owners_alone(federation, feddp):
    """Logs, audit, the job's folder, and what a site keeps of it; the control: FLARE's script leaves process numbers to all.
    The kits, with all that is in them by now, may start again."""
    job, _ = feddp
    storage = federation.folder.parent / "server"  # where the server has moved the job's folder
    for name in (SERVER, *HOSPITALS):
        kit = federation.kits / name
        folders = [storage] if name == SERVER else [kit / job, kit / "feddp"]
        shown = f"the certificate of the server {SERVER} is valid until" in (kit / "log.txt").read_text()
        assert shown is (name not in (SERVER, WITHOUT)), "the site's admission says it when a job starts"
        written = [*kit.glob("log*"), *kit.glob("audit*")]
        assert {path.name for path in written} >= {"log.txt", "log.json", "audit.log"}, name
        for folder in folders:
            kept = [folder, *folder.rglob("*")]
            assert len(kept) > 4, folder
            written += kept
        assert not [path for path in written if path.stat().st_mode & 0o077]
        assert (kit / "daemon_pid.fl").stat().st_mode & 0o077 == 0o044
        assert name == WITHOUT or check(kit)[1] == []


@pytest.fixture(scope="module")
def newcomer(federation):
    """The kit of hospital-e, not started."""
    (line,) = (line for line in commands_for("test_provisioning", "docs/how-to/provision.md") if "--add-client" in line)
    federation.shell(line)
    return federation.folder / "kits/feddp/prod_01" / NEWCOMER


@pytest.fixture(scope="module")
def wrong(federation, newcomer, tmp_path_factory):
    """Copies of its kit, each spoilt: {why: (kit, what `feddp kit check` says of it)}."""
    root = tmp_path_factory.mktemp("wrong")
    made = {}
    for why in ("expired", "key", "certificate", "root", "project"):
        made[why] = Path(shutil.copytree(newcomer, root / why)) / "startup"
    put(made["expired"] / "client.crt", by_the_root(federation, newcomer, (-9, -2)))
    shutil.copy(federation.kits / "hospital-b" / KEY, made["key"])
    for name in ("client.crt", "client.key"):
        shutil.copy(federation.kits / "hospital-b/startup" / name, made["certificate"])
    put(made["root"] / "rootCA.pem", self_signed("feddp")[1])
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    put(made["project"] / "client.crt", signed(NEWCOMER, "other", key, self_signed("other")[0]))
    put(made["project"] / "client.key", key=key)
    return {why: startup.parent for why, startup in made.items()}


def by_the_root(federation, kit: Path, days: tuple[int, int]):
    """A certificate of the project's own root for a kit's own key, valid between two numbers of days from now."""
    state = json.loads((federation.folder / "kits/feddp/state/cert.json").read_text())
    root, own = (load_pem_private_key(pem, None) for pem in (state["root_pri_key"].encode(), (kit / KEY).read_bytes()))
    return signed(NEWCOMER, "feddp", own, root, days)


SAID = {
    "expired": "client.crt: expired on",
    "key": "client.key: is not the key of client.crt",
    "certificate": "client.crt: belongs to hospital-b, but the kit to hospital-e",
    "root": "client.crt: was not issued by rootCA.pem",
    "project": "client.crt: was not issued by rootCA.pem",
}


@pytest.mark.parametrize("why", SAID)
def test_the_check_of_a_wrong_kit(newcomer, wrong, why):
    (problem,) = check(wrong[why])[1]
    assert SAID[why] in str(problem)
    assert check(newcomer)[1] == [], "the control, and the server is reached"


def test_a_wrong_kit_started_all_the_same_never_joins_and_the_genuine_one_does(federation, newcomer, wrong):
    """FLARE is silent at the site where the kit's own chain does not verify. hospital-e joins a federation that is running."""
    logs = {why: kit / "log.txt" for why, kit in wrong.items()}
    for kit in wrong.values():
        federation.start(kit)

    def written(why: str, words: str) -> bool:
        return logs[why].exists() and words in logs[why].read_text()

    until(lambda: written("key", "KEY_VALUES_MISMATCH"), "the kit with another's key said nothing")
    turned_away = "the name belongs to the certificate of hospital-e"
    until(lambda: turned_away in federation.log(SERVER), "the kit with another's certificate was not turned away")
    for why in ("expired", "root", "project"):
        until(lambda why=why: written(why, "registered aux handler"), f"{why} did not start")
    assert federation.joined() == set(HOSPITALS)
    assert not any(written(why, "Successfully registered") for why in wrong)
    for kit in wrong.values():
        federation.kill(kit)
    federation.start(newcomer)
    until(lambda: federation.joined() == {*HOSPITALS, NEWCOMER}, "the genuine kit did not join")
    with federation.console() as console:
        assert NEWCOMER in console("check_status server")
    assert "Successfully registered" in (newcomer / "log.txt").read_text()


@pytest.mark.parametrize("why", ["none", "expired", "project"])
def test_the_server_itself_refuses_the_certificate(federation, newcomer, wrong, tmp_path, why):
    """FLARE's client would not even try. Two controls get an answer: the genuine certificate, and one made as the
    expired one was, but in date."""
    assert answer(newcomer, wrong.get(why)) == b""
    assert answer(newcomer, newcomer).startswith(b"HTTP/1.1")
    renewed = Path(shutil.copytree(newcomer / "startup", tmp_path / "renewed/startup"))
    put(renewed / "client.crt", by_the_root(federation, newcomer, (-1, 1)))
    assert answer(newcomer, renewed.parent).startswith(b"HTTP/1.1")


def answer(kit: Path, of: Path | None) -> bytes:
    """What the server says to the first line over TLS, with the certificate and key `of` a kit; nothing where it hangs up."""
    address = json.loads((kit / "startup/fed_client.json").read_text())["servers"][0]["service"]["target"]
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=kit / "startup/rootCA.pem")
    context.check_hostname = False
    if of is not None:
        context.load_cert_chain(of / "startup/client.crt", of / KEY)
    with socket.create_connection((host, int(port)), timeout=20) as plain, context.wrap_socket(plain) as secured:
        try:
            secured.sendall(b"GET / HTTP/1.1\r\nHost: server\r\n\r\n")
            return secured.recv(100)
        except (ConnectionError, ssl.SSLError):
            return b""


def test_the_readme_starts_what_was_started(federation):
    """Its lines are what `Deployment.start` runs for everybody; here they find FLARE running and leave it alone."""
    for line in STARTING:
        kit = federation.folder / Path(typed(line, federation.folder)).parents[1]
        pid = (kit / "daemon_pid.fl").read_text()
        said = federation.shell(f"{typed(line, federation.folder)} && wait && sleep 1")
        assert "There seems to be one instance" in said
        assert (kit / "daemon_pid.fl").read_text() == pid


def test_everybody_is_stopped(federation):
    """The last test: FLARE's process ends, and the script that would start it again."""
    kits = [federation.kits / name for name in (SERVER, *HOSPITALS)]
    processes = [psutil.Process(int((kit / name).read_text())) for kit in kits for name in ("daemon_pid.fl", "pid.fl")]
    for line in STOPPING:
        federation.shell(typed(line, federation.folder))
    until(lambda: not any(process.is_running() for process in processes), "some did not stop")
    federation.started = [kit for kit in federation.started if kit not in kits]
