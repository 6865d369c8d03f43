"""What a consortium does on the first day, on provisioned kits: FedDP from the admin console to the table; and who is refused,
where, and with which words. One federation for all tests."""

import io
import json
import re
import shlex
import shutil
import socket
import ssl
from pathlib import Path

import pytest
import torch
from captured import NOTHING, value_of
from certificates import put, self_signed, signed
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from deployment import HOSPITALS, LEAD, NEWCOMER, README, SERVER, SHIPPED_SERVER, deployment, until
from driven import drive
from rich.console import Console as Screen
from safetensors.torch import load_file

from feddp import jobs
from feddp.kit.check import check
from feddp.methods.plan import Plan
from feddp.report import table
from feddp.sealing.envelope import MAGIC

CONSENTING = HOSPITALS[:3]  # to the calibration exchange
STUDY = "study"  # a scope that hospital-d lacks
SHORT = {
    "--rounds 200": "--rounds 2 --set batch=4",
    "--calibration-epochs 20": "--calibration-epochs 1",
    "--size 384": "--size 64",
}
WIDGETS = {
    HOSPITALS[0]: "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent",
    HOSPITALS[1]: "nvflare.app_common.logging.job_log_streamer.JobLogStreamer",
}
KEY = "startup/client.key"
FILTER = "nvflare.app_common.filters.exclude_vars.ExcludeVars"
OAEP = padding.OAEP(padding.MGF1(SHA256()), SHA256(), label=None)
AT_SERVER = "nvflare.app_common.widgets.validation_json_generator.ValidationJsonGenerator"


def blocks(kind: str) -> list[list[str]]:
    """The README's commands that need a running federation, by block."""
    return [text.splitlines() for text in re.findall(rf"^```{kind}\n(.*?)\n```$", README, re.MULTILINE | re.DOTALL)]


def typed(line: str, folder: Path, job: str = "") -> str:
    """A line of the README, for this federation: its server's name, a short run on small images, a job's id."""
    assert ("JOB_ID" in line) <= bool(job), line
    for old, new in {SHIPPED_SERVER: SERVER, "$PWD": str(folder), "JOB_ID": job, **SHORT}.items():
        line = line.replace(old, new)
    return line


STARTING, EXPORT, SUBMITTING = blocks("bash")
(CONSOLE,) = blocks("console")


@pytest.fixture(scope="module")
def federation(tmp_path_factory, capture):
    """hospital-a to -c have a second scope, with the same guard, and hospital-a more images that a mean must be over there;
    hospital-b takes FedDP alone in the first; hospital-d keeps its queries and consents to nothing."""
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
        assert [check(made.kits / name, offline=True)[1] for name in (SERVER, *HOSPITALS, LEAD)] == [[]] * 6
        for line in EXPORT:
            made.shell(typed(line, made.folder))
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
def feddp(federation, capture):
    """What the README's console lines show, by command, and the job's id; the table is there before it is downloaded."""
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
    client = json.loads((federation.folder / "jobs/feddp/app_client/config/config_fed_client.json").read_text())
    plan = Plan.from_json(client["components"][0]["args"]["plan"])
    secrets = {hospital: (federation.kits / hospital / "feddp/secret").read_text() for hospital in HOSPITALS}
    assert len(set(secrets.values())) == 4
    data = federation.folder.parent / "data"
    sites = drive(plan, data, tmp_path, tuple(HOSPITALS), silent=("hospital-d",), secrets=secrets)
    for hospital, site in sites.items():
        own, wanted = load_file(federation.store(hospital, job) / "calibrated.safetensors"), site.store.read("calibrated")[0]
        assert own.keys() == wanted.keys()
        assert all(torch.equal(own[key], wanted[key]) for key in own)


def test_no_personal_value_passes_the_server_and_its_keys_open_no_envelope(federation, feddp, capture):
    """Of every frame that the server's process got and sent, tensor downloads too: γ's values are there (the control), and
    three envelopes, none from or for hospital-d; no value of a private tensor is. A recipient's key unwraps what is wrapped for
    it; the server's does not."""
    job, _ = feddp
    frames = capture.frames()
    for hospital in HOSPITALS:
        state = load_file(federation.store(hospital, job) / "start.safetensors")
        private = {value_of(value) for name, value in state.items() if ".attn.q." in name}
        shared = {value_of(value) for name, value in state.items() if ".attn.q." not in name} - {NOTHING}
        assert len(private) == 16
        assert len(shared) > 50
        assert not any(value in frames for value in private)
        assert all(value in frames for value in list(shared)[:20])
    envelopes = [frames[match.start() : match.start() + 2**16] for match in re.finditer(re.escape(MAGIC), frames)]
    headers = [json.loads(e[24 : 24 + int.from_bytes(e[8:16], "big")]) for e in envelopes]
    assert {(h["sender"], *sorted(h["recipients"])) for h in headers} == {
        (sender, *(peer for peer in CONSENTING if peer != sender)) for sender in CONSENTING
    }
    server = load_pem_private_key((federation.kits / SERVER / "startup/server.key").read_bytes(), None)
    for name, slot in [item for header in headers for item in header["recipients"].items()]:
        own = load_pem_private_key((federation.kits / name / KEY).read_bytes(), None)
        assert len(own.decrypt(bytes.fromhex(slot["key"]), OAEP)) == 32
        with pytest.raises(ValueError, match="Decryption"):
            server.decrypt(bytes.fromhex(slot["key"]), OAEP)


# `nvflare job`, with a job that two hospitals' policies forbid


@pytest.fixture(scope="module")
def fedavg(federation):
    said, job = {}, ""
    for line in SUBMITTING:
        words = shlex.split(line)
        said[words[2] if words[0] == "nvflare" else "export"] = text = federation.shell(typed(line, federation.folder, job))
        job = job or (re.search(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text) or [""])[0]
    return job, said


def test_the_lead_submits_without_the_console(federation, fedavg):
    job, said = fedavg
    assert list(said) == ["export", "submit", "list", "wait", "meta", "download"]
    assert job in said["list"]
    assert "FINISHED:COMPLETED" in said["meta"]
    assert json.loads((federation.folder / "results" / job / "workspace/results.json").read_text())["method"] == "fedavg"


def test_what_a_hospital_keeps_private_stops_fedavg_there_and_the_others_go_on(federation, fedavg):
    """Its audit file says so in one line a round, with the task and the number of tensors, and no value."""
    job, _ = fedavg
    workspace = federation.folder / "results" / job / "workspace"
    refused = progress(workspace, "refused", "train")
    assert set(refused) == {"hospital-b", "hospital-d"}
    assert "TASK_RESULT_FILTER_ERROR" in refused["hospital-d"]["reason"]
    stopped = "egress guard stopped: site hospital-d: task train tried to send 16 tensors that may not leave"
    assert stopped in federation.log("hospital-d", job)
    line = rf"\[J:{job}\]\[A:train#[^]]*\]\[{stopped} \([a-z]\S+, \.\.\.\); nothing was sent\]$"
    assert [bool(re.search(line, said)) for said in federation.audited("hospital-d", job)] == [True, True]
    for hospital in ("hospital-a", "hospital-c"):
        assert hospital in progress(workspace, "answer", "train")
        assert federation.audited(hospital, job) == []


def test_a_method_that_a_hospital_does_not_take_is_stopped_there_before_it_trains(federation, fedavg, feddp):
    """FedDP, which it takes, ran there in the same scope."""
    job, _ = fedavg
    refused = progress(federation.folder / "results" / job / "workspace", "refused", "train")
    assert "EXECUTION_EXCEPTION" in refused["hospital-b"]["reason"]
    words = r"\[task failed: site hospital-b: its policy takes jobs of feddp, and this one's is fedavg; add it to `methods`"
    lines = [re.search(rf"\[A:(\w+)#[^]]*\]{words}", said) for said in federation.audited("hospital-b", job)]
    assert [line and line[1] for line in lines] == ["train", "train", "score", "adopt", "evaluate"]
    assert not list(federation.store("hospital-b", job).glob("*.safetensors"))
    assert list(federation.store("hospital-b", feddp[0]).glob("*.safetensors")), "the control"


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
        for command in ("tail {} log.txt", "ls {}", "report_resources client {}"):
            refused = f"user '{person}' is not authorized for '{command.split()[0]}'"
            assert refused in console(command.format("hospital-b"))
            assert "not authorized" not in console(command.format("hospital-a"))
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
        assert "configure_site_log is answered by no site" in console("configure_site_log client hospital-a INFO")


def test_the_lead_touches_no_hospitals_machine(federation):
    with federation.console() as console:
        for command in ("tail hospital-a log.txt", "restart client hospital-a", "tail server log.txt"):
            assert f"user '{LEAD}' is not authorized for '{command.split()[0]}'" in console(command)


# hostile jobs, submitted by the lead


@pytest.fixture(scope="module")
def hostile(federation, feddp, fedavg, tmp_path_factory):
    """Submits them all, then waits for each: {name: (id, meta data at the end)}. Most are for one hospital alone."""
    root = tmp_path_factory.mktemp("hostile")
    shipped = federation.folder / "jobs/fedavg"

    def job(name: str, sites: list[str], **meta) -> Path:
        folder = Path(shutil.copytree(shipped, root / name))
        configured(folder, "app_server", "server", lambda c: c["components"][0]["args"]["plan"].update(rounds=1))
        configured(folder, "app_client", "client", lambda c: c["components"][0]["args"]["plan"].update(rounds=1))
        deploy = {"app_server": ["server"], "app_client": sites}
        described(folder, name=name, min_clients=min(2, len(sites)), deploy_map=deploy, **meta)
        return folder

    made = []
    for site, path in WIDGETS.items():
        made.append(job(path.rsplit(".", 1)[1], [site]))
        configured(made[-1], "app_client", "client", lambda c, path=path: c["components"].append({"id": "x", "path": path}))
    made.append(job("filter", ["hospital-c"]))
    configured(made[-1], "app_client", "client", lambda c: c["task_result_filters"][0]["filters"].append({"path": FILTER}))
    made.append(job("unanswered", ["hospital-d"]))
    configured(made[-1], "app_client", "client", lambda c: c["executors"][0].update(tasks=["harvest"]))
    made.append(job("server", ["hospital-a"]))
    configured(made[-1], "app_server", "server", lambda c: c["components"].append({"id": "x", "path": AT_SERVER}))
    for app in ("app_client", "app_server"):
        made.append(job(f"code-{app}", HOSPITALS))
        (made[-1] / app / "custom").mkdir()
        (made[-1] / app / "custom/mine.py").write_text("print('hello')\n")
    made.append(job(STUDY, HOSPITALS, scope=STUDY))
    shutil.copytree(made[-1] / "app_client", made[-1] / "app_renamed")
    configured(made[-1], "app_renamed", "client", _train_evaluates)
    renamed = {
        "app_server": ["server"],
        "app_client": [h for h in HOSPITALS if h != "hospital-c"],
        "app_renamed": ["hospital-c"],
    }
    described(made[-1], deploy_map=renamed)
    ids = {folder.name: federation.session.submit_job(str(folder)) for folder in made}
    return {name: (id, federation.finished(id)) for name, id in ids.items()}


def _train_evaluates(config: dict) -> None:
    """The executor of stage 1 answers the evaluation too, and nobody else does."""
    train = next(e for e in config["executors"] if e["executor"]["path"] == jobs.SITE_CLASSES["train"])
    train["tasks"].append("evaluate")
    config["executors"] = [train]


@pytest.mark.parametrize(
    ("name", "site", "path"),
    [
        *((path.rsplit(".", 1)[1], site, path) for site, path in WIDGETS.items()),
        ("filter", "hospital-c", FILTER),
    ],
)
def test_a_class_off_the_hospitals_list_is_not_loaded(federation, hostile, name, site, path):
    """FLARE's own ways past a result filter, and a filter after the guard; no task reaches the hospital."""
    id, meta = hostile[name]
    assert meta["status"] == "FINISHED:ABNORMAL"
    assert re.search(rf"Component '{re.escape(path)}' at config path '[^']*' is not in allow_list", federation.log(site, id))
    assert not (federation.kits / site / "feddp" / id).exists()


def test_a_class_off_the_servers_list_is_not_loaded(federation, hostile):
    id, meta = hostile["server"]
    assert meta["status"] == "FINISHED:EXECUTION_EXCEPTION"
    said = (federation.kits / SERVER / "console.log").read_text()
    assert re.search(rf"{id}/.*Component '{AT_SERVER}' at config path '[^']*' is not in allow_list", said)
    assert not (federation.kits / "hospital-a/feddp" / id).exists()


def test_nobody_brings_code(federation, hostile):
    """submit_job accepts it, as FLARE 2.9 looks at code where it is deployed."""
    id, meta = hostile["code-app_client"]
    assert meta["status"] == "FINISHED:FAILED_TO_RUN"
    assert {f"{hospital}: NVFLARE_ERROR: BYOC not permitted" for hospital in HOSPITALS} <= set(meta["job_deploy_detail"])
    id, meta = hostile["code-app_server"]
    assert meta["status"] == "FINISHED:FAILED_TO_RUN"
    assert "Failed to deploy app 'app_server': BYOC not permitted" in federation.log(SERVER).split(id)[-1]


def test_a_hospital_without_the_jobs_scope_refuses_and_the_others_go_on(federation, hostile):
    id, meta = hostile[STUDY]
    assert meta["status"] == "FINISHED:COMPLETED"
    assert sorted(meta["job_deploy_detail"]) == [
        "hospital-a: OK",
        "hospital-b: OK",
        "hospital-c: OK",
        f"hospital-d: NVFLARE_ERROR: privacy scope '{STUDY}' is not allowed",
        "server: OK",
    ]
    assert set(progress(federation.results(id), "answer", "train")) == set(HOSPITALS[:3])


def test_means_over_too_few_images_are_withheld_from_the_results(federation, hostile):
    """hospital-a's policy of this scope wants 9 images, and it tests on 8, as hospital-b does, whose numbers are there."""
    id, _ = hostile[STUDY]
    sites = json.loads((federation.results(id) / "results.json").read_text())["sites"]
    assert sites["hospital-a"] == {"withheld": 9}
    assert sites["hospital-b"]["final"]["dice"]["n"] == 8
    withheld = [line for line in federation.audited("hospital-a", id) if "[A:evaluate#" in line]
    assert len(withheld) == 1
    assert re.search(r"\[egress guard withheld .*\bfinal\b.*: over fewer than 9 images or cases\]$", withheld[0])
    assert federation.audited("hospital-b", id) == []


def test_an_executor_under_another_tasks_name_sends_nothing(federation, hostile):
    """The others' evaluation, of the same job, is the control."""
    id, _ = hostile[STUDY]
    workspace = federation.results(id)
    assert set(progress(workspace, "answer", "evaluate")) == {"hospital-a", "hospital-b"}
    refused = progress(workspace, "refused", "evaluate")
    assert list(refused) == ["hospital-c"]
    assert "evaluate ended with EXECUTION_EXCEPTION" in refused["hospital-c"]["reason"]
    (line,) = federation.audited("hospital-c", id)
    assert re.search(r"\[A:evaluate#[^]]*\]\[task failed: TrainExecutor does not answer evaluate\]$", line)


def test_a_task_that_nobody_answers_ends_the_run(federation, hostile):
    id, meta = hostile["unanswered"]
    assert meta["status"] == "FINISHED:EXECUTION_EXCEPTION"
    assert "no executor available for task train" in federation.log("hospital-d", id)


# a hospital joins later, and who comes with a wrong kit


@pytest.fixture(scope="module")
def newcomer(federation):
    """The kit of hospital-e, not started."""
    line = next(line.strip() for line in README.splitlines() if "--add-client" in line and line.startswith("    "))
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
    "certificate": "client.crt: is hospital-b's, and the kit is hospital-e's",
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
    turned_away = "authenticated as 'hospital-b' but claimed endpoint 'hospital-e'"
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
    """Its two lines are what `Deployment.start` runs for everybody; here they find FLARE running and leave it alone."""
    for line in STARTING:
        kit = federation.folder / Path(typed(line, federation.folder)).parents[1]
        pid = (kit / "daemon_pid.fl").read_text()
        said = federation.shell(f"{typed(line, federation.folder)} && wait && sleep 1")
        assert "There seems to be one instance" in said
        assert (kit / "daemon_pid.fl").read_text() == pid
