"""`feddp compare`, from what is asked to what is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from feddp.compare.drawings import draw_methods, draw_study
from feddp.compare.efficiency import efficiency_table
from feddp.compare.runs import Campaign, Result, read_results
from feddp.compare.scores import CASE, FINAL, has_cases, scores
from feddp.compare.statistics import sentence
from feddp.compare.studies import STUDIES
from feddp.compare.tables import Table, scores_table, spread_table
from feddp.compare.unseen import open_unseen, unseen_table
from feddp.compare.variants import Common, Variant
from feddp.errors import FedDPError
from feddp.training.volumes import VOLUME_METRICS

BY_CASE = (
    "All test slices of a patient are one volume; ± is over a site's test cases. Sites whose images are no slices have none."
)


@dataclass(frozen=True)
class Request:
    """What to compare.

    Args:
        methods: variants, as `Variant.parse` reads them.
        studies: names in STUDIES.
        unseen: a site's folder outside the federation, for `methods`.
        command: the command line, for the record.
    """

    methods: Sequence[str]
    data: Path
    out: Path
    common: Common
    seeds: Sequence[int] = (0,)
    studies: Sequence[str] = ()
    unseen: Path | None = None
    device: str = "cpu"
    threads: int | None = None
    command: str = ""


@dataclass(frozen=True)
class Comparison:
    """What came of it: the first table (Table I, where there are methods), and why runs failed, by name."""

    summary: str
    failed: dict[str, str]


def compare(request: Request) -> Comparison:
    """Runs what is not finished yet, and writes tables.md, table_*.csv, table_*.tex and the figures to `request.out`.

    Raises:
        FedDPError: anything asked for is unknown or does not fit; nothing has been run then.
    """
    methods, studies = _check(request)
    entries = [entry for name in studies for entry in STUDIES[name].entries]
    variants = list(dict.fromkeys([*methods, *(entry.variant for entry in entries)]))
    campaign = Campaign(variants, request.common, request.seeds, request.data, request.out)
    for i, one in enumerate(methods):
        for other in methods[:i]:
            if campaign.same(one, other):
                raise FedDPError(f"--methods: {other} and {one} are the same run; name one of them")
    unseen = open_unseen(request.unseen, request.data, campaign.facts) if request.unseen else None
    results = campaign.execute(request.device, request.threads)

    named = {str(variant): results[variant] for variant in methods}
    tables = _methods_tables(named, campaign.sites, len(request.seeds)) if methods else []
    for name in studies:
        study = STUDIES[name]
        rows = [(entry.labels, results[entry.variant], entry.when) for entry in study.entries]
        tables.append(scores_table(name, study.title, study.heads, rows, study.metrics, campaign.sites, len(request.seeds)))
    if unseen:
        tables.append(unseen_table(named, unseen, campaign.sites, request.common.size, request.device))
    if methods:
        tables.append(efficiency_table(named, request.data, request.device))
    for table in tables:
        table.write(request.out)
    parts = [_header(request, campaign), *(table.markdown() for table in tables), _remarks(campaign)]
    (request.out / "tables.md").write_text("\n".join(parts), encoding="utf-8")
    if any(result.folders for result in named.values()):
        draw_methods(request.out, named, campaign.sites)
    for name in studies:
        draw_study(name, request.out, results, campaign.sites)
    return Comparison(tables[0].markdown(), campaign.failed)


def _check(request: Request) -> tuple[list[Variant], list[str]]:
    if not request.methods and not request.studies:
        raise FedDPError("nothing to compare: name methods with --methods a,b,... or studies with --studies")
    if request.unseen and not request.methods:
        raise FedDPError("--unseen measures the networks of --methods; name some")
    if unknown := [name for name in request.studies if name not in STUDIES]:
        raise FedDPError(f"--studies {','.join(unknown)}: unknown; there are {', '.join(STUDIES)}")
    if not request.seeds or len(set(request.seeds)) < len(request.seeds):
        raise FedDPError("--seeds: name at least one seed, and each once")
    return [Variant.parse(text) for text in request.methods], list(dict.fromkeys(request.studies))


def _methods_tables(named: Mapping[str, Result], sites: list[str], seeds: int) -> list[Table]:
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


def _header(request: Request, campaign: Campaign) -> str:
    common, sites = request.common, campaign.sites
    machines = sorted({run.machine for run in campaign.runs if run.record.exists()})
    epochs = "each method's own" if common.calibration_epochs is None else common.calibration_epochs
    return "\n".join(
        [
            f"# Comparison on {request.data.resolve().name}: {', '.join(sites)}",
            "",
            f"    {request.command}",
            "",
            *(f"{machine}." for machine in machines),
            f"Seeds {', '.join(map(str, request.seeds))}; {common.rounds} rounds; epochs at home: {epochs};"
            f" {common.size} px; {common.network}{'; ' + ' '.join(common.settings) if common.settings else ''}.",
            "Values are means over the seeds, image by image; ± is the population standard deviation over a site's test images,"
            " over the sites' means in Average, and over the seeds' Averages in ± seeds.",
            "",
        ]
    )


def _remarks(campaign: Campaign) -> str:
    """Runs that failed, and in those that did not, the sites that are missing or whose calibration failed."""
    failed = [f"- {name}: {reason}" for name, reason in campaign.failed.items()] or ["None."]
    sites = []
    for run in campaign.runs:
        if run.name not in campaign.failed:
            results = read_results(run.folder)
            sites += [f"- {run.name}: {site} is missing: {reason}" for site, reason in results["missing"].items()]
            untuned = [site for site, r in results["sites"].items() if not r.get("calibration", {"tuned": True})["tuned"]]
            sites += [f"- {run.name}: {site}: its calibration failed; it keeps the stage before" for site in untuned]
    return "\n".join(["## Runs that failed", "", *failed, "", "## Sites to look at", "", *(sites or ["None."])]) + "\n"
