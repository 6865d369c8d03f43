"""Every site's network of a finished run at every other site: whether a personal network suits its own site's images best.

Each network predicts the test images of each site. A site's own network is compared with the other networks on the same images
by Wilcoxon's two-sided signed-rank test over the images, not corrected for the number of tests. FedAvg's networks are all the
same, so its rows are too.

    feddp bench crossed RUN --data DATA
    feddp bench crossed RUN --against OTHER --data DATA

With --against, a site's own network is that of the run OTHER, and every network of RUN is compared with it: whether FineTune's
network of the site is better than FedAvg's, for example. Both runs need their networks (`feddp runs slim` removes them), and
have the same sites, size and normalisation: images are resized and normalised as in the runs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from scipy.stats import wilcoxon

from benchmarks.common import finished, image_dice, of_a_run, report
from feddp.data.images import SPLIT
from feddp.data.loading import load
from feddp.data.progress import track
from feddp.errors import InputError

Crossed = dict[str, dict[str, list[float]]]  # {site of the network: {site of the images: Dice in per cent}}


def main(arguments: Sequence[str]) -> None:
    options = of_a_run("crossed", __doc__, "a finished run with its networks")
    options.add_argument("--against", type=Path, help="a finished run whose networks are the sites' own; default: RUN")
    given = options.parse_args(arguments)
    plan, networks, folders = finished(given.run, given.data)
    images = {site: load(folder, SPLIT, plan.size, plan.training.normalise) for site, folder in folders.items()}
    pairs = [(owner, site) for owner in networks for site in images]
    found: Crossed = {}
    for owner, site in track(pairs, "Networks at sites"):
        found.setdefault(owner, {})[site] = image_dice(networks[owner], images[site])
    own = {site: found[site][site] for site in images}
    figures = {"method": plan.method, "rounds": plan.rounds, "seed": plan.seed}
    if given.against:
        other, others, _ = finished(given.against, given.data)
        kinds = [(each.size, each.training.normalise, sorted(sites)) for each, sites in ((plan, networks), (other, others))]
        if kinds[0] != kinds[1]:
            raise InputError(f"--against {given.against}: its size, normalisation or sites are not those of {given.run}")
        own = {site: image_dice(others[site], images[site]) for site in track(list(images), "Networks of the other run")}
        figures["against"] = {"method": other.method, "rounds": other.rounds, "seed": other.seed, "dice": means(own)}
    p = {owner: {site: against(own[site], row[site]) for site in images} for owner, row in found.items()}
    rows = [(owner, *(cell(row[site], p[owner][site]) for site in images)) for owner, row in found.items()]
    if given.against:
        rows.append((f"the site itself in {given.against}", *(cell(own[site], None) for site in images)))
    figures |= {"p": p, "dice": {owner: means(row) for owner, row in found.items()}}
    report("crossed", ("Dice (%) of the network of", *(f"at {site}" for site in images)), rows, figures)


def against(own: Sequence[float], values: Sequence[float]) -> float | None:
    """Returns the test's p of a network's values on a site's images against those of the site's own; None where all are equal,
    as those of the own network itself are."""
    differences = [one - other for one, other in zip(values, own, strict=True)]
    return float(wilcoxon(differences).pvalue) if any(differences) else None


def means(of: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {site: mean(values) for site, values in of.items()}


def cell(values: Sequence[float], p: float | None) -> str:
    return f"{mean(values):.2f}" + ("" if p is None else f" (p = {p:.2g})")
