"""The one exception a user is meant to read."""

from dataclasses import dataclass
from pathlib import Path


class FedDPError(Exception):
    """Bad input: a folder, a mask, a config, a contribution, a certificate.

    The message names the file or the site and the remedy; the command line prints it without a traceback and
    exits with 2.
    """


class Stopped(FedDPError):
    """The job was aborted while this was at work: nobody's mistake, so nothing to report."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one file, and what to do about it; `str` gives the line a user reads."""

    file: Path
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}. {self.remedy}."


class BadFile(FedDPError):
    """A `Problem` met where there is no list to put it in."""

    def __init__(self, problem: Problem):
        super().__init__(str(problem))
        self.problem = problem
