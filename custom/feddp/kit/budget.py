"""`feddp kit budget`: shows the used part of a site's budget and resets it."""

from collections.abc import Mapping
from pathlib import Path

from feddp.errors import InputError, PolicyError
from feddp.flare.budget import Ledger, Used
from feddp.flare.kept import kept_below
from feddp.flare.policy import Budget, SitePolicy
from feddp.flare.scopes import scopes_of
from feddp.kit.containers import Containers, kept_root
from feddp.kit.files import require_owner
from feddp.kit.privacy import privacy_file
from feddp.sealing.kit import CLIENT, Kit


def budget(folder: Path, reset: bool) -> list[str]:
    """Returns a line for each data folder that the policy names or that jobs opened; `reset` first sets the counts to zero.

    Raises:
        FedDPError: the kit does not belong to a site, its policy or budget cannot be read, or the files are in a cluster.
    """
    kit = Kit.open(folder)
    if kit.kind != CLIENT:
        raise InputError(f"{folder} is the kit of the {kit.kind} {kit.name}; only sites have a budget, so name a site's kit")
    root = kept_root(kit)
    if root is None:
        raise PolicyError(f"site {kit.name}: its budget is in a volume of the cluster; to reset it, remove budget.json there")
    ledger = Ledger(kit.name, kept_below(root))
    allowed = _allowed(kit)  # before the reset, because it may fail
    if reset:
        require_owner(kit)
        ledger.reset()
    return _lines(ledger.used(), allowed)


def _allowed(kit: Kit) -> dict[str, Budget]:
    """Returns {data folder: its budget}. A job uses its scope's budget; of scopes with one folder, the last is shown."""
    scopes = scopes_of(privacy_file(kit)).values()
    policies = [SitePolicy.of(kit.name, scope.get("properties"), simulated=False) for scope in scopes]
    return {str(counted(kit, policy)): policy.budget for policy in policies}


def counted(kit: Kit, policy: SitePolicy) -> Path:
    """Returns the data folder as the site's jobs count it: in a container, `data` is not a path of this machine."""
    return policy.data if Containers.of(kit) else policy.data.resolve()


def _lines(used: Mapping[str, Used], allowed: Mapping[str, Budget]) -> list[str]:
    lines = []
    for data in sorted(used.keys() | allowed.keys()):
        mine, limit = used.get(data, Used()), allowed.get(data)
        of = (f" of {limit.jobs}", f" of {limit.evaluations}") if limit else ("", "")
        end = "" if limit else "; no scope of privacy.json names it now"
        lines.append(f"{data}: {len(mine.jobs)}{of[0]} jobs, {mine.evaluations}{of[1]} evaluations{end}")
    return lines
