"""What a site's policy let out of a run's files, and whose tensors it let in, when the run began: a job that continues the run
gets no more.

The plan says nothing about the site's data folder and consent, and a plan may be approved in several scopes. Without this, a
run trained under a scope without consent could be continued under one with it, and its private tensors would leave. Nor does
an adaptation get the run's network under a scope that keeps fewer roles private.
"""

from pathlib import Path
from typing import Any

from feddp.errors import PolicyError
from feddp.files import write_json
from feddp.flare.policy import SitePolicy
from feddp.reading import read_own
from feddp.training.claim import AS_NEW, PLAN

TERMS = "terms.json"  # in the run's folder
NAMES = ("data", "private", "consent", "recipients", "senders")  # in the file; an earlier version had no senders
SITES = ("recipients", "senders")  # of these, None means all sites


def require_terms(folder: Path, policy: SitePolicy) -> None:
    """Writes the terms of a run that begins; compares those of a run that goes on.

    Raises:
        PolicyError: the policy has other data or other private roles, wider consent, or more recipients or senders; or the file
            is damaged.
    """
    if not (folder / TERMS).exists():
        if (folder / PLAN).exists():
            raise PolicyError(f"{folder} has a {PLAN} but no {TERMS}; {AS_NEW}")
        write_json(folder / TERMS, _terms(policy))
    require_no_wider(folder, policy)


def require_no_wider(folder: Path, policy: SitePolicy) -> None:
    """As `require_terms`, for a run that may not have begun here; writes nothing."""
    first, now = _first(folder, AS_NEW), _terms(policy)
    if first is None:
        return
    wider = [name for name in ("data", "private") if first[name] != now[name]]
    if not set(now["consent"]) <= set(first["consent"]):
        wider.append("consent")
    for name in SITES:
        before, after = first[name], now[name]
        if before is not None and (after is None or not set(after) <= set(before)):
            wider.append(name)
    if wider:
        what = " and ".join(wider)
        raise PolicyError(f"{folder} belongs to a run that began under another {what} in privacy.json; {AS_NEW}")


def require_as_private(folder: Path, policy: SitePolicy) -> None:
    """For a job that takes the network with which this site ended a run; writes nothing.

    Such a job may have wider consent and other data: a site usually consents to it after the run, and it trains nothing.

    Raises:
        PolicyError: the policy no longer keeps a role private that it kept when the run began, or the file is missing or
            damaged.
    """
    first = _first(folder, remedy := "leave this site out of the adaptation")
    if first is None and (folder / PLAN).exists():
        raise PolicyError(f"{folder} has a {PLAN} but no {TERMS}, so its private roles are not known; {remedy}")
    if first and (given := sorted(set(first["private"]) - set(policy.private))):
        raise PolicyError(
            f"{folder} belongs to a run that keeps {', '.join(given)} private here, and `private` in privacy.json no longer"
            f" does; {remedy}"
        )


def _first(folder: Path, remedy: str) -> dict[str, Any] | None:
    """Returns the terms with which a run began; None if the file does not exist. Raises PolicyError if it is damaged."""
    path = folder / TERMS
    if not path.exists():
        return None
    first = {"senders": None} | read_own(path, PolicyError, remedy)
    lists = [value for name, value in first.items() if name != "data" and not (name in SITES and value is None)]
    if first.keys() != set(NAMES) or not all(map(_are_names, lists)):
        raise PolicyError(f"{path} does not hold {', '.join(NAMES)} and nothing else; {remedy}")
    return first


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _terms(policy: SitePolicy) -> dict[str, Any]:
    return {
        "data": str(policy.data.resolve()),
        "private": sorted(policy.private),
        "consent": sorted(policy.consent),
        "recipients": None if policy.recipients is None else sorted(policy.recipients),
        "senders": None if policy.senders is None else sorted(policy.senders),
    }
