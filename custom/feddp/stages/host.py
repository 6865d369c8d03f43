"""What a stage's site half may ask of the site that it runs at."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from feddp.adaptation.request import AdaptationRequest
from feddp.plan.schema import Plan
from feddp.stages.site import Site
from feddp.stages.tensors import Expected
from feddp.training.store import Store


class Host(Protocol):
    """One site in one job: its name, its policy's words, its folders. `open` gives what needs its images."""

    name: str
    plan: Plan
    expected: Expected  # what the plan's answers hold
    request: AdaptationRequest | None  # of a job that adapts a finished run's models
    stopped: Callable[[], bool]  # whether the job was aborted

    @property
    def store(self) -> Store:
        """This site's own files of this job."""

    @property
    def data(self) -> Path:
        """The folder with the site's images."""

    @property
    def device(self) -> str: ...

    @property
    def secret(self) -> str:
        """The site's own part of every seed; empty where the plan's seed decides alone."""

    def consents(self, word: str) -> bool:
        """Whether the site's policy consents to an exchange."""

    def files(self, job: str) -> Path:
        """Where this site's own files of a job lie, this one or an earlier one."""

    def open(self) -> Site:
        """The site with its images, opened once a process."""
