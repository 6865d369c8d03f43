"""From the sites' images.csv to means: over seeds image by image, then over a site's images, then over sites.

Likewise from cases.csv, where images are the slices of volumes: a case takes an image's place.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from feddp.compare.runs import Result, read_results
from feddp.errors import FedDPError
from feddp.methods.results import VOLUMES
from feddp.methods.site import SLOT_OF
from feddp.training.metrics import METRICS, Row, summarize
from feddp.training.volumes import VOLUME_METRICS

BEFORE, FINAL = "before", "final"  # a site's network before its last stage at home, and the one it ends with
Images = dict[str, Row]  # by the image's name, or the case's
Summary = dict[str, dict[str, float]]  # as `metrics.summarize`


@dataclass(frozen=True)
class Kind:
    """What is measured: a row of the sites' table `<name>s.csv`, in whose column `name` its name stands."""

    name: str
    metrics: tuple[str, ...]


IMAGE, CASE = Kind("image", METRICS), Kind("case", VOLUME_METRICS)


@dataclass(frozen=True)
class Scores:
    """A variant's test metrics.

    Attributes:
        images: {site: {image, or case: metrics}}, means over the seeds; a site that is missing under a seed, or has no volumes
            where cases are asked for, is left out.
        sites: {site: summary over its images}.
        average: the summary over the sites' means; None where a site is missing, as it would be no such average.
        seeds: {metric: population standard deviation, over the seeds, of each seed's average}; None for one seed.
    """

    images: dict[str, Images]
    sites: dict[str, Summary]
    average: Summary | None
    seeds: dict[str, float] | None


def scores(result: Result, sites: list[str], when: str = FINAL, kind: Kind = IMAGE) -> Scores:
    """The metrics of a variant with a finished run, at `sites`, before or after the last stage at home.

    Raises:
        FedDPError: a finished run lacks a file, or the seeds differ in their test images.
    """
    runs = [read_rows(folder, when, kind) for folder in result.folders.values()]
    images = {site: over_seeds(site, [run[site] for run in runs]) for site in sites if all(site in run for run in runs)}
    by_site = {site: summarize(list(rows.values())) for site, rows in images.items()}
    whole = by_site.keys() == set(sites)
    seeds = None
    if whole and len(runs) > 1:
        averages = [average({site: summarize(list(run[site].values())) for site in sites}) for run in runs]
        seeds = {m: float(np.std([a[m]["mean"] for a in averages])) for m in kind.metrics}
    return Scores(images, by_site, average(by_site) if whole else None, seeds)


def average(sites: dict[str, Summary]) -> Summary:
    """The summary over the sites' means, as the papers' Average: its std is the population's over the sites."""
    return summarize([{metric: cell["mean"] for metric, cell in summary.items()} for summary in sites.values()])


def over_seeds(what: str, runs: list[Images]) -> Images:
    """Image by image the mean over runs. FedDPError where the runs hold different images; `what` is named."""
    if any(run.keys() != runs[0].keys() for run in runs):
        raise FedDPError(f"{what}: the seeds were tested on different images; remove the runs made on other data")
    return {image: {m: float(np.mean([run[image][m] for run in runs])) for m in row} for image, row in runs[0].items()}


def has_cases(result: Result) -> bool:
    """Whether a site of one of its runs has volumes; runs made before there were any have none."""
    return any(VOLUMES in site for folder in result.folders.values() for site in read_results(folder)["sites"].values())


def read_rows(folder: Path, when: str, kind: Kind) -> dict[str, Images]:
    """{site: {image, or case: metrics}} of a finished run. FedDPError where a site's table is not there or cannot be read."""
    results = read_results(folder)
    last = SLOT_OF[results["stages"][-1]]
    sites = [site for site, found in results["sites"].items() if kind is IMAGE or VOLUMES in found]
    return {site: _read(folder / "sites" / site / f"{kind.name}s.csv", kind, when, last) for site in sites}


def _read(path: Path, kind: Kind, when: str, last: str) -> Images:
    """`last` is the network of the run's last stage, which a site that failed it does not have."""
    slots: dict[str, Images] = {}  # in the order of the stages, as a site writes them
    try:
        with open(path, newline="", encoding="utf-8") as handle:
            for row in csv.DictReader(handle):
                slots.setdefault(row["network"], {})[row[kind.name]] = {m: float(row[m]) for m in kind.metrics}
    except (OSError, KeyError, ValueError) as error:
        raise FedDPError(f"{path} is no table of {kind.name}s ({error!r}); remove its run, it will be run again") from None
    if not slots:
        raise FedDPError(f"{path} has no {kind.name}; remove its run, it will be run again")
    earlier = [slot for slot in slots if slot != last]
    return slots[earlier[-1] if when == BEFORE and earlier else list(slots)[-1]]
