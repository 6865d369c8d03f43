"""What a verdict's numbers cover and what they do not, and what makes a comparison uneven."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields

from feddp.compare.reference import LAST, REFERENCE
from feddp.compare.statistics import FEW, LEAST, METRIC, RESAMPLES
from feddp.pages.collected import Collected, Measurements
from feddp.pages.differences import IMAGES, PATIENTS, SITES
from feddp.reading import counted
from feddp.stages.empty import at_the_end
from feddp.training.settings import Training

_CONDITIONS = ("network", "size", "rounds", "weights", "selection")  # in results.json, which two compared runs should share
# in its settings, which holds those that were given: how networks are trained and measured; `selection` is above
_SETTINGS = tuple(field.name for field in fields(Training) if field.name != "selection")
_NAMED = 4  # methods and sites that a sentence lists


def covered(subject: Measurements, bases: Collection[str], patients: bool) -> Iterator[str]:
    """What the intervals cover.

    Args:
        bases: of the contrasts, what their intervals are over (`differences.Contrast`).
        patients: whether the patients of the test images are known.
    """
    if PATIENTS in bases:
        yield (
            f"Intervals over patients are of {RESAMPLES} draws of the test patients within each site, wider by Student's"
            " factor, as in the tables below; sites count equally. They cover the choice of patients, not another training. Of"
            " the sites' own, about 1 in 20 excludes the true difference by chance."
        )
    if IMAGES in bases:
        yield (
            f"Intervals over images are percentile bootstraps of {RESAMPLES} resamples, paired by test image and drawn within"
            " each site; sites count equally. They cover the choice of test images, not another training, and are too narrow"
            " where several images show one patient: which do, the folder of a `feddp compare` says, unless it is of an earlier"
            " version. Of the sites' own, about 1 in 20 excludes the true difference by chance."
        )
    if SITES in bases:
        yield (
            "Intervals over sites are Student's, mean ± t · s / √n of the sites' differences: for a sample of few sites they"
            " are wide. They do not cover another training."
        )
    if "" in bases:
        enough = f"{LEAST} test patients, two of them at each site" if patients else f"{LEAST} images at each site"
        yield f"An interval needs {FEW} sites, or {enough}, whose values are on this machine and not withheld."
    if len(subject.runs) == 1:
        yield "One seed was run: how much another training would change the numbers is not known."


def caveats(subject: Measurements, references: Sequence[Measurements], collected: Collected) -> Iterator[str]:
    """What makes a comparison uneven, or its numbers optimistic."""
    compared = [subject, *references]
    each = {m.called: m.runs[0].results for m in compared}
    values = {name: {label: r.get(name) for label, r in each.items()} for name in _CONDITIONS}
    values |= {name: {label: r.get("settings", {}).get(name, "default") for label, r in each.items()} for name in _SETTINGS}
    for name, found in values.items():
        if len({json.dumps(value) for value in found.values()}) > 1:
            shown = ", ".join(f"{label}: {'none' if value in (None, '') else value}" for label, value in found.items())
            yield f"These runs differ in {name} ({shown}), so a difference may come from that."
    rounds = {m.called: m.round for m in compared}
    if len(set(rounds.values())) > 1:
        shown = ", ".join(f"{label}: {which}" for label, which in rounds.items())
        yield f"Their networks are of different rounds ({shown}), and which round is taken may matter as much as the method."
        if any(m.variant == REFERENCE and m.round == "best" for m in references) and subject.round == "last":
            yield f"FedAvg's last round is {LAST[1]}: name it in --methods of `feddp compare`."
    if any(run.results["selection"] == "test" for m in compared for run in m.runs):
        yield "Optimistic: rounds and epochs were chosen on the test images (selection=test)."
    warned = [f"Warning, {run.name}: {text}" for run in collected.runs if (text := at_the_end(run.results, run.last))]
    yield from warned[:_NAMED]
    if more := warned[_NAMED:]:
        yield f"{counted(len(more), 'more run')} with such a warning: results.md of each has it."
    if without := [site for site in collected.sites if site not in subject.means(METRIC)]:
        yield f"Without a result of {subject.label} in every run: {listed(without)}. Who took part, below, says why."


def listed(names: Sequence[str]) -> str:
    """The first of them, and how many more."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
