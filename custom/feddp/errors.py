"""The exceptions whose messages a user reads, and `Stopped`, whose message nobody needs.

FedDPError             a run failed; the subclass gives the kind of cause
  InputError           a given file, folder, option or setting is wrong
    BadFile            one given file is wrong
  PolicyError          a site refuses: its policy, its budget or the plan it approved does not allow the request
    SharedError        a site refuses shared tensors that the sites' training cannot give
  ContributionError    the server refuses a site's answer, or has too few answers
  SealingError         a certificate, a handshake or an envelope of an exchange between sites is wrong
  StorageError         a disk is full, a folder is read-only, or a file system has no locks
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
    """An error that a user can correct.

    The message names the file or the site and the remedy. The command line prints it without a traceback and exits with 2.
    """


class InputError(FedDPError):
    """A file, a folder, an option or a setting is wrong."""


class PolicyError(FedDPError):
    """A site's policy, its budget or the plan that it approved does not allow the request, or cannot be read."""


class SharedError(PolicyError):
    """The shared tensors that the server sent are not what the sites' training gives, or not what it sent to the others."""


class ContributionError(FedDPError):
    """A site's answer is not acceptable, or too few answers are."""


class SealingError(FedDPError):
    """A sealed envelope, or the certificate or handshake behind it, cannot be trusted."""


class StorageError(FedDPError):
    """The system does not write or lock a file: the disk is full, the folder read-only, or the file system without locks."""


class Stopped(Exception):
    """The job was aborted during the work. It is not an error, so it is not reported and not a FedDPError."""


@dataclass(frozen=True)
class Problem:
    """A fault of one file and its remedy; `str` returns the line that a user reads."""

    file: Path
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}. {self.remedy}."


class BadFile(InputError):
    """A `Problem` raised as an error."""

    def __init__(self, problem: Problem):
        super().__init__(str(problem))
        self.problem = problem


def is_of_user(error: OSError, words: Iterable[str]) -> bool:
    """Returns whether a path among `words`, which a user wrote, or a full disk caused `error`; any other cause is our bug.

    The system names the file that it refuses: the given path, a file below it, or one of its parent folders.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    refused = [Path(os.path.abspath(name)) for name in (error.filename, error.filename2) if isinstance(name, str | os.PathLike)]
    given = [Path(os.path.abspath(word.split("=", 1)[-1] if word.startswith("-") else word)) for word in words if word]
    return any(name.is_relative_to(path) or path.is_relative_to(name) for name in refused for path in given)


def written_down(error: BaseException) -> Path:
    """Writes the traceback of `error` to a new temporary file that only its user can read; returns the path."""
    handle, name = tempfile.mkstemp(prefix="feddp-", suffix=".log")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.writelines(traceback.format_exception(error))
    return Path(name)
