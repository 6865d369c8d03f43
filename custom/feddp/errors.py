"""The exceptions that a user is meant to read, and the one that nobody is.

FedDPError             a run failed; its children say of what kind the cause is
  InputError           a file, a folder, an option or a setting that somebody gave
    BadFile            the same, of one file
  PolicyError          a site refuses: its policy, its budget or the plan it approved does not allow what is asked
  ContributionError    the server refuses a site's answer, or has too few of them
  SealingError         a certificate, an introduction or an envelope of the exchange among sites
Stopped                the job was aborted
"""

import errno
import os
import tempfile
import traceback
from collections.abc import Iterable
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


def is_of_user(error: OSError, words: Iterable[str]) -> bool:
    """Whether the cause of `error` is a path that the words of a command give, or a full disk; anything else is a bug of ours.

    The system names the file that it refuses: the path itself, a file below it, or a folder on the way to it.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    refused = [Path(os.path.abspath(name)) for name in (error.filename, error.filename2) if isinstance(name, str | os.PathLike)]
    given = [Path(os.path.abspath(word.split("=", 1)[-1] if word.startswith("-") else word)) for word in words if word]
    return any(name.is_relative_to(path) or path.is_relative_to(name) for name in refused for path in given)


def written_down(error: BaseException) -> Path:
    """Writes the traceback of `error` to a new file in the folder for temporary files, for its user alone; returns its path."""
    handle, name = tempfile.mkstemp(prefix="feddp-", suffix=".log")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.writelines(traceback.format_exception(error))
    return Path(name)
