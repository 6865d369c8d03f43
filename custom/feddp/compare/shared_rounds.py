"""Which runs of a comparison have the same rounds, so that one of them trains for all (`feddp.run.rounds`).

OUT/rounds/<digest>/      what the participants have after the last round, as long as an unfinished run goes on from it
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from feddp.methods import METHODS
from feddp.plan.schema import Plan
from feddp.run.rounds import digest_of, remove

FOLDER = "rounds"


class Trained(Protocol):
    """A run of a comparison (`feddp.compare.planned_run.Run`)."""

    @property
    def wanted(self) -> dict[str, Any]: ...

    @property
    def folder(self) -> Path: ...

    def is_finished(self) -> bool: ...


class SharedRounds:
    """The rounds of `runs`, whose comparison has the folder `out`. Those of another machine or device are not used."""

    def __init__(self, runs: Sequence[Trained], out: Path, machine: str):
        self._of: dict[Path, Path] = {}  # {a run's folder: that of its rounds}
        self._runs: dict[Path, list[Trained]] = {}
        self._first: dict[Path, int] = {}  # the number of the first run with the same rounds, by their folder or the run's own
        for number, run in enumerate(runs):
            plan = Plan.from_json(run.wanted["plan"])
            if METHODS[plan.method].federated:
                data = {name: value for name, value in run.wanted.items() if name != "plan"}
                folder, earlier = (
                    out
                    / FOLDER
                    / sha256(f"{digest_of(plan)}{json.dumps(of, sort_keys=True)}{machine}".encode()).hexdigest()[:16]
                    for of in (data, run.wanted["data"])  # versions before looked at no pixels
                )
                if earlier.exists():
                    folder = earlier
                self._of[run.folder] = folder
                self._runs.setdefault(folder, []).append(run)
            self._first.setdefault(self._key(run), number)
        self.tidy()  # after a comparison that was killed when all had finished

    def place(self, run: Trained) -> int:
        """Returns by what runs are sorted so that those with the same rounds follow one another, and all keep their order
        otherwise."""
        return self._first.get(self._key(run), 0)

    def folder(self, run: Trained) -> Path | None:
        """Returns where an unfinished run finds its rounds or leaves them; None if no other one needs them and none has left
        them."""
        folder = self._of.get(run.folder)
        if folder is None or folder.exists():
            return folder
        return folder if sum(not each.is_finished() for each in self._runs[folder]) > 1 else None

    def tidy(self) -> None:
        """Removes the rounds that no unfinished run needs."""
        for folder, runs in self._runs.items():
            if folder.exists() and all(run.is_finished() for run in runs):
                remove(folder)
                if not any(folder.parent.iterdir()):
                    folder.parent.rmdir()

    def _key(self, run: Trained) -> Path:
        return self._of.get(run.folder, run.folder)
