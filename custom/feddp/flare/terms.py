"""What a site's policy let out of a run's files when the run began: a job that continues the run gets no more.

The plan says nothing about the site's data folder and consent, and a plan may be approved in several scopes. Without this, a
run trained under a scope without consent could be continued under one with it, and its private tensors would leave.
"""

from pathlib import Path
from typing import Any

from feddp.errors import PolicyError
from feddp.files import write_json
from feddp.flare.policy import SitePolicy
from feddp.reading import read_own
from feddp.training.claim import AS_NEW, PLAN

TERMS = "terms.json"  # in the run's folder


def require_terms(folder: Path, policy: SitePolicy) -> None:
    """Writes the terms of a run that begins; compares those of a run that goes on.

    Raises:
        PolicyError: the policy has other data or other private roles, or wider consent; or the file is damaged.
    """
    if not (folder / TERMS).exists():
        if (folder / PLAN).exists():
            raise PolicyError(f"{folder} has a {PLAN} but no {TERMS}; {AS_NEW}")
        write_json(folder / TERMS, _terms(policy))
    require_no_wider(folder, policy)


def require_no_wider(folder: Path, policy: SitePolicy) -> None:
    """As `require_terms`, for a run that may not have begun here; writes nothing."""
    path, now = folder / TERMS, _terms(policy)
    if not path.exists():
        return
    first = read_own(path, PolicyError, AS_NEW)
    if first.keys() != now.keys() or not _are_names(first["consent"]) or not _are_names(first["recipients"] or []):
        raise PolicyError(f"{path} does not hold {', '.join(now)} and nothing else; {AS_NEW}")
    wider = [name for name in ("data", "private") if first[name] != now[name]]
    if not set(now["consent"]) <= set(first["consent"]):
        wider.append("consent")
    before, after = first["recipients"], now["recipients"]  # None: all sites
    if before is not None and (after is None or not set(after) <= set(before)):
        wider.append("recipients")
    if wider:
        what = " and ".join(wider)
        raise PolicyError(f"{folder} belongs to a run that began under another {what} in privacy.json; {AS_NEW}")


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _terms(policy: SitePolicy) -> dict[str, Any]:
    return {
        "data": str(policy.data.resolve()),
        "private": sorted(policy.private),
        "consent": sorted(policy.consent),
        "recipients": None if policy.recipients is None else sorted(policy.recipients),
    }
