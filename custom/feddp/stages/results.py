"""The content of results.json, made by the evaluation or by a run without a federation."""

from collections.abc import Mapping, Sequence
from typing import Any

from feddp.methods import METHODS
from feddp.plan.schema import Plan
from feddp.protocol import BEST_PER_SITE, VOLUMES, WHEN, WITHHELD
from feddp.training.columns import METRICS, VOLUME_METRICS, columns
from feddp.training.metrics import summarize


def gathered(
    plan: Plan,
    sites: Mapping[str, Mapping[str, Any]],
    start_round: int | None,
    best_round: int | None,
    missing: Mapping[str, str] | None = None,
    matrix: Mapping[str, Any] | None = None,
    nbytes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns the results of a run.

    Args:
        sites: {site: summaries (`metrics.summarize`) of its network under the names WHEN, and other entries; "round" is its
            own best round, where each site adopts that (`Plan.best_per_site`)}. The average has VOLUMES if every site has
            them. A site with WITHHELD may lack summaries; the average is then over the other sites.
        start_round, best_round: the round selected after stage 1 for all sites, and the best by their validation IoU.
        missing: {site without a result: the reason}.
        matrix: {site: {model: summary}} of the sites that exchanged with consent.
        nbytes: size of one exchange of the shared and of the personal tensors.
    """
    average: dict[str, Any] = _average([site for site in sites.values() if WHEN[-1] in site], columns(METRICS, plan.classes))
    cases = [site[VOLUMES] for site in sites.values() if VOLUMES in site]
    if cases and all(VOLUMES in site or WITHHELD in site for site in sites.values()):
        average[VOLUMES] = _average(cases, columns(VOLUME_METRICS, plan.classes))
    return {
        **plan.to_json(),
        "seed": plan.seed,
        "stages": list(plan.stages),
        "federated": METHODS[plan.method].federated,
        "selection": plan.training.selection,
        "start_round": start_round,
        "best_round": best_round,
        **({BEST_PER_SITE: True} if plan.best_per_site else {}),
        # replaces the plan's `sites`, a list of names
        "sites": dict(sites),
        "missing": dict(missing or {}),
        "average": average,
        "matrix": dict(matrix or {}),
        "bytes": dict(nbytes or {}),
    }


def _average(sites: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, Any]:
    """Summarises the sites' means; empty without sites."""
    if not sites:
        return {}
    return {when: summarize([{metric: site[when][metric]["mean"] for metric in metrics} for site in sites]) for when in WHEN}
