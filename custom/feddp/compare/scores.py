"""From the sites' images.csv to means: over seeds image by image, then over a site's images, then over sites.

Likewise from cases.csv, where images are the slices of volumes: a case takes an image's place.
"""

from dataclasses import dataclass

import numpy as np

from feddp.compare.results import FINAL, IMAGE, Images, Kind, Result
from feddp.errors import InputError
from feddp.training.metrics import summarize

Summary = dict[str, dict[str, float]]  # as `metrics.summarize`


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
        InputError: a finished run lacks a file, or the seeds differ in their test images.
    """
    runs = result.rows(when, kind)
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
    """Image by image the mean over runs. InputError where the runs hold different images; `what` is named."""
    if any(run.keys() != runs[0].keys() for run in runs):
        raise InputError(f"{what}: the seeds were tested on different images; remove the runs made on other data")
    return {image: {m: float(np.mean([run[image][m] for run in runs])) for m in row} for image, row in runs[0].items()}
