"""The exceptions that a user is meant to read, and the one that nobody is.

FedDPError             a run failed; its children say of what kind the cause is
  InputError           a file, a folder, an option or a setting that somebody gave
    BadFile            the same, of one file
  PolicyError          a site refuses: its policy, its budget or the plan it approved does not allow what is asked
  ContributionError    the server refuses a site's answer, or has too few of them
  SealingError         a certificate, an introduction or an envelope of the exchange among sites
Stopped                the job was aborted
"""

from dataclasses import dataclass
from pathlib import Path


class FedDPError(Exception):
    """What a user can mend.

    The message names the file or the site and the remedy; the command line prints it without a traceback and
    exits with 2.
    """


class InputError(FedDPError):
    """A file, a folder, an option or a setting is not what it must be."""


class PolicyError(FedDPError):
    """A site's policy, its budget or the plan that it approved does not allow what is asked, or cannot be read."""


class ContributionError(FedDPError):
    """A site's answer must not count, or too few do."""


class SealingError(FedDPError):
    """Something sealed, or the certificate or the introduction it is sealed for, cannot be trusted."""


class Stopped(Exception):
    """The job was aborted while this was at work: nobody's mistake, so nothing to report, and no FedDPError."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one file, and what to do about it; `str` gives the line a user reads."""

    file: Path
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}. {self.remedy}."


class BadFile(InputError):
    """A `Problem` met where there is no list to put it in."""

    def __init__(self, problem: Problem):
        super().__init__(str(problem))
        self.problem = problem
