"""results.json: what a run leaves, gathered by the evaluation or by a run without a federation."""

from collections.abc import Mapping, Sequence
from typing import Any

from feddp.methods import METHODS
from feddp.plan.schema import Plan
from feddp.protocol import VOLUMES, WHEN, WITHHELD
from feddp.training.metrics import METRICS, summarize
from feddp.training.volumes import VOLUME_METRICS


def gathered(
    plan: Plan,
    sites: Mapping[str, Mapping[str, Any]],
    start_round: int | None,
    best_round: int | None,
    missing: Mapping[str, str] | None = None,
    matrix: Mapping[str, Any] | None = None,
    nbytes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The results of a run.

    Args:
        sites: each site's own: summaries (`metrics.summarize`) of its network under the names WHEN, and what else is known;
            where every site has VOLUMES, the average has them. A site that has WITHHELD may lack either: the average is over
            the others, and lacks what they all do.
        start_round, best_round: the round that stage 1 handed on, and the best by mean validation IoU.
        missing: sites without a result, and why.
        matrix: site -> {model: summary}, of those who exchanged with consent.
        nbytes: of one exchange of the shared and of the personal tensors.
    """
    average: dict[str, Any] = _average([site for site in sites.values() if WHEN[-1] in site], METRICS)
    cases = [site[VOLUMES] for site in sites.values() if VOLUMES in site]
    if cases and all(VOLUMES in site or WITHHELD in site for site in sites.values()):
        average[VOLUMES] = _average(cases, VOLUME_METRICS)
    return {
        **plan.to_json(),
        "seed": plan.seed,
        "stages": list(plan.stages),
        "federated": METHODS[plan.method].federated,
        "selection": plan.training.selection,
        "start_round": start_round,
        "best_round": best_round,
        # beside the plan's `sites`, a list of names, which these results replace
        "sites": dict(sites),
        "missing": dict(missing or {}),
        "average": average,
        "matrix": dict(matrix or {}),
        "bytes": dict(nbytes or {}),
    }


def _average(sites: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, Any]:
    """The summaries over the sites' means; empty without a site."""
    if not sites:
        return {}
    return {when: summarize([{metric: site[when][metric]["mean"] for metric in metrics} for site in sites]) for when in WHEN}
