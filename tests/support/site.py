"""One site of a federation in one process: a job's components, the policy of the site's kit, and what FLARE says to them."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.fuel.utils import fobs

from feddp.errors import FedDPError
from feddp.flare import messages
from feddp.flare.executor import StageExecutor
from feddp.flare.filters import PrivateTensorGuard
from feddp.flare.policy import SitePolicy
from feddp.flare.site import SiteComponent
from feddp.plan.schema import Plan
from feddp.protocol import LARGEST, PARTS
from feddp.stages.site import Site
from feddp.training.columns import METRICS
from feddp.training.store import Store

# what a site's tasks answer beside tensors
CELL = {"mean": 0.5, "std": 0.1, "n": 2}
SUMMARY = dict.fromkeys(METRICS, CELL)
TABLES = {"before_calibration": SUMMARY, "final": SUMMARY, "peers": {"site-2": SUMMARY}}
NUMBERS = {
    "round": 1,
    "phase": 0,
    "loss": 0.5,
    "dice": 0.5,
    "iou": 0.4,
    "samples": 8.0,
    "seconds": 1.0,
    **dict.fromkeys(PARTS, 0.0),
}


class Unsigned:
    """What a site knows of the others where none signs anything: all have made every step."""

    samples: ClassVar[dict[str, int]] = {}

    def tell(self, told):
        pass

    def require_same(self, *args):
        return LARGEST

    def remember(self, *args):
        pass


class Alone:
    """A site's session in a job whose server asks for no notes."""

    notes = Unsigned()

    def __init__(self, session):
        self._session = session

    def __getattr__(self, name):
        return getattr(self._session(), name)


class FlareSite:
    """A site's process of a job.

    Args:
        folder: the site's kit; what it keeps is below `feddp`, and its audit file is `audit.txt`.
        request: of an unseen site, as `AdaptationRequest.to_json`; the job is then an adaptation.
        simulated: as in FLARE's simulator: nothing is sealed, counted or kept secret, and no gate is asked for.
        agrees: whether it takes shared tensors only with the other sites' notes of them, which needs a kit's certificate.
        admits: whether the policy takes the plan, whatever its bounds are.
        policy: properties of the kit's privacy.json.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path | str = "nowhere",
        name: str = "site-1",
        job: str = "job",
        request: dict[str, Any] | None = None,
        simulated: bool = False,
        admits: bool = True,
        agrees: bool = False,
        **policy: Any,
    ):
        self.name, self.folder, self.request, self.simulated, self.admits = name, Path(folder), request, simulated, admits
        self.policy, self.agrees = {"data": "nowhere"} | policy, agrees
        self.submitted(plan, job)

    def submitted(self, plan: Plan, job: str = "job", resume: str = "", **policy: Any) -> "FlareSite":
        """Another job, or the same one again, in a process of its own; `policy` is for this job alone."""
        self.plan, self.job, self.run = plan, job, resume or job
        self.component = SiteComponent(plan.to_json(), self.request, resume)
        if not self.agrees:
            seals = self.component.seals
            self.component.seals = lambda fl_ctx: Alone(partial(seals, fl_ctx))
        admitting = SitePolicy.admitting(plan) if self.admits else {}
        if self.admits and self.request is not None:
            admitting["approve"] = [{"job": job, "plan": plan.digest(self.request)}]
        properties = admitting | self.policy | policy
        self.fl_ctx = FLContext()
        self.fl_ctx.get_engine = lambda *a, **k: SimpleNamespace(get_component={"site": self.component}.get)
        self.fl_ctx.get_identity_name = lambda *a, **k: self.name
        self.fl_ctx.set_prop(FLContextKey.CURRENT_RUN, job, private=False)
        self.fl_ctx.set_prop(FLContextKey.SIMULATE_MODE, self.simulated)
        workspace = SimpleNamespace(get_root_dir=lambda: str(self.folder))
        self.fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace)
        self.fl_ctx.set_prop(FLContextKey.SCOPE_PROPERTIES, properties | {"data": str(properties["data"])})
        return self

    @property
    def data(self) -> Path:
        return Path(self.policy["data"])

    @property
    def store(self) -> Store:
        """The site's own files of the run."""
        return Store(self.folder / "feddp" / self.run)

    @property
    def shared(self):
        """The job's shared tensors as the network has them before any training."""
        return self.component.expected.partition.split(self.component.expected.network.state_dict())[0]

    def open(self) -> Site:
        return self.component.context(self.fl_ctx).open()

    def at(self, task: str) -> FLContext:
        """FLARE's context of a task."""
        self.fl_ctx.set_prop(FLContextKey.TASK_NAME, task)
        return self.fl_ctx

    def executed(self, task: str, tensors=None, **scalars: Any) -> Shareable:
        """The executor's answer, before any filter."""
        return StageExecutor().execute(task, messages.pack(tensors, **scalars), self.at(task), Signal())

    def guarded(self, task: str, message: Shareable) -> Shareable:
        """What the guard lets out of an answer. FedDPError where that is nothing."""
        return PrivateTensorGuard().process(message, self.at(task))

    def sends(self, task: str, message: Shareable):
        """The tensors and scalars of what the guard lets out."""
        return messages.unpack(self.guarded(task, message))

    def answer(self, task: str, tensors=None, **scalars: Any) -> Shareable:
        """As FLARE has it: what the guard will not let out is an error's code, and its words are in `guard_error`."""
        try:
            return self.guarded(task, self.executed(task, tensors, **scalars))
        except FedDPError as error:
            self.guard_error = str(error)
            return make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)

    def stopped(self, task: str, message: Shareable, match: str) -> None:
        """The guard raises, with these words, and they are in the one line that the audit file has more."""
        before = len(self.audited())
        with pytest.raises(FedDPError, match=match) as caught:
            self.sends(task, message)
        (line,) = self.audited()[before:]
        assert f"[J:{self.job}][A:{task}#?][egress guard stopped: site {self.name}: " in line
        assert " ".join(str(caught.value).split())[:400] in line

    def audited(self) -> list[str]:
        return (self.folder / "audit.txt").read_text().splitlines()

    def events(self) -> list[dict[str, Any]]:
        """What the site wrote down about the job, in its own folder."""
        return [json.loads(line) for line in (self.store.folder / "record.jsonl").read_text().splitlines()]

    def last_error(self) -> str:
        return [event["message"] for event in self.events() if event["event"] == "error"][-1]


def context(component: SiteComponent, task: str = "train", **policy: Any) -> FLContext:
    """FLARE's context of a task at a hospital, in the clear: what it would seal can be looked at."""
    policy = {"consent": [], "private": []} | policy
    return FlareSite(component.plan, name="hospital", simulated=True, **policy).at(task)


def bytes_of(message: Shareable) -> bytes:
    """The message as FLARE would serialise it, tensors inline."""
    messages.register_tensors()
    return fobs.dumps(message)
