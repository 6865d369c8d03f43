"""A run of the two sites of `tiny_root`, as each environment takes it."""

from pathlib import Path

from feddp.plan.schema import Plan
from feddp.run.session import Request

SITES = ("site-1", "site-2")


def request_for(root: Path, out: Path, plan: Plan, threads: int | None = None) -> Request:
    """Both sites consent to every exchange. `threads`: fewer than sites, and FLARE's simulator starts a process a task."""
    policies = {site: {"data": str(root / site), "consent": ["calibration", "spectra"]} for site in SITES}
    return Request(plan, policies, out, threads)
