"""Where several predictions of an image disagree: of several networks, or of one under the symmetries of the square.

Other networks are those of a run's other sites, such as the personal ones of IOP-FL. Flips and turns measure less: how much the
network's answer depends on an orientation that it may have learnt.
"""

import csv
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from feddp.adaptation.models import described, prepared
from feddp.data.folder import metadata_of
from feddp.data.formats.write import names
from feddp.data.pixels import write_png
from feddp.errors import InputError
from feddp.export.graph import Graph
from feddp.files import replacing
from feddp.run.images import InputImages, Reading
from feddp.run.threshold import probabilities
from feddp.training.device import asked_for
from feddp.training.metrics import THRESHOLD

MEAN, DISAGREEMENT, ORDER = "mean", "disagreement", "look_first.csv"
_LARGEST = 0.5  # standard deviation of numbers in [0, 1]


def write_uncertainty(
    network: Path, others: Sequence[Path], images: Path, out: Path, device: str = "cpu", reading: Reading = Reading()
) -> Path:
    """Writes mean and disagreement of every slice in `images` to folders of these names in `out`; returns the path of ORDER.

    The pictures have 8 bits, one per class: `<name>.png`, or `<name>-<c>.png` for class c of several. In MEAN, 255 is
    probability 1; in DISAGREEMENT, 255 is a standard deviation of 0.5, the largest there is. ORDER lists the slices by the
    names of their masks, the most doubtful first, with `doubt`. Files that cannot be read are left out.

    Raises:
        InputError: a file holds no network of FedDP, another one has other channels, classes or labels, an image does not fit,
            or a prediction is not finite.
    """
    require_alike(network, others)
    metadata, where = described(network), asked_for(device)
    graphs = [Graph.of(file)[0].to(where) for file in (network, *others)]
    for folder in (MEAN, DISAGREEMENT):
        (out / folder).mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, float, float]] = []
    found = InputImages(images, metadata.channels, reading)
    for entry, _, pixels in found.read("Comparing predictions of"):
        for name, image in zip(names(entry, pixels), pixels, strict=True):
            members = torch.stack(list(_members(graphs, torch.from_numpy(image.copy()))))
            deviation = members.std(dim=0, unbiased=False)
            for folder, maps, largest in ((MEAN, members.mean(dim=0), 1.0), (DISAGREEMENT, deviation, _LARGEST)):
                for c, shades in enumerate((maps / largest * 255).round().clamp(0, 255).to(torch.uint8).numpy(), 1):
                    write_png(out / folder / (f"{name}-{c}.png" if len(maps) > 1 else f"{name}.png"), shades)
            rows.append((f"{name}.png", doubt(members), deviation.max().item()))
    rows.sort(key=lambda row: (-row[1], row[0]))
    with replacing(out / ORDER) as part, open(part, "w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(("image", "doubt", "largest_disagreement"))
        writer.writerows(rows)
    return out / ORDER


def require_alike(network: Path, others: Sequence[Path]) -> None:
    """Raises InputError if no mean of a network and another means anything.

    That is where they have other channels, classes or labels, or take images that are made in another way.
    """
    for other in others:
        if metadata_of(described(other)) != metadata_of(described(network)):
            raise InputError(f"{other} has other channels, classes or labels than {network}; name networks of one run")
        if prepared(other) != prepared(network):
            raise InputError(
                f"{other} was trained on images that were made in another way than those of {network}; leave it out"
            )


def doubt(members: Tensor) -> float:
    """Returns the mean deviation (M, C, H, W) over the pixels that any member finds, per class, and of these the largest.

    0 if no member finds anything: that all agree on an empty mask says nothing against it.
    """
    found, deviation = (members > THRESHOLD).any(dim=0), members.std(dim=0, unbiased=False)
    return max((each[where].mean().item() for each, where in zip(deviation, found, strict=True) if where.any()), default=0.0)


def _members(graphs: Sequence[Graph], image: Tensor) -> Iterator[Tensor]:
    """Yields one prediction (C, H, W) per network or, of a single one, per symmetry of the square; the first is plain."""
    if len(graphs) > 1:
        yield from (probabilities(graph, image.numpy()) for graph in graphs)
        return
    for down, across, transposed in product((False, True), repeat=3):
        flips = [axis for axis, flipped in enumerate((down, across)) if flipped]
        turned = image.flip(flips)
        found = probabilities(graphs[0], (turned.transpose(0, 1) if transposed else turned).numpy())
        yield (found.mT if transposed else found).flip([axis + 1 for axis in flips])
