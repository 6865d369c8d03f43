"""What a comparison writes: each table's files, and tables.md with all of them between the command and what went wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from feddp.compare.request import Request
from feddp.compare.runs import Campaign
from feddp.files import read_results
from feddp.reporting.tables import ResultTable

SPREAD = (
    "; ± is the population standard deviation over a site's test images, over the sites' means in Average, and over the"
    " seeds' Averages in ± seeds."
)


@dataclass(frozen=True)
class Comparison:
    """What came of it: the first table (Table I, where there are methods), and why runs failed, by name."""

    summary: str
    failed: dict[str, str]


def write_report(
    request: Request, tables: Sequence[ResultTable], campaigns: Sequence[Campaign], more: Mapping[str, str] | None = None
) -> Comparison:
    """Writes tables.md and every table's CSV and LaTeX to `request.out`.

    Args:
        campaigns: all that ran.
        more: what else failed, by name, with the reason.
    """
    failed = {name: reason for campaign in campaigns for name, reason in campaign.failed.items()} | dict(more or {})
    for table in tables:
        table.write(request.out)
    parts = [_header(request, campaigns), *(table.markdown() for table in tables), _remarks(campaigns, failed)]
    (request.out / "tables.md").write_text("\n".join(parts), encoding="utf-8")
    return Comparison(tables[0].markdown(), failed)


def _header(request: Request, campaigns: Sequence[Campaign]) -> str:
    """What was compared, on which machines, and how its numbers are to be read."""
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
            f"Seeds {', '.join(map(str, request.seeds))}; {common.rounds} rounds; epochs at home: {epochs};"
            f" {common.size} px; {common.network}{'; ' + ' '.join(common.settings) if common.settings else ''}.",
            "Values are means over the seeds, image by image"
            + (", then over the folds; ± is the population standard deviation over the folds." if request.folds else SPREAD),
            "",
        ]
    )


def _remarks(campaigns: Sequence[Campaign], failed: Mapping[str, str]) -> str:
    """Runs that failed, and in those that did not, the sites that are missing or whose calibration failed."""
    reasons = [f"- {name}: {reason}" for name, reason in failed.items()] or ["None."]
    sites = []
    for run in (run for campaign in campaigns for run in campaign.runs):
        if run.name not in failed:
            results = read_results(run.folder)
            sites += [f"- {run.name}: {site} is missing: {reason}" for site, reason in results["missing"].items()]
            untuned = [site for site, r in results["sites"].items() if not r.get("calibration", {"tuned": True})["tuned"]]
            sites += [f"- {run.name}: {site}: its calibration failed; it keeps the stage before" for site in untuned]
    return "\n".join(["## Runs that failed", "", *reasons, "", "## Sites to look at", "", *(sites or ["None."])]) + "\n"
