"""Counts the jobs and evaluations on a site's data and enforces the policy's budget.

Very many means over the same images reveal more about single images than one mean. Therefore a site counts the jobs and the
evaluations of each data folder, on disk. An evaluation is a result with measured numbers (`protocol.MEASURED`) or with a
round's shared tensors.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from feddp.errors import PolicyError
from feddp.files import write_json
from feddp.flare.kept import alone
from feddp.flare.policy import Budget

FILE = "budget.json"
REMEDY = "its administrator reads the count with `feddp kit budget KIT` and resets it with `feddp kit budget KIT --reset`"


@dataclass
class Used:
    """The use of one data folder: the ids of the jobs that opened it, and the number of evaluations."""

    jobs: list[str] = field(default_factory=list)
    evaluations: int = 0


class Ledger:
    """A site's budget.json in `folder`: the use of each data folder."""

    def __init__(self, site: str, folder: Path):
        self.site, self.folder, self.path = site, folder, folder / FILE

    def enter(self, data: Path, job: str, allowed: Budget) -> None:
        """Counts a job once, even if it enters several times.

        Raises:
            PolicyError: the policy allows no further job, or the file cannot be read.
        """
        with alone(self.folder):
            used = self.used()
            if self._entered(used, data, job, allowed):
                self._write(used)

    def measured(self, data: Path, job: str, allowed: Budget) -> None:
        """Counts one evaluation of a job, before its result leaves.

        Raises:
            PolicyError: the policy allows no further evaluation; or as for `enter`.
        """
        with alone(self.folder):
            used = self.used()
            self._entered(used, data, job, allowed)
            mine = used[str(data.resolve())]
            if mine.evaluations >= allowed.evaluations:
                self._refuse(data, f"{mine.evaluations} of {allowed.evaluations} evaluations")
            mine.evaluations += 1
            self._write(used)

    def require_left(self, data: Path, allowed: Budget) -> None:
        """Raises PolicyError where a further job would be refused at once, or its first result; counts nothing."""
        mine = self.used().get(str(data), Used())
        for name, count, limit in (
            ("jobs", len(mine.jobs), allowed.jobs),
            ("evaluations", mine.evaluations, allowed.evaluations),
        ):
            if count >= limit:
                raise PolicyError(
                    f"the budget for {data} is used up ({count} of {limit} {name}); `feddp kit budget KIT --reset` resets it"
                )

    def used(self) -> dict[str, Used]:
        """Returns {resolved path of the data folder: its use}.

        Raises:
            PolicyError: the file cannot be read, so the remaining budget is unknown.
        """
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            used = {data: Used(list(map(str, each["jobs"])), each["evaluations"]) for data, each in content.items()}
            if not all(type(each.evaluations) is int and each.evaluations >= 0 for each in used.values()):
                raise ValueError("evaluations is not a number")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PolicyError(f"site {self.site}: {self.path} cannot be read ({error}), so nothing leaves; {REMEDY}") from error
        return used

    def reset(self) -> None:
        """Sets all counts to zero."""
        with alone(self.folder):
            self._write({})

    def _entered(self, used: dict[str, Used], data: Path, job: str, allowed: Budget) -> bool:
        """Returns whether the job is new; if so, adds it to `used`."""
        mine = used.setdefault(str(data.resolve()), Used())
        if job in mine.jobs:
            return False
        if len(mine.jobs) >= allowed.jobs:
            self._refuse(data, f"{len(mine.jobs)} of {allowed.jobs} jobs")
        mine.jobs.append(job)
        return True

    def _refuse(self, data: Path, what: str) -> None:
        raise PolicyError(f"site {self.site}: its policy's budget for {data} is used up ({what}); nothing was sent; {REMEDY}")

    def _write(self, used: dict[str, Used]) -> None:
        write_json(self.path, {data: vars(each) for data, each in used.items()}, mode=0o600)
