"""The runs of a comparison: all are planned before the first starts, equal runs are run once, finished runs not again.

OUT/runs/<slug>/seed-<s>/       what `feddp run` leaves, without the workspace of a finished run
OUT/runs/<slug>/seed-<s>.json   the run's plan, its data, its machine, and whether it finished
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import quote

import torch

from feddp.compare.planned_run import PIXELS, Run
from feddp.compare.scores import BEFORE, FINAL, Result
from feddp.compare.shared_rounds import SharedRounds
from feddp.compare.variants import WHEN, Common, Variant
from feddp.data.digest import pixels_digest
from feddp.data.folder import SiteFolder
from feddp.errors import FedDPError, InputError
from feddp.jobs.folder import federation_of
from feddp.limits import TABLE_BYTES
from feddp.methods import METHODS
from feddp.methods.base import CALIBRATE, LOCAL_STAGES
from feddp.plan.resolve import build_network, partition_of
from feddp.plan.schema import Plan
from feddp.reading import read
from feddp.run import options as run_options
from feddp.terminal import Screen
from feddp.training.claim import release


@dataclass(frozen=True)
class Place:
    """Where runs run, as in `run_here`: the environment, the sites' devices, and how many sites run at once."""

    env: str = "sim"
    device: str = "cpu"
    threads: int | None = None

    @property
    def first(self) -> str:
        """The device on which a comparison itself computes."""
        return self.device.split(",")[0].strip()

    @property
    def machine(self) -> str:
        """This machine with the sites' devices, as a run's record names it."""
        return f"{platform.platform()}, {os.cpu_count()} CPUs, device {self.device}, torch {torch.__version__}"


class Attempt(Protocol):
    """Something that may be finished, and fails alone."""

    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> Path: ...

    def is_finished(self) -> bool: ...


SomeAttempt = TypeVar("SomeAttempt", bound=Attempt)


def attempt_all(what: str, attempts: Sequence[SomeAttempt], execute: Callable[[SomeAttempt], None]) -> dict[Path, str]:
    """Executes what is not finished, and reports on stderr which is under way; the reasons of the failed ones, by folder.

    One failure stops no other attempt.
    """
    screen = Screen(err=True, soft_wrap=True)
    reasons: dict[Path, str] = {}
    for number, attempt in enumerate(attempts, 1):
        done = attempt.is_finished()
        line = f"{what} {number} of {len(attempts)}: {attempt.name}{' (finished before)' * done}"
        screen.print(line)
        if not done:
            try:
                execute(attempt)
            except Exception as error:  # whatever happened to this one, the others go on
                reason = str(error) if isinstance(error, FedDPError) else f"{type(error).__name__}: {error}"
                reasons[attempt.folder] = reason
                screen.print(f"failed: {attempt.name}: {reason}", style="red")
    return reasons


class Campaign:
    """All runs that a comparison needs. Nothing is written before `execute`.

    Args:
        variants: the variants that are compared; equal runs among them are run once.
        common: what all runs share.
        seeds: each variant runs under each of them.
        data: the root of the sites' folders.
        out: the comparison's folder.
        sites: the sites below `data` that take part; all of them if None.
        label: begins the runs' names.

    Attributes:
        failed: the runs that failed in `execute`, by name, with the reason.

    Raises:
        InputError: a method, network, setting or private rule is unknown or does not fit, or `out` holds a run of
            another plan or other data, or one that another process has; says which.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        common: Common,
        seeds: Sequence[int],
        data: Path,
        out: Path,
        sites: Sequence[str] | None = None,
        label: str = "",
    ):
        self.data, self.out, self.common, self.label = data, out, common, label
        self.sites, self.metadata = federation_of(data, sites)
        self._seeds = seeds
        self.failed: dict[str, str] = {}
        self._slugs: dict[Variant, str] = {}
        self._runs: dict[str, list[Run]] = {}
        self._rules: set[tuple[object, ...]] = set()
        for variant in variants:
            try:
                self._add(variant, seeds)
            except FedDPError as error:
                raise InputError(f"{variant}: {error}") from None
        for run in self.runs:
            run.require_own()

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self._runs.values() for run in runs]

    def same(self, one: Variant, other: Variant) -> bool:
        """Whether two variants are the same run, as `feddp` and `feddp@lambda=1` are."""
        return self._slugs[one] == self._slugs[other]

    def is_last(self, variant: Variant) -> bool:
        """Whether its networks are of the last round, or went on from it."""
        return self._plan(variant, self._seeds[0]).start == "last"

    def refuse_equal(self, variants: Sequence[Variant]) -> None:
        """InputError where two of `variants` are the same run."""
        for i, one in enumerate(variants):
            for other in variants[:i]:
                if self.same(one, other) and one.when == other.when:
                    raise InputError(f"--methods: {other} and {one} are the same run; name one of them")

    def execute(self, place: Place = Place()) -> dict[Variant, Result]:
        """Runs what is not finished, as `attempt_all`; without FLARE, rounds that several runs have in common once."""
        for run in self.runs:
            run.close_if_finished()
        shared = SharedRounds(self.runs if place.env == "local" else (), self.out, place.machine)
        ordered = sorted(self.runs, key=shared.place)
        reasons = attempt_all("run", ordered, lambda run: self._execute(run, place, shared))
        self.failed = {run.name: reasons[run.folder] for run in self.runs if run.folder in reasons}
        return {variant: _result(self._runs[slug], reasons, variant.when) for variant, slug in self._slugs.items()}

    @cached_property
    def _data(self) -> dict[str, dict[str, str]]:
        """Of each site a digest of dataset.json and split.csv, and one of what images and masks show."""
        texts = {}
        for site in self.sites:
            folder = self.data / site
            content = b"".join(read(folder / name, TABLE_BYTES, folder) for name in ("dataset.json", "split.csv"))
            texts[site] = hashlib.sha256(content).hexdigest()
        return {"data": texts, PIXELS: {site: pixels_digest(SiteFolder.open(self.data / site)) for site in self.sites}}

    def _add(self, variant: Variant, seeds: Sequence[int]) -> None:
        plan = self._plan(variant, seeds[0])
        if variant.when == BEFORE and not LOCAL_STAGES & set(plan.stages):
            raise InputError(f"it has no local stage before which its networks could be measured; leave {WHEN} out")
        layers = json.dumps(plan.layers, sort_keys=True)  # a rule may select what a setting adds to the network
        rule = (plan.network, plan.rule, layers)
        if rule not in self._rules:
            partition_of(plan, build_network(plan))  # fail before the campaign starts, not hours into it
            self._rules.add(rule)
        slug = self._slugs[variant] = self._slug(variant, plan)
        if slug not in self._runs:
            self._runs[slug] = [self._run(variant, slug, seed) for seed in seeds]

    def _plan(self, variant: Variant, seed: int) -> Plan:
        return variant.options(self.common, seed).plan(self.metadata, self.sites)

    def _slug(self, variant: Variant, plan: Plan) -> str:
        """The folder's name, equal for equal runs: the variant with sorted changes, without those that change nothing."""
        variant = replace(variant, when=FINAL)  # the same run
        if CALIBRATE in METHODS[variant.method].stages:
            variant = replace(variant, then=None)
        variant = replace(variant, changes=tuple(sorted(dict(variant.changes).items())))
        for key, _ in variant.changes:
            if self._is_plan_of(variant.without(key), plan):
                variant = variant.without(key)
        return quote(str(variant).replace("|", ","), safe="@=+,")

    def _is_plan_of(self, variant: Variant, plan: Plan) -> bool:
        try:
            return self._plan(variant, plan.seed) == plan
        except FedDPError:  # the change is what makes it a plan
            return False

    def _run(self, variant: Variant, slug: str, seed: int) -> Run:
        plan = self._plan(variant, seed).to_json()
        wanted = {"plan": json.loads(json.dumps(plan)), **self._data}
        folder = self.out / "runs" / slug / f"seed-{seed}"
        return Run(replace(variant, when=FINAL), variant.options(self.common, seed), wanted, folder, self.label)

    def _execute(self, run: Run, place: Place, shared: SharedRounds) -> None:
        run.claim()
        try:
            self._run_here(run, place, shared)
        finally:
            release(run.folder)  # a file is open for each lock, and a comparison may have a thousand runs

    def _run_here(self, run: Run, place: Place, shared: SharedRounds) -> None:
        run.note(False, place.machine)
        threads = place.threads if METHODS[run.options.method].federated else None
        run_options.run_here(
            self.data,
            run.folder,
            run.options,
            env=place.env,
            device=place.device,
            threads=threads,
            sites=self.sites,
            rounds=shared.folder(run),
        )
        run.close(place.machine)
        shared.tidy()


def _result(runs: Sequence[Run], reasons: Mapping[Path, str], when: str) -> Result:
    folders = {run.options.seed: run.folder for run in runs if run.folder not in reasons}
    return Result(folders, {run.options.seed: reasons[run.folder] for run in runs if run.folder in reasons}, when)
