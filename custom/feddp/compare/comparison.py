"""`feddp compare`, from what is asked to what is written."""

from collections.abc import Mapping
from dataclasses import replace

from feddp.compare.drawings import draw_methods, draw_study
from feddp.compare.efficiency import efficiency_table
from feddp.compare.folds import compare_folds
from feddp.compare.leave_one_out import LeaveOneOut
from feddp.compare.outside_studies import OUTSIDE
from feddp.compare.outside_tables import draw_outside, outside_tables
from feddp.compare.report import Comparison, write_report
from feddp.compare.request import Request
from feddp.compare.results import CASE, FINAL, Result, has_cases
from feddp.compare.runs import Campaign
from feddp.compare.scores import scores
from feddp.compare.statistics import sentence
from feddp.compare.studies import STUDIES
from feddp.compare.tables import scores_table, spread_table
from feddp.compare.unseen import open_unseen, unseen_table
from feddp.compare.variants import Variant
from feddp.reporting.tables import ResultTable
from feddp.training.volumes import VOLUME_METRICS

BY_CASE = (
    "All test slices of a patient are one volume; ± is over a site's test cases. Sites whose images are no slices have none."
)


def compare(request: Request) -> Comparison:
    """Runs what is not finished yet, and writes tables.md, table_*.csv, table_*.tex and the figures to `request.out`.

    Raises:
        InputError: anything asked for is unknown or does not fit; nothing has been run then.
    """
    methods = [Variant.parse(text) for text in request.methods]
    studies = {name: STUDIES[name] for name in request.studies}
    variants = [*methods, *(entry.variant for study in studies.values() for entry in study.entries)]
    campaign = Campaign(variants, request.common, request.seeds, request.data, request.out)
    campaign.refuse_equal(methods)
    if request.folds:
        return compare_folds(request, methods)
    unseen = open_unseen(request.unseen, request.data, campaign.facts) if request.unseen else None
    around = {name: OUTSIDE[name](len(campaign.sites)) for name in request.outside}
    outside = LeaveOneOut(around, request.common, request.seeds, request.data, request.out) if around else None

    results, seeds = campaign.execute(request.device, request.threads), len(request.seeds)
    named = {str(variant): results[variant] for variant in methods}
    tables = _methods_tables(named, campaign.sites, seeds) if methods else []
    for name, study in studies.items():
        rows = [(entry.labels, results[entry.variant], entry.when) for entry in study.entries]
        tables.append(scores_table(name, study.title, study.heads, rows, study.metrics, campaign.sites, seeds))
    if unseen:
        tables.append(unseen_table(named, unseen, campaign.sites, request.common.size, request.device))
    if methods:
        tables.append(efficiency_table(named, request.data, request.device))
    if any(result.folders for result in named.values()):
        draw_methods(request.out, named, campaign.sites)
    for name in studies:
        draw_study(name, request.out, results, campaign.sites)
    if not outside:
        return write_report(request, tables, [campaign])
    adapted = outside.execute(request.device, request.threads)
    for name, study in around.items():
        tables += outside_tables(name, study, adapted, campaign.sites, seeds)
        draw_outside(name, study, request.out, adapted, campaign.sites)
    return write_report(request, tables, [campaign, *outside.campaigns.values()], outside.failed)


def _methods_tables(named: Mapping[str, Result], sites: list[str], seeds: int) -> list[ResultTable]:
    """Table I or II with the test of its best two, and the same for the other metrics."""
    rows = [((label,), result, FINAL) for label, result in named.items()]
    title = "Table I / II: the methods"
    first = scores_table("methods", title, ("Method",), rows, ("dice", "assd"), sites, seeds, per_site=True)
    title = "The methods by IoU, HD95 and HD"
    more = scores_table("methods_more", title, ("Method",), rows, ("iou", "hd95", "hd"), sites, seeds, per_site=True)
    test = sentence({label: scores(result, sites) for label, result in named.items() if result.folders and result.competes})
    start = "Methods without a stage at home hand on the best round on the selection split, the others the last (Algorithm 1)."
    tables = [replace(first, notes=(test, start, *first.notes)), more, spread_table(named, sites)]
    if any(has_cases(result) for result in named.values()):
        title = "The methods by case"
        cases = scores_table("volumes", title, ("Method",), rows, VOLUME_METRICS, sites, seeds, per_site=True, kind=CASE)
        tables.append(replace(cases, notes=(BY_CASE, *cases.notes)))
    return tables
