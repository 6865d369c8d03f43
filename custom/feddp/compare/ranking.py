"""Which methods differ beyond chance: each against a reference, corrected for their number, and how sure their order is.

The note below Table I tests the two best ones alone. A patient is one observation in every test.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from feddp.compare.patients import Names, PatientScores, firsts, holm, percentiles, ranks
from feddp.compare.reference import LAST, REFERENCE, reference, unlike
from feddp.compare.scores import Result, Scores, scores
from feddp.compare.statistics import LEAST, LEVEL, METRIC, RESAMPLES
from feddp.reading import counted
from feddp.reporting.tables import BLANK, Cell, ResultTable, Value

_HEADS = ("Dice (%)", "interval", "Worst site", "Worst site's Dice (%)", "Variance over sites")
_AGAINST = ("Against", "difference", "interval of it", "p", "p by Holm", "Mean rank", "interval of the rank", "First in (%)")


def finished(named: Mapping[str, Result], sites: list[str]) -> dict[str, Scores]:
    """The scores of the federated methods that finished under every seed at every site."""
    whole = {label: scores(result, sites) for label, result in named.items() if result.folders and result.competes}
    return {label: found for label, found in whole.items() if found.average is not None}


def ranking_tables(
    found: Mapping[str, Scores], names: Names, kept: Names | None, last: Collection[str] = ()
) -> list[ResultTable]:
    """Over all test images; then over those with structures, if some masks are empty; [] of fewer than two methods.

    Of an empty mask, Dice is 1 if the prediction is empty too, else 0: a few such images outweigh what methods differ in
    elsewhere.

    Args:
        found: `finished`; each is compared with FedAvg (`feddp.compare.reference`), or else the first.
        names: the patient of each test image.
        kept: the same of the images with structures (`feddp.compare.tested.with_structures`).
        last: the methods whose networks are of the last round, or went on from it.
    """
    if len(found) < 2:
        return []
    tables = [_table("ranking", "Which methods differ", found, names, last)]
    if kept and kept != names:
        empty = [(site, image) for site, images in names.items() for image in images if image not in kept[site]]
        tables.append(_table("ranking_filled", "Which methods differ on images with structures", found, kept, last, empty))
    return tables


def best_two(methods: Mapping[str, Scores]) -> list[str]:
    """The methods with the two highest averages of Dice, the best first; fewer where fewer methods have an average."""
    means = {name: scores.average[METRIC]["mean"] for name, scores in methods.items() if scores.average}
    return sorted(means, key=lambda name: -means[name])[:2]


def sentence(methods: Mapping[str, Scores], names: Names, last: Collection[str]) -> str:
    """The note below Table I: the two best methods' test.

    Args:
        names: the patient of each test image.
        last: the methods whose networks are of the last round, or went on from it. The choice of the round may move a method
            as much as methods differ, so the note says where the two differ in it.
    """
    best = best_two(methods)
    if len(best) < 2:
        return "Wilcoxon signed-rank test: needs two methods that finished at every site."
    found = compare_two(PatientScores.of({name: methods[name].rows for name in best}, METRIC, names))
    test = f"Wilcoxon signed-rank test (two-sided, per patient, seeds averaged), {best[0]} against {best[1]}: {found}."
    ends, other = ([name for name in best if (name in last) == wanted] for wanted in (True, False))
    if not (ends and other):
        return test
    return f"{test} {ends[0]} is of the last round or went on from it; {other[0]} is of the best round."


def compare_two(tested: PatientScores) -> str:
    """The test of the first method against the second in words. Dice is in points of per cent."""
    differences = tested.differences(0, 1)
    differing = int(np.count_nonzero(differences))
    if not differing:
        return f"no difference in any patient (n = {tested.count})"
    median = f"median difference {np.median(differences):+.2f} points of Dice"
    return f"n = {tested.count} test patients, {differing} of them differ, {median}, p = {tested.p_value(0, 1):.4g}"


def _table(
    name: str,
    title: str,
    found: Mapping[str, Scores],
    names: Names,
    last: Collection[str],
    empty: Sequence[tuple[str, str]] = (),
) -> ResultTable:
    """One row per method, by falling mean; with a column for the (site, image) with an empty mask, unless they are few."""
    tested = PatientScores.of({label: each.rows for label, each in found.items()}, METRIC, names)
    means, by_site = tested.means(), tested.by_site()
    base = [tested.methods.index(reference(label, tested.methods, last)) for label in tested.methods]
    others = [i for i in range(len(means)) if i != base[i]]
    p = dict(zip(others, (tested.p_value(i, base[i]) for i in others), strict=True))
    adjusted = dict(zip(others, holm(list(p.values())), strict=True))
    drawn = tested.draws
    place = None if drawn is None else ranks(drawn)
    first = None if place is None else firsts(place)
    rows: list[tuple[Cell, ...]] = []
    for i in np.argsort(-means, kind="stable"):
        dice = dict(zip(names, by_site[:, i].tolist(), strict=True))
        worst = min(dice, key=lambda site: (dice[site], site))
        row: list[Cell] = [Value(float(means[i])), BLANK, worst, Value(dice[worst])]
        if drawn is not None:
            row[1] = shown_interval(*tested.interval(drawn[:, i], means[i]))
        row.append(Value(float(np.var(list(dice.values())))))
        if i == base[i]:
            row += [BLANK] * 5
        else:
            apart, wide = tested.apart(i, base[i])
            row += [tested.methods[base[i]], Value(apart), shown_interval(*wide) if wide else BLANK]
            row += [Value(p[i], digits=4), Value(adjusted[i], digits=4)]
        if place is None or first is None:
            row += [BLANK] * 3
        else:
            row += [
                Value(float(place[:, i].mean()), digits=1),
                shown_interval(*percentiles(place[:, i]), digits=1),
                Value(float(first[i]), digits=1),
            ]
        if len(empty) >= LEAST:  # a mean of fewer would show single images
            rows_of = found[tested.methods[i]].rows
            row.append(Value(float(np.mean([100 * rows_of[site][image][METRIC] for site, image in empty])), digits=1))
        rows.append((tested.methods[i], *row))
    heads, notes = ["Method", *_HEADS, *_AGAINST], _notes(tested, len(others), last)
    if empty:
        left = (
            f"Left out here: {counted(len(empty), 'test image')} with an empty mask. Dice is 1 there if the prediction is empty"
        )
        notes = (*notes, f"{left} too, else 0; of several classes, the mean.")
    if len(empty) >= LEAST:
        heads.append(f"Dice (%) of {len(empty)} empty masks")
    return ResultTable(name, title, tuple(heads), (None,) * len(heads), tuple(rows), notes)


def shown_interval(low: float, high: float, digits: int = 2) -> str:
    return f"{low:.{digits}f} to {high:.{digits}f}"


def _notes(tested: PatientScores, tests: int, last: Collection[str]) -> tuple[str, ...]:
    number = f"{tested.count} test patients of {len(tested.images)} sites"
    variance = "Variance over sites: the population's, of the sites' means."
    test = (
        f"p: Wilcoxon's signed-rank test, two-sided, over {number}, each the mean over its images and the"
        f" seeds; by Holm: corrected for {counted(tests, 'test')}. The test weighs patients alike, the mean"
        " sites: their signs may differ."
    )
    notes = [variance, test, *_rounds(tested.methods, last)]
    if not tested.enough:
        return (*notes, "No intervals: they need two patients at each site, and six in all.")
    drawn = (
        f"Intervals ({LEVEL} %) and ranks: {RESAMPLES} draws of the patients within each site, the same for all methods"
        " (Rao & Wu, 1988), those of Dice wider by Student's factor. They cover the choice of patients, not another training."
    )
    return (*notes, drawn)


def _rounds(methods: Sequence[str], last: Collection[str]) -> list[str]:
    """Says why there are two references, or that the one there is does not suit all methods."""
    against = {reference(label, methods, last) for label in methods}
    notes = [
        f"{name} is FedAvg's last round. Methods that go on from the last round are compared with it, the others with"
        f" {REFERENCE}, which is the best round."
        for name in LAST
        if name in against and REFERENCE in against
    ]
    for ends in (True, False):
        if found := [label for label in unlike(methods, last) if (label in last) == ends]:
            notes.append(_uneven(found, reference(found[0], methods, last), ends))
    return notes


def _uneven(found: Sequence[str], base: str, ends: bool) -> str:
    """Says that the methods `found`, of the last round if `ends`, else of the best, are compared with one of the other."""
    kind, other = ("last round, or gone on from it,", "best") if ends else ("best round,", "last")
    said = f"{', '.join(found)}: of the {kind} but compared with {base}, of the {other} round."
    if base == REFERENCE:
        more = f"add {LAST[1]} beside finetune, which needs no run more, or {LAST[0]}"
        return f"{said} To compare with FedAvg's last round, {more}."
    return f"{said} To compare with FedAvg's best round, add {REFERENCE}." if base in LAST else said
