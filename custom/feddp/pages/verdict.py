"""The verdict in words: whether the personal networks are better than Local Train's and FedAvg's, where, and by how much."""

from collections.abc import Iterable
from dataclasses import dataclass

from feddp.compare.statistics import LEVEL, METRIC, RESAMPLES
from feddp.methods import METHODS
from feddp.methods.base import CALIBRATE, HEADS, TRAIN, TUNE
from feddp.pages.collected import PROSE, Collected, Measurements
from feddp.pages.differences import IMAGES, SITES, Contrast, Side, contrast, points, why_none
from feddp.protocol import WHEN
from feddp.reading import counted

REFERENCES = ("local", "fedavg")  # what a personal network has to beat: training alone, and one network for all
BETTER, WORSE, OPEN = "better", "worse", "open"
_LOCAL = {TUNE, HEADS, CALIBRATE}


@dataclass(frozen=True)
class Finding:
    """One sentence of the verdict with its tone, and what follows from the same numbers."""

    tone: str
    text: str
    more: tuple[str, ...] = ()
    contrast: Contrast | None = None


@dataclass(frozen=True)
class Verdict:
    subject: Measurements | None  # the method whose networks are judged; None where there is no run, as of folds
    findings: tuple[Finding, ...]
    calibration: Contrast | None  # of the subject, after against before its last stage
    stage: str  # what that stage is called
    scope: tuple[str, ...]  # what the numbers do and do not cover
    missing: tuple[str, ...]  # what cannot be said, and the command that would let it be said

    @property
    def contrasts(self) -> list[Contrast]:
        found = [finding.contrast for finding in self.findings]
        return [each for each in found if each]


def judge(collected: Collected) -> Verdict:
    """InputError where two runs were tested on different images of a site."""
    subject = _subject(collected.methods.values())
    if subject is None:
        none = "This comparison has no runs of --methods that could be compared image by image: see its tables."
        return Verdict(None, (), None, "", (), (none,))
    findings, missing = [], []
    for name in REFERENCES:
        reference = _method(collected, name)
        if reference is subject:
            continue
        if reference is None:
            missing.append(name)
        elif found := contrast(Side(subject), Side(reference), (subject.label, reference.label)):
            findings.append(against(found))
    calibration, stage = _calibration(subject), _stage(subject)
    if calibration:
        findings.append(against(calibration, f"after the {stage}", "before it"))
    if worst := _worst(subject, collected):
        findings.append(worst)
    return Verdict(subject, tuple(findings), calibration, stage, _scope(subject, findings), _missing(subject, missing))


def against(found: Contrast, one: str = "", other: str = "") -> Finding:
    """The sentences about a contrast; `one` and `other` name it where the methods' names would not."""
    average, count = found.average, len(found.sites)
    mine = f"{found.one} {one}".strip()
    amount = f"{points(average.mean)} points of Dice on average over {counted(count, 'site')}"
    where = f"The mean is higher at {len(found.better)} of {counted(count, 'site')}."
    if average.interval is None:
        better = "higher" if average.mean > 0 else "lower" if average.mean < 0 else "the same"
        text = f"{mine} scores {better} than {other or found.other}: {amount} ({why_none(found)}); this may be chance."
        return Finding(OPEN, text.replace("the same than", "the same as"), (where,), found)
    low, high = average.interval
    amount += f" ({LEVEL} % interval {points(low)} to {points(high)})"
    verb, tone = {
        1: ("is better than", BETTER),
        -1: ("is worse than", WORSE),
        0: ("is not shown to differ from", OPEN),
    }[average.side]
    sides = [each.side for each in found.sites.values()]
    more = [where]
    if found.basis == IMAGES:
        more.append(
            f"Sites' own intervals: above 0 at {sides.count(1)}, below 0 at {sides.count(-1)}, across 0 at {sides.count(0)}."
        )
    if len(found.seeds) > 1:
        more.append(f"By seed, the average difference is {points(min(found.seeds))} to {points(max(found.seeds))}.")
    if found.left_out:
        more.append(f"Left out, because only one of the two has a result there: {', '.join(found.left_out)}.")
    return Finding(tone, f"{mine} {verb} {other or found.other}: {amount}.", tuple(more), found)


def _subject(methods: Iterable[Measurements]) -> Measurements | None:
    """FedDP, or the first method with networks of the sites' own; else the first of all."""
    found = list(methods)
    personal = [m for m in found if m.runs[0].results["method"] not in (*REFERENCES, "centralized")]
    feddp = [m for m in personal if m.label == PROSE["feddp"]]
    return next(iter((*feddp, *personal, *found)), None)


def _method(collected: Collected, name: str) -> Measurements | None:
    """The plain runs of a method: not a variant with changes, where both are there."""
    found = [m for m in collected.methods.values() if m.runs[0].results["method"] == name]
    return next((m for m in found if m.label == PROSE[name]), found[0] if found else None)


def _calibration(subject: Measurements) -> Contrast | None:
    stages = subject.runs[0].results["stages"]
    if TRAIN not in stages or not _LOCAL & set(stages):
        return None
    return contrast(Side(subject), Side(subject, WHEN[0]), (subject.label, subject.label))


def _stage(subject: Measurements) -> str:
    return "calibration" if CALIBRATE in subject.runs[0].results["stages"] else "local stage"


def _worst(subject: Measurements, collected: Collected) -> Finding | None:
    means = subject.means(METRIC)
    if not means:
        return None
    site = min(means, key=lambda name: (means[name], name))
    others = {label: found for label in collected.methods if (found := _at(collected.methods[label], site)) is not None}
    others.pop(subject.label, None)
    shown = ", ".join(f"{label} {100 * others[label]:.1f} %" for label in list(others)[:4])
    best = max(means.values())
    more = [f"That is {100 * (best - means[site]):.1f} points below its best site."] if len(means) > 1 else []
    if shown:
        more.append(f"There, others have: {shown}.")
    return Finding("worst", f"The worst site of {subject.label} is {site}, with {100 * means[site]:.1f} % Dice.", tuple(more))


def _at(method: Measurements, site: str) -> float | None:
    return method.means(METRIC).get(site)


def _scope(subject: Measurements, findings: Iterable[Finding]) -> tuple[str, ...]:
    bases = {finding.contrast.basis for finding in findings if finding.contrast}
    lines = []
    if IMAGES in bases:
        lines.append(
            f"Intervals are percentile bootstraps of {RESAMPLES} resamples, paired by test image and drawn within each site;"
            " sites count equally. They cover the choice of test images, not another training, and are too narrow where"
            " several images show one patient."
        )
    if SITES in bases:
        lines.append(
            f"Intervals over sites draw the sites' differences again ({RESAMPLES} resamples); few sites make them coarse."
        )
    if len(subject.runs) == 1:
        lines.append("One seed was run: how much another training would change the numbers is not known.")
    if any(run.results["selection"] == "test" for run in subject.runs):
        lines.append("Optimistic: rounds and epochs were chosen on the test images (selection=test).")
    return tuple(lines)


def _missing(subject: Measurements, names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    method = subject.runs[0].results["method"]
    known = method if method in METHODS else "feddp"
    others = " or ".join(
        {"local": "training alone (Local Train)", "fedavg": "one network for all sites (FedAvg)"}[n] for n in names
    )
    asked = ",".join(dict.fromkeys((*REFERENCES, known)))
    return (
        f"Whether {subject.label} is better than {others} cannot be said from these runs.",
        f"To find out: feddp compare --methods {asked} --data ROOT --out FOLDER",
    )
