"""The site component: one `Site` shared by a job's executors, its filters, and nobody else."""

import os
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, WorkspaceConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from torch import nn

from feddp.data.folder import SiteFolder
from feddp.errors import FedDPError, InputError, PolicyError
from feddp.flare.budget import Ledger
from feddp.flare.cell_gate import require_gate
from feddp.flare.kept import secret_of
from feddp.flare.messages import register_tensors
from feddp.flare.policy import OWN, SitePolicy
from feddp.flare.sealing import identity_of, simulated
from feddp.methods.aggregation import Spec
from feddp.methods.site import Site
from feddp.partition import Partition, select
from feddp.plan.resolve import build_network, partition_of, require_initial
from feddp.plan.schema import Plan
from feddp.sealing.session import Session
from feddp.training.store import INITIAL, Store, Tensors, require_job_id


class SiteComponent(FLComponent):
    """Opens this site's folder, store and network when the first task comes.

    Args:
        plan: the run, as `Plan.to_json`.
        outside: a newcomer's request, as `OutsideRequest.to_json`, beside the plan of the finished run.
    """

    def __init__(self, plan: dict[str, Any], outside: dict[str, Any] | None = None):
        super().__init__()
        self.plan, self.outside = Plan.from_json(plan), outside
        # FLARE starts a task that the server pushes beside the one that was fetched; there is one network for both
        self.one_at_a_time = threading.Lock()
        self._site: Site | None = None
        self._seals: Session | None = None
        register_tensors()

    @cached_property
    def network(self) -> nn.Module:
        """The job's network, untrained: for the names of its tensors."""
        return build_network(self.plan)

    @cached_property
    def partition(self) -> Partition:
        return partition_of(self.plan, self.network)

    def policy(self, fl_ctx: FLContext) -> SitePolicy:
        """What this hospital says of its data, its device and its consent.

        Raises:
            PolicyError: there is no policy for the job's scope or no gate before this process's cells, and this is not the
                simulator; or it does not take this job, or names a private role that the job's network does not have.
        """
        site = fl_ctx.get_identity_name()
        if not simulated(fl_ctx):
            require_gate(site)
        policy = SitePolicy.of(site, fl_ctx.get_prop(FLContextKey.SCOPE_PROPERTIES), simulated(fl_ctx))
        policy.accept(site, self.plan, self.outside)
        if without := [role for role in policy.private if not select(self.network, role)]:
            raise PolicyError(
                f"site {site}: its policy keeps {', '.join(without)} private, and the job's {self.plan.network} has no such"
                " tensor, so that would protect nothing; leave this site out, or change `private` of privacy.json"
            )
        return policy

    def store(self, fl_ctx: FLContext) -> Store:
        """This site's own files of this job."""
        return Store(self.files(fl_ctx, fl_ctx.get_job_id()))

    @staticmethod
    def files(fl_ctx: FLContext, job: str) -> Path:
        """Where this site's own files of a job lie: under its workspace, which the server does not read.

        In a container the workspace ends with the job; there the site says where, by FLARE's own NVFL_RESULT_ROOT.

        Raises:
            InputError: the id would lead elsewhere.
        """
        require_job_id(job)
        return SiteComponent.kept(fl_ctx) / job

    @staticmethod
    def kept(fl_ctx: FLContext) -> Path:
        """The folder of all jobs' files, and of what the site keeps across jobs."""
        root = os.environ.get(WorkspaceConstants.ENV_VAR_RESULT_ROOT)
        return kept_below(Path(root or fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir()))

    def enter(self, fl_ctx: FLContext) -> None:
        """Counts this job among those of the site's data; the simulator's are research, and not counted.

        Raises:
            PolicyError: the policy's budget has no more jobs.
        """
        if not simulated(fl_ctx):
            policy = self.policy(fl_ctx)
            self._ledger(fl_ctx).enter(policy.data, fl_ctx.get_job_id(), policy.budget)

    def measured(self, fl_ctx: FLContext) -> None:
        """Counts a result with measured numbers, likewise.

        Raises:
            PolicyError: the policy's budget has no more evaluations.
        """
        if not simulated(fl_ctx):
            policy = self.policy(fl_ctx)
            self._ledger(fl_ctx).measured(policy.data, fl_ctx.get_job_id(), policy.budget)

    def _ledger(self, fl_ctx: FLContext) -> Ledger:
        return Ledger(fl_ctx.get_identity_name(), self.kept(fl_ctx))

    def secret(self, fl_ctx: FLContext) -> str:
        """The site's own part of every seed; empty in the simulator and where the policy says that the plan's decides alone."""
        return secret_of(self.kept(fl_ctx)) if self.policy(fl_ctx).seed == OWN and not simulated(fl_ctx) else ""

    def seals(self, fl_ctx: FLContext) -> Session:
        """This site's part in the job's sealed exchanges.

        Raises:
            SealingError: there is something wrong with the site's certificate.
        """
        if self._seals is None:
            self._seals = Session(identity_of(fl_ctx), fl_ctx.get_job_id())
        return self._seals

    def open(self, fl_ctx: FLContext, abort_signal: Signal) -> Site:
        """The site, opened once a process; `abort_signal` stops whatever it does.

        Raises:
            FedDPError: the policy does not take this job, or no more jobs, what is stored under its id is another plan's, or
                the site lacks the network that the job starts from.
        """
        if self._site is None:
            self.enter(fl_ctx)
            policy, store = self.policy(fl_ctx), self.store(fl_ctx)
            store.claim(self.plan.to_json())
            torch.set_num_threads(policy.threads)
            site, folder = fl_ctx.get_identity_name(), SiteFolder.open(policy.data)
            if few := policy.bounds.too_few(len(folder.rows_of("train"))):
                raise PolicyError(f"site {site}: {few[0]}")
            initial, secret = self._initial(site, store), self.secret(fl_ctx)
            self._site = Site(*(site, folder, self.plan, store, policy.device, initial), secret=secret, job=fl_ctx.get_job_id())
        self._site.stopped = lambda: abort_signal.triggered
        return self._site

    def keep_initial(self, tensors: Tensors, fl_ctx: FLContext) -> None:
        """Stores the whole network that the server's app brought: what this site starts from, private tensors included.

        Raises:
            FedDPError: the policy does not take this job, or the tensors are not exactly the plan's.
        """
        site, state = fl_ctx.get_identity_name(), self.network.state_dict()
        self.policy(fl_ctx)
        Spec.of(state, tuple(state)).check(f"{site} was sent initial tensors", tensors)
        require_initial(self.plan, f"site {site} was sent", tensors)
        store = self.store(fl_ctx)
        store.claim(self.plan.to_json())
        store.write(INITIAL, tensors)

    def _initial(self, site: str, store: Store) -> Tensors | None:
        """What `keep_initial` stored; None where the plan's seed decides."""
        if not self.plan.weights:
            return None
        if not store.has(INITIAL):
            raise FedDPError(
                f"site {site}: the job starts from initial tensors, and this site was not there when they were handed over"
                " (task initial); it takes no part: submit the job again when the site has joined"
            )
        return store.read(INITIAL)[0]


def kept_below(root: Path) -> Path:
    """Where a site whose workspace is `root` keeps its files."""
    return root / "feddp"


def site_component(fl_ctx: FLContext) -> SiteComponent:
    """The job's site component.

    Raises:
        InputError: the job has none.
    """
    component = fl_ctx.get_engine().get_component("site")
    if not isinstance(component, SiteComponent):
        raise InputError("the job has no component `site`; export it with `feddp job`")
    return component
