"""One site in one job, built once per process: its name, policy and files. It is the host of the stages' site halves."""

import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from feddp.adaptation.request import AdaptationRequest
from feddp.data.folder import SiteFolder
from feddp.errors import FedDPError, PolicyError
from feddp.files import RECORD, read_events, write_json
from feddp.flare.budget import Ledger
from feddp.flare.kept import alone, files_of, secret_of
from feddp.flare.numbers import selected_by
from feddp.flare.policy import OWN, SitePolicy
from feddp.flare.terms import require_as_private, require_terms
from feddp.flare.unused import require_not_removed
from feddp.reading import one_line, read_json
from feddp.stages.initial import first_network
from feddp.stages.movement import DRIFTED
from feddp.stages.order import behind
from feddp.stages.site import Site
from feddp.stages.tensors import Expected
from feddp.training.claim import hold
from feddp.training.device import settle
from feddp.training.store import Store

SAMPLES = "samples.json"  # in a run's folder: the sites' numbers of training images, as they have signed them


class SiteContext:
    """One site in one job.

    Args:
        run: the id of the job with which the run began; the site's files and draws belong to the run.
        expected: the tensors of the answers of the job's plan.
        kept: the folder of this site's files, of all jobs and across jobs.
        simulated: whether the job is a simulation on one machine; then it is not counted, and the site has no secret.
        job: this job's id, if it continues the run; it is counted as a job of its own.

    Raises:
        PolicyError: the policy does not accept the job, or names a private role that the job's network does not have.
    """

    def __init__(
        self,
        name: str,
        run: str,
        expected: Expected,
        request: AdaptationRequest | None,
        policy: SitePolicy,
        kept: Path,
        simulated: bool,
        job: str = "",
    ):
        plan = expected.plan
        self.name, self.run, self.plan, self.request, self.policy, self.job = name, run, plan, request, policy, job or run
        self.expected, self.kept, self.simulated = expected, kept, simulated
        self.stopped: Callable[[], bool] = lambda: False
        self.audit: Callable[[str], object] = lambda line: None  # into FLARE's audit file, which a run without FLARE lacks
        self._site: Site | None = None
        self._entered = False
        policy.accept(name, plan, None if request is None else request.to_json())
        if vain := policy.vain(plan, expected.network):
            raise PolicyError(f"site {name}: {vain[0]}")

    @property
    def data(self) -> Path:
        return self.policy.data

    @property
    def device(self) -> str:
        return self.policy.device

    @cached_property
    def store(self) -> Store:
        """This site's own files of this run.

        Raises:
            PolicyError: the site's policy lets more out of them than when the run began.
        """
        store = Store(self.files(self.run))
        require_terms(store.folder, self.policy)
        if self.job != self.run:
            store.least = max(0, store.latest() - behind(self.plan))
        return store

    @property
    def scoring(self) -> bool:
        """Whether scores over the images by which rounds are selected may leave. In a simulation nothing is withheld, and an
        adaptation selects no round."""
        return self.simulated or self.request is not None or selected_by(self.plan, self.policy.data) >= self.policy.min_images

    @cached_property
    def samples(self) -> int:
        """The number of the site's training images; 0 in an adaptation, whose folder may have no splits."""
        if self.request is not None:
            return 0
        return len(SiteFolder.open(self.policy.data).rows_of(*self.plan.training.trained_on))

    @cached_property
    def _known_samples(self) -> dict[str, int]:
        path = self.store.folder / SAMPLES
        return {str(site): int(count) for site, count in read_json(path).items()} if path.exists() else {}

    def known_samples(self, signed: Mapping[str, int]) -> dict[str, int]:
        """Returns the numbers of training images of the sites that have signed theirs in this run, and this site's.

        They are kept in the run's folder: a site that is lost, or takes no part in a job that continues the run, has moved the
        shared tensors too.
        """
        if not signed:  # the store is not opened before the job is counted
            return {self.name: self.samples}
        if not signed.items() <= self._known_samples.items():
            self._known_samples |= signed
            write_json(self.store.folder / SAMPLES, self._known_samples)
        return self._known_samples | {self.name: self.samples}

    @cached_property
    def secret(self) -> str:
        """The site's part of every seed; empty in a simulation, and if the policy's `seed` is "plan"."""
        return secret_of(self.kept) if self.policy.seed == OWN and not self.simulated else ""

    def files(self, run: str) -> Path:
        """Returns this site's folder of a run.

        Raises:
            InputError: `run` is not a valid id.
            PolicyError: it is an earlier run, and the policy no longer keeps private what it kept when that run began.
        """
        folder = files_of(self.kept, run)
        if run != self.run:
            require_as_private(folder, self.policy)
        return folder

    def consents(self, word: str) -> bool:
        return self.policy.consents(word)

    def left_out(self, task: str, peer: str, why: FedDPError) -> None:
        """Notes in the record and the audit file that a task uses nothing of a peer, and why."""
        self.store.record("left_out", task=task, peer=peer, message=one_line(str(why)))
        self.audit(f"left site {peer} out: {why}")

    @property
    def min_images(self) -> int:
        return self.policy.min_images

    def withheld(self, task: str, why: str) -> None:
        """Notes in the log, the record and the audit file that a task gives nothing, and why."""
        logging.getLogger("feddp").warning("site %s: %s gives nothing: %s", self.name, task, why)
        self.store.record("withheld", task=task, message=why)
        self.audit(f"withheld: {why}")

    def warned(self, why: str) -> None:
        """Notes in the log, the record and the audit file, once in a run, what the site's administrator should look at."""
        if any(event["event"] == DRIFTED for event in read_events(self.store.folder / RECORD)):
            return
        logging.getLogger("feddp").warning("site %s: %s", self.name, why)
        self.audit(f"warning: {why}")
        self.store.record(DRIFTED, message=why)

    def enter(self) -> None:
        """Counts this job in the data's budget and configures the process for the policy's device, once per process.

        Raises:
            PolicyError: the policy's budget allows no further job.
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
            PolicyError: the policy's budget allows no further evaluation.
        """
        if not self.simulated:
            self._ledger.measured(self.policy.data, self.job, self.policy.budget)

    @property
    def _ledger(self) -> Ledger:
        return Ledger(self.name, self.kept)

    def release(self) -> bool:
        """Takes the site's images and CUDA graphs off its GPU; returns whether that frees memory."""
        return self._site is not None and self._site.leave_gpu()

    def claim(self) -> None:
        """Takes the run's folder for this process.

        Raises:
            PolicyError: the folder belongs to another plan or is in use; or another job's process has removed the run since
                this job's process began.
        """
        hold(self.store.folder)
        if not self.simulated:
            with alone(self.kept):  # a removal under way has ended then, and a later one finds the folder held
                require_not_removed(self.name, self.kept, self.run)
        self.store.claim(self.plan.to_json())

    def open(self) -> Site:
        """Returns the site with its images, opened once per process.

        Raises:
            FedDPError: the files under the job's id belong to another plan, the data folder has too few images or does not fit
                the plan, or the site lacks the network from which the job starts.
        """
        if self._site is None:
            self.claim()
            folder = SiteFolder.open(self.policy.data)
            if few := self.policy.bounds.too_few(self.samples):
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
                self.run,
                self.warned,
            )
        return self._site
