"""Tracking in FLARE, at the server (track.md): round events, metrics artifacts, MLflow and W&B; sites can load none of it."""

import json
import re
import subprocess
import sys
import time
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedTopic
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.data_event.data_bus import DataBus

from feddp.flare import tracking
from feddp.flare.configuration import SERVER_CLASSES, SITE_CLASSES
from feddp.kit.components import REVIEWED, STATSD
from feddp.kit.files import LOCAL
from feddp.sealing.kit import CLIENT, SERVER
from feddp.tracking import VARIABLE
from feddp.tracking.curves import Scalar
from support import ROOT
from support.server import SITES, Run, good

IOUS = {1: 0.6, 2: 0.4}  # of the rounds' means, at every site


@pytest.fixture
def run(tmp_path, plan_for, toy):
    """A job of two rounds whose sites answer at once; `asked` is the server's tracking.json."""

    def run(asked=None):
        if asked is not None:
            (tmp_path / "local").mkdir(exist_ok=True)
            (tmp_path / "local/tracking.json").write_text(asked if isinstance(asked, str) else json.dumps(asked))
        plan = plan_for(method="fedavg", network=toy, rounds=2, sites=SITES, start="last")
        made = Run(tmp_path, plan, SITES, lambda *asked: good(*asked, ious=IOUS)).run("train", "evaluate")
        made.persistor.handle_event(EventType.END_RUN, made.fl_ctx)
        assert not made.panics
        assert (tmp_path / "results.json").exists()
        return made

    return run


def warned(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "track" in record.getMessage()]


def test_every_round_fires_flares_events_with_its_number(run):
    started, done = AppEventType.ROUND_STARTED, AppEventType.ROUND_DONE
    assert run().fl_ctx.get_engine().fired == [(started, 1, 2), (done, 1, 2), (started, 2, 2), (done, 2, 2)]


def test_flares_metrics_artifacts(run, tmp_path, caplog):
    """Losses of 1.0, Dice of 0.5 at every site; IoU 0.6 after round 1, the best, and 0.4 after round 2."""
    run()
    rounds = [json.loads(line) for line in (tmp_path / "metrics/round_metrics.jsonl").read_text().splitlines()]
    means = [{each["name"]: each["value"] for each in record["aggregated_metrics"]} for record in rounds]
    assert [record["round"] for record in rounds] == [1, 2]
    assert means == [{"train/loss": 1.0, "val/dice": 0.5, "val/iou": pytest.approx(iou)} for iou in IOUS.values()]
    assert [site["name"] for site in rounds[0]["sites"]] == SITES
    assert {"name": "val/iou", "value": 0.6} in rounds[0]["sites"][0]["metrics"]
    summary = json.loads((tmp_path / "metrics/metrics_summary.json").read_text())
    assert (summary["final_round"], summary["best_round"]) == (2, 1)
    assert summary["key_metric"] == {"name": "val/iou", "mode": "max"}
    assert list((tmp_path / "tb_events").glob("events.out.tfevents*"))
    assert warned(caplog) == []


@pytest.mark.parametrize(("rounds", "best"), [(2, 1), (3, 3), (4, 4)])
def test_the_best_round_of_the_artifacts_is_the_servers_where_a_site_is_absent(rounds, best, tmp_path):
    """Means 0.45, 0.55, 0.47, 0.5. Over the sites in both: B's 0.55 against 0.6; +0.03 and +0.01; A's 0.5 against 0.33."""
    artifacts = tracking.Artifacts(tracking._context(tmp_path, "job", "job"))
    for round, ious in enumerate(({"A": 0.3, "B": 0.6}, {"B": 0.55}, {"A": 0.33, "B": 0.61}, {"A": 0.5})[:rounds], 1):
        values = {**ious, "mean": sum(ious.values()) / len(ious)}
        artifacts.write([Scalar(f"val/iou/{site}", round, iou, 0.0) for site, iou in values.items()])
    artifacts.close()
    assert json.loads((tmp_path / "metrics/metrics_summary.json").read_text())["best_round"] == best


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory):
    """The package, installed for this file alone: MONAI imports it in every process that finds it."""
    target = str(tmp_path_factory.mktemp("mlflow"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps"]
    pip += ["--no-compile"]  # what is imported is compiled then, and that is little of it
    subprocess.run([*pip, "--target", target, "-r", str(ROOT / "tests/mlflow.lock")], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, target])
        yield import_module("mlflow")


@pytest.mark.tools
def test_mlflow_in_a_file_of_the_servers(run, mlflow, tmp_path, monkeypatch, caplog):
    """FLARE's own receiver, one run for the federation, which ends with the job."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlflow").as_uri()
    run({"mlflow": {"tracking_uri": uri, "kw_args": {"experiment_name": "lgg", "run_name": "fedavg"}}})
    assert warned(caplog) == []
    client = mlflow.tracking.MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("lgg").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.tags["job_id"] == "job"
    history = client.get_metric_history(found.info.run_id, "val/iou/A")
    assert [(point.step, point.value) for point in history] == [(1, 0.6), (2, 0.4)]
    assert {"train/loss/mean", "round/seconds", "bytes/to/B"} <= found.data.metrics.keys()


def test_weights_and_biases_through_flares_receiver(run, tmp_path, monkeypatch, caplog):
    """With a stand-in for the package `wandb`, which is no dependency: FLARE's receiver runs it in a process of its own."""
    stand_in, logged = ModuleType("wandb"), tmp_path / "logged"

    class Begun:
        @staticmethod
        def finish():
            with open(logged, "a") as file:
                file.write("finished\n")

    def log(values, step):
        with open(logged, "a") as file:
            file.write(json.dumps([step, values]) + "\n")

    stand_in.init, stand_in.log = lambda **options: Begun, log
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    name = tracking.RECEIVERS["wandb"].rpartition(".")[0]
    receiver = import_module(name)
    del sys.modules[name]
    monkeypatch.setitem(sys.modules, name, receiver)  # for this test alone: it knows the stand-in
    monkeypatch.setenv("WANDB_MODE", "")  # the receiver sets it
    run({"wandb": {"wandb_args": {"project": "p", "name": "n", "group": "g", "job_type": "t"}}})
    assert warned(caplog) == []
    *steps, end = logged.read_text().splitlines()
    assert end == "finished"
    found = dict(json.loads(line) for line in steps)
    assert (found[1]["val/iou/A"], found[2]["val/iou/A"]) == (0.6, 0.4)
    assert found[2]["train/loss/mean"] == 1.0


@pytest.fixture
def statsd(monkeypatch):
    """FLARE's StatsDReporter with a stand-in for the package `datadog`, which is no dependency; the gauges that it sent."""
    stand_in, sent = ModuleType("datadog"), {}
    stand_in.initialize = lambda **options: None
    stand_in.statsd = SimpleNamespace(gauge=lambda name, value, tags: sent.update({(name, *sorted(tags)): value}))
    monkeypatch.setitem(sys.modules, "datadog", stand_in)
    module, _, name = STATSD.rpartition(".")
    reporter = getattr(import_module(module), name)()
    yield sent
    del sys.modules[module]
    DataBus().unsubscribe(ReservedTopic.APP_METRICS, reporter.process_metrics)


def test_statsd_takes_the_scalars_where_the_server_reports(run, statsd, caplog):
    """The last value of each curve stays; the labels are the job's id and the site."""
    run()
    assert warned(caplog) == []
    assert statsd["feddp_val_iou", "job_id:job", "site:A"] == 0.4
    assert statsd["feddp_round_sites", "job_id:job"] == 3
    dashboard = (ROOT / "docs/assets/grafana.json").read_text()
    shown = set(re.findall(r"feddp_\w+", dashboard))
    assert len(shown) > 4
    assert shown <= {name for name, *_ in statsd}, "no panel of another name"


def test_another_file_may_ask(run, tmp_path, monkeypatch, caplog):
    (tmp_path / "other.json").write_text('{"nothing": {}}')
    monkeypatch.setenv(VARIABLE, str(tmp_path / "other.json"))
    run({})
    (line,) = warned(caplog)
    assert "other.json: unknown tracker 'nothing'; known: mlflow, wandb" in line
    caplog.clear()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    run()
    (line,) = warned(caplog)
    assert "none.json does not exist; correct FEDDP_TRACKING" in line


@pytest.mark.tools
@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"mlflow": {"tracking_uri": 3}}, "mlflow tracks this run no longer (ValueError: tracking_uri needs"),
        ({"mlflow": {"no_such": 3}}, "mlflow tracks this run no longer (TypeError: "),
        ({"wandb": {"wandb_args": {}}}, "wandb tracks this run no longer (ModuleNotFoundError: No module named 'wandb')"),
        ({"mlflow": 3}, "write an object of trackers and their arguments; known: mlflow, wandb"),
        ("{", "tracking.json"),
    ],
)
def test_what_cannot_track_is_one_line_and_the_run_goes_on(asked, why, run, mlflow, tmp_path, caplog):
    run(asked)
    (line,) = warned(caplog)
    assert why in line
    assert (tmp_path / "metrics/metrics_summary.json").exists(), "the others go on"


def test_a_tracker_that_hangs_holds_up_no_run(run, monkeypatch, caplog):
    """Its server answers nothing: no round waits for it, and the job's end only so long."""

    class Hangs:
        def initialize(self, context):
            time.sleep(5)

    stand_in = ModuleType("hangs")
    stand_in.Hangs = Hangs
    monkeypatch.setitem(sys.modules, "hangs", stand_in)
    monkeypatch.setitem(tracking.RECEIVERS, "mlflow", "hangs.Hangs")
    monkeypatch.setattr(tracking, "PATIENCE", 0.2)
    begun = time.monotonic()
    run({"mlflow": {}})
    assert time.monotonic() - begun < 4.5
    (line,) = warned(caplog)
    assert "mlflow tracks this run no longer (TimeoutError: it did not take everything within 0 s" in line


def authorized(classes, path):
    """Whether FLARE builds a class of a job, at a participant with this allow-list."""
    authorizer = ComponentPathAuthorizer()
    authorizer._get_policy = lambda fl_ctx, workspace: (classes, "enforce", "resources.json")
    try:
        authorizer.authorize_component_config({"path": path}, fl_ctx=FLContext())
    except UnsafeComponentError:
        return False
    return True


def test_no_job_brings_a_tracker_to_anybody():
    """Neither FLARE's trackers nor what turns a site's events into messages is on our lists, though on FLARE's default."""
    trackers = [name for name in DEFAULT_CLASS_ALLOW_LIST if ".tracking." in name or "ConvertToFedEvent" in name]
    trackers += [
        "feddp.tracking.Tracking",
        "feddp.flare.tracking.Beside",
        "nvflare.fuel_opt.statsd.statsd_reporter.StatsDReporter",
    ]
    assert len(trackers) > 6
    for classes in (SITE_CLASSES, SERVER_CLASSES):
        allowed = sorted(classes.values())
        assert [name for name in trackers if authorized(allowed, name)] == []
        assert authorized(allowed, allowed[0]), "the control"


def test_only_the_servers_kit_may_report_to_statsd():
    """A hospital's kit with it fails `feddp kit check`: it would send what it counts to a host that the kit names."""
    assert (STATSD in REVIEWED[SERVER], STATSD in REVIEWED[CLIENT]) == (True, False)
    assert (tracking.TRACKING in LOCAL[SERVER], tracking.TRACKING in LOCAL[CLIENT]) == (True, False)
