"""The verdict in words: whether the personal networks are better than Local Train's and FedAvg's, where, and by how much."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from feddp.compare.patients import Names
from feddp.compare.reference import LAST, REFERENCE
from feddp.compare.reference import reference as row_of
from feddp.compare.statistics import LEVEL, METRIC
from feddp.methods import METHODS
from feddp.methods.base import CALIBRATE, LOCAL_STAGES, TRAIN
from feddp.pages.caveats import caveats, covered, listed
from feddp.pages.collected import PROSE, Collected, Measurements
from feddp.pages.differences import Contrast, Side, contrast, points
from feddp.partition import NONE
from feddp.protocol import WHEN

REFERENCES = ("local", REFERENCE)  # what a personal network has to beat: training alone, and one network for all
BETTER, WORSE, OPEN = "better", "worse", "open"


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
    missing: tuple[str, ...]  # what cannot be said
    command: str  # that would let it be said; "" if nothing is missing

    @property
    def contrasts(self) -> list[Contrast]:
        found = [finding.contrast for finding in self.findings]
        return [each for each in found if each]


def judge(collected: Collected) -> Verdict:
    """InputError where two runs were tested on different images of a site."""
    subject = _subject(collected.methods.values())
    if subject is None:
        none = "No run of --methods finished here, and only such runs can be compared image by image. All tables are below."
        return Verdict(None, (), None, "", (), (none,), "")
    calibration, stage = _calibration(subject, collected.patients), _stage(subject)
    findings, references, absent, missing = [], [], [], []
    for name in REFERENCES:
        reference = _reference(collected, name, subject)
        if reference is subject:
            continue
        if reference is None:
            absent.append(name)
            continue
        if found := contrast(Side(subject), Side(reference), (subject.called, reference.called), collected.patients):
            finding = against(found)
            before = _before(subject, reference, stage, collected.patients)
            findings.append(replace(finding, more=(*finding.more, *before)))
            references.append(reference)
        else:
            missing.append(f"No site has a result of both {subject.called} and {reference.called}.")
    if calibration:
        findings.append(against(calibration, f"after the {stage}", "before it"))
    if worst := _worst(subject, collected):
        findings.append(worst)
    contrasts = [finding.contrast for finding in findings if finding.contrast]
    bases = {each.basis for each in contrasts} | {each.own for each in contrasts if each.own}
    scope = (*covered(subject, bases, bool(collected.patients)), *caveats(subject, references, collected))
    said, command = _absent(subject, absent)
    return Verdict(subject, tuple(findings), calibration, stage, scope, (*missing, *said), command)


def against(found: Contrast, one: str = "", other: str = "") -> Finding:
    """The sentences about a contrast; `one` and `other` name it where the methods' names would not."""
    average, count = found.average, len(found.sites)
    mine, theirs = f"{found.one} {one}".strip(), other or found.other
    where = (
        f"on average over {count} sites" if count > 1 else f"at {next(iter(found.sites))}, the only site with a result of both"
    )
    amount = f"{points(average.mean)} points of Dice {where}"
    if average.interval is None:
        tone, words = OPEN, {1: "scores higher than", -1: "scores lower than", 0: "scores the same as"}[average.sign]
        text = f"{mine} {words} {theirs}: {amount}. There is no interval, so this may be chance."
    else:
        words, tone = {
            1: ("is better than", BETTER),
            -1: ("is worse than", WORSE),
            0: ("is not shown to differ from", OPEN),
        }[average.side]
        text = f"{mine} {words} {theirs}: {amount}{_interval(found)}."
    return Finding(tone, text, tuple(_more(found)), found)


def _interval(found: Contrast) -> str:
    if found.average.interval is None:
        return ""
    return " ({} % interval over {} {} to {})".format(LEVEL, found.basis, *map(points, found.average.interval))


def _before(subject: Measurements, reference: Measurements, stage: str, patients: Names) -> Iterator[str]:
    """What the subject's networks have ahead of the reference's without its last stage, in which they train longer."""
    own, other = (set(each.runs[0].results["stages"]) for each in (subject, reference))
    if subject.ends and TRAIN in own and LOCAL_STAGES & own and not (reference.ends and LOCAL_STAGES & other):
        found = contrast(Side(subject, WHEN[0]), Side(reference), (subject.called, reference.called), patients)
        if found:
            amount = f"{points(found.average.mean)} points{_interval(found)}"
            yield f"Before the {stage}, in which its networks train further, the difference is {amount}."


def _more(found: Contrast) -> Iterator[str]:
    if len(found.sites) > 1:
        equal = f" and equal at {n}" if (n := found.count(0)) else ""
        yield f"The mean is higher at {found.count(1)} of {len(found.sites)} sites{equal}."
        if found.own:
            own = [each.side for each in found.sites.values() if each.interval]
            few = f"; none at {n}, with too few {found.own}" if (n := len(found.sites) - len(own)) else ""
            yield f"Sites' own intervals: above 0 at {own.count(1)}, below 0 at {own.count(-1)}, with 0 at {own.count(0)}{few}."
    if len(found.seeds) > 1:
        yield f"By seed, the average difference is {points(min(found.seeds))} to {points(max(found.seeds))}."
    mine, theirs = (", ".join(map(str, seeds)) for seeds in found.ran)
    if mine != theirs:
        yield f"The seeds differ: {found.one} has {mine}; {found.other} has {theirs}."
    if found.left_out:
        yield f"Left out, because only one of the two has a result there: {listed(found.left_out)}."


def _subject(methods: Iterable[Measurements]) -> Measurements | None:
    """FedDP, or the first method with networks of the sites' own; else the first of all."""
    found = list(methods)
    personal = [m for m in found if _is_personal(m)]
    plain = [m for m in personal if m.label == PROSE["feddp"]]
    feddp = [m for m in personal if m.runs[0].results["method"] == "feddp"]
    return next(iter((*plain, *feddp, *personal, *found)), None)


def _is_personal(measured: Measurements) -> bool:
    """Whether the sites train together and end with networks of their own."""
    results = measured.runs[0].results
    name = results["method"]
    if name in REFERENCES or measured.variant in LAST or not results.get("federated", True):
        return False
    if name not in METHODS or LOCAL_STAGES & set(results["stages"]):
        return True
    private = results.get("settings", {}).get("private") or METHODS[name].private
    return METHODS[name].personal or tuple(private) != (NONE,)


def _reference(collected: Collected, name: str, subject: Measurements) -> Measurements | None:
    """The runs of Local Train or FedAvg: not a variant with changes, where both are there.

    Of FedAvg those of the subject's choice of round, as in the tables (`feddp.compare.reference`).
    """
    methods = collected.methods.values()
    rows = {m.variant: m for m in reversed(methods) if m.variant in (REFERENCE, *LAST)} if name == REFERENCE else {}
    if rows:
        last = {m.variant for m in (subject, *rows.values()) if m.round == "last"}
        return rows[row_of(subject.variant, rows, last)]
    found = [m for m in methods if m.runs[0].results["method"] == name]
    return next((m for m in found if m.label == PROSE[name]), found[0] if found else None)


def _calibration(subject: Measurements, patients: Names) -> Contrast | None:
    stages = subject.runs[0].results["stages"]
    if TRAIN not in stages or not LOCAL_STAGES & set(stages) or not subject.ends:
        return None
    return contrast(Side(subject), Side(subject, WHEN[0]), (subject.label, subject.label), patients)


def _stage(subject: Measurements) -> str:
    return "calibration" if CALIBRATE in subject.runs[0].results["stages"] else "local stage"


def _worst(subject: Measurements, collected: Collected) -> Finding | None:
    """The site with the lowest Dice; several where they are equal as shown."""
    means = {site: round(100 * mean, 1) for site, mean in subject.means(METRIC).items()}
    if not means:
        return None
    lowest, best = min(means.values()), max(means.values())
    sites = sorted(site for site, mean in means.items() if mean == lowest)
    if lowest == best:
        where = f"At {sites[0]}, its only site with a result," if len(sites) == 1 else f"At all {len(sites)} sites"
        return Finding("worst", f"{where} {subject.label} has {lowest:.1f} % Dice.")
    more = [f"That is {best - lowest:.1f} points below its best site."]
    if len(sites) > 1:
        text = f"The worst sites of {subject.label} are {listed(sites)}, with {lowest:.1f} % Dice each."
        return Finding("worst", text, tuple(more))
    others = {m.called: m.means(METRIC).get(sites[0]) for m in collected.methods.values() if m is not subject}
    if shown := [f"{label} {100 * dice:.1f} %" for label, dice in others.items() if dice is not None]:
        more.append(f"There, others have: {listed(shown)}.")
    return Finding("worst", f"The worst site of {subject.label} is {sites[0]}, with {lowest:.1f} % Dice.", tuple(more))


def _absent(subject: Measurements, names: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """What cannot be said without these references, and the command that runs them."""
    if not names:
        return (), ""
    method = subject.runs[0].results["method"]
    known = method if method in METHODS else "feddp"
    said = {"local": "training alone (Local Train)", "fedavg": "one network for all sites (FedAvg)"}
    asked = ",".join(dict.fromkeys((*REFERENCES, *([LAST[1]] if subject.round == "last" else []), known)))
    what = f"Whether {subject.label} is better than {' or '.join(said[n] for n in names)} cannot be said from these runs."
    return (what,), f"feddp compare --methods {asked} --data ROOT --out FOLDER"
