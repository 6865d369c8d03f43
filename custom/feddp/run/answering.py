"""Sites that answer without FLARE: in the process of the run, or in one of its workers (`feddp.run.workers`)."""

import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from feddp import protocol
from feddp.errors import ContributionError, FedDPError, Stopped, StorageError
from feddp.flare.context import SiteContext
from feddp.flare.kept import kept_below
from feddp.flare.policy import SitePolicy
from feddp.jobs.folder import LOCAL
from feddp.partition import Tensors
from feddp.plan.schema import Plan
from feddp.protocol import Kind
from feddp.stages import answered
from feddp.stages.message import Message
from feddp.stages.precision import halved
from feddp.stages.tensors import Expected


class Answering:
    """Answers tasks for the sites of this process.

    Args:
        sites: the sites by name.
        half: whether shared tensors travel in half precision.
        stopped: set when the run must stop.
        log: takes the tracebacks of sites that fail.
    """

    def __init__(self, sites: Mapping[str, SiteContext], half: bool, stopped: threading.Event, log: Path):
        self._sites, self._half, self._stopped, self._log = sites, half, stopped, log

    def reply(self, task: str, site: str, message: Message) -> Message:
        """Returns a site's answer.

        Raises:
            FedDPError: the site failed, for whatever reason; the others go on.
            Stopped: the run must stop.
        """
        context = self._sites[site]  # a policy that refuses the job raises here
        try:
            return self._answer(task, context, message)
        except Stopped:  # the whole run, not this site
            raise
        except StorageError as error:
            self._record(context, task, str(error))
            raise ContributionError(f"site {site}: {error}") from error
        except FedDPError as error:
            self._record(context, task, str(error))
            raise
        except Exception as error:  # as in FLARE: of any type; the log has its traceback
            self._record(context, task, f"{type(error).__name__}: {error}")
            note(self._log, traceback.format_exc())
            raise ContributionError(f"site {site}: {task} ended with {type(error).__name__}; {self._log} says why") from error

    def _record(self, context: SiteContext, task: str, message: str) -> None:
        try:
            context.store.record("error", task=task, message=message)
        except StorageError as error:  # the site's disk is full
            note(self._log, f"WARNING - {error}")

    def _answer(self, task: str, context: SiteContext, message: Message) -> Message:
        kind = protocol.spec_of(task).kind
        context.stopped = self._stopped.is_set
        if kind not in (Kind.READY, Kind.START):
            context.enter()
        brought = _carried(message.tensors, self._half and task in protocol.with_shared())
        answer = answered(task, Message(brought, message.scalars), context)
        return Message(_carried(answer.tensors, self._half and kind is Kind.ROUND), answer.scalars)


def _carried(tensors: Mapping[str, Tensor], half: bool) -> Tensors:
    """Returns the tensors as they arrive: copies, rounded to half precision if they travel so."""
    copies = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
    return halved(copies) if half else copies


def note(log: Path, line: str) -> None:
    """Appends a line to the log of a run without FLARE."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


class LocalSites(Mapping[str, SiteContext]):
    """The sites of a run, each made when it is first asked; their folders lie below `root`, as in the simulator.

    Args:
        policies: {site: the properties of its policy}.
    """

    def __init__(self, plan: Plan, policies: Mapping[str, Mapping[str, object]], root: Path):
        self._expected, self._policies, self._root = Expected(plan), policies, root
        self._made: dict[str, SiteContext] = {}

    def __getitem__(self, site: str) -> SiteContext:
        if site not in self._made:
            policy = SitePolicy.of(site, self._policies[site], simulated=True)
            kept = kept_below(self._root / site)
            self._made[site] = SiteContext(site, LOCAL, self._expected, None, policy, kept, simulated=True)
        return self._made[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)
