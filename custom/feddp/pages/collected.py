"""What a report is made from: the runs below the folders that it is given, by method, and a comparison's tables.

Site names, method names and reasons come from files of other machines: the templates escape them. Only what leaves a site is
read of a site that withholds something by its policy.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from feddp.compare.patients import Names
from feddp.compare.reference import LAST, REFERENCE
from feddp.compare.scores import BEFORE, FINAL, IMAGE, Result, Rows, over_seeds, read_site
from feddp.compare.statistics import METRIC
from feddp.compare.studies import STUDIES
from feddp.compare.variants import Variant
from feddp.errors import BadFile, InputError
from feddp.files import COMPARISON, IMAGES, PROGRESS, RECORD, RESULTS, Event, read_events, read_results, site_folder
from feddp.limits import RESULTS_BYTES
from feddp.methods import METHODS
from feddp.methods.base import STAGES, round_of
from feddp.protocol import STD_WITHHELD, VOLUMES, WHEN, WITHHELD
from feddp.reading import is_count, is_name, is_number, is_text, read_json, shown, without_paths
from feddp.reporting.tables import ResultTable
from feddp.stages.events import read_progress
from feddp.stages.movement import DRIFTED

PROSE = {"feddp": "FedDP", "fedavg": "FedAvg", "local": "Local Train"}  # names of papers, where a page speaks of methods


@dataclass(frozen=True)
class FinishedRun:
    """One run: its folder, the method's name on the page, and what it measured.

    `last` is WHEN[0] where the method's networks are those before the last stage at a site (`variants.Variant.when`).
    """

    folder: Path
    label: str
    results: dict[str, Any]
    last: str = WHEN[1]

    @cached_property
    def events(self) -> list[Event]:
        return read_progress(self.folder / PROGRESS)

    @property
    def sites(self) -> list[str]:
        return sorted(self.results["sites"])

    @property
    def name(self) -> str:
        return f"{self.label}, seed {self.results['seed']}"

    def summary(self, site: str, when: str, volumes: bool = False) -> Mapping[str, Mapping[str, float]]:
        """The summaries of a site's test metrics (`metrics.summarize`), of its images or of its volumes; empty where its policy
        withholds them, or where it has no volumes."""
        shown = WHEN[0] if self.last == WHEN[0] else when
        entry = self.results["sites"].get(site, {})
        found: Mapping[str, Mapping[str, float]] = (entry.get(VOLUMES, {}) if volumes else entry).get(shown, {})
        return found

    def drifted(self, site: str) -> bool:
        """Whether a site's record, where it is on this machine and the policy withholds nothing, warns of shared tensors that
        are unusually far from the first ones."""
        entry = self.results["sites"].get(site)
        if entry is None or WITHHELD in entry or STD_WITHHELD in entry:
            return False
        return any(event.get("event") == DRIFTED for event in read_events(site_folder(self.folder, site) / RECORD))

    def rows(self, site: str, when: str) -> Rows | None:
        """The metrics of each image, where the site's table is on this machine and its policy withholds no spread of them."""
        entry = self.results["sites"][site]
        if WITHHELD in entry or STD_WITHHELD in entry or not (site_folder(self.folder, site) / IMAGES).exists():
            return None
        before = WHEN[0] in (when, self.last)
        return read_site(self.folder, site, self.results["stages"], BEFORE if before else FINAL, IMAGE)


@dataclass(frozen=True)
class Measurements:
    """The runs of one method that finished, one per seed, and the reasons of those that did not.

    `variant` is what `feddp compare` calls it; of runs that are named one by one, the method alone or FedAvg's last round.
    """

    label: str
    runs: tuple[FinishedRun, ...]
    failed: tuple[str, ...] = ()
    variant: str = ""

    @property
    def ends(self) -> bool:
        """Whether the networks are those that the runs end with, not those before the last stage."""
        return all(run.last == WHEN[1] for run in self.runs)

    @property
    def called(self) -> str:
        """The label in a sentence; FedAvg's last round has that of the run that it is taken from."""
        return f"{PROSE[REFERENCE]}'s last round" if self.label in LAST else self.label

    @property
    def round(self) -> str:
        """The round that the networks are of, or went on from: "best" or "last"."""
        results = self.runs[0].results
        return round_of(results.get("settings", {}).get("start", "auto"), results["stages"])

    @property
    def result(self) -> Result:
        return Result({run.results["seed"]: run.folder for run in self.runs}, dict(enumerate(self.failed)))

    def means(self, metric: str, when: str = WHEN[1], volumes: bool = False) -> dict[str, float]:
        """{site: mean over its test images or volumes, then over the seeds}, of the sites that every run has."""
        found = [{site: run.summary(site, when, volumes) for site in run.sites} for run in self.runs]
        each = [{site: cells[metric]["mean"] for site, cells in sites.items() if metric in cells} for sites in found]
        return {site: float(np.mean([found[site] for found in each])) for site in each[0] if all(site in f for f in each)}

    def rows(self, site: str, when: str = WHEN[1]) -> Rows | None:
        """The metrics of each test image of a site, means over the seeds; None where a run has none (`FinishedRun.rows`)."""
        each = [run.rows(site, when) for run in self.runs]
        return None if any(rows is None for rows in each) else over_seeds(site, [rows for rows in each if rows is not None])


@dataclass(frozen=True)
class Collected:
    """Methods in their order, and of a comparison its studies, tables and failures, and {site: {test image: patient}}."""

    methods: dict[str, Measurements]
    studies: Mapping[str, Mapping[Variant, Result]]
    tables: tuple[ResultTable, ...]
    failed: Mapping[str, str]
    patients: Names

    @property
    def runs(self) -> list[FinishedRun]:
        return [run for method in self.methods.values() for run in method.runs]

    @cached_property
    def sites(self) -> list[str]:
        """Of all runs, those of the studies too."""
        variants = {variant: result for results in self.studies.values() for variant, result in results.items()}
        studied = [read_results(folder) for result in variants.values() for folder in result.folders.values()]
        each = [*(run.results for run in self.runs), *studied]
        return sorted({site for results in each for site in (*results["sites"], *results.get("missing", ()))})


def collect(folders: Sequence[Path]) -> Collected:
    """Reads one comparison's folder, or the folders of finished runs; runs that differ in their seed alone are one method.

    Raises:
        InputError: a folder is neither, or one of its files is damaged; names it.
    """
    comparisons = [folder for folder in folders if (folder / COMPARISON).exists()]
    if comparisons and len(folders) > 1:
        raise InputError(f"{comparisons[0]} is a comparison, which has its runs below it; name it alone")
    if comparisons:
        return _comparison(comparisons[0])
    for folder in folders:
        if (folder / "runs").is_dir() and not (folder / RESULTS).exists():
            raise InputError(
                f"{folder} has no {COMPARISON}: give its `feddp compare` again, or name runs below {folder / 'runs'}"
            )
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InputError(f"{', '.join(map(str, folders))}: a folder is named twice; name each once")
    results = {folder: _read(folder) for folder in folders}
    alike: dict[str, list[Path]] = {}
    for folder, found in results.items():
        plan = {name: value for name, value in found.items() if name in _PLAN} | {
            "of": sorted({*found["sites"], *found["missing"]})
        }
        alike.setdefault(json.dumps(plan, sort_keys=True), []).append(folder)
    labels = [label_of(results[group[0]]["method"]) for group in alike.values()]
    methods = {}
    for label, group in zip(labels, alike.values(), strict=True):
        seeds = [results[folder]["seed"] for folder in group]
        if len(set(seeds)) < len(seeds):
            raise InputError(f"{group[0]} and {group[1]} are runs of one plan and one seed; name one of them")
        name = label if labels.count(label) == 1 else f"{label} ({group[0].resolve().name})"
        if name in methods:
            raise InputError(f"{group[0]}: another run is called {name!r} too; rename its folder")
        one = Measurements(name, tuple(FinishedRun(folder, name, results[folder]) for folder in group))
        method = results[group[0]]["method"]
        methods[name] = replace(one, variant=LAST[0] if (method, one.round) == (REFERENCE, "last") else method)
    return Collected(methods, {}, (), {}, {})


# the entries of results.json that are the plan's, without the seed
_PLAN = {
    "method",
    "network",
    "channels",
    "classes",
    "labels",
    "size",
    "rounds",
    "stages",
    "settings",
    "weights",
    "private",
    "behaviour",
}


def label_of(method: str) -> str:
    """What a page calls a method."""
    return PROSE.get(method) or (METHODS[method].label if method in METHODS else "") or method


def _comparison(folder: Path) -> Collected:
    path = folder / COMPARISON
    try:
        content = read_json(path, RESULTS_BYTES, folder)
        variants = {Variant.parse(text): stored for text, stored in content["results"].items()}
        results = {variant: _stored(folder, stored, variant.when) for variant, stored in variants.items()}
        tables = tuple(ResultTable.from_json(table) for table in content["tables"])
        methods, failed = {}, {name: without_paths(reason) for name, reason in content["failed"].items()}
        for variant in map(Variant.parse, content["methods"]):
            label = PROSE.get(str(variant), variant.label)
            last = WHEN[variant.when == FINAL]
            runs = tuple(FinishedRun(run, label, _read(run), last) for run in results[variant].folders.values())
            methods[label] = Measurements(label, runs, tuple(results[variant].failed.values()), str(variant))
        studies = {name: results for name in content["studies"]}
        patients = _patients(content.get("patients", {}))
        if lacking := {entry.source.variant for name in studies for entry in STUDIES[name].entries} - results.keys():
            raise KeyError(str(lacking.pop()))
    except (KeyError, TypeError, ValueError, AttributeError, BadFile) as error:
        raise InputError(
            f"{path} is damaged ({error!r}); give the same `feddp compare` again, it writes the file anew"
        ) from None
    return Collected({label: found for label, found in methods.items() if found.runs}, studies, tables, failed, patients)


def _patients(stored: Mapping[str, Mapping[str, int]]) -> Names:
    """A comparison numbers the patients of each site. TypeError if what is stored holds anything but numbers."""
    if not all(is_count(number) for images in stored.values() for number in images.values()):
        raise TypeError("a patient is no number")
    return {site: {image: str(number) for image, number in images.items()} for site, images in stored.items()}


def _stored(folder: Path, stored: Mapping[str, Any], when: str) -> Result:
    folders = {int(seed): folder / path for seed, path in stored["folders"].items()}
    for run in folders.values():
        if not run.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{run} is not below {folder}")
    return Result(folders, {int(seed): reason for seed, reason in stored["failed"].items()}, when)


def _read(folder: Path) -> dict[str, Any]:
    """results.json; InputError if it lacks what a page needs, as results of another version do."""
    results = read_results(folder)
    remedy = "name the --out folder of a `feddp run`"
    wanted = ("method", "network", "rounds", "seed", "stages", "selection", "average")
    if lacking := [name for name in wanted if name not in results]:
        raise InputError(f"{folder / RESULTS} lacks {', '.join(lacking)}; {remedy}")
    if wrong := [name for name, fits in _TYPES.items() if name in results and not fits(results[name])]:
        raise InputError(f"{folder / RESULTS}: {wrong[0]} is {shown(results[wrong[0]])}; {remedy}")
    for site, entry in results["sites"].items():
        if not isinstance(entry, dict):
            raise InputError(f"{folder / RESULTS}: {site} is {shown(entry)}; {remedy}")
        if wrong := [name for name, fits in _ENTRIES.items() if name in entry and not fits(entry[name])]:
            raise InputError(f"{folder / RESULTS}: {site}'s {wrong[0]} is {shown(entry[wrong[0]])}; {remedy}")
    results.setdefault("missing", {})
    return results


def _reasons(value: object) -> bool:
    """Whether it is {site: why}; each a text, of several lines perhaps."""
    return isinstance(value, dict) and all(map(is_text, value.values()))


def _means(value: object) -> bool:
    """Whether it is {metric: {"mean": a number}}."""
    return isinstance(value, dict) and all(isinstance(cell, dict) and is_number(cell.get("mean")) for cell in value.values())


def _all_means(value: object) -> bool:
    """Whether it is one such table for each of its names."""
    return isinstance(value, dict) and all(map(_means, value.values()))


def _matrix(value: object) -> bool:
    """Whether it is {site: {model: such a table with METRIC}}."""
    if not isinstance(value, dict) or not all(map(_all_means, value.values())):
        return False
    return all(METRIC in cells for row in value.values() for cells in row.values())


def _peers(value: object) -> bool:
    """Whether it is {"peers": a count}."""
    return isinstance(value, dict) and is_count(value.get("peers"))


_TYPES: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("method", "network", "selection"), is_name),
    **dict.fromkeys(("rounds", "size", "seed"), is_count),
    "stages": lambda value: isinstance(value, list) and set(map(str, value)) <= STAGES.keys(),
    "settings": lambda value: isinstance(value, dict),
    "missing": _reasons,
    "missed": lambda value: isinstance(value, dict) and all(map(is_count, value.values())),
    "without": lambda value: isinstance(value, dict) and all(map(_reasons, value.values())),
    "matrix": _matrix,
}
# of a site's entry
_ENTRIES: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(WHEN, _means),
    VOLUMES: _all_means,
    **dict.fromkeys(("spectra", "calibration"), _peers),
}
