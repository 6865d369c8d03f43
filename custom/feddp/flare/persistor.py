"""The server's memory: the plan, the shared tensors and nothing else, and the run's progress."""

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from torch import Tensor, nn

from feddp.errors import ContributionError
from feddp.files import PROGRESS, RESULTS, append_event, replacing, write_json
from feddp.flare.messages import register_tensors
from feddp.methods.aggregation import Spec
from feddp.networks.weights import read_network, save_network
from feddp.partition import Partition
from feddp.plan.resolve import build_network, exchanged, head_names, initial_tensors, partition_of
from feddp.plan.schema import Plan

LATEST, BEST = "shared_latest", "shared_best"


class SharedTensorPersistor(FLComponent):
    """Keeps γ of the latest and of the best round in the server's run folder.

    Args:
        plan: the run, as `Plan.to_json`.
    """

    def __init__(self, plan: dict[str, Any]):
        super().__init__()
        self.plan = Plan.from_json(plan)
        self.handed_over = False  # whether the sites have been sent the network that the job brought
        self.start_round: int | None = None  # the round that stage 1 handed on
        self.best_round: int | None = None
        self.peers: dict[str, list[str]] = {}  # whose personal tensors each site was calibrated with
        self.styles: dict[str, list[str]] = {}  # whose amplitude spectra each site trains with (FedDG)
        self.lost: dict[str, str] = {}  # sites that vanished, and when
        register_tensors()

    @cached_property
    def _network(self) -> nn.Module:
        return build_network(self.plan)

    @property
    def _state(self) -> dict[str, Tensor]:
        return self._network.state_dict()

    @cached_property
    def partition(self) -> Partition:
        return partition_of(self.plan, self._network)

    @cached_property
    def shared_spec(self) -> Spec:
        """Exactly what a site contributes in stage 1."""
        return Spec.of(self._state, self.partition.shared)

    @cached_property
    def personal_spec(self) -> Spec:
        """Exactly what a consenting site gives for IGC."""
        return Spec.of(self._state, exchanged(self.plan, self.partition))

    @cached_property
    def head_spec(self) -> Spec:
        """Exactly what a consenting site gives at every epoch of FedLC's head calibration."""
        return Spec.of(self._state, head_names(self._network))

    @cached_property
    def network_spec(self) -> Spec:
        """Exactly a whole network: what a consenting site gives for a hospital outside."""
        return Spec.of(self._state, tuple(self._state))

    def brought(self, fl_ctx: FLContext) -> dict[str, Tensor] | None:
        """The tensors that the job brought along, if it did.

        Raises:
            InputError: they are not those of the plan.
        """
        # its get_app_config_dir leaves "config" out in kits of `nvflare package`
        app = fl_ctx.get_engine().get_workspace().get_app_dir(fl_ctx.get_job_id())
        return initial_tensors(self.plan, Path(app) / "config")

    def first(self, fl_ctx: FLContext) -> dict[str, Tensor]:
        """γ^0: the shared part of the common start."""
        return self.partition.split(self.brought(fl_ctx) or self._state)[0]

    def save(self, shared: Mapping[str, Tensor], round: int, fl_ctx: FLContext) -> None:
        """Writes γ of `round` as the latest, whole or not at all.

        Raises:
            ContributionError: a name is private, or is not one of the shared tensors; nothing is written.
        """
        if wrong := sorted(shared.keys() - set(self.partition.shared)):
            raise ContributionError(
                f"the persistor was given {len(wrong)} tensors that are not shared ({wrong[0]}, ...); not written"
            )
        save_network(self.folder(fl_ctx) / f"{LATEST}.safetensors", dict(shared), {"round": str(round)})

    def keep_best(self, fl_ctx: FLContext) -> None:
        """The latest round is the best so far: its file, which `save` never writes into, gets a second name."""
        folder = self.folder(fl_ctx)
        with replacing(folder / f"{BEST}.safetensors") as link:
            os.link(folder / f"{LATEST}.safetensors", link)

    def load(self, name: str, fl_ctx: FLContext) -> tuple[dict[str, Tensor], int]:
        """γ and its round."""
        shared, metadata = read_network(self.folder(fl_ctx) / f"{name}.safetensors")
        return shared, int(metadata["round"])

    @staticmethod
    def folder(fl_ctx: FLContext) -> Path:
        """The server's run folder of this job; `download_job` brings it to whoever submitted the job."""
        return Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))

    def progress(self, fl_ctx: FLContext, event: str, **facts: Any) -> None:
        """Appends a line to progress.jsonl, which `feddp run` follows."""
        append_event(self.folder(fl_ctx) / PROGRESS, event, **facts)

    def write_results(self, fl_ctx: FLContext, results: Mapping[str, Any]) -> None:
        """Writes results.json, with the job's id: a later job finds by it what this one left at the sites."""
        write_json(self.folder(fl_ctx) / RESULTS, {"job": fl_ctx.get_job_id(), **results})
