"""`feddp watch`: shows how a run stands until it ends: a run in a folder of this machine, or a job (`feddp.run.watch_job`)."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.live import Live

from feddp.errors import FedDPError, InputError
from feddp.files import RUN
from feddp.plan.schema import Plan
from feddp.reporting.standing import RUNNING, fitted, view
from feddp.run.folders import FINISHED, RunFolder, runs_below
from feddp.run.session import to_go_on
from feddp.stages.events import progress_after
from feddp.stages.standing import Standing
from feddp.terminal import Screen

POLL = 1.0  # seconds between two looks


@dataclass(frozen=True)
class Look:
    """How a run stands: its state in a word or two, its `Standing.summary`, and what is wrong if it ended without results."""

    state: str
    summary: Mapping[str, Any] = field(default_factory=dict)
    ended: bool = False
    failure: str = ""


class Watched(ABC):
    """A run that can be looked at."""

    @abstractmethod
    def look(self) -> Look:
        """Returns how the run stands now."""


class FolderRun(Watched):
    """The run in a folder of this machine.

    Raises:
        InputError: the folder is no run's, its run.json is damaged, or its plan is of another version.
    """

    def __init__(self, folder: Path):
        self.run = RunFolder.of(_only_running(folder))
        self._standing, self._read = Standing(Plan.from_json(self.run.stored["plan"])), 0

    def look(self) -> Look:
        state = self.run.state  # before the events are read: a run that has ended writes no more
        events, self._read = progress_after(self.run.progress(), self._read)
        for event in events:
            self._standing.add(event)
        failure = "" if state in (RUNNING, FINISHED) else f"{self.run.path} was {state}; {to_go_on(self.run.path)}"
        return Look(state, self._standing.summary(time.time()), state != RUNNING, failure)


def _only_running(folder: Path) -> Path:
    """Returns the folder of the run: `folder`, or of a comparison's runs below it the one that is running."""
    if (folder / RUN).exists() or not folder.is_dir():
        return folder
    running = [run.path for run in runs_below(folder)[0] if run.state == RUNNING]
    if len(running) != 1:
        names = ", ".join(map(str, running)) or "none"
        raise InputError(f"{folder} is no run, and below it one run must be running (there: {names}); name a run's folder")
    return running[0]


def watch(run: Watched, poll: float = POLL) -> None:
    """Shows how the run stands, until it ends. Where the output is no terminal, only the end is shown.

    Raises:
        FedDPError: the run ended without results, or cannot be looked at.
    """
    with Live(console=Screen(), auto_refresh=False) as live:
        while True:
            look = run.look()
            shown = view(look.summary, look.state) if look.ended else fitted(look.summary, look.state, live.console)
            live.update(shown, refresh=True)
            if look.ended:
                break
            time.sleep(poll)
    if look.failure:
        raise FedDPError(look.failure)
