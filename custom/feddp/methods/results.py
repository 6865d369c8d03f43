"""What a run leaves as results.json, from whatever gathered it: the last workflow of a federation, or a pooled run."""

from collections.abc import Mapping
from typing import Any

from feddp.methods import METHODS
from feddp.methods.plan import Plan
from feddp.training.metrics import METRICS, summarize

RESULTS = "results.json"
SHARED = "shared.safetensors"  # beside it: γ of the round that stage 1 handed on
WHEN = ("before_calibration", "final")


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
        sites: each site's own: summaries (`metrics.summarize`) of its network under the names WHEN, and what else is known.
        start_round, best_round: the round that stage 1 handed on, and the best by mean validation IoU.
        missing: sites without a result, and why.
        matrix: site -> {model: summary}, of those who exchanged with consent.
        nbytes: of one exchange of the shared and of the personal tensors.
    """
    average = {when: summarize([{m: site[when][m]["mean"] for m in METRICS} for site in sites.values()]) for when in WHEN}
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
