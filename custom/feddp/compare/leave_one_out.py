"""Every site in turn is unseen: the others train, and their models are adapted to its images without labels.

OUT/without-<site>/runs/    the runs of all the others, as `compare.runs` keeps them
OUT/only-<a>+<b>/runs/      the runs of fewer sites; one folder whichever site is unseen

What is done at the unseen site is in each run's own folder (`compare.adaptations`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from feddp.compare.adaptations import Adaptation, Joining
from feddp.compare.runs import Campaign, Place, attempt_all
from feddp.compare.scores import Result, Rows, Unit
from feddp.compare.studies import JOIN, AdaptedModels, Study
from feddp.compare.variants import Common, Variant
from feddp.data.folder import SiteFolder
from feddp.data.images import SPLIT
from feddp.errors import InputError
from feddp.jobs.folder import federation_of
from feddp.training.settings import Tuning

Inside = tuple[str, ...]  # the sites that train
Adaptations = dict[int, dict[str, Adaptation]]  # by seed and by unseen site


@dataclass(frozen=True)
class UnseenResult:
    """The adaptations of one entry; the reasons of the seeds that lack some unseen site. It is read as a `Result` is."""

    folders: Adaptations
    failed: dict[int, str]

    @property
    def competes(self) -> bool:
        return not self.failed

    @property
    def selections(self) -> set[str]:
        """The splits of the unseen sites whose images have chosen anything."""
        return {split for sites in self.folders.values() for made in sites.values() for split in made.selections}

    def rows(self, when: str, unit: Unit) -> list[dict[str, Rows]]:
        """{unseen site: {image: metrics}} of every seed; there is one network, whatever `when` is, and only images."""
        return [{site: made.images for site, made in sites.items()} for sites in self.folders.values()]

    def seconds(self) -> float:
        """Seconds per image, the mean over sites and seeds."""
        return float(np.mean([made.seconds for sites in self.folders.values() for made in sites.values()]))


class LeaveOneOut:
    """All runs and adaptations of some studies. Nothing is written before `execute`.

    Attributes:
        campaigns: the runs, by the sites that train.
        failed: the adaptations that failed in `execute`, by name, with the reason.

    Raises:
        InputError: there are fewer than two sites, one has no test images, or a run cannot be planned.
    """

    def __init__(
        self, studies: Mapping[str, Study[AdaptedModels]], common: Common, seeds: Sequence[int], data: Path, out: Path
    ):
        self.seeds, self.data = seeds, data
        self.epochs = Tuning().tune_epochs if common.calibration_epochs is None else common.calibration_epochs
        self.sites = federation_of(data)[0]
        if len(self.sites) < 2:
            raise InputError(f"{data} has one site; one outside and one inside are needed")
        for site in self.sites:
            if not SiteFolder.open(data / site).rows_of(SPLIT):
                raise InputError(f"{data / site} has no image in split {SPLIT}, which is what is measured outside")
        self.sources = list(dict.fromkeys(entry.source for study in studies.values() for entry in study.entries))
        needed: dict[Inside, list[Variant]] = {}
        for source in self.sources:
            for unseen in self.sites:
                needed.setdefault(source.sites(unseen, self.sites), []).append(source.variant)
        self.campaigns = {
            inside: Campaign(list(dict.fromkeys(variants)), common, seeds, data, out / name, inside, name)
            for inside, variants in needed.items()
            for name in [self._name(inside)]
        }
        self.failed: dict[str, str] = {}

    def execute(self, place: Place = Place()) -> dict[AdaptedModels, UnseenResult]:
        """Runs and adapts what is not finished, as `attempt_all`."""
        runs = {inside: campaign.execute(place) for inside, campaign in self.campaigns.items()}
        wanted = {source: self._adaptations(source, runs) for source in self.sources}
        each = {made.folder: made for found, _ in wanted.values() for sites in found.values() for made in sites.values()}
        reasons = attempt_all("adaptation", list(each.values()), lambda made: made.execute(place.first))
        self.failed = {each[folder].name: reason for folder, reason in reasons.items()}
        return {source: _finished(found, missing, reasons) for source, (found, missing) in wanted.items()}

    def _name(self, inside: Inside) -> str:
        missing = sorted(set(self.sites) - set(inside))
        return f"without-{missing[0]}" if len(missing) == 1 else f"only-{'+'.join(inside)}"

    def _adaptations(
        self, source: AdaptedModels, runs: Mapping[Inside, Mapping[Variant, Result]]
    ) -> tuple[Adaptations, dict[int, str]]:
        """The adaptations of finished runs; and why a seed lacks some, where a run failed."""
        found: Adaptations = {seed: {} for seed in self.seeds}
        missing: dict[int, str] = {}
        for unseen in self.sites:
            result = runs[source.sites(unseen, self.sites)][source.variant]
            missing |= {seed: f"{unseen} outside: {reason}" for seed, reason in result.failed.items()}
            for seed, run in result.folders.items():
                settings = replace(source.settings, seed=seed)
                asked = run, self.data / unseen, source.strategy, settings
                found[seed][unseen] = Joining(*asked, self.epochs) if source.strategy == JOIN else Adaptation(*asked)
        return found, missing


def _finished(found: Adaptations, missing: dict[int, str], reasons: Mapping[Path, str]) -> UnseenResult:
    """`found` without the adaptations that failed; their seeds have a reason."""
    lacking = {
        seed: f"{site} outside: {reasons[made.folder]}"
        for seed, sites in found.items()
        for site, made in sites.items()
        if made.folder in reasons
    }
    whole = {seed: {s: made for s, made in sites.items() if made.folder not in reasons} for seed, sites in found.items()}
    return UnseenResult({seed: sites for seed, sites in whole.items() if sites}, missing | lacking)
