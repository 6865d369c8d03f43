"""How much better one set of networks is than another, site by site: paired differences of test Dice with intervals."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from feddp.compare.patients import Names, PatientScores
from feddp.compare.scores import Rows
from feddp.compare.statistics import METRIC, interval, interval_of_few
from feddp.errors import InputError
from feddp.pages.collected import Measurements
from feddp.protocol import WHEN

PATIENTS, IMAGES, SITES = "patients", "images", "sites"


@dataclass(frozen=True)
class Difference:
    """In points of Dice: the mean, and its interval, if there is one."""

    mean: float
    interval: tuple[float, float] | None = None

    @property
    def sign(self) -> int:
        """1, 0 or -1, of the mean as it is shown."""
        return _sign(self.mean)

    @property
    def side(self) -> int:
        """1 where the interval, as shown, lies above 0, -1 where it lies below, 0 where it includes 0 or there is none."""
        if self.interval is None:
            return 0
        return int(_sign(self.interval[0]) > 0) - int(_sign(self.interval[1]) < 0)


@dataclass(frozen=True)
class Side:
    """The networks of a method, before (WHEN[0]) or after (WHEN[1]) their last stage at a site."""

    measured: Measurements
    when: str = WHEN[1]

    def means(self) -> dict[str, float]:
        return self.measured.means(METRIC, self.when)

    def rows(self, site: str) -> Rows | None:
        return self.measured.rows(site, self.when)


@dataclass(frozen=True)
class Contrast:
    """`one` minus `other`."""

    one: str
    other: str
    sites: dict[str, Difference]
    average: Difference
    basis: str  # what the average's interval is over: PATIENTS, IMAGES, SITES, or "" if there is none
    own: str  # what the sites' own intervals are over: PATIENTS, IMAGES, or "" if there are none
    left_out: tuple[str, ...]  # sites that only one of the two has
    seeds: tuple[float, ...]  # the average's mean by seed, of the seeds that both have
    ran: tuple[tuple[int, ...], tuple[int, ...]]  # the seeds of the two

    def count(self, sign: int) -> int:
        """The number of sites whose difference has this sign: 1, 0 or -1."""
        return sum(found.sign == sign for found in self.sites.values())


def contrast(one: Side, other: Side, names: tuple[str, str], patients: Names) -> Contrast | None:
    """`one` against `other` at the sites that both have; None without such a site.

    Args:
        patients: the patient of each test image, where they are known: then a patient is one observation, not an image.

    Raises:
        InputError: at some site the two were tested on different images.
    """
    mine, theirs = one.means(), other.means()
    common = [site for site in mine if site in theirs]
    if not common:
        return None
    paired = {site: _paired(site, one.rows(site), other.rows(site)) for site in common}
    if not all(found.keys() <= patients.get(site, {}).keys() for site, found in paired.items()):
        patients = {}  # of all sites or of none
    sites = {
        # of the images where they are here: the means in results.json may be rounded, the interval around them is not
        site: Difference(float(np.mean([*found.values()])), _within({site: found}, patients))
        if found
        else Difference(100 * (mine[site] - theirs[site]))
        for site, found in paired.items()
    }
    means = [found.mean for found in sites.values()]
    within, over_sites = _within(paired, patients), interval_of_few(means)
    average = Difference(float(np.mean(means)), within or over_sites)
    inner = PATIENTS if patients else IMAGES
    basis = inner if within else SITES if over_sites else ""
    own = inner if any(found.interval for found in sites.values()) else ""
    left_out = tuple(sorted(mine.keys() ^ theirs.keys()))
    ran = (_seeds(one), _seeds(other))
    return Contrast(*names, sites, average, basis, own, left_out, _by_seed(one, other, common), ran)


def _within(paired: Mapping[str, Mapping[str, float]], patients: Names) -> tuple[float, float] | None:
    """The interval of the sites' mean difference over their patients, or over their images where no patients are known.

    Args:
        paired: {site: {image: its difference}}. None where a site has no images here, or there are too few observations.
    """
    if not all(paired.values()):
        return None
    if not patients:
        return interval([[*found.values()] for found in paired.values()])
    rows = {site: {image: {METRIC: value / 100} for image, value in found.items()} for site, found in paired.items()}
    names = {site: {image: patients[site][image] for image in found} for site, found in paired.items()}
    tested = PatientScores.of({"difference": rows}, METRIC, names)
    return None if tested.draws is None else tested.interval(tested.draws[:, 0], float(tested.means()[0]))


def points(value: float) -> str:
    """A difference as text, with its sign; of less than 0.05 points, with a second decimal."""
    if not _sign(value):
        return "0.0"
    return f"{value:+.{1 if round(value, 1) else 2}f}".replace("-", "−")


def _sign(value: float) -> int:
    """Of a difference as `points` shows it."""
    shown = round(value, 2)
    return int(shown > 0) - int(shown < 0)


def _seeds(side: Side) -> tuple[int, ...]:
    return tuple(sorted(run.results["seed"] for run in side.measured.runs))


def _paired(site: str, one: Rows | None, other: Rows | None) -> dict[str, float]:
    """Each image's difference in points; none where one of the two has no rows."""
    if one is None or other is None:
        return {}
    if one.keys() != other.keys():
        raise InputError(f"{site}: the runs were tested on different images; name runs on the same data")
    return {image: 100 * (one[image][METRIC] - other[image][METRIC]) for image in one}


def _by_seed(one: Side, other: Side, sites: Iterable[str]) -> tuple[float, ...]:
    def averages(side: Side) -> dict[int, float]:
        found = {run.results["seed"]: [run.summary(s, side.when)[METRIC]["mean"] for s in sites] for run in side.measured.runs}
        return {seed: float(np.mean(values)) for seed, values in found.items()}

    mine, theirs = averages(one), averages(other)
    return tuple(100 * (mine[seed] - theirs[seed]) for seed in sorted(mine.keys() & theirs.keys()))
