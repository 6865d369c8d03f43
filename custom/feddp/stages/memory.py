"""The server's memory of a run: the plan, the shared tensors, the progress, and what one stage leaves for the next.

Of a network, the server keeps the shared tensors only.
"""

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
from feddp.partition import Tensors
from feddp.plan.resolve import initial_tensors
from feddp.plan.schema import Plan
from feddp.protocol import Sent
from feddp.stages.tensors import Expected

LATEST, BEST = "shared_latest", "shared_best"


class ServerMemory:
    """Keeps γ of the latest and of the best round in the server's run folder.

    Args:
        job: the job's id.
        folder: the run folder of this job; `download_job` downloads it.
        config: the folder of the job's app with the initial tensors, if the plan names any.
        request: of a job that adapts a finished run's models.
    """

    def __init__(self, plan: Plan, job: str, folder: Path, config: Path, request: AdaptationRequest | None = None):
        self.plan, self.job, self.folder, self.request = plan, job, folder, request
        self.expected, self._config = Expected(plan), config
        self.handed_over = False  # whether the server has sent the job's initial tensors
        self.start_round: int | None = None  # the round from which the stages after stage 1 start
        self.best_round: int | None = None
        self.handshakes: dict[str, Tensors] = {}  # {consent word: handshakes of the consenting sites, named `<site>/<name>`}
        self.peers: dict[str, list[str]] = {}  # {site: the peers it was calibrated with}
        self.styles: dict[str, list[str]] = {}  # {site: the peers whose amplitude spectra it trains with} (FedDG)
        self.lost: dict[str, str] = {}  # {site that vanished: during which task}

    def brought(self) -> Tensors | None:
        """Returns the initial tensors that the job carries, or None.

        Raises:
            InputError: they do not match the plan's fingerprint.
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
        """Marks the latest round as the best so far: a hard link to its file, which `save` replaces and never edits."""
        with replacing(self.folder / f"{BEST}.safetensors") as link:
            os.link(self.folder / f"{LATEST}.safetensors", link)

    def load(self, name: str) -> tuple[Tensors, int]:
        """Returns γ and its round."""
        shared, metadata = read_network(self.folder / f"{name}.safetensors")
        return shared, int(metadata["round"])

    def note_peers(self, peers: Mapping[str, list[str]]) -> None:
        """Records the peers whose tensors each site was calibrated with, in any stage or epoch."""
        for site, given in peers.items():
            self.peers[site] = sorted({*self.peers.get(site, []), *given})

    def progress(self, event: str, **metadata: Any) -> None:
        """Appends a line to progress.jsonl, which `feddp run` follows."""
        append_event(self.folder / PROGRESS, event, **metadata)

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Writes results.json with the job's id, by which a later job finds this job's files at the sites."""
        write_json(self.folder / RESULTS, {"job": self.job, **results})


def start_file(folder: Path, round: int) -> Path:
    """Returns the file with γ of `round`, the last or the best one, in a server's run folder.

    Raises:
        FedDPError: there is none.
    """
    for file in (folder / f"{name}.safetensors" for name in (LATEST, BEST)):
        if file.exists() and outline(file)[1].get("round") == str(round):
            return file
    raise FedDPError(f"the server's folder {folder} lacks the shared tensors of round {round}; its log says why")
