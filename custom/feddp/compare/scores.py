"""What the finished runs of a variant measured, and its means: over seeds image by image, then over images, then over sites.

The same for cases, where images are the slices of volumes: there, one case takes the place of one image.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from feddp.errors import InputError
from feddp.files import folder_of, read_results, site_folder
from feddp.limits import TABLE_BYTES
from feddp.methods.base import STAGES
from feddp.protocol import VOLUMES
from feddp.reading import opened
from feddp.training.columns import METRICS, VOLUME_METRICS, class_names, of_class
from feddp.training.metrics import Row, summarize

AVERAGE = "Average"
BEFORE, FINAL = "before", "final"  # a site's network before its last stage there, and the one it ends with
Rows = dict[str, Row]  # {name of an image, or of a case: its metrics}
Summary = dict[str, dict[str, float]]  # as `metrics.summarize`


@dataclass(frozen=True)
class Unit:
    """What is measured: one row of a site's table `<name>s.csv`, which holds its name in the column `name`.

    The table may also hold each metric of each class (`feddp.training.columns.columns`).
    """

    name: str
    metrics: tuple[str, ...]


IMAGE, CASE = Unit("image", METRICS), Unit("case", VOLUME_METRICS)


class Measured(Protocol):
    """What a table has one row of: by seed what finished, and the reasons of the seeds that did not finish everywhere."""

    @property
    def folders(self) -> Mapping[int, Any]: ...

    @property
    def failed(self) -> Mapping[int, str]: ...

    @property
    def competes(self) -> bool:
        """Whether it takes part in the choice of the best value and in the test."""
        ...

    @property
    def selections(self) -> set[str]:
        """The splits whose IoU chose rounds and epochs: val or test."""
        ...

    def rows(self, when: str, unit: Unit) -> list[dict[str, Rows]]:
        """{site: {image, or case: metrics}} of every seed."""
        ...


@dataclass(frozen=True)
class Result:
    """The runs of a variant by seed: the folders of those that finished, the reasons of those that failed.

    `when` is BEFORE where the variant's networks are those before the last stage at a site.
    """

    folders: dict[int, Path]
    failed: dict[int, str]
    when: str = FINAL

    @property
    def competes(self) -> bool:
        """A federation that finished under every seed."""
        return not self.failed and all(read_results(folder)["federated"] for folder in self.folders.values())

    @cached_property
    def selections(self) -> set[str]:
        return {read_results(folder)["selection"] for folder in self.folders.values()}

    def rows(self, when: str, unit: Unit) -> list[dict[str, Rows]]:
        return [read_rows(folder, BEFORE if self.when == BEFORE else when, unit) for folder in self.folders.values()]


@dataclass(frozen=True)
class Scores:
    """The test metrics of a variant.

    Attributes:
        rows: {site: {image, or case: metrics}}, means over the seeds; without a site that is missing under a seed, or that has
            no volumes where cases are asked for.
        sites: {site: summary over its images}.
        average: the summary over the sites' means; None where a site is missing.
        seeds: {site, or AVERAGE if no site is missing: {metric: population standard deviation, over the seeds, of each seed's
            mean there}}; None for one seed.
    """

    rows: dict[str, Rows]
    sites: dict[str, Summary]
    average: Summary | None
    seeds: dict[str, dict[str, float]] | None


def scores(result: Measured, sites: list[str], when: str = FINAL, unit: Unit = IMAGE) -> Scores:
    """The metrics of what finished under at least one seed, at `sites`, before or after the last stage there.

    Raises:
        InputError: a finished run lacks a file, or the seeds differ in their test images.
    """
    runs = result.rows(when, unit)
    rows = {site: over_seeds(site, [run[site] for run in runs]) for site in sites if all(site in run for run in runs)}
    by_site = {site: summarize(list(found.values())) for site, found in rows.items()}
    whole = by_site.keys() == set(sites)
    seeds = None
    if len(runs) > 1:
        each = [{site: summarize(list(run[site].values())) for site in rows} for run in runs]
        means = [found | ({AVERAGE: average(found)} if whole else {}) for found in each]
        seeds = {column: _over_seeds([found[column] for found in means]) for column in (*rows, *([AVERAGE] if whole else []))}
    return Scores(rows, by_site, average(by_site) if whole else None, seeds)


def _over_seeds(summaries: list[Summary]) -> dict[str, float]:
    """{metric that all seeds have: population standard deviation of the seeds' means}."""
    metrics = [metric for metric in summaries[0] if all(metric in summary for summary in summaries)]
    return {metric: float(np.std([summary[metric]["mean"] for summary in summaries])) for metric in metrics}


def average(sites: Mapping[str, Summary]) -> Summary:
    """The summary over the sites' means, as the papers' Average: its std is the population's over the sites.

    Of the metrics that all sites have: what was adapted before classes were kept apart lacks theirs.
    """
    shared = [metric for metric in next(iter(sites.values())) if all(metric in summary for summary in sites.values())]
    return summarize([{metric: summary[metric]["mean"] for metric in shared} for summary in sites.values()])


def over_seeds(what: str, runs: list[Rows]) -> Rows:
    """The mean over runs, image by image, of the metrics that all runs have.

    Raises:
        InputError: the runs hold different images; names `what`.
    """
    if any(run.keys() != runs[0].keys() for run in runs):
        raise InputError(f"{what}: the seeds were tested on different images; remove the runs made on other data")
    return {
        image: {m: float(np.mean([run[image][m] for run in runs])) for m in row if all(m in run[image] for run in runs)}
        for image, row in runs[0].items()
    }


def has_cases(result: Result) -> bool:
    """Whether a site of one of its runs has volumes; results written before volumes were measured have none."""
    return any(VOLUMES in site for folder in result.folders.values() for site in read_results(folder)["sites"].values())


def classes_of(results: Iterable[Measured]) -> list[str]:
    """The classes that have metrics of their own in the tables of some run, if there are several classes."""
    rows = (row for result in results for run in result.rows(FINAL, IMAGE) for found in run.values() for row in found.values())
    return class_names(name for row in rows for name in row)


def read_rows(folder: Path, when: str, unit: Unit) -> dict[str, Rows]:
    """{site: {image, or case: metrics}} of a finished run. InputError where a site's table is not there or cannot be read."""
    results = read_results(folder)
    sites = [site for site, found in results["sites"].items() if unit is IMAGE or VOLUMES in found]
    return {site: read_site(folder, site, results["stages"], when, unit) for site in sites}


def read_site(folder: Path, site: str, stages: Sequence[str], when: str, unit: Unit) -> Rows:
    """{image, or case: metrics} of one site of a finished run with these stages; InputError as `read_rows`."""
    return read_table(site_folder(folder, site) / f"{unit.name}s.csv", unit, when, STAGES[stages[-1]])


def read_table(path: Path, unit: Unit, when: str, last: str) -> Rows:
    """{image, or case: metrics} of a site's table; raises InputError if it is none.

    `last` is the network of the run's last stage; a site where that stage failed does not have it.
    """
    slots: dict[str, Rows] = {}  # in the order of the stages, as a site writes them
    try:
        with opened(path, TABLE_BYTES, folder_of(path)) as content:
            table = csv.DictReader(io.TextIOWrapper(content, newline="", encoding="utf-8"))
            classes = class_names(table.fieldnames or ())
            names = [of_class(metric, name) for name in ("", *classes) for metric in unit.metrics]
            for row in table:
                slots.setdefault(row["network"], {})[row[unit.name]] = {name: _finite(row[name]) for name in names}
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise InputError(f"{path} is no table of {unit.name}s ({error!r}); remove its run, it will be run again") from None
    if not slots:
        raise InputError(f"{path} has no {unit.name}; remove its run, it will be run again")
    earlier = [slot for slot in slots if slot != last]
    return slots[earlier[-1] if when == BEFORE and earlier else list(slots)[-1]]


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no measured number")
    return value
