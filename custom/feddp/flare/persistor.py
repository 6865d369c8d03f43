"""The server's component of a job: its plan and its memory in the job's run folder."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.app_common.app_constant import AppConstants
from nvflare.lighter.constants import AdminRole
from nvflare.widgets.info_collector import InfoCollector

from feddp.adaptation.request import AdaptationRequest
from feddp.errors import InputError, PolicyError
from feddp.files import PROGRESS, Event, events_after, write_text
from feddp.flare.ends import at_server
from feddp.flare.kept import files_of
from feddp.flare.messages import register_tensors
from feddp.flare.site import runs_of
from feddp.flare.tracking import round_event, tracking
from feddp.flare.unread import drop_unfinished_answers, outlive_unread_answers
from feddp.flare.unused import remove_unused
from feddp.flare.workspace import kept_by
from feddp.plan.schema import Plan
from feddp.stages.memory import ServerMemory
from feddp.stages.standing import Standing
from feddp.tracking import Tracking

SUBMITTER = "submitter.txt"  # in the run's folder: who submitted the run's first job
DAYS = 90  # after which the server removes the state of a run that nothing modified; FLARE's job store keeps the results
STANDING = "standing"
STATS = "feddp"  # our part of what FLARE's command `show_stats server JOB_ID` shows


class SharedTensorPersistor(FLComponent):
    """Opens the server's memory, which stores shared tensors and refuses all others (`feddp.stages.memory`).

    Adds to `show_stats` the number of completed rounds, and how the run stands (`feddp.stages.standing`), by which a person
    sees how far a job is.

    Args:
        plan: the run, as `Plan.to_json`; for an adaptation, the finished run.
        adaptation: the request of an adaptation at an unseen site, as `AdaptationRequest.to_json`.
        resume: the id of the run that the job continues.
    """

    def __init__(self, plan: dict[str, Any], adaptation: dict[str, Any] | None = None, resume: str = ""):
        super().__init__()
        self.plan = Plan.from_json(plan)
        self.request = AdaptationRequest.from_json(adaptation) if adaptation else None
        self.resume = resume
        self._memory: ServerMemory | None = None
        self._standing, self._read, self._asked = Standing(self.plan), 0, threading.Lock()
        self._tracking: Tracking | None = None
        register_tensors()
        outlive_unread_answers()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS and self._memory is not None:
            told = {"round": self._memory.round, "of": self.plan.rounds, STANDING: self._summary(self._memory)}
            fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR).set_info(STATS, told)
        elif event_type == EventType.END_RUN:
            if self._tracking is not None:
                self._tracking.close()
            drop_unfinished_answers()

    def _summary(self, memory: ServerMemory) -> dict[str, Any]:
        with self._asked:  # two people may ask at once
            events, self._read = events_after(memory.folder / PROGRESS, self._read)
            for event in events:
                self._standing.add(event)
            return self._standing.summary(time.time())

    def memory(self, fl_ctx: FLContext) -> ServerMemory:
        """Returns the memory, one for all workflows of the job. The first call removes unused runs."""
        if self._memory is None:
            workspace, job = fl_ctx.get_engine().get_workspace(), fl_ctx.get_job_id()
            # workspace.get_app_config_dir omits "config" in kits of `nvflare package`
            config = Path(workspace.get_app_dir(job)) / "config"
            own = files_of(kept_by(fl_ctx.get_identity_name(), workspace.get_root_dir()), self.resume or job)
            if self.resume and not own.is_dir():
                raise InputError(f"the server has no run {self.resume}; name its first job, or export without --resume")
            meta = fl_ctx.get_prop(FLContextKey.JOB_META) or {}  # the simulator has none
            for line in remove_unused(own.parent, DAYS, runs_of(own.name, self.request)):
                self.log_info(fl_ctx, line, fire_event=False)
            if self.resume:
                _require_submitter(own / SUBMITTER, meta)
            self._memory = ServerMemory(self.plan, own.name, Path(workspace.get_run_dir(job)), own, config, self.request)
            if not self.resume and self.request is None:
                write_text(own / SUBMITTER, str(meta.get(JobMetaKey.SUBMITTER_NAME.value, "")))
            for line in at_server(Path(workspace.get_root_dir())):
                self.log_warning(fl_ctx, line, fire_event=False)
                self._memory.progress("certificate", message=line)
            self._watch(self._memory, fl_ctx, str(meta.get(JobMetaKey.JOB_NAME.value, job)))
        return self._memory

    def _watch(self, memory: ServerMemory, fl_ctx: FLContext, name: str) -> None:
        """Tracks the run, and fires FLARE's events at the beginning and end of each round, at the server alone."""
        engine, job = fl_ctx.get_engine(), fl_ctx.get_job_id()

        def warn(line: str) -> None:
            with engine.new_context() as context:
                self.log_warning(context, line, fire_event=False)

        def fire(event: Event) -> None:
            if found := round_event(event):
                with engine.new_context() as context:
                    numbers = {AppConstants.CURRENT_ROUND: found[1], AppConstants.NUM_ROUNDS: self.plan.rounds}
                    for key, value in numbers.items():
                        context.set_prop(key, value, private=True, sticky=False)
                    self.fire_event(found[0], context)

        local = Path(engine.get_workspace().get_site_config_dir())
        self._tracking = tracking(memory.folder, local, job, name, warn)
        memory.watch(self._tracking)
        memory.watch(fire, earlier=False)


def _require_submitter(path: Path, meta: Mapping[str, Any]) -> None:
    """Raises PolicyError unless the job's submitter began the run or administers the project: others may not have its files."""
    first = path.read_text(encoding="utf-8") if path.exists() else ""
    name, role = (str(meta.get(key.value, "")) for key in (JobMetaKey.SUBMITTER_NAME, JobMetaKey.SUBMITTER_ROLE))
    if name != first and role != AdminRole.PROJECT_ADMIN:
        raise PolicyError(f"run {path.parent.name} was submitted by another person; only that person continues it")


def persistor_of(fl_ctx: FLContext) -> SharedTensorPersistor:
    """Returns the job's persistor; raises InputError if it has no SharedTensorPersistor."""
    persistor = fl_ctx.get_engine().get_component("persistor")
    if not isinstance(persistor, SharedTensorPersistor):
        raise InputError("the job's server has no component `persistor` of FedDP; export the job with `feddp job`")
    return persistor
