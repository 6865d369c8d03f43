"""`feddp compare`, from the request to the files: tables, figures, and tables.md with the command, all tables and failures.

comparison.json holds what `feddp report` needs beside the runs: the tables, some of which were measured once, which run is of
which method and study, and which test images are of one patient. Its paths are relative to the comparison's folder.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from feddp.compare.efficiency import efficiency_table, stages_table, times_table
from feddp.compare.figures import draw_methods, draw_outside, draw_study
from feddp.compare.folds import fold_campaigns, fold_tables
from feddp.compare.leave_one_out import LeaveOneOut
from feddp.compare.pairs import pairs_tables
from feddp.compare.patients import Names
from feddp.compare.published import orderings_table
from feddp.compare.ranking import finished, ranking_tables
from feddp.compare.request import ComparisonRequest
from feddp.compare.runs import Campaign
from feddp.compare.scores import FINAL, Result
from feddp.compare.studies import OUTSIDE, STUDIES
from feddp.compare.tables import OPTIMISTIC, methods_tables, optimistic, outside_tables, study_table
from feddp.compare.tested import empty_masks, numbered, patients, with_structures
from feddp.compare.unseen import open_unseen, unseen_tables
from feddp.compare.variants import Variant
from feddp.data.folder import SiteFolder
from feddp.errors import InputError
from feddp.files import COMPARISON, read_results, write_json
from feddp.reading import read_own
from feddp.reporting.tables import ResultTable

SPREAD = (
    "; ± is the population standard deviation over a site's test images, over the sites' means in Average, and over the"
    " seeds' Averages in ± seeds."
)


_BEFORE = f".{COMPARISON}"  # of the comparison before one that runs, or that was broken off


@dataclass(frozen=True)
class Comparison:
    """The outcome: the first table (Table I, where there are methods), and why runs failed, by name."""

    summary: ResultTable
    failed: dict[str, str]


def compare(request: ComparisonRequest) -> Comparison:
    """Runs what is not finished yet, and writes tables.md, table_*.csv, table_*.tex and the figures to `request.out`.

    Raises:
        InputError: anything asked for is unknown or does not fit; nothing has been run then.
    """
    methods = [Variant.parse(text) for text in request.methods]
    studies = {name: STUDIES[name] for name in request.studies}
    variants = [*methods, *(entry.source.variant for study in studies.values() for entry in study.entries)]
    campaign = Campaign(variants, request.common, request.seeds, request.data, request.out)
    campaign.refuse_equal(methods)
    unseen = open_unseen(request.unseen, request.data, campaign.metadata) if request.unseen else None
    around = {name: OUTSIDE[name](len(campaign.sites)) for name in request.outside}
    outside = LeaveOneOut(around, request.common, request.seeds, request.data, request.out) if around else None
    dealt = (request.common, request.seeds, request.data, request.out, request.folds)
    campaigns = fold_campaigns(methods, *dealt) if request.folds else []
    before = _tables(request.out)
    with suppress(FileNotFoundError):  # there is none, or another comparison in this folder renames it at this moment
        (request.out / COMPARISON).replace(request.out / _BEFORE)  # while it runs, it is not finished (`feddp runs slim`)
    if campaigns:
        return _write(request, before, fold_tables(campaigns, methods, request.seeds, request.place), campaigns)
    results, sites, seeds = campaign.execute(request.place), campaign.sites, len(request.seeds)
    named = {variant.label: results[variant] for variant in methods}
    final = [variant for variant in methods if variant.when == FINAL]
    # of a run that only a row before its last stage names, the costs are those of the whole run, so they have its name
    runs = [v for v in methods if v in final or not any(campaign.same(v, one) for one in final)]
    whole = {replace(variant, when=FINAL).label: results[variant] for variant in runs}
    last = {variant.label for variant in methods if campaign.is_last(variant)}
    folders = {site: SiteFolder.open(request.data / site) for site in sites}
    names = {site: patients(folder) for site, folder in folders.items()}
    tables = methods_tables(named, sites, names, seeds, last) if methods else []
    if len(ranked := finished(named, sites)) > 1:
        empty = {site: empty_masks(folder, request.common.size) for site, folder in folders.items()}
        kept = with_structures(names, empty)
        published = orderings_table(ranked, names, kept, last)
        tables += ranking_tables(ranked, names, kept, last) + ([published] if published else [])
        tables += pairs_tables(ranked, names, kept, last)
    tables = _marked(tables, named.values())
    tables += [study_table(name, study, results, sites, seeds) for name, study in studies.items()]
    if unseen:
        tables += unseen_tables({v.label: results[v] for v in final}, unseen, sites, request.common.size, request.place.first)
    if methods:
        tables += [efficiency_table(whole, request.data, request.place.first), times_table(whole), stages_table(whole)]
    if any(result.folders for result in whole.values()):
        draw_methods(request.out, whole, sites)
    for name in studies:
        draw_study(name, request.out, results, sites)
    if not outside:
        return _write(request, before, tables, [campaign], results=results, names=names)
    adapted = outside.execute(request.place)
    for name, around_study in around.items():
        tables += outside_tables(name, around_study, adapted, sites, seeds)
        draw_outside(name, around_study, request.out, adapted, sites)
    return _write(request, before, tables, [campaign, *outside.campaigns.values()], outside.failed, results, names)


def _write(
    request: ComparisonRequest,
    before: set[str],
    tables: Sequence[ResultTable],
    campaigns: Sequence[Campaign],
    more: Mapping[str, str] | None = None,
    results: Mapping[Variant, Result] | None = None,
    names: Names | None = None,
) -> Comparison:
    """Writes tables.md, comparison.json and every table's CSV and LaTeX to `request.out`.

    Args:
        before: the names of the tables of an earlier comparison there; those that are not written again are removed.
        campaigns: all runs.
        more: the reasons of other failures, by name.
        results: what the methods and studies measured; of folds there are only tables.
        names: the patient of each test image.
    """
    failed = {name: reason for campaign in campaigns for name, reason in campaign.failed.items()} | dict(more or {})
    for table in tables:
        table.write(request.out)
    for name in before - {table.name for table in tables}:
        for ending in ("csv", "tex"):
            (request.out / f"table_{name}.{ending}").unlink(missing_ok=True)
    parts = [_header(request, campaigns), *(table.markdown() for table in tables), _remarks(campaigns, failed)]
    (request.out / "tables.md").write_text("\n".join(parts), encoding="utf-8")
    write_json(
        request.out / COMPARISON,
        {
            "methods": [str(Variant.parse(text)) for text in request.methods] if results else [],
            "studies": list(request.studies) if results else [],
            "results": {str(variant): _stored(result, request.out) for variant, result in (results or {}).items()},
            "failed": failed,
            "patients": {site: numbered(images) for site, images in (names or {}).items()},
            "tables": [table.to_json() for table in tables],
        },
    )
    (request.out / _BEFORE).unlink(missing_ok=True)
    return Comparison(tables[0], failed)


def _marked(tables: Sequence[ResultTable], results: Iterable[Result]) -> list[ResultTable]:
    """The tables, each with a note where a method chose rounds and epochs on the test images."""
    mark = optimistic(results)
    return [table if OPTIMISTIC in table.notes else replace(table, notes=(*mark, *table.notes)) for table in tables]


def _tables(out: Path) -> set[str]:
    """Returns the names of the tables of the comparison that finished here last, also if another was broken off since."""
    for name in (COMPARISON, _BEFORE):
        with suppress(FileNotFoundError):
            return {table["name"] for table in read_own(out / name, InputError, "remove it").get("tables", [])}
    return set()


def _stored(result: Result, out: Path) -> dict[str, dict[int, str]]:
    folders = {seed: str(folder.relative_to(out)) for seed, folder in result.folders.items()}
    return {"folders": folders, "failed": result.failed}


def _header(request: ComparisonRequest, campaigns: Sequence[Campaign]) -> str:
    """What was compared, on which machines, and how to read its numbers."""
    common, sites = request.common, sorted({site for campaign in campaigns for site in campaign.sites})
    machines = sorted({run.machine for campaign in campaigns for run in campaign.runs if run.record.exists()})
    epochs = "each method's own" if common.calibration_epochs is None else common.calibration_epochs
    return "\n".join(
        [
            f"# Comparison on {request.data.resolve().name}: {', '.join(sites)}",
            "",
            f"    {request.command}",
            "",
            *(f"{machine}." for machine in machines),
            f"Seeds {', '.join(map(str, request.seeds))}; {common.rounds} rounds; local epochs: {epochs};"
            f" {common.size} px; {common.network}{'; ' + ' '.join(common.settings) if common.settings else ''}.",
            "Values are means over the seeds, image by image"
            + (", then over the folds; ± is the population standard deviation over the folds." if request.folds else SPREAD),
            "",
        ]
    )


def _remarks(campaigns: Sequence[Campaign], failed: Mapping[str, str]) -> str:
    """Runs that failed; and in finished runs, the sites that are missing or whose calibration failed."""
    reasons = [f"- {name}: {reason}" for name, reason in failed.items()] or ["None."]
    sites = []
    for run in (run for campaign in campaigns for run in campaign.runs):
        if run.name not in failed:
            results = read_results(run.folder)
            sites += [f"- {run.name}: {site} is missing: {reason}" for site, reason in results["missing"].items()]
            untuned = [site for site, r in results["sites"].items() if not r.get("calibration", {"tuned": True})["tuned"]]
            sites += [f"- {run.name}: {site}: its calibration failed; it keeps the stage before" for site in untuned]
    return "\n".join(["## Runs that failed", "", *reasons, "", "## Sites to look at", "", *(sites or ["None."])]) + "\n"
