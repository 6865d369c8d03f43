"""Job folders: the committed ones are what `feddp job` exports, and every one of them runs."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.app_common.resource_managers.gpu_resource_manager import GPUResourceManager
from nvflare.private.fed.server.server_json_config import ServerJsonConfigurator
from typer.testing import CliRunner

from benchmarks.small import shallow
from feddp.cli import app
from feddp.data.synthesize import synthesize
from feddp.errors import FedDPError, PolicyError, StorageError
from feddp.files import WEIGHTS
from feddp.flare.configuration import SERVER_CLASSES, SITE_CLASSES
from feddp.flare.job_folder import read_folder, require_meta
from feddp.flare.site import SiteComponent
from feddp.jobs.folder import export, jobs_in
from feddp.networks import NETWORKS
from feddp.networks.weights import fingerprint, save_network
from feddp.plan.resolve import build_network, initial_tensors
from feddp.plan.schema import Plan
from feddp.run import session
from feddp.run.local import local
from feddp.run.options import Options, resume_here, run_here
from support import ROOT
from support.disk import full

SYNTHETIC = ["--sites", "site-1,site-2,site-3,site-4", "--rounds", "15"]
COMMITTED = {
    "feddp_synthetic": [*SYNTHETIC, "--calibration-epochs", "5"],
    "fedavg_synthetic": [*SYNTHETIC, "--method", "fedavg"],
    "feddp_lgg": ["--sites", "CS,DU,FG,HT", "--classes", "tumour", "--rounds", "200", "--size", "256"],
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_committed_job_is_listed_here():
    assert {p.name for p in (ROOT / "jobs").iterdir()} == set(COMMITTED)


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_folder_is_what_is_exported(name, tmp_path):
    done = CliRunner().invoke(app, ["job", "--out", str(tmp_path / name), *COMMITTED[name]])
    assert done.exit_code == 0, done.output
    assert files(tmp_path / name) == files(ROOT / "jobs" / name)


@pytest.mark.parametrize("name", COMMITTED)
def test_a_committed_job_names_only_the_classes_that_sites_allow(name):
    for side, allowed in (("server", SERVER_CLASSES), ("client", SITE_CLASSES)):
        config = (ROOT / "jobs" / name / f"app_{side}/config/config_fed_{side}.json").read_text()
        paths = {part.split('"')[0] for part in config.split('"path": "')[1:]}
        assert paths <= set(allowed.values())
        assert not list((ROOT / "jobs" / name).rglob("custom")), "BYOC"


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    root = tmp_path_factory.mktemp("four")
    synthesize(root, sites=4, images=10, size=32)
    return root


@pytest.mark.parametrize("name", COMMITTED)
def test_a_committed_job_runs_a_round(name, four, tmp_path, monkeypatch):
    """Its plan as it is, but for its numbers: one round, one calibration epoch, 32 px; its network with fewer channels. Here in
    one process; that FLARE runs what is exported to the same bits, test_environments.py and test_simulator.py show."""
    job = ROOT / "jobs" / name
    config = json.loads((job / "app_server/config/config_fed_server.json").read_text())
    (plan,) = [c["args"]["plan"] for c in config["components"]]
    monkeypatch.setitem(NETWORKS, plan["network"], shallow)
    plan |= {"rounds": 1, "size": 32, "settings": {"calibration_epochs": 1}}
    sites = json.loads((job / "meta.json").read_text())["deploy_map"]["app_client"]
    data = tmp_path / "data"
    shutil.copytree(four, data)
    for made, site in zip(sorted(data.iterdir()), sites, strict=True):
        description = json.loads((made / "dataset.json").read_text()) | {"classes": plan["classes"]}
        (made / "dataset.json").write_text(json.dumps(description))
        made.rename(data / site)
    policies = {site: {"data": str(data / site), "consent": ["calibration"]} for site in sites}
    plan = Plan.from_json(plan)
    results = session.run(session.Request(plan, policies, tmp_path / "run"), local, name)
    assert set(results["sites"]) == set(sites)
    for site in results["sites"].values():
        assert site["final"]["dice"]["n"] >= 2
        assert ("calibration" in site) == ("calibrate" in plan.stages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "fedmagic"], "unknown method 'fedmagic'; known: apfl, centralized, ditto, "),
        (["--network", "vgg"], "unknown network 'vgg'; known: pvt_v2_b0-fpn, pvt_v2_b1-fpn"),
        (["--rounds", "0"], "rounds=0"),
        (["--size", "100"], "size=100"),
        (["--set", "lr"], "--set lr: write key=value"),
        (["--set", "lr=fast"], "lr='fast' cannot be read as float"),
        (["--set", "speed=1"], "unknown setting 'speed'"),
        (["--set", "private=queries"], "queries"),
        (["--set", "min_sites=3"], "2 sites are fewer than min_sites=3"),
        (["--network", "resnet18-fpn"], "'query' selects no tensor"),
        (["--method", "fedavg", "--calibration-epochs", "3"], "fedavg has no calibration"),
        (["--then", "igc", "--calibration-epochs", "0"], "drop one"),
        (["--then", "magic"], "--then magic"),
        (["--weights", "nowhere.pth"], "nowhere.pth"),
    ],
)
def test_a_wrong_job_is_refused_before_it_is_written(arguments, message, tmp_path):
    with pytest.raises(FedDPError, match=message.replace("(", r"\(")):
        CliRunner().invoke(app, ["job", "--out", str(tmp_path / "x"), "--sites", "A,B", *arguments], catch_exceptions=False)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["method", "network"])
def test_a_job_edited_by_hand_is_refused_by_every_component(name, plan_for):
    """A lead can write any JSON: both sides read it the same way, and say what is known."""
    from feddp.flare.persistor import SharedTensorPersistor

    plan = plan_for().to_json() | {name: "unheard of"}
    for component in (SiteComponent, SharedTensorPersistor):
        with pytest.raises(FedDPError, match=f"unknown {name} 'unheard of'"):
            component(plan)


@pytest.mark.parametrize("weights", ["../../feddp/other/start.safetensors", WEIGHTS, "5A" * 32, "5a" * 31, "5a" * 32 + "\n"])
def test_a_job_names_no_path_at_a_participant(plan_for, weights):
    """A file of another job of the site, say: a plan says the SHA-256 of what its job starts from, and nothing else."""
    with pytest.raises(FedDPError, match="is not a SHA-256 in hex"):
        plan_for(weights=weights)
    assert plan_for(weights="5a" * 32).weights == "5a" * 32, "the control"


def test_only_a_job_of_ours_is_replaced(plan_for, tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job/meta.json").write_text("{}")
    with pytest.raises(FedDPError, match="neither empty nor an exported job"):
        export(plan_for(), tmp_path / "job")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FedDPError, match="neither empty nor an exported job"):
        export(plan_for(), tmp_path / "file")
    assert export(plan_for(), tmp_path / "ours") == export(plan_for(rounds=3), tmp_path / "ours")


def test_what_only_looks_like_a_job_is_no_job_of_ours(feddp, tmp_path):
    """Neither text in another encoding, nor a file that is far too large, nor a pipe, which is not waited for."""
    config = tmp_path / "job/app_server/config/config_fed_server.json"
    config.parent.mkdir(parents=True)

    def refused():
        code, _, said = feddp("job", "--sites", "A,B", "--size", "32", "--out", tmp_path / "job")
        return code == 2 and f"{tmp_path / 'job'} is neither empty nor an exported job; choose another folder" in said

    named = SERVER_CLASSES["persistor"].encode()
    config.write_bytes(b"\xff\xfe")
    assert refused()
    with open(config, "wb") as file:
        file.write(named)
        file.truncate(2**30)
    assert refused()
    config.unlink()
    os.mkfifo(config)
    assert refused()


@pytest.fixture
def put_aside(plan_for, tmp_path):
    """A job whose replacement was killed between its two renames: the old job and the new one have hidden names."""
    job = export(plan_for(rounds=3), tmp_path / "job")
    before = files(job)
    export(plan_for(rounds=4), tmp_path / "new").rename(tmp_path / ".job.part")
    job.rename(tmp_path / ".job.old")
    return before


def test_a_job_whose_replacement_was_killed_is_not_lost(put_aside, plan_for, tmp_path):
    """Neither where the next export fails, here on a full disk, nor where a run is looked for; then it is replaced."""
    with full(tmp_path), pytest.raises(StorageError):
        export(plan_for(rounds=5), tmp_path / "job")
    assert files(tmp_path / "job") == put_aside
    (tmp_path / "job").rename(tmp_path / ".job.old")
    assert jobs_in(tmp_path) == [tmp_path / "job"]
    assert files(tmp_path / "job") == put_aside
    assert files(export(plan_for(rounds=5), tmp_path / "job")) != put_aside
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def in_use(folder, patience):
    raise PolicyError(f"{folder} is in use by another process")


def foreign(old, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: old.stat().st_uid + 1)


@pytest.mark.parametrize(
    "plant",
    [
        foreign,
        lambda old, _: old.symlink_to(old.rename(old.with_name("elsewhere"))),
        lambda old, _: [shutil.rmtree(old), old.write_text("no folder")],
        lambda old, _: [shutil.rmtree(old), old.mkdir()],
    ],
    ids=["of another user", "a link", "a file", "no job"],
)
def test_what_this_user_s_export_did_not_put_aside_stays_aside(put_aside, tmp_path, monkeypatch, plant):
    plant(tmp_path / ".job.old", monkeypatch)
    jobs_in(tmp_path)
    assert not (tmp_path / "job").exists()
    assert (tmp_path / ".job.old").exists()


def test_a_job_that_cannot_be_replaced_stays(plan_for, tmp_path, monkeypatch):
    before, rename = files(export(plan_for(rounds=3), tmp_path / "job")), Path.rename

    def refuses(path, target):
        if path.name == ".job.part":
            raise OSError("the disk broke")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuses)
    with pytest.raises(OSError, match="the disk broke"):
        export(plan_for(rounds=4), tmp_path / "job")
    assert files(tmp_path / "job") == before
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_a_run_whose_job_was_put_aside_is_continued_from_its_tensors(tiny_root, toy, tmp_path, monkeypatch):
    """The checkpoint is gone: the job in the run's folder alone has the tensors.

    The run is locked first, because another process may be between its two renames.
    """
    checkpoint, out = tmp_path / "checkpoint.safetensors", tmp_path / "run"
    plan = Options("fedavg", network=toy).plan({"channels": 3, "classes": ("lesion",), "labels": "nested"}, ["A", "B"])
    save_network(checkpoint, build_network(plan).state_dict(), {})
    options = Options("fedavg", 1, network=toy, size=32, settings=("batch=4",), weights=str(checkpoint))
    with monkeypatch.context() as patch:
        patch.setattr("feddp.run.local.served", lambda *_: (_ for _ in ()).throw(FedDPError("killed")))
        with pytest.raises(FedDPError, match="killed"):
            run_here(tiny_root, out, options, "local")
    checkpoint.unlink()
    (job,) = (out / "job").iterdir()
    aside = job.rename(job.with_name(f".{job.name}.old"))
    with monkeypatch.context() as patch:
        patch.setattr("feddp.run.options.hold", in_use)
        with pytest.raises(PolicyError):
            resume_here(out)
    assert aside.exists()
    assert resume_here(out)["sites"].keys() == {"site-1", "site-2"}
    assert [path.name for path in (out / "job").iterdir()] == [job.name]


def test_a_job_brings_its_initial_tensors_along(plan_for, toy, tmp_path):
    """In the server's app alone; both plans say what they are: here, ones."""
    state = {name: torch.ones_like(value) for name, value in build_network(plan_for(network=toy)).state_dict().items()}
    plan = plan_for(network=toy, weights=fingerprint(state))
    job = export(plan, tmp_path / "job", initial=state)
    assert [str(path.relative_to(job)) for path in job.rglob("*.safetensors")] == [f"app_server/config/{WEIGHTS}"]
    initial = initial_tensors(plan, job / "app_server/config")
    assert initial.keys() == state.keys()
    assert all((value == 1).all() for value in initial.values())


def test_no_job_is_exported_with_other_tensors_than_its_plan_says(plan_for, toy, tmp_path):
    state = build_network(plan_for(network=toy)).state_dict()
    plan = plan_for(network=toy, weights=fingerprint(state))
    other = {name: value + 1 for name, value in state.items()}
    for wrong, initial in ((plan, None), (plan_for(network=toy), state), (plan, other)):
        with pytest.raises(FedDPError, match="the job job was given: .* but the job's plan has .*; export the job anew"):
            export(wrong, tmp_path / "job", initial=initial)
        assert not (tmp_path / "job").exists()
    assert export(plan, tmp_path / "job", initial=state).exists(), "the control"


def test_calibration_is_appended_to_any_method_and_left_out_of_any(tmp_path):
    """`--then igc` is a stage more, `--calibration-epochs 0` one less; each is a workflow of its own."""

    def exported(name, *arguments):
        done = CliRunner().invoke(app, ["job", "--out", str(tmp_path / name), "--sites", "A,B", *arguments])
        assert done.exit_code == 0, done.output
        server = json.loads((tmp_path / name / "app_server/config/config_fed_server.json").read_text())
        return server["components"][0]["args"]["plan"]["stages"], [w["id"] for w in server["workflows"]]

    for name, stages, *arguments in (
        ("a", ["train", "calibrate"], "--method", "fedavg", "--then", "igc"),
        ("b", ["train", "tune", "calibrate"], "--method", "finetune", "--then", "igc"),
        ("c", ["train", "calibrate"], "--method", "feddp", "--then", "igc"),
        ("d", ["train"], "--method", "feddp", "--calibration-epochs", "0"),
        ("e", ["spectra", "train"], "--method", "feddg"),
        ("f", ["spectra", "train", "calibrate"], "--method", "feddg", "--then", "igc"),
    ):
        assert exported(name, *arguments) == (stages, ["ready", *stages, "evaluate"])


class Read(ServerJsonConfigurator):
    """FLARE's reader of a server's part of a job, which then sets nothing for this whole process."""

    def finalize_config(self, config_ctx):
        pass


def test_sites_ask_for_a_task_every_20th_of_a_second(plan_for, tmp_path):
    """As FLARE's server reads the job. Where it says nothing, a site that found no task waits 2 s before it asks again, in
    every round and every exchange."""
    folder = export(plan_for(), tmp_path / "job") / "app_server"
    file, kit = folder / "config/config_fed_server.json", tmp_path / "kit"
    for name in ("startup", "local"):
        (kit / name).mkdir(parents=True)

    def interval():
        args = SimpleNamespace(job_id="job", workspace=str(kit))
        read = Read(Workspace(str(kit)), str(file), args, str(folder))
        read.configure()
        return read.task_request_interval

    assert interval() == 0.05
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "server"}))
    assert interval() == 2, "the control"


def test_a_list_with_an_empty_entry_is_refused(feddp, tmp_path):
    """A site that is forgotten between two commas must not be left out of the job without a word."""
    code, _, said = feddp("job", "--sites", "A,,B", "--size", "32", "--out", tmp_path / "job")
    assert code == 2
    assert "'A,,B' has an empty entry" in said
    assert not (tmp_path / "job").exists()


def test_a_replaced_export_is_told(feddp, tmp_path):
    export = ("job", "--sites", "A,B", "--size", "32", "--out", tmp_path / "job")
    assert "replaced" not in feddp(*export)[2]
    code, out, said = feddp(*export, "--rounds", "3")
    assert (code, out.strip()) == (0, str(tmp_path / "job"))
    assert f"{tmp_path / 'job'} held another export, which this one replaced; plan " in said
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ((), {}),
        (("--gpus", 1), {"num_of_gpus": 1}),
        (("--gpus", 2, "--gpu-memory", 7.5), {"num_of_gpus": 2, "mem_per_gpu_in_GiB": 7.5}),
    ],
)
def test_a_job_asks_every_site_for_gpus(feddp, tmp_path, words, asked):
    """In the form of FLARE's GPUResourceManager, and as sites admit it; the rest of the job does not change."""
    assert feddp("job", "--sites", "B,A", "--size", "32", "--out", tmp_path / "job", *words)[0] == 0
    meta = json.loads((tmp_path / "job/meta.json").read_text())
    assert meta["resource_spec"] == ({"A": asked, "B": asked} if asked else {})
    require_meta(meta, read_folder("server", tmp_path / "job/app_server"))
    if asked:
        manager = GPUResourceManager(num_of_gpus=2, mem_per_gpu_in_GiB=8, ignore_host=True)
        assert manager.check_resources(asked, FLContext())[0]
        assert not manager.check_resources(asked | {"num_of_gpus": 3}, FLContext())[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu-memory", 8), "--gpu-memory 8 is the memory of the GPUs of --gpus; name their number"),
        (("--gpus", 65), "resource_spec.A.num_of_gpus is 65; a job may ask for num_of_gpus up to 64"),
        (("--gpus", 1, "--gpu-memory", 2000), "resource_spec.A.mem_per_gpu_in_GiB is 2000.0; a job may ask for"),
    ],
)
def test_gpus_that_no_site_admits_are_not_asked_for(feddp, tmp_path, words, message):
    code, _, said = feddp("job", "--sites", "A,B", "--size", "32", "--out", tmp_path / "job", *words)
    assert code == 2
    assert message in said
    assert not (tmp_path / "job").exists()
