"""`feddp kit approve`: what a hospital's administrator is told of a job, and the line that lets it run."""

import json
import os
from types import SimpleNamespace

import pytest
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE
from nvflare.lighter.utils import serialize_cert, serialize_pri_key
from typer.testing import CliRunner

from feddp.adaptation.request import AdaptationRequest
from feddp.cli import app
from feddp.errors import FedDPError
from feddp.flare.budget import Ledger
from feddp.flare.policy import Budget, SitePolicy
from feddp.jobs.folder import export, write_job
from feddp.kit.describe import described
from feddp.plan.resolve import build_network, partition_of
from feddp.provision import GUARD
from support.certificates import SERVER, Office
from support.tls import listening, mutual

SITES = ("site-1", "site-2", "site-3")
RUN = "0d2c1f2e-1111-4222-8333-444455556666"


@pytest.fixture
def plan(plan_for):
    return plan_for(sites=SITES, min_sites=3)


@pytest.fixture
def folder(plan, tmp_path):
    return export(plan, tmp_path / "ours")


@pytest.fixture
def kit(tmp_path, tiny_root):
    """site-1's, whose policy consents to nothing; as it is provisioned, no job is approved."""
    folder = tmp_path / "kit"
    for name in ("startup", "local"):
        (folder / name).mkdir(parents=True)
    servers = [{"name": "feddp", "identity": "server", "service": {"target": "server:8002"}}]
    (folder / "startup/fed_client.json").write_text(json.dumps({"servers": servers, "client": {"fqsn": "site-1"}}))
    (folder / "local/resources.json.default").write_text('{"components": []}')
    scopes = [
        {
            "name": name,
            "properties": {"data": str(tiny_root / "site-1"), "approve": []},
            "task_result_filters": [{"path": GUARD}],
        }
        for name in ("feddp", "study")
    ]
    (folder / "local/privacy.json").write_text(json.dumps({"scopes": scopes}))
    (folder / "local/privacy.json").chmod(0o600)
    return folder


def approve(folder, kit, *options, answer=None):
    done = CliRunner().invoke(app, ["kit", "approve", str(folder), str(kit), *options], input=answer)
    if isinstance(done.exception, FedDPError):
        raise done.exception
    return done.exit_code, done.output


def properties(kit, scope="feddp") -> dict:
    return next(s for s in json.loads((kit / "local/privacy.json").read_text())["scopes"] if s["name"] == scope)["properties"]


def edit(kit, **changes) -> None:
    content = json.loads((kit / "local/privacy.json").read_text())
    content["scopes"][0]["properties"].update(changes)
    (kit / "local/privacy.json").write_text(json.dumps(content))


def policy(kit) -> SitePolicy:
    return SitePolicy.of("site-1", properties(kit), simulated=False)


def test_the_line_that_is_written_lets_this_plan_in_and_no_other(folder, kit, plan, plan_for):
    with pytest.raises(FedDPError, match="has not approved"):
        policy(kit).accept("site-1", plan)
    code, said = approve(folder, kit, "--yes")
    assert code == 0
    assert properties(kit)["approve"] == [{"job": "ours", "plan": plan.digest()}]
    policy(kit).accept("site-1", plan)
    with pytest.raises(FedDPError, match="has not approved"):
        policy(kit).accept("site-1", plan_for(sites=SITES, min_sites=3, seed=1))
    assert properties(kit, "study")["approve"] == [], "the job's scope alone"
    assert os.stat(kit / "local/privacy.json").st_mode & 0o777 == 0o600
    assert sorted(os.listdir(kit / "local")) == ["privacy.json", "resources.json.default"]
    code, said = approve(folder, kit, "--yes")
    assert (code, "takes it already" in said) == (0, True)
    assert len(properties(kit)["approve"]) == 1


def test_what_the_job_will_do_is_said(folder, kit, plan):
    """Facts that are this plan's: names, bytes of the shared tensors, steps over the 8 images, consent that this kit lacks."""
    _, said = approve(folder, kit, answer="n\n")
    state = build_network(plan).state_dict()
    shared = partition_of(plan, build_network(plan)).shared
    nbytes = sum(state[name].numel() * state[name].element_size() for name in shared)
    for words in (
        f"plan {plan.digest()}",
        "method feddp, network pvt_v2_b0-fpn, images of 3 channels at 32 x 32",
        "sites: site-1, site-2, site-3; a round needs the answers of 3",
        f"sent to the server in every round (2 in all): {len(shared)} tensors, {nbytes:,} bytes",
        "not sent to the server: 16 tensors of this network",
        "each round: 1 epoch in steps of 4 images, 2 steps per epoch for the 8 training images here; learning rate 0.001",
        "stages: train, calibrate",
        "consent to calibration: the job asks for it; this kit does not consent",
        f"to the other sites: once, 16 tensors, {4 * 193_536:,} bytes, which complete",  # parameters by hand: test_partition
        "initial tensors: none",
        "batch=4 (default 6): samples",
        "; privacy: with fewer images per step, the tensors that leave reveal more about each image",
        "calibration_epochs=1 (default 20)",
    ):
        assert words in said
    edit(kit, consent=["calibration"], recipients=["site-2"], senders=["site-3"])
    said = "consent to calibration: the job asks for it; this kit consents, for site-2, and uses what site-3 gives"
    assert said in approve(folder, kit, answer="n\n")[1]


@pytest.mark.parametrize(("batch", "said"), [(3, "3 steps"), (7, "1 step"), (8, "1 step")])
def test_the_steps_are_those_that_training_makes(kit, plan_for, tiny_root, batch, said):
    """Of 8 images and batches of 7 the eighth waits for another epoch: batch normalization takes no batch of one image."""
    job = SimpleNamespace(plan=plan_for(sites=SITES, batch=batch), request=None, asked=None, resume="")
    text = "\n".join(described("ours", job, policy(kit), tiny_root / "site-1"))
    assert f"in steps of {batch} images, {said} per epoch for the 8 training images here" in text


@pytest.mark.parametrize(("start", "least", "notes"), [("best", 5, 2), ("last", 5, 1), ("best", 2, 0)])
def test_too_few_images_to_select_rounds_by_are_said(plan_for, tmp_path, kit, start, least, notes):
    """The tiny site has two. Other sites may have enough, so it is no reason against the job."""
    edit(kit, min_images=least)
    job = export(plan_for(method="fedavg", sites=SITES, min_sites=3, start=start), tmp_path / "job")
    said = approve(job, kit, answer="n\n")[1]
    few = "note: 2 images in val here, and min_images of privacy.json is 5: no score leaves"
    part = "  this site has no part in the choice of the best round; if no site has enough, the job ends at its start"
    assert [line for line in (few, part) if line in said] == [few, part][:notes]
    assert "refused" not in said


def test_settings_that_are_not_the_jobs_own_choice_are_not_listed(folder, kit, plan_for):
    """`feddp job` asks for three sites by itself; an adaptation trains nothing, so the run's settings do not concern it."""
    said = approve(folder, kit, answer="n\n")[1]
    assert "min_sites" not in said
    assert "calibration_epochs=1" in said
    request = AdaptationRequest("site-1", ("site-2",), "11111111-2222-3333-4444-555555555555", settings={"epochs": 3})
    late = SimpleNamespace(plan=plan_for(sites=SITES, min_sites=1), request=request, asked=None, resume="")
    text = "\n".join(described("late", late, policy(kit), None))
    assert "settings of the adaptation that differ from the defaults: epochs=3" in text
    assert not [name for name in late.plan.settings if f"{name}=" in text]


def test_until_when_the_site_can_take_part_is_said(folder, kit):
    """The server's certificate too, if the server shows it; else the hospital approves all the same."""
    office = Office()
    for name, whose in (("client", "site-1"), ("server", SERVER)):
        certificate, key = office.issue(whose, until=20)
        (kit / f"startup/{name}.crt").write_bytes(serialize_cert(certificate))
        (kit / f"startup/{name}.key").write_bytes(serialize_pri_key(key))
    (kit / "startup/rootCA.pem").write_bytes(serialize_cert(office.root))
    configuration = json.loads((kit / "startup/fed_client.json").read_text())
    configuration["servers"][0]["identity"] = SERVER
    (kit / "startup/fed_client.json").write_text(json.dumps(configuration))
    with listening(mutual(kit, kit), kit):
        said = approve(folder, kit, answer="n\n")[1]
    for whose, start in (("site-1", "warning: "), (f"the server {SERVER}", "warning: "), ("the root of project feddp", "")):
        assert f"\n{start}the certificate of {whose} is valid until " in said
    code, said = approve(folder, kit, "--yes")
    assert code == 0
    assert "warning: the server 127.0.0.1:" in said


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("feddg", "to the other sites: once, the centres of at most 16 mean amplitude spectra, each of a group of patients"),
        ("fedlc", "to the other sites: in every epoch (1 in all), 2 tensors of the head"),
    ],
)
def test_what_an_exchange_gives_is_said(plan_for, tmp_path, kit, method, words):
    folder = export(plan_for(method=method, sites=SITES, min_sites=3), tmp_path / method)
    assert words in approve(folder, kit, answer="n\n")[1]


def test_a_job_that_the_hospitals_own_private_stands_against(plan_for, tmp_path, kit):
    edit(kit, private=["query"])
    folder = export(plan_for(method="fedavg", sites=SITES, min_sites=3), tmp_path / "job")
    said = approve(folder, kit, answer="n\n")[1]
    assert "the job shares 16 query tensors, which `private` of privacy.json keeps at this site: the guard stops them" in said


@pytest.mark.parametrize("late", [False, True])
def test_a_network_without_what_the_hospital_keeps_private_is_not_approved(plan_for, tmp_path, kit, late):
    """The site refuses it; `tests/integration/test_guard.py`. So it does an adaptation."""
    edit(kit, private=["query", "projector"])
    plan = plan_for(sites=SITES, min_sites=3)
    request = AdaptationRequest("N", ("site-1",), RUN) if late else None
    code, said = approve(write_job(tmp_path / "job", "feddp", plan, request, None), kit, "--yes")
    assert code == 2
    assert "refused: its policy keeps projector private, but the job's pvt_v2_b0-fpn has no such tensor" in said
    assert properties(kit)["approve"] == []


def test_a_job_that_continues_a_run_is_approved_as_the_site_takes_it(plan_for, plan, tmp_path, kit):
    """Under the consent with which the run began, for its own plan, and as long as the site has it."""
    folder, run = export(plan, tmp_path / "again", resume=RUN), kit / "feddp" / RUN
    run.mkdir(parents=True)
    (run / "plan.json").write_text(json.dumps(plan.to_json()))
    terms = {"data": str(policy(kit).data.resolve()), "private": [], "consent": [], "recipients": None}
    (run / "terms.json").write_text(json.dumps(terms))
    assert "Let it run here?" in approve(folder, kit, answer="n\n")[1]

    def refused(words: str) -> None:
        code, said = approve(folder, kit, "--yes")
        assert code == 2
        assert f"refused: {words}" in said
        assert properties(kit)["approve"] == []

    edit(kit, consent=["calibration"])
    refused(f"{run} belongs to a run that began under another consent in privacy.json; submit the job as a new one")
    edit(kit, consent=[])
    (run / "plan.json").write_text(json.dumps(plan_for(sites=SITES, min_sites=3, seed=1).to_json()))
    refused(f"{run} belongs to a run with seed=1, but this job has seed=0")
    (kit / "feddp/removed").mkdir()
    run.rename(kit / "feddp/removed" / RUN)
    refused(f"site site-1: it removed the run {RUN}")


def test_a_job_for_other_images_is_not_approved(plan_for, tmp_path, kit):
    folder = export(plan_for(sites=SITES, min_sites=3, channels=1, classes=("disc", "cup")), tmp_path / "job")
    code, said = approve(folder, kit, "--yes")
    assert code == 2
    assert "refused: the job is for 1 channels, disc, cup (nested), but " in said
    assert "has 3 channels, lesion (nested); ask its lead" in said


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:\N{ARABIC-INDIC DIGIT THREE}", 0])
def test_a_device_that_is_none_is_named(folder, kit, device):
    edit(kit, device=device)
    with pytest.raises(FedDPError, match="write cpu, cuda or cuda:N"):
        approve(folder, kit, "--yes")


def test_without_a_yes_nothing_is_written(folder, kit):
    before = (kit / "local/privacy.json").read_bytes()
    code, said = approve(folder, kit, answer="n\n")
    assert (code, "nothing was written" in said) == (1, True)
    assert (kit / "local/privacy.json").read_bytes() == before
    assert approve(folder, kit, answer="y\n")[0] == 0
    assert len(properties(kit)["approve"]) == 1


def test_what_another_user_writes_the_site_could_not_read(folder, kit, monkeypatch):
    before = (kit / "local/privacy.json").read_bytes()
    monkeypatch.setattr(os, "geteuid", lambda: kit.stat().st_uid + 1)
    with pytest.raises(FedDPError, match=f"belongs to user {kit.stat().st_uid}, who could not read what you write there; type"):
        approve(folder, kit, "--yes")
    assert (kit / "local/privacy.json").read_bytes() == before


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"jobs": 3}, ""),
        ({"jobs": 2}, "site-1 is used up (2 of 2 jobs); `feddp"),
        ({"evaluations": 1}, "is used up (1 of 1 evaluations)"),
    ],
)
def test_a_job_beyond_the_budget_is_not_approved(folder, kit, tiny_root, budget, words):
    """Two jobs and one evaluation have used the site's data."""
    ledger = Ledger("site-1", kit / "feddp")
    ledger.enter(tiny_root / "site-1", "one", Budget())
    ledger.measured(tiny_root / "site-1", "two", Budget())
    edit(kit, budget=budget)
    code, said = approve(folder, kit, "--yes")
    assert (code, len(properties(kit)["approve"])) == ((2, 0) if words else (0, 1))
    assert words in said


@pytest.mark.parametrize(
    ("changes", "own", "words"),
    [
        ({"lr": 40}, {}, "lr=40.0 is above its upper bound 0.01"),
        ({"batch": 1}, {}, "batch=1 is below its lower bound 4"),
        ({}, {"methods": ["fedavg"]}, "its policy accepts the methods: fedavg, but the job uses feddp"),
        ({}, {"bounds": {"batch": 4, "min_sites": 4}}, "min_sites=3 is below its lower bound 4"),
        ({"batch": 16}, {"bounds": {"batch": 9}}, "it has 8 training images, but its bounds require at least 9 per step"),
        ({"sites": ("a", "b", "c")}, {}, "the job is not for site-1"),
    ],
)
def test_what_the_bounds_refuse_is_not_approved(plan_for, tmp_path, kit, changes, own, words):
    edit(kit, **own)
    before = (kit / "local/privacy.json").read_bytes()
    folder = export(plan_for(**{"sites": SITES, "min_sites": 3} | changes), tmp_path / "job")
    code, said = approve(folder, kit, "--yes")
    assert code == 2
    assert f"refused: {words}" in said
    assert (kit / "local/privacy.json").read_bytes() == before


def test_a_folder_that_no_site_would_take_is_not_approved(folder, kit, tmp_path):
    """It is read by what reads it at the site: the hash is of what is deployed, or there is none."""
    config = folder / "app_client/config/config_fed_client.json"
    content = json.loads(config.read_text())
    content["components"].append({"id": "x", "path": "os.mkdir"})
    whole = config.read_text()
    config.write_text(json.dumps(content))
    with pytest.raises(FedDPError, match=r"config_fed_client.json: components\[1\] is"):
        approve(folder, kit, "--yes")
    config.write_text(whole)
    (folder / "app_other").mkdir()
    with pytest.raises(FedDPError, match="holds 'app_other'"):
        approve(folder, kit, "--yes")
    (folder / "app_other").rmdir()
    with pytest.raises(FedDPError, match="is not a job's folder"):
        approve(tmp_path / "nowhere", kit, "--yes")
    assert properties(kit)["approve"] == []
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):  # as FLARE's console leaves it
        (inner / NVFLARE_SIG_FILE).write_text("{}")
        (inner / NVFLARE_SUBMITTER_CRT_FILE).write_text("certificate")
    assert approve(folder, kit, "--yes")[0] == 0


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_no_pipe_in_a_jobs_folder_is_waited_for(folder, kit, side, make):
    """A folder of that name was an error of the system, without a remedy."""
    file = f"config/config_fed_{side}.json"
    (folder / f"app_{side}" / file).unlink()
    make(folder / f"app_{side}" / file)
    with pytest.raises(FedDPError, match=f"^app_{side}: {file} is not a regular file; export the job with `feddp job`"):
        approve(folder, kit, "--yes")


def test_a_pipe_as_the_policy_is_named(folder, kit):
    (kit / "local/privacy.json").unlink()
    os.mkfifo(kit / "local/privacy.json")
    with pytest.raises(FedDPError, match=r"local/privacy\.json: is not a regular file\."):
        approve(folder, kit, "--yes")


def test_a_newcomers_job_is_approved_as_what_it_is(plan_for, tmp_path, kit):
    """Of a request with other donors nothing was said."""
    plan = plan_for(sites=SITES)
    request = AdaptationRequest("N", ("site-1", "site-2"), "0d2c1f2e-1111-4222-8333-444455556666", settings={"epochs": 3})
    code, said = approve(write_job(tmp_path / "late", "feddp", plan, request, None), kit, "--yes")
    assert code == 0
    assert "site-1, site-2 give their whole networks of job 0d2c1f2e-1111-4222-8333-444455556666 to N" in said
    assert "epochs=3" in said
    assert "consent to outside: the job asks for it; this kit does not consent" in said
    policy(kit).accept("site-1", plan, request.to_json())
    with pytest.raises(FedDPError, match="has not approved"):
        policy(kit).accept(
            "site-1", plan, AdaptationRequest("M", ("site-1", "site-2"), request.job, settings={"epochs": 3}).to_json()
        )


def test_a_policy_that_takes_any_plan_keeps_its_word(folder, plan_for, tmp_path, kit):
    """An adaptation is not covered by it, and has no place beside it: the site would refuse every job."""
    edit(kit, approve="any")
    request = AdaptationRequest("N", ("site-1",), "0d2c1f2e-1111-4222-8333-444455556666")
    late = write_job(tmp_path / "late", "feddp", plan_for(sites=SITES), request, None)
    code, said = approve(late, kit, "--yes")
    assert code == 2
    assert f'refused: `approve` is "any" in {kit / "local/privacy.json"}, which does not cover an adaptation; write' in said
    assert properties(kit)["approve"] == "any"
    code, said = approve(folder, kit, "--yes")
    assert (code, "takes it already" in said) == (0, True)
    edit(kit, approve=[])
    assert approve(late, kit, "--yes")[0] == 0
    assert policy(kit).approves(plan_for(sites=SITES), request.to_json())


def test_an_adaptation_of_a_run_that_keeps_more_private_is_not_approved(plan_for, tmp_path, kit):
    request = AdaptationRequest("N", ("site-1",), "0d2c1f2e-1111-4222-8333-444455556666")
    folder = write_job(tmp_path / "late", "feddp", plan_for(sites=SITES), request, None)
    run = kit / "feddp" / request.job
    run.mkdir(parents=True)
    terms = {"data": "/d", "private": ["query", "head"], "consent": [], "recipients": None}
    (run / "terms.json").write_text(json.dumps(terms))
    edit(kit, private=["query"])
    code, said = approve(folder, kit, "--yes")
    assert code == 2
    assert f"refused: {run} belongs to a run that keeps head private here" in said
    edit(kit, private=["query", "head"])
    assert approve(folder, kit, "--yes")[0] == 0


def test_only_a_hospitals_kit_approves(folder, kit):
    (kit / "startup/fed_client.json").rename(kit / "startup/fed_server.json")
    content = json.loads((kit / "startup/fed_server.json").read_text())
    content["servers"][0]["admin_server"] = "server"
    (kit / "startup/fed_server.json").write_text(json.dumps(content))
    with pytest.raises(FedDPError, match="is the kit of a server"):
        approve(folder, kit, "--yes")
