"""The server's memory of a run: the plan, the shared tensors and nothing else of a network, the run's progress, and what one
stage leaves for the next."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from feddp.adaptation.request import AdaptationRequest
from feddp.errors import ContributionError, FedDPError
from feddp.files import PROGRESS, RESULTS, append_event, replacing, write_json
from feddp.networks.header import outline
from feddp.networks.weights import read_network, save_network
from feddp.plan.resolve import initial_tensors
from feddp.plan.schema import Plan
from feddp.protocol import Sent
from feddp.stages.tensors import Expected
from feddp.training.store import Tensors

LATEST, BEST = "shared_latest", "shared_best"


class ServerMemory:
    """Keeps γ of the latest and of the best round in the server's run folder.

    Args:
        job: the job's id.
        folder: the run folder of this job; `download_job` brings it to whoever submitted the job.
        config: the folder in which the job's app brings tensors along, where the plan says that it does.
        request: of a job that adapts a finished run's models.
    """

    def __init__(self, plan: Plan, job: str, folder: Path, config: Path, request: AdaptationRequest | None = None):
        self.plan, self.job, self.folder, self.request = plan, job, folder, request
        self.expected, self._config = Expected(plan), config
        self.handed_over = False  # whether the sites have been sent the network that the job brought
        self.start_round: int | None = None  # the round that the stages after stage 1 start from
        self.best_round: int | None = None
        self.introductions: dict[str, Tensors] = {}  # by consent: what consenting sites showed, by `<site>/<name>`
        self.peers: dict[str, list[str]] = {}  # whose personal tensors each site was calibrated with
        self.styles: dict[str, list[str]] = {}  # whose amplitude spectra each site trains with (FedDG)
        self.lost: dict[str, str] = {}  # sites that vanished, and when

    def brought(self) -> Tensors | None:
        """The tensors that the job brought along, if it did.

        Raises:
            InputError: they are not those of the plan.
        """
        return initial_tensors(self.plan, self._config)

    def first(self) -> Tensors:
        """γ^0: the shared part of the common start."""
        return self.expected.partition.split(self.brought() or self.expected.network.state_dict())[0]

    def save(self, shared: Mapping[str, Tensor], round: int) -> None:
        """Writes γ of `round` as the latest, whole or not at all.

        Raises:
            ContributionError: a name is private, or is not one of the shared tensors; nothing is written.
        """
        if wrong := sorted(shared.keys() - set(self.expected.names(Sent.SHARED))):
            raise ContributionError(
                f"the persistor was given {len(wrong)} tensors that are not shared ({wrong[0]}, ...); not written"
            )
        save_network(self.folder / f"{LATEST}.safetensors", dict(shared), {"round": str(round)})

    def keep_best(self) -> None:
        """The latest round is the best so far: its file, which `save` never writes into, gets a second name."""
        with replacing(self.folder / f"{BEST}.safetensors") as link:
            os.link(self.folder / f"{LATEST}.safetensors", link)

    def load(self, name: str) -> tuple[Tensors, int]:
        """γ and its round."""
        shared, metadata = read_network(self.folder / f"{name}.safetensors")
        return shared, int(metadata["round"])

    def note_peers(self, peers: Mapping[str, list[str]]) -> None:
        """Whose tensors each site was calibrated with, in any stage and epoch that it took part in."""
        for site, given in peers.items():
            self.peers[site] = sorted({*self.peers.get(site, []), *given})

    def progress(self, event: str, **facts: Any) -> None:
        """Appends a line to progress.jsonl, which `feddp run` follows."""
        append_event(self.folder / PROGRESS, event, **facts)

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Writes results.json, with the job's id: a later job finds by it what this one left at the sites."""
        write_json(self.folder / RESULTS, {"job": self.job, **results})


def start_file(folder: Path, round: int) -> Path:
    """The file in a server's run folder with γ of `round`, the last or the best.

    Raises:
        FedDPError: there is none.
    """
    for file in (folder / f"{name}.safetensors" for name in (LATEST, BEST)):
        if file.exists() and outline(file)[1].get("round") == str(round):
            return file
    raise FedDPError(f"the server's folder {folder} lacks the shared tensors of round {round}; its log says why")
