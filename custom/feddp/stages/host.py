"""The interface through which a stage's site half sees its site."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from feddp.adaptation.request import AdaptationRequest
from feddp.errors import FedDPError
from feddp.plan.schema import Plan
from feddp.stages.site import Site
from feddp.stages.tensors import Expected
from feddp.training.store import Store


class Host(Protocol):
    """One site in one job: its name, its policy and its folders. `open` adds its images and its network."""

    name: str
    plan: Plan
    expected: Expected  # the tensors of each answer
    request: AdaptationRequest | None  # only in a job that adapts a finished run's models
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
    def scoring(self) -> bool:
        """Whether the site's scores of the images by which rounds are selected may leave."""

    @property
    def samples(self) -> int:
        """The number of the site's training images; 0 in an adaptation, which trains on none."""

    @property
    def min_images(self) -> int:
        """Means over fewer images, or patients, do not leave."""

    @property
    def secret(self) -> str:
        """The site's part of every seed; empty if only the plan's seed counts."""

    def left_out(self, task: str, peer: str, why: FedDPError) -> None:
        """Notes in the site's own files that a task uses nothing of a peer, and why. Nothing of this leaves the site."""

    def withheld(self, task: str, why: str) -> None:
        """Notes in the site's own log and files that a task gives nothing, and why. Nothing of this leaves the site."""

    def consents(self, word: str) -> bool:
        """Whether the site's policy consents to an exchange."""

    def files(self, job: str) -> Path:
        """Returns this site's folder of `job`, the current job or an earlier one."""

    def claim(self) -> None:
        """Takes this site's folder of the run for this process, before the first write there."""

    def open(self) -> Site:
        """Returns the site with its images; it is opened once per process."""

    def release(self) -> bool:
        """Takes the site's images and CUDA graphs off its full GPU; returns whether that frees memory."""
