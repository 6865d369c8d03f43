"""From the sites' images.csv to means: over seeds image by image, then over a site's images, then over sites."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from feddp.compare.runs import Result, read_results
from feddp.errors import FedDPError
from feddp.methods.site import SLOT_OF
from feddp.training.metrics import METRICS, Row, summarize

BEFORE, FINAL = "before", "final"  # a site's network before its last stage at home, and the one it ends with
Images = dict[str, Row]  # by the image's name
Summary = dict[str, dict[str, float]]  # as `metrics.summarize`


@dataclass(frozen=True)
class Scores:
    """A variant's test metrics.

    Attributes:
        images: {site: {image: METRICS}}, means over the seeds; a site that is missing under a seed is left out.
        sites: {site: summary over its images}.
        average: the summary over the sites' means; None where a site is missing, as it would be no such average.
        seeds: {metric: population standard deviation, over the seeds, of each seed's average}; None for one seed.
    """

    images: dict[str, Images]
    sites: dict[str, Summary]
    average: Summary | None
    seeds: dict[str, float] | None


def scores(result: Result, sites: list[str], when: str = FINAL) -> Scores:
    """The metrics of a variant with a finished run, at `sites`, before or after the last stage at home.

    Raises:
        FedDPError: a finished run lacks a file, or the seeds differ in their test images.
    """
    runs = [read_images(folder, when) for folder in result.folders.values()]
    images = {site: over_seeds(site, [run[site] for run in runs]) for site in sites if all(site in run for run in runs)}
    by_site = {site: summarize(list(rows.values())) for site, rows in images.items()}
    whole = by_site.keys() == set(sites)
    seeds = None
    if whole and len(runs) > 1:
        averages = [average({site: summarize(list(run[site].values())) for site in sites}) for run in runs]
        seeds = {m: float(np.std([a[m]["mean"] for a in averages])) for m in METRICS}
    return Scores(images, by_site, average(by_site) if whole else None, seeds)


def average(sites: dict[str, Summary]) -> Summary:
    """The summary over the sites' means, as the papers' Average: its std is the population's over the sites."""
    return summarize([{metric: summary[metric]["mean"] for metric in METRICS} for summary in sites.values()])


def over_seeds(what: str, runs: list[Images]) -> Images:
    """Image by image the mean over runs. FedDPError where the runs hold different images; `what` is named."""
    if any(run.keys() != runs[0].keys() for run in runs):
        raise FedDPError(f"{what}: the seeds were tested on different images; remove the runs made on other data")
    return {image: {m: float(np.mean([run[image][m] for run in runs])) for m in METRICS} for image in runs[0]}


def read_images(folder: Path, when: str) -> dict[str, Images]:
    """{site: {image: METRICS}} of a finished run. FedDPError where a site's images.csv is not there or cannot be read."""
    results = read_results(folder)
    last = SLOT_OF[results["stages"][-1]]
    return {site: _read(folder / "sites" / site / "images.csv", when, last) for site in results["sites"]}


def _read(path: Path, when: str, last: str) -> Images:
    """`last` is the network of the run's last stage, which a site that failed it does not have."""
    slots: dict[str, Images] = {}  # in the order of the stages, as a site writes them
    try:
        with open(path, newline="", encoding="utf-8") as handle:
            for row in csv.DictReader(handle):
                slots.setdefault(row["network"], {})[row["image"]] = {m: float(row[m]) for m in METRICS}
    except (OSError, KeyError, ValueError) as error:
        raise FedDPError(f"{path} is no table of images ({error!r}); remove its run, it will be run again") from None
    if not slots:
        raise FedDPError(f"{path} has no image; remove its run, it will be run again")
    earlier = [slot for slot in slots if slot != last]
    return slots[earlier[-1] if when == BEFORE and earlier else list(slots)[-1]]
