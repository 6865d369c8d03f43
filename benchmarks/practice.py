"""A round's work at a site against plain practice: float32, every image decoded in every epoch, evaluation image by image.

Ours decodes once, onto the GPU where one computes, trains, and evaluates in batches on the device. Plain practice decodes the
images anew, in the same process and not by workers, trains a bare loop with the same augmentation, predicts one image
at a time, and measures it on the CPU. Both measure Dice and IoU, as a round does, and no distances. With --graphs ours trains
with CUDA graphs too, in turns with the others.
"""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn

from benchmarks.common import BF16, FP32, computing, count, interleaved, parser, pixels, ratio, report, shown
from benchmarks.loop import bare, ours
from feddp.data.folder import SiteFolder
from feddp.data.loading import Sample, load
from feddp.data.placing import placed
from feddp.data.synthesize import synthesize
from feddp.networks import DEFAULT, build
from feddp.stages.stopwatch import Stopwatch
from feddp.training.calibration import mean_scores
from feddp.training.device import asked_for, settle, wait
from feddp.training.loop import adamw
from feddp.training.metrics import overlap
from feddp.training.settings import Training, from_settings

OURS, GRAPHS, PLAIN = "ours", "ours, CUDA graphs", "plain practice"


def main(arguments: Sequence[str]) -> None:
    options = parser("practice", __doc__)
    options.add_argument("--size", type=pixels, default=96)
    options.add_argument("--stored", type=count, default=384, help="pixels of the images on disk")
    options.add_argument("--images", type=count, default=40, help="three fifths to train on, a fifth to validate")
    options.add_argument("--pairs", type=count, default=5)
    options.add_argument("--compute", choices=(FP32, BF16), default=FP32, help="of ours")
    options.add_argument("--graphs", action="store_true", help="measure ours with CUDA graphs too")
    options.add_argument("--device", default="cpu")
    options.add_argument("--network", default=DEFAULT)
    given = options.parse_args(arguments)
    device = asked_for(given.device)
    settle(device.type, 1)
    sides = [OURS, *([GRAPHS] if given.graphs else []), PLAIN]
    own = {side: from_settings(Training, computing(given.compute, side == GRAPHS)) for side in sides}
    networks = {side: build(given.network, 3, 1, seed=0).to(device) for side in sides}
    optimizers = {side: adamw(networks[side], own[side].lr, own[side].weight_decay) for side in sides}
    with tempfile.TemporaryDirectory() as root:
        synthesize(Path(root), 1, given.images, given.stored)
        folder = SiteFolder.open(Path(root) / "site-1")
        samples, validation = (placed(load(folder, split, given.size), device) for split in ("train", "val"))
        turns: dict[str, list[dict[str, float]]] = {side: [] for side in sides}

        def a_round(side: str) -> None:
            watch = Stopwatch()
            with watch.part("training"):
                ours(networks[side], optimizers[side], samples, own[side])
                wait(given.device)
            with watch.part("evaluation"):
                mean_scores(networks[side], validation)
            turns[side].append(watch.parts)

        def plain() -> None:
            watch = Stopwatch()
            with watch.part("decoding"):
                decoded = {split: load(folder, split, given.size) for split in ("train", "val")}
            with watch.part("training"):
                bare(networks[PLAIN], optimizers[PLAIN], decoded["train"], own[PLAIN], FP32)
                wait(given.device)
            with watch.part("evaluation"):
                image_by_image(networks[PLAIN], decoded["val"], device)
            turns[PLAIN].append(watch.parts)

        calls = {side: plain if side == PLAIN else partial(a_round, side) for side in sides}
        seconds = interleaved("Rounds", given.pairs, calls, given.device)
    parts = {
        f"{side}, {name}": [round(turn[name], 6) for turn in found[-given.pairs :]]  # without the turn that is not counted
        for side, found in turns.items()
        for name in found[0]
    }
    gains = {side: ratio(seconds[PLAIN], seconds[side]) for side in sides if side != PLAIN}
    rows = [(name, f"{median(values):.3f}") for name, values in (seconds | parts).items()]
    rows += [(f"{PLAIN} / {side}, per pair", shown(gain)) for side, gain in gains.items()]
    figures = vars(given) | {"seconds": seconds, "parts": parts, "ratio": gains}
    report("practice", ("a round's work", "seconds, median"), rows, figures, given.device)


@torch.no_grad()
def image_by_image(network: nn.Module, samples: Sequence[Sample], device: torch.device) -> None:
    network.eval()
    for sample in samples:
        maps = torch.sigmoid(network(sample["image"][None].to(device)))
        overlap(maps.cpu(), sample["mask"][None])
