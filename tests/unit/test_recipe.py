"""FLARE's recipes: the job is `feddp job`'s to the byte, and what a FedDP job cannot carry is refused by one line."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.job_def import JobMetaKey
from nvflare.recipe import PocEnv, SimEnv, add_experiment_tracking, set_per_site_config, set_recipe_meta
from nvflare.recipe import poc_env as flare_poc

from feddp import recipe as recipes
from feddp.errors import FedDPError, InputError
from feddp.files import PROGRESS, RESULTS, RUN, read_events
from feddp.flare.configuration import META
from feddp.flare.job_folder import read_folder
from feddp.methods import METHODS
from feddp.methods.base import CALIBRATE
from feddp.networks import NETWORKS
from feddp.recipe import FedDPRecipe, PersonalizedRecipe
from feddp.run.local import local
from feddp.stages import train as stage
from support.small import Small

SITES = ["A", "B", "C"]
ARRAYS = "nvflare.app_common.decomposers.numpy_decomposers.NumpyArrayDecomposer"
FEDERATED = [name for name in METHODS if METHODS[name].federated]


@pytest.fixture
def recipe(toy):
    return FedDPRecipe(sites=SITES, network=toy, name="run")


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("method", FEDERATED)
def test_the_job_is_the_one_of_the_command_line(method, feddp, tmp_path, monkeypatch):
    """Of every federated method."""
    monkeypatch.setitem(NETWORKS, "small", Small)
    network = "pvt_v2_b0-fpn" if method in ("lora", "virtual_class") else "small"  # what these change, it lacks
    words = ["--method", method, "--sites", ",".join(SITES), "--network", network, "--rounds", 3, "--size", 64]
    words += ["--set", "batch=4"]
    code, _, said = feddp("job", *words, "--set", "weight_decay=0.01", "--out", tmp_path / "typed" / "run")
    assert code == 0, said
    settings = {"batch": 4, "weight_decay": 0.01}
    made = PersonalizedRecipe(method=method, sites=SITES, network=network, rounds=3, size=64, settings=settings, name="run")
    made.export(str(tmp_path / "made"))
    found = files(tmp_path / "made")
    assert found == files(tmp_path / "typed")
    assert not [name for name in found if "custom" in name]


def test_a_recipe_takes_what_the_command_takes(toy, tiny_root, feddp, tmp_path):
    """Sites and classes from the data, IGC after another method, initial tensors, a run that is continued, a scope."""
    run = "7ddf6a5c-6f9c-4b39-9d8e-3f2f0b8f2a10"
    first = tmp_path / "first.pt"
    torch.save(NETWORKS[toy](3, 1).state_dict(), first)
    words = ["--method", "ditto", "--data", tiny_root, "--network", toy, "--then", "igc", "--calibration-epochs", 2]
    words += ["--weights", first, "--scope", "research", "--resume", run, "--set", "augment=false"]
    assert feddp("job", *words, "--out", tmp_path / "typed/ditto_tiny")[0] == 0
    recipe = PersonalizedRecipe(
        method="ditto",
        data=tiny_root,
        network=toy,
        then="igc",
        calibration_epochs=2,
        weights=str(first),
        scope="research",
        resume=run,
        settings={"augment": False},
        name="ditto_tiny",
    )
    recipe.export(str(tmp_path / "made"))
    assert files(tmp_path / "made") == files(tmp_path / "typed")
    job = read_folder("server", tmp_path / "made/ditto_tiny/app_server")
    assert (job.resume, CALIBRATE in job.plan.stages, job.plan.sites) == (run, True, ("site-1", "site-2"))


def test_a_recipe_is_named_after_method_and_data(toy, tiny_root):
    assert FedDPRecipe(data=tiny_root, network=toy).name == f"feddp_{tiny_root.name}"
    assert FedDPRecipe(sites=SITES, network=toy).name == "feddp"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"method": "centralized", "sites": SITES}, "needs all images in one place"),
        ({"method": "nothing", "sites": SITES}, "unknown method 'nothing'"),
        ({}, "the recipe has no sites"),
        (
            {"sites": ["server", "B"]},
            "'server' is no name of a site: it is FLARE's name of the server; call",
        ),
        ({"sites": "CS"}, "sites='CS' is a text, not a list; write sites=['CS']"),
        ({"sites": SITES, "classes": "tumor"}, "classes='tumor' is a text, not a list"),
        ({"sites": SITES, "settings": ["batch=4"]}, "settings=['batch=4'] is no dict"),
        ({"data": "data", "channels": 3}, "channels: the folders below data say this; leave it out"),
        ({"data": "data", "classes": ["x"], "labels": "nested"}, "classes, labels: the folders below data say this"),
        ({"sites": SITES, "channels": 2}, "channels=2: images of sites have 1 or 3"),
        ({"sites": SITES, "then": "tune"}, "the only stage that can follow is igc"),
        ({"sites": SITES, "settings": {"bacth": 4}}, "bacth"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, why, tmp_path):
    with pytest.raises(InputError, match=re.escape(why)) as refused:
        PersonalizedRecipe(**arguments).export(str(tmp_path))
    assert "\n" not in str(refused.value)


class Blur(DXOFilter):
    """A filter of the user's own."""

    def __init__(self):
        super().__init__([], [])

    def process_dxo(self, dxo, shareable, fl_ctx):
        return dxo


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: r.add_client_input_filter(Blur()), "carries no Blur for @ALL: the filters of a site are those"),
        (lambda r: r.add_client_output_filter(Blur(), clients=["A"]), "carries no Blur for A: the filters of a site"),
        (lambda r: r.add_server_input_filter(Blur()), "carries no Blur for server: the filters"),
        (lambda r: r.add_server_output_filter(Blur()), "carries no Blur for server: the filters"),
        (lambda r: r.add_client_config({"timeout": 3}), "carries no dict for @ALL: its folder follows from the plan"),
        (lambda r: r.add_server_config({"timeout": 3}), "carries no dict for server: its folder follows from the plan"),
        (lambda r: r.add_client_file("script.py"), "carries no str for @ALL: its folder"),
        (lambda r: r.add_server_file("script.py"), "carries no str for server: its folder"),
        (lambda r: r.enable_log_streaming(), "carries no JobLogStreamer for @ALL: no log leaves a site"),
        (lambda r: r.enable_tensor_streaming(), "carries no TensorServerStreamer for server: its folder"),
        (lambda r: r.add_decomposers([ARRAYS]), "carries no DecomposerRegister for server: its folder"),
        (lambda r: add_experiment_tracking(r, "tensorboard"), "carries no TBAnalyticsReceiver for server: every run has"),
        (lambda r: set_per_site_config(r, {"A": {"lr": 1}}), "a FedDP job has no configuration per site"),
        (lambda r: set_recipe_meta(r, JobMetaKey.CUSTOM_PROPS, {"a": 1}), "a FedDP job has no metadata custom_props"),
        (lambda r: r.run(None, server_exec_params={"timeout": 3}), "carries no dict for server: its folder"),
        (lambda r: r.run(None, client_exec_params={"timeout": 3}), "carries no dict for @ALL: its folder"),
    ],
)
def test_what_a_job_cannot_carry_is_refused_and_not_ignored(recipe, change, why):
    with pytest.raises(InputError, match=re.escape(why)) as refused:
        change(recipe)
    assert "\n" not in str(refused.value)


def test_scope_and_gpus_are_metadata_of_ours(recipe, tmp_path):
    set_recipe_meta(recipe, JobMetaKey.SCOPE, "research")
    set_recipe_meta(recipe, JobMetaKey.RESOURCE_SPEC, {"A": {"num_of_gpus": 1}})
    recipe.export(str(tmp_path))
    meta = json.loads((tmp_path / "run" / META).read_text())
    assert (meta["scope"], meta["resource_spec"]) == ("research", {"A": {"num_of_gpus": 1}})
    set_recipe_meta(recipe, JobMetaKey.RESOURCE_SPEC, {"A": {"num_of_gpus": 1000}})
    with pytest.raises(InputError, match="num_of_gpus is 1000"):
        recipe.export(str(tmp_path))


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"clients": ["A", "B"]}, "SimEnv has the clients A, B, but the plan's sites are A, B, C"),
        ({"num_clients": 2}, "SimEnv has 2 clients, but the plan's sites are A, B, C"),
        ({"clients": SITES, "gpu_config": "0"}, "SimEnv: gpu_config has no effect"),
        ({"clients": SITES, "log_config": "full"}, "SimEnv: log_config has no effect"),
        ({"clients": SITES}, "SimEnv needs the sites' images on this machine; name their root with data=ROOT"),
    ],
)
def test_what_the_simulator_cannot_do_is_refused(recipe, env, why, tmp_path):
    with pytest.raises(InputError, match=re.escape(why)):
        recipe.execute(SimEnv(workspace_root=str(tmp_path), **env))


def test_a_simulated_run_is_continued_by_itself(toy, tiny_root, tmp_path):
    recipe = FedDPRecipe(data=tiny_root, network=toy, resume="7ddf6a5c-6f9c-4b39-9d8e-3f2f0b8f2a10")
    with pytest.raises(InputError, match="SimEnv continues an unfinished run by itself"):
        recipe.execute(SimEnv(num_clients=2, workspace_root=str(tmp_path)))


def test_the_same_recipe_again_continues_a_run_and_leaves_a_finished_one(toy, tiny_root, tmp_path, monkeypatch):
    """The sites fail in the second round. In this process in place of the simulator (test_simulator.py has that)."""
    monkeypatch.setattr(recipes, "simulator", local)
    recipe = PersonalizedRecipe(
        method="fedavg", data=tiny_root, network=toy, rounds=2, size=32, settings={"batch": 4, "start": "last"}, name="run"
    )
    env, trained = SimEnv(num_clients=2, num_threads=1, workspace_root=str(tmp_path)), stage.train

    def train(site, shared, round, *arguments, **options):
        if round == 1:
            raise RuntimeError("a power cut")
        return trained(site, shared, round, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "train", train)
        with pytest.raises(FedDPError, match="to go on: feddp run --resume"):
            recipe.execute(env)
    out = Path(recipe.execute(env).get_result())
    assert out == tmp_path / "run"
    asked = [event["round"] for event in read_events(out / PROGRESS) if event["event"] == "ask" and event["task"] == "train"]
    assert asked == [1, 2, 2]
    assert json.loads((out / RUN).read_text())["threads"] == 1
    assert set(json.loads((out / RESULTS).read_text())["sites"]) == {"site-1", "site-2"}
    assert not (out / "local").exists(), "FLARE's own allow-list"
    with pytest.raises(InputError, match="holds a finished run; name another folder"):
        recipe.execute(env)


@pytest.fixture
def prepared(monkeypatch):
    """What a PocEnv gives to FLARE's provisioning, which is not run: the POC is not started."""
    given = {}

    def prepare(**options):
        """Beside the federation that an earlier PocEnv left."""
        given.update(options)
        for name in ("prod_00", "prod_01"):
            (Path(options["workspace"]) / "feddp" / name).mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(flare_poc, "prepare_poc_provision", prepare)
    monkeypatch.setattr(flare_poc, "_start_poc", lambda **options: None)
    monkeypatch.setattr(flare_poc, "SERVICE_START_TIMEOUT", 0)
    monkeypatch.setattr(PocEnv, "_check_poc_running", lambda self: False)
    monkeypatch.setattr(PocEnv, "_get_session_manager", lambda self: given["manager"])
    monkeypatch.setattr(recipes, "connect", lambda *where: SimpleNamespace(close=lambda: given.update(joined=where)))
    return given


def test_a_poc_lies_in_no_default_folder_of_flares(toy, tiny_root, prepared, tmp_path, monkeypatch, capsys):
    """Its project has our builder, and policies that approve this plan; its lead has the environment's name."""

    def submit_job(job):
        job.export_job(str(tmp_path / "sent"))
        assert prepared["joined"] == (tmp_path / "feddp_poc/feddp/prod_01", ["site-1", "site-2"], "lead@b.org")
        return "id"

    prepared["manager"] = SimpleNamespace(submit_job=submit_job)
    monkeypatch.delenv("NVFLARE_POC_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    recipe = FedDPRecipe(data=tiny_root, network=toy, name="run")
    assert recipe.execute(PocEnv(username="lead@b.org")).get_job_id() == "id"
    assert prepared["workspace"] == str(tmp_path / "feddp_poc")
    assert str(tmp_path / "feddp_poc") in capsys.readouterr().err
    project = yaml.safe_load(Path(prepared["project_conf_path"]).read_text())
    sites = {each["name"]: each for each in project["participants"]}
    assert set(sites) == {"localhost", "site-1", "site-2", "lead@b.org"}
    assert sites["site-1"]["policy"]["approve"] == [{"job": "feddp", "plan": recipe.plan.digest()}]
    assert {each["org"] for each in project["participants"]} == {"consortium"}, "else PocEnv could not stop the sites"
    assert project["builders"][-1]["path"] == "feddp.provision.SitePolicyBuilder"
    assert (tmp_path / "sent/run" / META).exists()


def test_a_poc_environment_takes_one_recipe_after_the_other(toy, tiny_root, prepared, monkeypatch, tmp_path):
    """Each has the project that approves its own plan."""
    prepared["manager"] = SimpleNamespace(submit_job=lambda job: "id")
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(tmp_path / "poc"))
    env = PocEnv()
    for rounds in (1, 2):
        recipe = FedDPRecipe(data=tiny_root, network=toy, rounds=rounds)
        recipe.execute(env)
        assert prepared["workspace"] == str(tmp_path / "poc")
        assert recipe.plan.digest() in Path(prepared["project_conf_path"]).read_text()


def test_a_job_is_not_submitted_while_a_site_is_missing(toy, tiny_root, prepared, monkeypatch, tmp_path):
    """PocEnv waits three seconds, whoever has joined; the run would then lack a site, and no table would say so. An export
    waits for nobody."""
    sent = []
    prepared["manager"] = SimpleNamespace(submit_job=lambda job: [job.export_job(str(tmp_path / "sent")), sent.append(job)])
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(tmp_path / "poc"))
    monkeypatch.setattr(PocEnv, "stop", lambda self, clean_up=False: prepared.update(stopped=True))

    def connect(*_):
        raise FedDPError("the federation did not start within 90 s")

    monkeypatch.setattr(recipes, "connect", connect)
    recipe = FedDPRecipe(data=tiny_root, network=toy, name="run")
    with pytest.raises(FedDPError, match="did not start"):
        recipe.execute(PocEnv())
    assert (sent, prepared["stopped"]) == ([], True)
    recipe.export(str(tmp_path / "exported"), env=PocEnv())
    assert (tmp_path / "exported/run" / META).exists()
    elsewhere = SimpleNamespace(deploy=lambda job: job.export_job(str(tmp_path / "elsewhere")) or "id")
    recipe.execute(elsewhere)
    assert (tmp_path / "elsewhere/run" / META).exists()


@pytest.mark.parametrize("option", [{"use_he": True}, {"docker_image": "x"}, {"gpu_ids": [0]}])
def test_a_pocs_options_without_effect_are_refused(option, toy, tiny_root, prepared):
    with pytest.raises(InputError, match=f"PocEnv: {next(iter(option))} has no effect"):
        FedDPRecipe(data=tiny_root, network=toy).execute(PocEnv(**option))
