"""A round's work at a site against plain practice: float32, every image decoded in every epoch, evaluation image by image.

Ours decodes once, onto the GPU where one computes, trains, and evaluates in batches on the device. Plain practice decodes the
images anew, in the same process and not by workers, trains a bare loop with the same augmentation, predicts one image
at a time, and measures it on the CPU. Both measure Dice and IoU, as a round does, and no distances.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.common import BF16, FP32, compute_settings, count, interleaved, parser, pixels, ratio, report, shown
from benchmarks.loop import bare, ours
from feddp.data.folder import SiteFolder
from feddp.data.loading import load
from feddp.data.placing import placed
from feddp.data.synthesize import synthesize
from feddp.networks import DEFAULT, build
from feddp.training.calibration import mean_scores
from feddp.training.device import asked_for, settle
from feddp.training.loop import adamw
from feddp.training.metrics import overlap
from feddp.training.settings import Training, from_settings


def main(arguments: Sequence[str]) -> None:
    options = parser("practice", __doc__)
    options.add_argument("--size", type=pixels, default=96)
    options.add_argument("--stored", type=count, default=384, help="pixels of the images on disk")
    options.add_argument("--images", type=count, default=40, help="three fifths to train on, a fifth to validate")
    options.add_argument("--pairs", type=count, default=5)
    options.add_argument("--compute", choices=(FP32, BF16), default=FP32, help="of ours")
    options.add_argument("--device", default="cpu")
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    device = asked_for(given.device)
    settle(device.type, 1)
    training = from_settings(Training, compute_settings(given.compute, given.device))
    networks = [build(given.network, 3, 1, seed=0).to(device) for _ in range(2)]
    optimizers = [adamw(network, training.lr, training.weight_decay) for network in networks]
    with tempfile.TemporaryDirectory() as root:
        synthesize(Path(root), 1, given.images, given.stored)
        folder = SiteFolder.open(Path(root) / "site-1")
        samples, validation = (placed(load(folder, split, given.size), device) for split in ("train", "val"))

        def a_round() -> None:
            ours(networks[0], optimizers[0], samples, training, given.compute)
            mean_scores(networks[0], validation)

        @torch.no_grad()
        def evaluated() -> None:
            networks[1].eval()
            for sample in load(folder, "val", given.size):
                maps = torch.sigmoid(networks[1](sample["image"][None].to(device)))
                overlap(maps.cpu(), sample["mask"][None])

        def plain() -> None:
            bare(networks[1], optimizers[1], load(folder, "train", given.size), training, FP32)
            evaluated()

        seconds = interleaved("Rounds", given.pairs, {"ours": a_round, "plain practice": plain}, given.device)
    gain = ratio(seconds["plain practice"], seconds["ours"])
    rows = [(name, f"{median(values):.2f}") for name, values in seconds.items()]
    rows.append(("plain practice / ours, per pair", shown(gain)))
    figures = vars(given) | {"seconds": seconds, "ratio": gain}
    report("practice", ("a round's work", "seconds, median"), rows, figures, given.device)
