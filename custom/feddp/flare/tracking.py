"""FLARE's own trackers at the server: the metrics artifacts of every run; MLflow, Weights & Biases and StatsD if it asks.

FLARE's receivers wait for messages of sites. Here they get the scalars that the server derives from its own events
(`feddp.tracking`), in the server's process, in one tracker's run for the whole federation; no job names them.

The server's `local/tracking.json` asks for them, with the arguments of FLARE's class:

{"mlflow": {"tracking_uri": "http://localhost:5000", "kw_args": {"experiment_name": "lgg"}},
 "wandb": {"mode": "offline", "wandb_args": {"project": "lgg", "name": "feddp", "group": "", "job_type": ""}}}

The environment variable FEDDP_TRACKING names another file.
"""

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.apis.analytix import AnalyticsDataType
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReservedTopic
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.analytix_utils import create_analytic_dxo
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.widgets.metrics_artifact_writer import MetricsArtifactWriter
from nvflare.fuel.data_event.data_bus import DataBus
from nvflare.metrics.metrics_keys import MetricKeys, MetricTypes

from feddp import protocol
from feddp.errors import InputError
from feddp.files import ARTIFACTS, Event
from feddp.limits import JSON_BYTES
from feddp.reading import read_json
from feddp.stages.selection import Scored, add
from feddp.tracking import VARIABLE, Tracker, Tracking
from feddp.tracking.curves import MEAN, SCORES, Scalar

TRACKING = "tracking.json"
FEDERATION = "federation"  # in whose name the scalars come
RECEIVERS = {
    "mlflow": "nvflare.app_opt.tracking.mlflow.mlflow_receiver.MLflowReceiver",
    "wandb": "nvflare.app_opt.tracking.wandb.wandb_receiver.WandBReceiver",
}
PATIENCE = 30.0  # seconds that a job waits at its end for a receiver, which may wait for a network
ROUND_EVENTS = {"ask": AppEventType.ROUND_STARTED, "round": AppEventType.ROUND_DONE}
KEY = {"name": f"val/{SCORES[-1]}", "mode": "max"}


def tracking(folder: Path, local: Path, job: str, name: str, warn: Callable[[str], None]) -> Tracking:
    """Returns the tracking of a job.

    Args:
        folder: the server's folder of the job.
        local: the server's folder `local`, which may hold tracking.json.
        job, name: the job's id and its name, which trackers show.
    """
    context = _context(folder, job, name)
    more: dict[str, Callable[[], Tracker]] = {"metrics artifacts": partial(Artifacts, context), "StatsD": partial(Bus, job)}
    named = os.environ.get(VARIABLE)
    try:
        asked = configured(Path(named or local / TRACKING), required=bool(named))
    except InputError as error:
        warn(f"no tracker of {named or TRACKING} is used: {error}")
        asked = {}
    return Tracking(folder, warn, more | {each: partial(Beside, each, args, context, warn) for each, args in asked.items()})


def configured(file: Path, required: bool) -> dict[str, dict[str, Any]]:
    """Returns {tracker: arguments} of the file; none if it does not exist and is not `required`.

    Raises:
        InputError: it is no JSON object of known trackers and their arguments.
    """
    try:
        content = read_json(file, JSON_BYTES)
    except FileNotFoundError:
        if required:
            raise InputError(f"{file} does not exist; correct {VARIABLE}") from None
        return {}
    if not isinstance(content, dict) or not all(isinstance(args, dict) for args in content.values()):
        raise InputError(f"{file}: write an object of trackers and their arguments; known: {', '.join(RECEIVERS)}")
    if unknown := sorted(content.keys() - RECEIVERS.keys()):
        raise InputError(f"{file}: unknown tracker {unknown[0]!r}; known: {', '.join(RECEIVERS)}")
    return content


def round_event(event: Event) -> tuple[str, int] | None:
    """Returns FLARE's name of an event at which a round begins or ends, and the round; None for others."""
    begins = event["event"] == "ask" and event["task"] == protocol.TRAIN and not event.get("phase")
    return (ROUND_EVENTS[event["event"]], event["round"]) if begins or event["event"] == "round" else None


class Artifacts:
    """Writes metrics_summary.json and round_metrics.jsonl with FLARE's MetricsArtifactWriter.

    The record of a round follows at the end of the next one, which brings its validation scores. The best round is the
    server's (`feddp.stages.selection`).
    """

    def __init__(self, context: FLContext):
        self._context, self._writer = context, MetricsArtifactWriter(results_dir=ARTIFACTS)
        self._open: dict[int, list[Scalar]] = {}
        self._scored: Scored = {}
        self._best: int | None = None

    def write(self, scalars: Sequence[Scalar]) -> None:
        for scalar in scalars:
            if scalar.tag.startswith(("train/", "val/")):
                self._open.setdefault(scalar.step, []).append(scalar)
        latest = max(self._open, default=0)
        for round in sorted(self._open):
            if round < latest:
                self._record(round)

    def close(self) -> None:
        for round in sorted(self._open):
            self._record(round)
        self._writer.handle_event(EventType.END_RUN, self._context)

    def _record(self, round: int) -> None:
        means: dict[str, float] = {}
        sites: dict[str, dict[str, float]] = {}
        for tag, _, value, _ in self._open.pop(round):
            metric, _, site = tag.rpartition("/")
            if metric != "train/seconds":
                (means if site == MEAN else sites.setdefault(site, {}))[metric] = value
        if not means:
            return
        info = {
            "sites": [{"name": site, "metrics": metrics} for site, metrics in sorted(sites.items())],
            "aggregation": {"method": "uniform mean over the sites"},
            "key_metric": KEY,
            "metric_source": "feddp",
        }
        model = FLModel(metrics=means, current_round=round, meta={AppConstants.METRICS_AGGREGATION_INFO: info})
        self._event(AppEventType.AFTER_AGGREGATION, AppConstants.AGGREGATION_RESULT, model)
        ious = {site: metrics[KEY["name"]] for site, metrics in sites.items() if KEY["name"] in metrics}
        former, self._best = self._best, add(self._scored, self._best, round, ious)
        if self._best != former:
            best = {"best_round": round, "best_aggregated_metrics": means, "key_metric": KEY, "source": "feddp"}
            self._event(AppEventType.GLOBAL_BEST_MODEL_AVAILABLE, AppConstants.METRICS_SELECTION_INFO, best)

    def _event(self, event: str, key: str, value: Any) -> None:
        self._context.set_prop(key, value, private=True, sticky=False)
        self._writer.handle_event(event, self._context)


class Bus:
    """Publishes scalars as gauges in this process, where a StatsDReporter of the server's resources.json takes them, if any.

    `train/loss/A` is `feddp_train_loss` with the label `site`.
    """

    def __init__(self, job: str):
        self._job, self._bus = job, DataBus()

    def write(self, scalars: Sequence[Scalar]) -> None:
        self._bus.publish([ReservedTopic.APP_METRICS], [self._gauge(scalar) for scalar in scalars])

    def _gauge(self, scalar: Scalar) -> dict[str, Any]:
        what, name, *site = scalar.tag.split("/", 2)
        labels = {"job_id": self._job, **({"site": site[0]} if site else {})}
        gauge = {MetricKeys.type: MetricTypes.GAUGE, MetricKeys.value: scalar.value, MetricKeys.tags: labels}
        return {MetricKeys.metric_name: f"feddp_{what}_{name}", **gauge}

    def close(self) -> None:
        """Nothing is left to do."""


class Beside:
    """One of FLARE's receivers in a thread of its own: the run does not wait for a network.

    Args:
        name: of RECEIVERS.
        args: the arguments of FLARE's class.
        warn: takes the line about a receiver that fails.
    """

    def __init__(self, name: str, args: Mapping[str, Any], context: FLContext, warn: Callable[[str], None]):
        self._name, self._args, self._context, self._warn = name, args, context, warn
        self._queue: queue.SimpleQueue[Sequence[Scalar] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracking {name}", daemon=True)
        self._thread.start()

    def write(self, scalars: Sequence[Scalar]) -> None:
        if self._error is not None:
            raise self._error
        self._queue.put(scalars)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(PATIENCE)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"it did not take everything within {PATIENCE:.0f} s of the job's end")

    def _run(self) -> None:
        try:
            module, _, name = RECEIVERS[self._name].rpartition(".")
            receiver = getattr(import_module(module), name)(**self._args)
            receiver.initialize(self._context)
            while (scalars := self._queue.get()) is not None:
                for scalar in scalars:
                    dxo = create_analytic_dxo(scalar.tag, scalar.value, AnalyticsDataType.SCALAR, global_step=scalar.step)
                    receiver.save(self._context, dxo.to_shareable(), FEDERATION)
            receiver.finalize(self._context)
        except Exception as error:  # of any type; the next call of this object raises it
            self._error = error


def _context(folder: Path, job: str, name: str) -> FLContext:
    """What FLARE's writers ask a context for: a run of one participant, the federation, whose files lie in `folder`."""
    context, path = FLContext(), str(folder)
    workspace = SimpleNamespace(get_run_dir=lambda _: path, get_result_root=lambda _: path)
    values = {
        ReservedKey.ENGINE: SimpleNamespace(get_workspace=lambda: workspace),
        ReservedKey.RUN_NUM: job,
        ReservedKey.IDENTITY_NAME: FEDERATION,
        FLContextKey.JOB_META: {"name": name},
    }
    for key, value in values.items():
        context.set_prop(key, value, private=True, sticky=False)
    return context
