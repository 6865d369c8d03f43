"""Cross-validation, as pFLFE's (002, Implementation Details): every image is a test image once.

OUT/folds/fold-<i>/data/<site>/    the site's folder under the fold's splits
OUT/folds/fold-<i>/runs/           the fold's runs

The folds follow from the first seed and the site's name, and are the same for all methods and seeds.
Deviations: the paper does not say whether its folds are of patients or images, nor what selects: here patients, and a
fifth of a fold's other patients validates.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from feddp.compare.report import Comparison, write_report
from feddp.compare.request import Request
from feddp.compare.results import FINAL
from feddp.compare.runs import Campaign
from feddp.compare.tables import scores_table, spread_table
from feddp.compare.variants import Variant
from feddp.data.folder import SiteFolder, find_sites
from feddp.data.folds import deal, write_fold
from feddp.reporting.tables import BLANK, Cell, ResultTable, Value
from feddp.training.seeds import seed_of


def compare_folds(request: Request, methods: Sequence[Variant]) -> Comparison:
    """Runs every method in every fold where it is not finished yet, and writes the methods' tables over the folds.

    Raises:
        InputError: a site has fewer patients than folds, or `request.out` holds other folds.
    """
    folders = [request.out / "folds" / f"fold-{i + 1}" for i in range(request.folds)]
    _deal(request, folders)
    campaigns = [
        Campaign(methods, request.common, request.seeds, folder / "data", folder, label=folder.name) for folder in folders
    ]
    tables: list[list[ResultTable]] = []
    for campaign in campaigns:
        results = campaign.execute(request.device, request.threads)
        named, sites = {str(variant): results[variant] for variant in methods}, campaign.sites
        rows = [((label,), result, FINAL) for label, result in named.items()]
        title, metrics = f"The methods, {request.folds} folds", ("dice", "assd")
        first = scores_table("methods", title, ("Method",), rows, metrics, sites, len(request.seeds), per_site=True)
        tables.append([first, spread_table(named, sites)])
    return write_report(request, [over_folds(same) for same in zip(*tables, strict=True)], campaigns)


def over_folds(folds: Sequence[ResultTable]) -> ResultTable:
    """Each number's mean ± population standard deviation over the folds' tables of equal heads and rows.

    What is no number in some fold is none here: its text there, the first of a failure's, is shown.
    """
    first = folds[0]
    rows = tuple(tuple(map(_over, zip(*same, strict=True))) for same in zip(*(table.rows for table in folds), strict=True))
    note = f"Each number is the mean over {len(folds)} folds of the fold's own, ± the population standard deviation over folds."
    notes = tuple(dict.fromkeys([note, *(text for table in folds for text in table.notes)]))
    apart = frozenset().union(*(table.apart for table in folds))
    return ResultTable(first.name, first.title, first.heads, first.better, rows, notes, apart)


def _over(cells: Sequence[Cell]) -> Cell:
    texts = [cell for cell in cells if not isinstance(cell, Value)]
    if texts:
        return max((text for text in texts if text != BLANK), key=len, default=BLANK)
    means = [cell.mean for cell in cells]
    return Value(float(np.mean(means)), float(np.std(means)), cells[0].digits)


def _deal(request: Request, folders: Sequence[Path]) -> None:
    """Writes every fold's data; none of them where some site cannot be dealt."""
    sites = [SiteFolder.open(path) for path in find_sites(request.data)]
    dealt = [deal(site, request.folds, seed_of(request.seeds[0], "folds", site.site)) for site in sites]
    for site, folds in zip(sites, dealt, strict=True):
        for folder, lines in zip(folders, folds, strict=True):
            write_fold(site, folder / "data" / site.site, lines)
