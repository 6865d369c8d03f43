"""The server's memory of a run: the plan, the shared tensors, the progress, and what one stage leaves for the next.

Of a network, the server keeps the shared tensors only. A run may consist of several jobs: each continues from what the job
before it left in the run's own folder.

plan.json                      the plan of the run
shared_latest.safetensors      γ of the last completed round; its metadata hold the round and the rest of the state
shared_previous.safetensors    the same of the time before, in case the latest is damaged
shared_best_12.safetensors     γ of round 12, the best so far by the state in one of these two files, or marked since

A job's own folder, which is downloaded, shows the latest and the best one (shared_best.safetensors), and the progress.
"""

import json
import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from feddp.adaptation.request import AdaptationRequest
from feddp.errors import BadFile, ContributionError, FedDPError, InputError
from feddp.files import (
    PROGRESS,
    RESULTS,
    TIME,
    Event,
    append_event,
    copy_anew,
    event_now,
    read_events,
    replacing,
    write_json,
    writing,
)
from feddp.limits import EVENT_BYTES
from feddp.methods.base import HEADS, TRAIN
from feddp.networks.header import outline
from feddp.networks.weights import save_network
from feddp.partition import Tensors
from feddp.plan.resolve import initial_tensors
from feddp.plan.schema import Plan
from feddp.protocol import Sent
from feddp.stages.accounting import accounted
from feddp.stages.events import OF_SITES
from feddp.stages.selection import Scored, packed, unpacked
from feddp.stages.tensors import Expected
from feddp.training.claim import claim
from feddp.training.store import read_kept

LATEST, PREVIOUS, BEST = "shared_latest", "shared_previous", "shared_best"
_NUMBERS = ("start_round", "best_round", "epoch")
_LISTS = ("peers", "styles", "done", "missed", "empty", "without", "samples")


class ServerMemory:
    """Keeps γ of the latest and of the best round, and what a later job needs to continue the run.

    Args:
        run: the id of the job with which the run began; a job that continues it has an id of its own.
        folder: the run folder of this job; `download_job` downloads it.
        kept: the folder of the run, which outlives this job.
        config: the folder of the job's app with the initial tensors, if the plan names any.
        request: of a job that adapts a finished run's models.

    Raises:
        PolicyError: `kept` belongs to another plan.
        StorageError: `kept` cannot be written; every later write raises it too.
    """

    def __init__(self, plan: Plan, run: str, folder: Path, kept: Path, config: Path, request: AdaptationRequest | None = None):
        self.plan, self.run, self.folder, self.kept, self.request = plan, run, folder, kept, request
        self.expected, self._config = Expected(plan), config
        self.handed_over = False  # whether the server has sent the job's initial tensors
        self.round = 0  # completed rounds
        self.epoch = 0  # completed epochs of an exchange of heads
        self.start_round: int | None = None  # the round from which the stages after stage 1 start
        self.best_round: int | None = None
        self.scored: Scored = {}  # the sites' validation IoU in the rounds, by which the best one is selected
        self._written_best: int | None = None  # the best round in the state on the disk
        self.done: list[str] = []  # completed stages
        self.handshakes: dict[str, Tensors] = {}  # {consent word: handshakes of the consenting sites, named `<site>/<name>`}
        self.peers: dict[str, list[str]] = {}  # {site: the peers it was calibrated with}
        self.styles: dict[str, list[str]] = {}  # {site: the peers whose amplitude spectra it trains with} (FedDG)
        self.missed: dict[str, int] = {}  # {site: how many rounds' means lack its contribution}; others missed none
        self.empty: dict[str, int] = {}  # {site: in how many rounds in a row its network found nothing (`feddp.stages.empty`)}
        self.without: dict[str, dict[str, str]] = {}  # {consent word: {site that took no part in the exchange: why}}
        self.lost: dict[str, str] = {}  # {site that vanished: during which task}
        self.versions: dict[str, dict[str, str]] = {}  # {site that takes part in this job, or the server: its versions}
        self.samples: dict[str, int] = {}  # {site: its number of training images, as it last stated it}
        self.notes: dict[str, str] = {}  # {site: the last note of shared tensors that it signed in this job}
        self.unfit: dict[str, str] = {}  # {site whose versions, told or not, keep it out of this job: why}
        self._progress: tuple[Path, ...] = (folder / PROGRESS,)  # one file, or two with the same lines (`_continue_progress`)
        self._telling = threading.Lock()
        self._watchers: list[Callable[[Event], None]] = []
        if request is None:
            self._open()

    def _open(self) -> None:
        """Reads the state that an earlier job of this run left, if any."""
        with writing(self.kept):
            self.kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        heads = f"at the sites, states of stage {HEADS} have replaced those of its last rounds"
        claim(self.kept, self.plan.to_json(), fixed=heads if HEADS in self.plan.stages else "")
        self._continue_progress()
        if not self._file(LATEST).exists():
            return
        try:
            _, metadata = read_kept(self._file(LATEST))
        except BadFile as bad:
            what = f"{bad.problem.file}: {bad.problem.what}"
            if not self._file(PREVIOUS).exists():
                self.progress("damaged", message=f"{what}; there is none before it, so the run starts again")
                self._file(LATEST).unlink()
                return
            self.progress("damaged", message=f"{what}; the round before it is used")
            os.replace(self._file(PREVIOUS), self._file(LATEST))
            _, metadata = read_kept(self._file(LATEST))
        self.round, state = int(metadata["round"]), json.loads(metadata["state"])
        for name in (*_NUMBERS, *_LISTS):
            setattr(self, name, state.get(name, getattr(self, name)))  # a run of an earlier version lacks some
        self.scored = unpacked(state["scored"])
        extended = TRAIN in self.done and self.round < self.plan.rounds
        if extended:
            self.without = {}  # the sites are asked again
        if extended or TRAIN not in self.done:
            self.done, self.epoch, self.start_round, self.peers = [], 0, None, {}
        self._written_best = self.best_round
        self._show(LATEST, LATEST)
        self._restore_best()
        self.progress("resumed", round=self.round, of=self.plan.rounds, done=self.done, epoch=self.epoch)

    def _restore_best(self) -> None:
        """Finds γ of the best round again; an earlier version had one file for whatever round was the best."""
        if self.best_round is None:
            return
        for name in (self.best, BEST, LATEST, PREVIOUS):
            file = self._file(name)
            if file.exists() and _round_of(file) == str(self.best_round):
                _place(file, self._file(self.best))
                self._show(self.best, BEST)
                return
        self.progress("damaged", message=f"the shared tensors of round {self.best_round}, the best so far, are lost")
        self.best_round, self.scored = None, {}

    def brought(self) -> Tensors | None:
        """Returns the initial tensors that the job carries, or None.

        Raises:
            InputError: they do not match the plan's fingerprint.
        """
        return initial_tensors(self.plan, self._config)

    def first(self) -> Tensors:
        """γ^0: the shared part of the common start."""
        return self.expected.partition.split(self.brought() or self.expected.network.state_dict())[0]

    def latest(self) -> Tensors:
        """γ of the last completed round, or of the common start."""
        return self.load(LATEST)[0] if self.round else self.first()

    def save(self, shared: Mapping[str, Tensor], round: int) -> None:
        """Writes γ of `round` as the latest, whole or not at all.

        Raises:
            ContributionError: a name is private, or is not one of the shared tensors; nothing is written.
        """
        if wrong := sorted(shared.keys() - set(self.expected.names(Sent.SHARED))):
            raise ContributionError(
                f"the persistor was given {len(wrong)} tensors that are not shared ({wrong[0]}, ...); not written"
            )
        self.round = round
        self._write(shared)

    def finish(self, stage: str) -> None:
        """Notes that a stage is complete: a later job of this run starts after it."""
        self.done.append(stage)
        self.note()

    def note(self) -> None:
        """Writes the state beside γ. Before the first round there is nothing to write: a later job starts anew."""
        if self.request is None and self.round:
            self._write(self.load(LATEST)[0])

    def _write(self, shared: Mapping[str, Tensor]) -> None:
        state = {name: getattr(self, name) for name in (*_NUMBERS, *_LISTS)} | {"scored": packed(self.scored)}
        if self._file(LATEST).exists():
            _place(self._file(LATEST), self._file(PREVIOUS))
        save_network(self._file(LATEST), dict(shared), {"round": str(self.round), "state": json.dumps(state)})
        self._show(LATEST, LATEST)
        named = {_best_of(self._written_best), self.best}  # by the states of the previous and of the latest file
        for file in self.kept.glob(f"{BEST}*.safetensors"):
            if file.stem not in named:
                file.unlink()
        self._written_best = self.best_round

    @property
    def best(self) -> str:
        """The name of the file with γ of the best round so far."""
        return _best_of(self.best_round)

    def keep_best(self) -> None:
        """Marks the latest round as the best so far. The former best's file stays as long as a state on the disk names it."""
        _place(self._file(LATEST), self._file(self.best))
        self._show(self.best, BEST)

    def load(self, name: str) -> tuple[Tensors, int]:
        """Returns γ and its round."""
        shared, metadata = read_kept(self._file(name))
        return shared, int(metadata["round"])

    def _file(self, name: str) -> Path:
        return self.kept / f"{name}.safetensors"

    def _show(self, name: str, shown: str) -> None:
        """Shows a file of the run as `shown` in this job's folder, from which it is downloaded."""
        _place(self._file(name), self.folder / f"{shown}.safetensors")

    def _continue_progress(self) -> None:
        """Continues the progress of the jobs before this one: one file, in the run's folder and in this job's.

        In a container these are two file systems, and so two files: the run's takes each line first, and this job's, which
        begins as its copy, takes it then. A process killed in between leaves the line to the next job's copy.
        """
        path, shown = self.kept / PROGRESS, self.folder / PROGRESS
        with writing(path):
            path.touch()
        _place(path, shown)
        if not shown.samefile(path):
            self._progress = (path, shown)

    def takes_part(self, site: str) -> bool:
        """Whether a site has told its versions in this job, if any was asked (`feddp.stages.ready`)."""
        return not self.versions or site in self.versions

    def note_missed(self, sites: Collection[str]) -> None:
        """Counts a round that ends without the contributions of these sites."""
        for site in sites:
            self.missed[site] = self.missed.get(site, 0) + 1

    def note_peers(self, peers: Mapping[str, list[str]]) -> None:
        """Records the peers whose tensors each site was calibrated with, in any stage or epoch."""
        for site, given in peers.items():
            self.peers[site] = sorted({*self.peers.get(site, []), *given})

    def progress(self, event: str, **metadata: Any) -> None:
        """Appends a line to progress.jsonl, which `feddp run` follows, and shows it to the watchers.

        A line that a site can cause at will is only shown where the file is half as large as its readers take: the rounds need
        the other half.
        """
        first = self._progress[0]
        with self._telling:  # the lines have one order in both files
            happened = event_now(event, **metadata)
            if event not in OF_SITES or not first.exists() or first.stat().st_size < EVENT_BYTES // 2:
                for path in self._progress:
                    append_event(path, **happened)
        for watcher in self._watchers:
            watcher(happened)

    def events(self) -> list[Event]:
        """Returns the events of the run so far."""
        return read_events(self.folder / PROGRESS)

    def watch(self, watcher: Callable[[Event], None], earlier: bool = True) -> None:
        """Calls `watcher` with every event from now on; if `earlier`, first with those of the run so far."""
        for event in self.events() if earlier else ():
            watcher(event)
        self._watchers.append(watcher)

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Writes time.json, then results.json with the run's id, by which a later job finds this run's files at the sites, and
        with the versions of all participants."""
        write_json(self.folder / TIME, accounted(self.events()))
        versions = {"versions": self.versions} if self.versions else {}
        write_json(self.folder / RESULTS, {"job": self.run, **results, **versions})


def _round_of(file: Path) -> str | None:
    """Returns the round in a file's metadata; None if the file is damaged."""
    try:
        return outline(file)[1].get("round")
    except InputError:
        return None


def _best_of(round: int | None) -> str:
    return f"{BEST}_{round}"


def _place(source: Path, target: Path) -> None:
    """Gives a file a second name, which replaces an older file of that name; where there can be none, a copy.

    A file of tensors is replaced and never edited, so that both are the same to its readers.
    """
    if target.exists() and target.samefile(source):
        return
    with replacing(target) as part:
        try:
            os.link(source, part)
        except OSError:  # another file system, as in a container, or one without links
            copy_anew(source, part)


def start_file(folder: Path, round: int) -> Path:
    """Returns the file with γ of `round`, the last or the best one, in a server's run folder.

    Raises:
        FedDPError: there is none.
    """
    for file in (folder / f"{name}.safetensors" for name in (LATEST, BEST)):
        if file.exists() and outline(file)[1].get("round") == str(round):
            return file
    raise FedDPError(f"the server's folder {folder} lacks the shared tensors of round {round}; its log says why")
