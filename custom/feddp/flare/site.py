"""The site component: one `SiteContext` that a job's executor and filters share."""

import os
import threading
from pathlib import Path
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, WorkspaceConstants
from nvflare.apis.fl_context import FLContext

from feddp.adaptation.request import AdaptationRequest
from feddp.errors import InputError
from feddp.flare.cell_gate import require_gate
from feddp.flare.context import SiteContext, files_of, kept_below
from feddp.flare.messages import register_tensors
from feddp.flare.policy import SitePolicy
from feddp.flare.sealing import identity_of, simulated
from feddp.plan.schema import Plan
from feddp.sealing.session import Session
from feddp.stages.tensors import Expected
from feddp.training.store import Store


class SiteComponent(FLComponent):
    """Creates the site's context when the job's first task arrives.

    Args:
        plan: the run, as `Plan.to_json`; for an adaptation, the finished run.
        adaptation: the request of an adaptation at an unseen site, as `AdaptationRequest.to_json`.
    """

    def __init__(self, plan: dict[str, Any], adaptation: dict[str, Any] | None = None):
        super().__init__()
        self.plan = Plan.from_json(plan)
        self.expected = Expected(self.plan)
        self.request = AdaptationRequest.from_json(adaptation) if adaptation else None
        # FLARE runs a task that the server pushes in parallel with the fetched one; both use the same network
        self.one_at_a_time = threading.Lock()
        self._context: SiteContext | None = None
        self._seals: Session | None = None
        register_tensors()

    def context(self, fl_ctx: FLContext) -> SiteContext:
        """Returns this site in this job.

        Raises:
            PolicyError: outside the simulator, the job's scope has no policy or this process's cells have no gate; or the
                policy does not accept the job, or names a private role that the job's network does not have.
        """
        if self._context is None:
            site, here = fl_ctx.get_identity_name(), simulated(fl_ctx)
            if not here:
                require_gate(site)
            policy = SitePolicy.of(site, fl_ctx.get_prop(FLContextKey.SCOPE_PROPERTIES), here)
            self._context = SiteContext(site, fl_ctx.get_job_id(), self.expected, self.request, policy, kept(fl_ctx), here)
        return self._context

    @staticmethod
    def store(fl_ctx: FLContext) -> Store:
        """Returns this site's files of this job, independent of the policy."""
        return Store(files_of(kept(fl_ctx), fl_ctx.get_job_id()))

    def seals(self, fl_ctx: FLContext) -> Session:
        """Returns this site's session of the job's sealed exchanges.

        Raises:
            SealingError: the site's certificate is missing or invalid.
        """
        if self._seals is None:
            self._seals = Session(identity_of(fl_ctx), fl_ctx.get_job_id())
        return self._seals


def kept(fl_ctx: FLContext) -> Path:
    """Returns the folder of all jobs' files and of the files kept across jobs. No server reads it.

    It lies in the site's workspace. In a container, whose workspace ends with the job, it lies in FLARE's NVFL_RESULT_ROOT.
    """
    root = os.environ.get(WorkspaceConstants.ENV_VAR_RESULT_ROOT)
    return kept_below(Path(root or fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir()))


def site_component(fl_ctx: FLContext) -> SiteComponent:
    """Returns the job's site component.

    Raises:
        InputError: the job has none.
    """
    component = fl_ctx.get_engine().get_component("site")
    if not isinstance(component, SiteComponent):
        raise InputError("the job has no component `site`; export it with `feddp job`")
    return component
