"""Which runs of a comparison have the same rounds, so that one of them trains for all (`feddp.run.rounds`).

OUT/rounds/<digest>/      what the participants have after the last round, as long as an unfinished run goes on from it
"""

import json
import shutil
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

from feddp.methods import METHODS
from feddp.plan.schema import Plan
from feddp.run.rounds import digest_of

FOLDER = "rounds"


class Trained(Protocol):
    """A run of a comparison (`feddp.compare.runs.Run`)."""

    @property
    def wanted(self) -> dict[str, Any]: ...

    @property
    def folder(self) -> Path: ...

    def is_finished(self) -> bool: ...


SomeRun = TypeVar("SomeRun", bound=Trained)


class SharedRounds:
    """The rounds of `runs`, whose comparison has the folder `out`. Those of another machine or device are not used."""

    def __init__(self, runs: Sequence[Trained], out: Path, machine: str):
        self._of: dict[Path, Path] = {}  # {a run's folder: that of its rounds}
        self._runs: dict[Path, list[Trained]] = {}
        for run in runs:
            plan = Plan.from_json(run.wanted["plan"])
            if METHODS[plan.method].federated:
                text = digest_of(plan) + json.dumps(run.wanted["data"], sort_keys=True) + machine
                folder = out / FOLDER / sha256(text.encode()).hexdigest()[:16]
                self._of[run.folder] = folder
                self._runs.setdefault(folder, []).append(run)
        for run in runs:
            self.release(run)  # of a comparison that was killed when all had finished

    def together(self, runs: Sequence[SomeRun]) -> list[SomeRun]:
        """Returns `runs` in their order, but those with the same rounds one after the other."""
        first = {folder: number for number, folder in reversed([*enumerate(map(self._key, runs))])}
        return sorted(runs, key=lambda run: first[self._key(run)])

    def folder(self, run: Trained) -> Path | None:
        """Returns where a run finds its rounds or leaves them; None if no other one needs them and none has left them."""
        folder = self._of.get(run.folder)
        if folder is None or folder.exists():
            return folder
        others = (other for other in self._runs[folder] if other.folder != run.folder)
        return folder if any(not other.is_finished() for other in others) else None

    def release(self, run: Trained) -> None:
        """Removes the rounds of a run, where no unfinished one needs them."""
        folder = self._of.get(run.folder)
        if folder is not None and folder.exists() and all(other.is_finished() for other in self._runs[folder]):
            part = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            folder.rename(part)  # half removed, it would look whole
            shutil.rmtree(part)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()

    def _key(self, run: Trained) -> Path:
        return self._of.get(run.folder, run.folder)
