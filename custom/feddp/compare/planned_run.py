"""One run of a comparison: its folder, and its record beside it, by which a run counts as finished, goes on, or is refused."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddp.compare.variants import Variant
from feddp.errors import InputError
from feddp.files import RESULTS, RUN, write_json
from feddp.reading import read_own
from feddp.run.options import Options
from feddp.run.session import SIMULATOR, WORKSPACE, recorded
from feddp.training.claim import LOCK, hold, is_held_elsewhere, is_unused

PIXELS = "pixels"  # of a run's record: digests of what the sites' images and masks show


@dataclass(frozen=True)
class Run:
    """One variant under one seed, and its folder."""

    variant: Variant
    options: Options
    wanted: dict[str, Any]  # the plan and the sites' data: what must be equal for a finished run to count
    folder: Path
    label: str = ""  # its campaign's, where a comparison has several

    @property
    def name(self) -> str:
        return f"{self.label and f'{self.label}: '}{self.variant}, seed {self.options.seed}"

    @property
    def record(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.json")

    def is_finished(self) -> bool:
        """Whether it has finished, of this plan and these data.

        Also where no comparison noted that: one was killed in that moment, or `feddp run --resume` ended the run.

        Raises:
            InputError: a file of the run is damaged.
        """
        stored = self._stored()
        # not by results.json alone: it does not say which data were read
        if stored is None or not self._is_of(stored) or not (self.folder / RESULTS).exists():
            return False
        return bool(stored["finished"]) or (self._resulted() and (not (self.folder / RUN).exists() or self._planned()))

    def require_own(self) -> None:
        """Raises InputError where the folder holds another run or no run, another process has it, or a file is damaged."""
        if self.is_finished():
            return
        stored = self._stored()
        began, own = (self.folder / RUN).exists(), stored is not None and self._is_of(stored)
        if stored and (self.folder / RESULTS).exists() and (began or not own):
            raise InputError(f"{self.folder} finished with another plan or other data; choose another --out, or remove it")
        if is_held_elsewhere(self.folder):
            raise InputError(f"{self.folder} is in use by another process; wait for it")
        if not stored and self.folder.exists() and not is_unused(self.folder):
            raise InputError(f"{self.folder} is no run of a comparison; choose another --out, or remove it")
        if began and not (own and self._planned()):
            raise InputError(
                f"{self.folder} holds an unfinished run of another plan or other data; give the options that it began with,"
                f" choose another --out, or `feddp runs delete {self.folder}`"
            )

    def claim(self) -> None:
        """Takes the folder for this process, and empties it, unless the run began: then it is continued. As `require_own`.

        Raises:
            PolicyError: another process takes the folder at this moment.
        """
        self.require_own()
        self.folder.mkdir(parents=True, exist_ok=True)
        hold(self.folder, patience=1)  # who only asks whether it is held has it for a moment
        self.require_own()  # another process may have begun there meanwhile
        if not (self.folder / RUN).exists():
            for path in [path for path in self.folder.iterdir() if path.name != LOCK]:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _stored(self) -> dict[str, Any] | None:
        """The record; None if there is none. InputError where it is damaged."""
        remedy = f"remove it and {self.folder}; the same `feddp compare` runs it again"
        try:
            content = read_own(self.record, InputError, remedy)
        except FileNotFoundError:
            return None
        kinds = {"plan": dict, "data": dict, PIXELS: dict, "machine": str, "finished": bool}
        given = {PIXELS: {}} | content  # earlier versions noted no pixels
        if wrong := [name for name, kind in kinds.items() if not isinstance(given.get(name), kind)]:
            raise InputError(f"{self.record} is damaged: {', '.join(wrong)} is missing or of another kind; {remedy}")
        return content

    def _planned(self) -> bool:
        """Whether its run.json is of this plan. InputError where that is damaged."""
        return bool(recorded(self.folder)["plan"] == self.wanted["plan"])

    def _resulted(self) -> bool:
        """Whether its results.json is of this plan. InputError where that is damaged."""
        remedy = f"`feddp runs delete {self.folder}`; the same `feddp compare` runs it again"
        results = read_own(self.folder / RESULTS, InputError, remedy)
        # of its sites it has the results
        return all(results.get(name) == value for name, value in self.wanted["plan"].items() if name != "sites")

    def _is_of(self, stored: Mapping[str, Any]) -> bool:
        """Whether a record is of this plan and these data, on whatever machine. Earlier versions noted no pixels."""
        return all(stored.get(name, value if name == PIXELS else None) == value for name, value in self.wanted.items())

    def note(self, finished: bool, machine: str) -> None:
        self.record.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.record, {**self.wanted, "machine": machine, "finished": finished})

    def close(self, machine: str) -> None:
        """Notes that it has finished, and removes what no later step needs: hundreds of MB of states and copies of the job."""
        for folder in (WORKSPACE, SIMULATOR):
            shutil.rmtree(self.folder / folder, ignore_errors=True)
        self.note(True, machine)

    def close_if_finished(self) -> None:
        """Does `close` where the run has finished and no comparison noted that."""
        stored = self._stored()
        if stored and not stored["finished"] and self.is_finished():
            self.close(stored["machine"])

    @property
    def machine(self) -> str:
        """The machine that it was run on; "" if it has no record."""
        return str((self._stored() or {"machine": ""})["machine"])
