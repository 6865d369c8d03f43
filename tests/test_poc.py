"""A real federation on this machine: certificates, a process a site, the sites' own policies. One POC for all tests."""

import json
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from driven import drive
from nvflare.fuel.flare_api.api_spec import NoConnection
from safetensors.torch import load_file
from typer.testing import CliRunner

from feddp import jobs
from feddp.cli import app
from feddp.data.synthesize import synthesize
from feddp.errors import FedDPError
from feddp.outside import job as outside
from feddp.run.poc import SERVER, PocJob, connect, federation
from feddp.run.session import Request, bring_home, handed_on
from feddp.sealing.envelope import MAGIC

OAEP = padding.OAEP(padding.MGF1(SHA256()), SHA256(), label=None)
SITES = ["site-1", "site-2", "site-3"]


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    """Where the server's process of a job leaves every frame that it gets and sends, if the folder is there when the job
    starts: half a gigabyte a run, so it is there for two."""
    root = tmp_path_factory.mktemp("capture")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDP_CAPTURE", str(root / "server"))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "capture"), prepend=os.pathsep)
        yield root / "server"
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def poc(tmp_path_factory, plan_for, capture):
    """Two hospitals that consent to everything; one that never shares its queries, takes no part in the calibration exchange,
    and takes others' models as the newcomer."""
    root = tmp_path_factory.mktemp("poc")
    synthesize(root / "data", sites=3, images=12, size=32)
    few = {"min_images": 1}  # two test images a site
    policies = {site: {"data": str(root / "data" / site), "consent": ["calibration", "outside"], **few} for site in SITES[:2]}
    policies["site-3"] = {"data": str(root / "data/site-3"), "consent": ["outside"], "private": ["query"], **few}
    with federation(Request(plan_for(), policies, root / "run")) as (kits, session):

        def run(name, plan, scope=jobs.SCOPE, edit=lambda folder: None, limit=240):
            folder = jobs.export(plan, SITES, root / name, scope)
            edit(folder)
            return submit(folder, limit)

        def submit(folder, limit=240):
            job = PocJob(kits, session, folder)
            deadline = time.monotonic() + limit
            while not job.finished():
                assert time.monotonic() < deadline, f"{folder.name} did not end: {job.log.read_text()[-2000:]}"
                time.sleep(0.5)
            return job

        yield kits, run, submit


PLAN = {"rounds": 2, "start": "last"}


@pytest.fixture(scope="module")
def feddp(poc, plan_for, capture):
    _, run, _ = poc
    capture.mkdir()
    job = run("feddp", plan_for(**PLAN))
    capture.rename(capture.with_name("feddp"))
    succeeded, server = job.outcome()
    assert succeeded, job.log.read_text()[-3000:]
    return job, server, json.loads((server / "results.json").read_text())


def test_feddp_runs_through_both_stages_on_certificates(feddp):
    _, _, results = feddp
    assert set(results["sites"]) == set(SITES)
    for site in results["sites"].values():
        for when in ("before_calibration", "final"):
            assert set(site[when]) == {"dice", "iou", "hd", "hd95", "assd"}
            assert 0 <= site[when]["dice"]["mean"] <= 1
            assert site[when]["dice"]["n"] >= 2


def test_a_site_without_consent_neither_gives_nor_receives(feddp):
    """The run goes on, and the results say who was calibrated with how many peers; the matrix has the exchangers alone."""
    job, server, results = feddp
    calibration = {site: results["sites"][site]["calibration"] for site in SITES}
    assert calibration["site-1"] == calibration["site-2"] == {"calibrated": True, "peers": 1, "tuned": True}
    assert calibration["site-3"] == {"calibrated": False, "peers": 0, "tuned": True}
    assert set(results["matrix"]) == {"site-1", "site-2"}
    assert all(set(row) == {"site-1", "site-2"} for row in results["matrix"].values())
    own = load_file(job.store("site-3") / "state_00002.safetensors")
    private = [value for name, value in own.items() if name.startswith("private/")]
    assert len(private) == 16
    for folder in (server, job.store("site-1"), job.store("site-2"), job.progress.parents[1]):
        for path in folder.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert not any(value.numpy().tobytes()[:64] in content for value in private), path


def test_what_is_exchanged_is_sealed_and_changes_no_bit(feddp, poc, plan_for, tmp_path):
    """Results and the sites' own logs say that it was; the networks are those of a plain loop over the same sites, in which
    nothing is sealed and the third takes no part in the exchange."""
    kits, _, _ = poc
    job, _, results = feddp
    assert results["sealed"] is True
    for site, events in {site: _record(job, site) for site in SITES}.items():
        peers = [peer for peer in SITES[:2] if peer != site]
        assert [e["recipients"] for e in events if e["event"] == "seal"] == ([peers] if site != "site-3" else [])
        assert [e["senders"] for e in events if e["event"] == "open"] == ([peers] if site != "site-3" else [])
    plain = drive(plan_for(**PLAN), kits.parents[3] / "data", tmp_path, tuple(SITES), silent=("site-3",))
    for name, site in plain.items():
        own, wanted = load_file(job.store(name) / "calibrated.safetensors"), site.store.read("calibrated")[0]
        assert own.keys() == wanted.keys()
        assert all(torch.equal(own[key], wanted[key]) for key in own)


def _record(job, site):
    return [json.loads(line) for line in (job.store(site) / "record.jsonl").read_text().splitlines()]


def test_no_personal_value_passes_the_server_and_its_keys_open_no_envelope(feddp, poc, capture):
    """Of every frame that the server's process got and sent, tensor downloads too: γ's values are there (the control), and two
    envelopes; no value of a private tensor is. A recipient's key unwraps what is wrapped for it; the server's does not."""
    kits, _, _ = poc
    job, _, _ = feddp
    frames = (capture.with_name("feddp") / "server.bin").read_bytes()
    for site in SITES:
        state = load_file(job.store(site) / "start.safetensors")
        private = {value_of(value) for name, value in state.items() if ".attn.q." in name}
        shared = {value_of(value) for name, value in state.items() if ".attn.q." not in name} - {NOTHING}
        assert len(private) == 16
        assert len(shared) > 50
        assert not any(value in frames for value in private)
        assert all(value in frames for value in list(shared)[:20])
    envelopes = [frames[match.start() :] for match in re.finditer(re.escape(MAGIC), frames)]
    headers = [json.loads(e[24 : 24 + int.from_bytes(e[8:16], "big")]) for e in envelopes]
    assert {(h["sender"], *h["recipients"]) for h in headers} == {("site-1", "site-2"), ("site-2", "site-1")}
    for header in headers:
        ((name, slot),) = header["recipients"].items()
        holders = [kits / name / "startup/client.key", kits / SERVER / "startup/server.key"]
        own, server = (load_pem_private_key(path.read_bytes(), password=None) for path in holders)
        assert len(own.decrypt(bytes.fromhex(slot["key"]), OAEP)) == 32
        with pytest.raises(ValueError, match="Decryption"):
            server.decrypt(bytes.fromhex(slot["key"]), OAEP)


def test_every_site_ends_with_a_network_of_its_own(feddp):
    job, _, _ = feddp
    networks = [load_file(job.store(site) / "calibrated.safetensors") for site in SITES]
    query = "encoder.model.stages_0.blocks.0.attn.q.weight"
    assert not any((networks[i][query] == networks[j][query]).all() for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_hospital_that_joins_later_gets_the_donors_models_and_nobody_else_does(poc, feddp, capture, tmp_path):
    """The job of `feddp job-outside`, from what download_job brought of the finished run, equals `feddp adapt` on the networks
    that the donors took home, bit for bit. The newcomer keeps masks and no model, the donors' files are as they were, and no
    value of a donor's network is in a file of the server's or in a frame that it got or sent; that the search finds what is
    there, the shared tensors show."""
    kits, _, submit = poc
    earlier, server, results = feddp
    assert results["job"] == earlier.id
    donors, newcomer = SITES[:2], SITES[2]
    before = {path: path.read_bytes() for site in donors for path in earlier.store(site).iterdir()}
    data, home, options = kits.parents[3] / "data" / newcomer, tmp_path / "run", ["epochs=1", "seed=3"]
    capture.mkdir()
    job = submit(outside.export(server, newcomer, donors, tmp_path / "outside", "routing", options, score=True))
    capture.rename(capture.with_name("outside"))
    succeeded, left = job.outcome()
    assert succeeded, job.log.read_text()[-3000:]

    for site in donors:
        bring_home(earlier.store(site), home / "sites" / site)
    shutil.copy(handed_on(server, results["start_round"]), home / "shared.safetensors")
    (home / "results.json").write_text(json.dumps({"sites": dict.fromkeys(donors)}))
    words = ["--models", home, "--images", data, "--out", tmp_path / "masks", "--epochs", 1, "--seed", 3, "--score"]
    done = CliRunner().invoke(app, ["adapt", *map(str, words)])
    assert done.exit_code == 0, done.output
    expected, found = ({p.name: p.read_bytes() for p in folder.glob("*.png")} for folder in (tmp_path / "masks", masks(job)))
    assert found == expected
    assert len(found) >= 2
    here, there = (json.loads((folder / "adapt.json").read_text()) for folder in (tmp_path / "masks", masks(job)))
    assert here["losses"] == there["losses"]

    said = json.loads((left / "results.json").read_text())
    assert (said["run"], said["newcomer"], said["donors"], said["without"]) == (earlier.id, newcomer, donors, {})
    assert said["sealed"] is True
    assert said["images"] == len(found)
    assert (said["loss_before"], said["loss"]) == (here["losses"][0], min(here["losses"]))
    assert said["scores"] == json.loads((tmp_path / "masks/scores.json").read_text())["summary"]

    assert {path: path.read_bytes() for site in donors for path in earlier.store(site).iterdir()} == before
    assert not list(job.store(newcomer).rglob("*.safetensors"))
    shared = load_file(handed_on(server, results["start_round"]))
    known = {value_of(tensor) for tensor in shared.values()}
    personal = {value_of(t) for s in donors for t in load_file(earlier.store(s) / "calibrated.safetensors").values()} - known
    assert len(personal) > 100
    contents = [path.read_bytes() for root in (kits / SERVER, left) for path in root.rglob("*") if path.is_file()]
    assert any(value in content for content in contents for value in known), "the control"
    assert not any(value in content for content in contents for value in personal)
    frames = (capture.with_name("outside") / "server.bin").read_bytes()
    assert sum(value in frames for value in known) > 50, "the control"
    assert not any(value in frames for value in personal)


def masks(job) -> Path:
    return job.store("site-3") / "masks"


NOTHING = b"nothing to tell it by"


def value_of(tensor) -> bytes:
    """A piece of a tensor's bytes that no other tensor has by chance."""
    return tensor.numpy().tobytes()[:64] if tensor.numel() >= 16 and tensor.unique().numel() > 8 else NOTHING


def test_a_sites_policy_stops_a_job_that_tries_and_the_others_go_on(poc, plan_for):
    """FedAvg shares the queries; the third hospital's privacy.json forbids it: its contribution never leaves, by name."""
    kits, run, _ = poc
    job = run("fedavg", plan_for(method="fedavg", rounds=1))
    succeeded, server = job.outcome()
    assert succeeded
    events = [json.loads(line) for line in (server / "progress.jsonl").read_text().splitlines()]
    refused = [e for e in events if e["event"] == "refused" and e["task"] == "train"]
    assert [e["site"] for e in refused] == ["site-3"]
    assert "TASK_RESULT_FILTER_ERROR" in refused[0]["reason"]
    for file in ("log.txt", "audit.log"):
        said = (kits / "site-3" / job.id / file).read_text()
        assert "egress guard stopped: site site-3: task train tried to send 16 tensors that may not leave" in said, file
        assert "egress guard stopped" not in (kits / "site-1" / job.id / file).read_text(), file
    assert {e["site"] for e in events if e["event"] == "answer" and e["task"] == "train"} == {"site-1", "site-2"}


def test_a_job_of_an_unknown_scope_is_refused_by_every_site(poc, plan_for):
    kits, run, _ = poc
    job = run("unscoped", plan_for(rounds=1), scope="research")
    assert job._status != "FINISHED:COMPLETED"
    assert not (kits / "site-1" / "feddp" / job.id).exists(), "no site opened its data for it"


def test_a_class_that_is_not_on_the_list_is_refused(poc, plan_for):
    """FLARE's own widget that would carry metrics round every filter: not on our sites' list."""

    def edit(folder: Path):
        path = folder / "app_client/config/config_fed_client.json"
        config = json.loads(path.read_text())
        config["components"].append({"id": "x", "path": "nvflare.app_common.widgets.convert_to_fed_event.ConvertToFedEvent"})
        path.write_text(json.dumps(config))

    kits, run, _ = poc
    job = run("smuggler", plan_for(rounds=1), edit=edit)
    assert job._status != "FINISHED:COMPLETED"
    assert "is not in allow_list" in (kits / "site-1" / job.id / "log.txt").read_text()


def test_the_kits_hold_our_policy_and_stream_no_logs(poc):
    kits, _, _ = poc
    for name in (SERVER, *SITES):
        local = kits / name / "local"
        for path in [p for p in (local / "resources.json", local / "resources.json.default") if p.exists()]:
            resources = json.loads(path.read_text())
            assert resources["class_list_enforcement_mode"] == "enforce"
            assert all(c.startswith("feddp.flare.") for c in resources["class_allow_list"])
            assert resources["allow_log_streaming"] is False
            assert not {"site_log_streamer", "log_receiver"} & {c["id"] for c in resources["components"]}
    privacy = json.loads((kits / "site-3/local/privacy.json").read_text())
    assert privacy["scopes"][0]["task_result_filters"] == [{"path": "feddp.flare.filters.PrivateTensorGuard", "args": {}}]


def test_a_server_that_is_not_ready_is_asked_again(monkeypatch, tmp_path):
    """FLARE's session raises NoConnection, or a TypeError on a server that listens before it has its certificate; and where no
    site ever joins, the last reason is said, with where to look."""
    joined = SimpleNamespace(get_system_info=lambda: SimpleNamespace(client_info=[SimpleNamespace(name="site-1")]))
    answers = iter([NoConnection("nobody there"), TypeError("'None' is not an instance of 'bytes'"), joined])

    def session(*_, **__):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("feddp.run.poc.new_secure_session", session)
    monkeypatch.setattr("feddp.run.poc.time.sleep", lambda _: None)
    assert connect(tmp_path, ["site-1"]) is joined
    monkeypatch.setattr("feddp.run.poc.READY", 0.05)
    answers = iter(lambda: TypeError("half an answer"), None)
    with pytest.raises(FedDPError, match=r"within 0.05 s \(last: TypeError: half an answer\); see console.log"):
        connect(tmp_path, ["site-1"])
