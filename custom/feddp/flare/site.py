"""The site component: one `SiteContext` that a job's executor and filters share."""

import threading
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

from feddp.adaptation.request import AdaptationRequest
from feddp.errors import InputError
from feddp.flare.audit import audit
from feddp.flare.cell_gate import require_gate
from feddp.flare.context import SiteContext
from feddp.flare.kept import files_of
from feddp.flare.messages import register_tensors
from feddp.flare.policy import SitePolicy
from feddp.flare.sealing import identity_of, simulated
from feddp.flare.unused import remove_unused, require_not_removed
from feddp.flare.workspace import kept
from feddp.lean import import_monai
from feddp.plan.schema import Plan
from feddp.sealing.session import Session
from feddp.stages.tensors import Expected
from feddp.training.store import Store


class SiteComponent(FLComponent):
    """Creates the site's context when the job's first task arrives.

    Args:
        plan: the run, as `Plan.to_json`; for an adaptation, the finished run.
        adaptation: the request of an adaptation at an unseen site, as `AdaptationRequest.to_json`.
        resume: the id of the run that the job continues.
    """

    def __init__(self, plan: dict[str, Any], adaptation: dict[str, Any] | None = None, resume: str = ""):
        super().__init__()
        self.plan = Plan.from_json(plan)
        self.expected = Expected(self.plan)
        self.request = AdaptationRequest.from_json(adaptation) if adaptation else None
        self.resume = resume
        # FLARE runs a task that the server pushes in parallel with the fetched one; both use the same network
        self.one_at_a_time = threading.Lock()
        self._context: SiteContext | None = None
        self._seals: Session | None = None
        register_tensors()

    def context(self, fl_ctx: FLContext) -> SiteContext:
        """Returns this site in this job. The first call removes the files of unused runs, outside the simulator.

        Raises:
            PolicyError: outside the simulator, the job's scope has no policy or this process's cells have no gate; or the
                policy does not accept the job, or names a private role that the job's network does not have; or the site has
                removed the run.
        """
        if self._context is None:
            site, run, here = fl_ctx.get_identity_name(), self._run(fl_ctx), simulated(fl_ctx)
            if not here:
                require_gate(site)
            require_not_removed(site, kept(fl_ctx), run)  # the admission of a job in a container does not see these files
            policy = SitePolicy.of(site, fl_ctx.get_prop(FLContextKey.SCOPE_PROPERTIES), here)
            import_monai()
            self._context = SiteContext(
                site, run, self.expected, self.request, policy, kept(fl_ctx), here, str(fl_ctx.get_job_id())
            )
            if not here and policy.keep_days is not None:
                for line in remove_unused(kept(fl_ctx), policy.keep_days, runs_of(run, self.request)):
                    audit(fl_ctx, f"{line} (keep_days)")
        return self._context

    def store(self, fl_ctx: FLContext) -> Store:
        """Returns this site's files of this run, independent of the policy."""
        return Store(files_of(kept(fl_ctx), self._run(fl_ctx)))

    def _run(self, fl_ctx: FLContext) -> str:
        return self.resume or str(fl_ctx.get_job_id())

    def seals(self, fl_ctx: FLContext) -> Session:
        """Returns this site's session of the job's sealed exchanges.

        Raises:
            SealingError: the site's certificate is missing or invalid.
        """
        if self._seals is None:
            self._seals = Session(identity_of(fl_ctx), fl_ctx.get_job_id())
        return self._seals

    def drop_keys(self, but: str = "") -> None:
        """Drops the keys of this process's handshakes, except those for the exchange `but` (`Session.drop`)."""
        if self._seals is not None:
            self._seals.drop(but)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Drops the keys at the end of the job, if an exchange was broken off."""
        if event_type == EventType.END_RUN:
            self.drop_keys()


def runs_of(run: str, request: AdaptationRequest | None) -> set[str]:
    """Returns the runs whose files a job uses: its own, and that of an adaptation's models."""
    return {run} if request is None else {run, request.job}


def site_component(fl_ctx: FLContext) -> SiteComponent:
    """Returns the job's site component.

    Raises:
        InputError: the job has none.
    """
    component = fl_ctx.get_engine().get_component("site")
    if not isinstance(component, SiteComponent):
        raise InputError("the job has no component `site`; export it with `feddp job`")
    return component
