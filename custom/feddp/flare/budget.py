"""How much jobs have asked of a site's data so far, and where its policy ends that.

Very many means over the same images tell of single images what one does not. So a site counts, for each data folder, its jobs,
and its evaluations: results that carry measured numbers (`flare.numbers.MEASURED`) or a round's shared tensors. The count
survives every process.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from feddp.errors import PolicyError
from feddp.files import write_json
from feddp.flare.kept import alone
from feddp.flare.policy import Budget

FILE = "budget.json"
REMEDY = "its administrator looks at it with `feddp kit budget KIT`, and begins anew with `feddp kit budget KIT --reset`"


@dataclass
class Used:
    """Of one data folder: the ids of the jobs that have opened it, and how often measured numbers left."""

    jobs: list[str] = field(default_factory=list)
    evaluations: int = 0


class Ledger:
    """A site's budget.json, in `folder`: what is used, by data folder."""

    def __init__(self, site: str, folder: Path):
        self.site, self.folder, self.path = site, folder, folder / FILE

    def enter(self, data: Path, job: str, allowed: Budget) -> None:
        """Counts a job, once however often it comes.

        Raises:
            PolicyError: it would be one more than the policy allows; or the file cannot be read.
        """
        with alone(self.folder):
            used = self.used()
            if self._entered(used, data, job, allowed):
                self._write(used)

    def measured(self, data: Path, job: str, allowed: Budget) -> None:
        """Counts one evaluation of a job, before it leaves.

        Raises:
            PolicyError: it would be one more than the policy allows; or as for `enter`.
        """
        with alone(self.folder):
            used = self.used()
            self._entered(used, data, job, allowed)
            mine = used[str(data.resolve())]
            if mine.evaluations >= allowed.evaluations:
                self._refuse(data, f"{mine.evaluations} of {allowed.evaluations} evaluations")
            mine.evaluations += 1
            self._write(used)

    def used(self) -> dict[str, Used]:
        """What is used, by the resolved path of the data folder.

        Raises:
            PolicyError: the file cannot be read: nobody knows then what is left.
        """
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            found = {data: Used(list(map(str, each["jobs"])), each["evaluations"]) for data, each in content.items()}
            if not all(type(each.evaluations) is int and each.evaluations >= 0 for each in found.values()):
                raise ValueError("evaluations that are no number")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PolicyError(f"site {self.site}: {self.path} cannot be read ({error}), so nothing leaves; {REMEDY}") from error
        return found

    def reset(self) -> None:
        """Nothing is used."""
        with alone(self.folder):
            self._write({})

    def _entered(self, used: dict[str, Used], data: Path, job: str, allowed: Budget) -> bool:
        """Whether the job is a new one; it is among `used` then."""
        mine = used.setdefault(str(data.resolve()), Used())
        if job in mine.jobs:
            return False
        if len(mine.jobs) >= allowed.jobs:
            self._refuse(data, f"{len(mine.jobs)} of {allowed.jobs} jobs")
        mine.jobs.append(job)
        return True

    def _refuse(self, data: Path, what: str) -> None:
        raise PolicyError(f"site {self.site}: its policy's budget for {data} is used up, {what}; nothing was sent; {REMEDY}")

    def _write(self, used: dict[str, Used]) -> None:
        write_json(self.path, {data: vars(each) for data, each in used.items()}, mode=0o600)
