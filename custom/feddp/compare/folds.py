"""Cross-validation, as pFLFE's (Xie et al., 2024): every image is a test image once.

OUT/folds/fold-<i>/data/<site>/    the site's folder under the fold's splits
OUT/folds/fold-<i>/runs/           the fold's runs

The folds follow from the first seed and the site's name, and are the same for all methods and seeds.
Deviations: the paper does not say whether its folds are of patients or images, nor which images select the round: here they
are of patients, and a fifth of a fold's other patients validates.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from feddp.compare.runs import Campaign, Place
from feddp.compare.scores import FINAL, classes_of
from feddp.compare.tables import class_tables, scores_table, spread_table
from feddp.compare.variants import Common, Variant
from feddp.data.folder import SiteFolder, find_sites
from feddp.data.folds import deal, write_fold
from feddp.reporting.tables import BLANK, Cell, ResultTable, Value
from feddp.training.seeds import seed_of


def fold_campaigns(
    methods: Sequence[Variant], common: Common, seeds: Sequence[int], data: Path, out: Path, count: int
) -> list[Campaign]:
    """The runs of every fold, whose data are written; none of them where some site cannot be dealt.

    Raises:
        InputError: a site has fewer patients than folds, or `out` holds other folds.
    """
    folders = [out / "folds" / f"fold-{i + 1}" for i in range(count)]
    sites = [SiteFolder.open(path) for path in find_sites(data)]
    dealt = [deal(site, count, seed_of(seeds[0], "folds", site.site)) for site in sites]
    for site, folds in zip(sites, dealt, strict=True):
        for folder, lines in zip(folders, folds, strict=True):
            write_fold(site, folder / "data" / site.site, lines)
    return [Campaign(methods, common, seeds, folder / "data", folder, label=folder.name) for folder in folders]


def fold_tables(
    campaigns: Sequence[Campaign], methods: Sequence[Variant], seeds: Sequence[int], place: Place
) -> list[ResultTable]:
    """Runs every method in every fold where it is not finished yet; the methods' tables over the folds."""
    done = [(campaign.execute(place), campaign.sites) for campaign in campaigns]
    classes = classes_of(result for results, _ in done for result in results.values())  # a fold may have no finished run
    tables: list[list[ResultTable]] = []
    for results, sites in done:
        named = {variant.label: results[variant] for variant in methods}
        rows = [((label,), result, FINAL) for label, result in named.items()]
        title, metrics = f"The methods, {len(campaigns)} folds", ("dice", "assd")
        first = scores_table("methods", title, ("Method",), rows, metrics, sites, len(seeds), per_site=True)
        by_class = class_tables("methods", "The methods", ("Method",), rows, sites, len(seeds), classes)
        tables.append([first, *by_class, spread_table(named, sites)])
    return [over_folds(same) for same in zip(*tables, strict=True)]


def over_folds(folds: Sequence[ResultTable]) -> ResultTable:
    """Each number's mean ± population standard deviation over the folds' tables of equal heads and rows.

    A cell that is no number in some fold is no number here: its text there is shown, that of a failure first.
    """
    first = folds[0]
    rows = tuple(tuple(map(_over, zip(*same, strict=True))) for same in zip(*(table.rows for table in folds), strict=True))
    note = f"Each number is the mean over {len(folds)} folds of the fold's own, ± the population standard deviation over folds."
    notes = tuple(dict.fromkeys([note, *(text for table in folds for text in table.notes)]))
    apart = frozenset[int]().union(*(table.apart for table in folds))
    return ResultTable(first.name, first.title, first.heads, first.better, rows, notes, apart)


def _over(cells: Sequence[Cell]) -> Cell:
    values = [cell for cell in cells if isinstance(cell, Value)]
    if len(values) < len(cells):
        texts = [cell for cell in cells if isinstance(cell, str) and cell != BLANK]
        return max(texts, key=len, default=BLANK)
    means = [value.mean for value in values]
    return Value(float(np.mean(means)), float(np.std(means)), values[0].digits)
