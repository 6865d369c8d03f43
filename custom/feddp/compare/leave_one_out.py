"""Every site in turn is a hospital outside: the others train, and their models are adapted to its images without labels.

OUT/without-<site>/runs/    the runs of all the others, as `compare.runs` keeps them, with their adaptations inside
OUT/only-<a>+<b>/runs/      of fewer; one folder whichever site is outside
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from feddp.compare.adaptation import Adaptation
from feddp.compare.outside_studies import Entry, Study
from feddp.compare.results import Images, Kind, Result
from feddp.compare.runs import Campaign
from feddp.compare.variants import Common, Variant
from feddp.data.folder import SiteFolder
from feddp.data.images import SPLIT
from feddp.errors import FedDPError, InputError
from feddp.jobs.folder import federation_of

Inside = tuple[str, ...]  # the sites that train
Results = Mapping[Variant, Result]
Found = dict[int, dict[str, Adaptation]]  # by seed and by the site outside


@dataclass(frozen=True)
class Outside:
    """An entry's adaptations by seed and by the site outside; the reasons of the seeds that some site has none of.

    Read as a `compare.results.Result` is.
    """

    folders: Found
    failed: dict[int, str]

    @property
    def competes(self) -> bool:
        return not self.failed

    @property
    def selections(self) -> set[str]:
        """None: whatever split chose the rounds inside, no image outside has chosen anything."""
        return set()

    def rows(self, when: str, kind: Kind) -> list[dict[str, Images]]:
        """{site outside: {image: METRICS}} under every seed; there is one network, whatever `when` says, and only images."""
        return [{site: made.images for site, made in sites.items()} for sites in self.folders.values()]

    def seconds(self) -> float:
        """A sample's, the mean over sites and seeds."""
        return float(np.mean([made.seconds for sites in self.folders.values() for made in sites.values()]))


class LeaveOneOut:
    """All runs and adaptations of some studies. Nothing is written before `execute`.

    Attributes:
        campaigns: the runs, by the sites inside.
        failed: the adaptations that failed in `execute`, by name, with the reason.

    Raises:
        InputError: there are fewer than two sites, one has no test images, or a run cannot be planned.
    """

    def __init__(self, studies: Mapping[str, Study], common: Common, seeds: Sequence[int], data: Path, out: Path):
        self.studies, self.seeds, self.data = studies, seeds, data
        self.sites = federation_of(data)[0]
        if len(self.sites) < 2:
            raise InputError(f"{data} has one site; one outside and one inside are needed")
        for site in self.sites:
            if not SiteFolder.open(data / site).rows_of(SPLIT):
                raise InputError(f"{data / site} has no image in split {SPLIT}, which is what is measured outside")
        needed: dict[Inside, list[Variant]] = {}
        for study in studies.values():
            for entry in study.entries:
                for outside in self.sites:
                    needed.setdefault(entry.sites(outside, self.sites), []).append(entry.variant)
        self.campaigns = {
            inside: Campaign(list(dict.fromkeys(variants)), common, seeds, data, out / name, inside, name)
            for inside, variants in needed.items()
            for name in [self._name(inside)]
        }
        self.failed: dict[str, str] = {}

    def _name(self, inside: Inside) -> str:
        missing = sorted(set(self.sites) - set(inside))
        return f"without-{missing[0]}" if len(missing) == 1 else f"only-{'+'.join(inside)}"

    def execute(self, device: str = "cpu", threads: int | None = None) -> dict[Entry, Outside]:
        """Runs and adapts what is not finished, and says on stderr what is under way; what fails stops nothing else."""
        runs = {inside: campaign.execute(device, threads) for inside, campaign in self.campaigns.items()}
        entries = list(dict.fromkeys(entry for study in self.studies.values() for entry in study.entries))
        wanted = {entry: self._adaptations(entry, runs) for entry in entries}
        each = {made.folder: made for found, _ in wanted.values() for sites in found.values() for made in sites.values()}
        reasons = self._adapt(list(each.values()), device)
        return {entry: self._outside(found, missing, reasons) for entry, (found, missing) in wanted.items()}

    def _adaptations(self, entry: Entry, runs: Mapping[Inside, Results]) -> tuple[Found, dict[int, str]]:
        """By seed and site outside; and why a seed lacks some, where a run failed."""
        found: Found = {seed: {} for seed in self.seeds}
        missing: dict[int, str] = {}
        for outside in self.sites:
            result = runs[entry.sites(outside, self.sites)][entry.variant]
            missing |= {seed: f"{outside} outside: {reason}" for seed, reason in result.failed.items()}
            for seed, run in result.folders.items():
                found[seed][outside] = Adaptation(run, self.data / outside, entry.how, replace(entry.settings, seed=seed))
        return found, missing

    def _adapt(self, adaptations: Sequence[Adaptation], device: str) -> dict[Path, str]:
        """Does what is not finished; the reasons of those that failed, by folder."""
        console = Console(stderr=True, soft_wrap=True)
        reasons: dict[Path, str] = {}
        for number, made in enumerate(adaptations, 1):
            done = made.is_finished()
            said = f"adaptation {number} of {len(adaptations)}: {made}{' (finished before)' * done}"
            console.print(said, highlight=False, markup=False)
            if not done:
                try:
                    made.execute(device)
                except Exception as error:  # as in a campaign: whatever happened to one, the others go on
                    reason = str(error) if isinstance(error, FedDPError) else f"{type(error).__name__}: {error}"
                    reasons[made.folder] = self.failed[str(made)] = reason
                    console.print(f"failed: {made}: {reason}", highlight=False, markup=False, style="red")
        return reasons

    def _outside(self, found: Found, missing: dict[int, str], reasons: Mapping[Path, str]) -> Outside:
        """What was found without the failed ones, which a seed then lacks."""
        lacking = {
            seed: f"{site} outside: {reasons[made.folder]}"
            for seed, sites in found.items()
            for site, made in sites.items()
            if made.folder in reasons
        }
        whole = {seed: {s: made for s, made in sites.items() if made.folder not in reasons} for seed, sites in found.items()}
        return Outside({seed: sites for seed, sites in whole.items() if sites}, missing | lacking)
