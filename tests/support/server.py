"""A server's stages in one process: FLARE's controllers against sites that are functions."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, TaskCompletionStatus
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants

from feddp.flare import messages
from feddp.flare.controller import StageController
from feddp.flare.persistor import SharedTensorPersistor
from feddp.protocol import PARTS
from feddp.training.columns import METRICS

SITES = ["A", "B", "C"]


class Engine:
    """What a controller asks of FLARE's engine: its clients, its components and where its files are."""

    def __init__(self, folder: Path, sites, persistor):
        self.clients = [Client(name, name) for name in sites]
        self.persistor = persistor
        self.folder = folder
        self.fired = []  # (event, round, rounds)

    def get_clients(self):
        return self.clients

    def sync_clients_from_main_process(self):
        """Nobody registers anew."""

    def get_component(self, name):
        return {"persistor": self.persistor}[name]

    def get_workspace(self):
        folder = str(self.folder)
        return SimpleNamespace(
            get_root_dir=lambda: folder,
            get_run_dir=lambda job: folder,
            get_app_dir=lambda job: folder,
            get_site_config_dir=lambda: f"{folder}/local",
        )

    @contextmanager
    def new_context(self):
        context = FLContext()
        context.set_prop(ReservedKey.ENGINE, self, private=True, sticky=False)
        yield context

    def fire_event(self, event, fl_ctx):
        self.fired.append((event, fl_ctx.get_prop(AppConstants.CURRENT_ROUND), fl_ctx.get_prop(AppConstants.NUM_ROUNDS)))


class Run:
    """Stages run against sites that are functions: (site, task, tensors, scalars) -> Shareable, answered in `order`.

    As in the simulator, which has no certificates, unless `secure`.
    """

    def __init__(self, folder, plan, sites, answer, order=None, secure=False, request=None):
        self.persistor = SharedTensorPersistor(plan.to_json(), request)
        self.fl_ctx = FLContext()
        self.fl_ctx.set_prop(FLContextKey.CURRENT_RUN, "job", private=False)
        self.fl_ctx.set_prop(FLContextKey.SECURE_MODE, secure)
        self.fl_ctx._engine = Engine(folder, sites, self.persistor)
        self.fl_ctx.get_engine = lambda *a, **k: self.fl_ctx._engine
        self.folder, self.sites, self.answer, self.order = folder, sites, answer, order or sites
        self.sent = []
        self.panics = []
        self.gone = set()  # silent for long
        self.open = set()  # silent from now on

    def run(self, *stages):
        for name in stages:
            stage = StageController(name)
            stage.broadcast = self.broadcast
            stage.cancel_all_tasks = lambda: None
            stage.cancel_task = self.cancel
            stage.communicator = SimpleNamespace(
                client_is_active=lambda name, reason, fl_ctx: None,
                process_task_check=lambda id, fl_ctx: None,
                check_tasks=self.check_tasks,
            )
            stage.system_panic = lambda reason, fl_ctx: self.panics.append(reason)
            stage.start_controller(self.fl_ctx)
            self.heard = stage.heard
            stage.control_flow(Signal(), self.fl_ctx)
        return self

    @property
    def memory(self):
        return self.persistor.memory(self.fl_ctx)

    def broadcast(self, task, fl_ctx, targets, min_responses):
        assert min_responses == len(targets)
        self.sent.append((task.name, list(targets), task.data))
        for site in self.order:
            if site in targets:
                client_task = ClientTask(Client(site, site), task)
                client_task.result = self.answer(site, task.name, *messages.unpack(task.data))
                if client_task.result is not None:
                    try:
                        task.result_received_cb(client_task, fl_ctx)
                    except Exception as error:  # as FLARE does
                        task.exception = error
        for site in self.gone & set(targets):
            self.heard[site] = float("-inf")
        silent = (self.gone | self.open) & set(targets)
        task.completion_status = None if silent else TaskCompletionStatus.OK

    def check_tasks(self):
        """FLARE's look at its tasks."""

    @staticmethod
    def cancel(task):
        task.completion_status = TaskCompletionStatus.CANCELLED

    def progress(self, event):
        lines = (self.folder / "progress.jsonl").read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] == event]


SUMMARY = {metric: {"mean": 0.5, "std": 0.0, "n": 3} for metric in METRICS}


def good(site, task, tensors, scalars, values=None, ious=None):
    """A site that adds its `values` entry to every tensor it is sent, and scores as `ious` says of the round it received."""
    offset = (values or {}).get(site, 0)
    if task == "train":
        metrics = {"loss": 1.0, "samples": 10.0, "seconds": 0.0, **dict.fromkeys(PARTS, 0.0)}
        if scalars["round"] and not scalars["phase"]:
            metrics |= {"dice": 0.5, "iou": (ious or {}).get(scalars["round"], 0.5)}
        return messages.pack(
            {n: v + offset for n, v in tensors.items()}, round=scalars["round"], phase=scalars["phase"], **metrics
        )
    if task in ("score", "adopt"):
        return messages.pack(round=scalars["round"], dice=0.5, iou=(ious or {}).get(scalars["round"], 0.5))
    if task == "evaluate":
        return messages.pack(before_calibration=SUMMARY, final=SUMMARY, peers={})
    raise AssertionError(task)
