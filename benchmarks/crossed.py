"""Every site's network of a finished run at every other site: whether a personal network suits its own site's images best.

Each network predicts the test images of each site. A site's own network is compared with the other networks on the same images
by Wilcoxon's two-sided signed-rank test over the images, not corrected for the number of tests. FedAvg's networks are all the
same, so its rows are too.

    feddp bench crossed RUN --data DATA

RUN needs its networks: `feddp runs slim` removes them. Images are resized and normalised as in the run.
"""

from collections.abc import Sequence
from statistics import mean

from scipy.stats import wilcoxon

from benchmarks.common import finished, image_dice, report
from feddp.data.images import SPLIT
from feddp.data.loading import load
from feddp.data.progress import track

Crossed = dict[str, dict[str, list[float]]]  # {site of the network: {site of the images: Dice in per cent}}


def main(arguments: Sequence[str]) -> None:
    _, plan, networks, folders = finished("crossed", __doc__, "a finished run with its networks", arguments)
    images = {site: load(folder, SPLIT, plan.size, plan.training.normalise) for site, folder in folders.items()}
    pairs = [(owner, site) for owner in networks for site in images]
    found: Crossed = {}
    for owner, site in track(pairs, "Networks at sites"):
        found.setdefault(owner, {})[site] = image_dice(networks[owner], images[site])
    p = {owner: {site: against_own(found, owner, site) for site in images} for owner in networks}
    rows = [(owner, *(cell(found[owner][site], p[owner][site]) for site in images)) for owner in networks]
    figures = {"method": plan.method, "rounds": plan.rounds, "seed": plan.seed, "p": p}
    figures["dice"] = {owner: {site: mean(values) for site, values in row.items()} for owner, row in found.items()}
    report("crossed", ("Dice (%) of the network of", *(f"at {site}" for site in images)), rows, figures)


def against_own(found: Crossed, owner: str, site: str) -> float | None:
    """Returns the test's p between a network and the site's own one; None for itself, or where all images have equal values."""
    differences = [one - other for one, other in zip(found[owner][site], found[site][site], strict=True)]
    return float(wilcoxon(differences).pvalue) if any(differences) else None


def cell(values: Sequence[float], p: float | None) -> str:
    return f"{mean(values):.2f}" + ("" if p is None else f" (p = {p:.2g})")
