"""A site of FLARE's stock FedAvg: the same local epoch, and nothing of FedDP's executor, guard or store."""

import time
from pathlib import Path

import nvflare.client as flare
from torch import Tensor

from feddp.data.folder import SiteFolder
from feddp.data.loading import Batch, load
from feddp.files import append_event
from feddp.networks import build
from feddp.training.calibration import mean_scores
from feddp.training.device import settle
from feddp.training.loop import adamw, fit_epoch
from feddp.training.losses import segmentation_loss
from feddp.training.settings import Training


def main(data: str, times: str, size: str, name: str) -> None:
    """Trains in every round.

    Args:
        data: the root of the sites' folders.
        times: the folder for the times of each site's rounds.
        size: of the images, in pixels.
        name: of the network.
    """
    flare.init()
    settle("cpu", 1)
    site, training = flare.get_site_name(), Training()
    folder = SiteFolder.open(Path(data) / site)
    samples, validation = (load(folder, split, int(size)) for split in ("train", "val"))
    network, measured = build(name, 3, 1, seed=0), segmentation_loss(training.loss)
    optimizer = adamw(network, training.lr, training.weight_decay)

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        return measured(logits, batch["mask"])

    while flare.is_running():
        model = flare.receive()
        if model is None:
            return
        started = time.time()
        network.load_state_dict(model.params)
        if model.current_round:  # as our sites do from the second round on
            mean_scores(network, validation)
        fit_epoch(network, optimizer, samples, loss, training, seed=model.current_round)
        append_event(Path(times) / f"{site}.jsonl", "round", round=model.current_round, started=started)
        flare.send(flare.FLModel(params=network.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": len(samples)}))
