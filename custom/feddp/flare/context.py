"""One site in one job, built once a process: its name, its policy, its files. The stages' site halves get it as their host."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from feddp.adaptation.request import AdaptationRequest
from feddp.data.folder import SiteFolder
from feddp.errors import PolicyError
from feddp.flare.budget import Ledger
from feddp.flare.kept import secret_of
from feddp.flare.policy import OWN, SitePolicy
from feddp.partition import select
from feddp.stages.initial import first_network
from feddp.stages.site import Site
from feddp.stages.tensors import Expected
from feddp.training.device import settle
from feddp.training.store import Store, require_job_id


class SiteContext:
    """What a site is in a job.

    Args:
        expected: what the answers of the job's plan hold.
        kept: the folder of all jobs' files of this site, and of what it keeps across jobs.
        simulated: whether the job is research on one machine: it is not counted, and the site has no secret.

    Raises:
        PolicyError: the policy does not take this job, or names a private role that the job's network does not have.
    """

    def __init__(
        self,
        name: str,
        job: str,
        expected: Expected,
        request: AdaptationRequest | None,
        policy: SitePolicy,
        kept: Path,
        simulated: bool,
    ):
        plan = expected.plan
        self.name, self.job, self.plan, self.request, self.policy = name, job, plan, request, policy
        self.expected, self.kept, self.simulated = expected, kept, simulated
        self.stopped: Callable[[], bool] = lambda: False
        self._site: Site | None = None
        self._entered = False
        policy.accept(name, plan, None if request is None else request.to_json())
        if without := [role for role in policy.private if not select(expected.network, role)]:
            raise PolicyError(
                f"site {name}: its policy keeps {', '.join(without)} private, and the job's {plan.network} has no such"
                " tensor, so that would protect nothing; leave this site out, or change `private` of privacy.json"
            )

    @property
    def data(self) -> Path:
        return self.policy.data

    @property
    def device(self) -> str:
        return self.policy.device

    @cached_property
    def store(self) -> Store:
        """This site's own files of this job."""
        return Store(self.files(self.job))

    @cached_property
    def secret(self) -> str:
        """The site's own part of every seed; empty in research, and where the policy says that the plan's decides alone."""
        return secret_of(self.kept) if self.policy.seed == OWN and not self.simulated else ""

    def files(self, job: str) -> Path:
        """Where this site's own files of a job lie. InputError where the id would lead elsewhere."""
        return files_of(self.kept, job)

    def consents(self, word: str) -> bool:
        return self.policy.consents(word)

    def enter(self) -> None:
        """Once a process: counts this job among those of the site's data, and settles the process for the policy's device.

        Raises:
            PolicyError: the policy's budget has no more jobs.
        """
        if self._entered:
            return
        if not self.simulated:
            self._ledger.enter(self.policy.data, self.job, self.policy.budget)
        settle(self.policy.device, self.policy.threads)
        self._entered = True

    def measured(self) -> None:
        """Counts a result with measured numbers.

        Raises:
            PolicyError: the policy's budget has no more evaluations.
        """
        if not self.simulated:
            self._ledger.measured(self.policy.data, self.job, self.policy.budget)

    @property
    def _ledger(self) -> Ledger:
        return Ledger(self.name, self.kept)

    def open(self) -> Site:
        """The site with its images, opened once a process.

        Raises:
            FedDPError: what is stored under the job's id is another plan's, the folder has too few images or does not fit the
                plan, or the site lacks the network that the job starts from.
        """
        if self._site is None:
            self.store.claim(self.plan.to_json())
            folder = SiteFolder.open(self.policy.data)
            if few := self.policy.bounds.too_few(len(folder.rows_of("train"))):
                raise PolicyError(f"site {self.name}: {few[0]}")
            self._site = Site(
                self.name,
                folder,
                self.plan,
                self.store,
                self.policy.device,
                first_network(self),
                lambda: self.stopped(),
                self.secret,
                self.job,
            )
        return self._site


def kept_below(root: Path) -> Path:
    """Where a site whose workspace is `root` keeps its files."""
    return root / "feddp"


def files_of(kept: Path, job: str) -> Path:
    """Where a site's own files of a job lie, below its folder of all jobs' files. InputError where the id leads elsewhere."""
    require_job_id(job)
    return kept / job
