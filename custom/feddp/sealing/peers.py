"""One bad peer does not end an exchange: it is left out by name, and the others' tensors are used."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from feddp.errors import ContributionError, FedDPError, SealingError

LeftOut = Callable[[str, FedDPError], None]  # is told a peer of which nothing is used, and why
_Found = TypeVar("_Found")


def good(peers: Iterable[str], check: Callable[[str], _Found], left_out: LeftOut) -> dict[str, _Found]:
    """Returns {peer: what `check` returns}; without the peers for which `check` raises, of which `left_out` is told.

    Raises:
        SealingError, ContributionError: there are peers and none is good. The site must not go on as if it had no peers.
    """
    found: dict[str, _Found] = {}
    wrong: dict[str, SealingError | ContributionError] = {}
    for peer in peers:
        try:
            found[peer] = check(peer)
        except (SealingError, ContributionError) as error:
            wrong[peer] = error
    if wrong and not found:
        first = next(iter(wrong.values()))
        raise type(first)("; ".join(map(str, wrong.values()))) from first
    for peer, why in wrong.items():
        left_out(peer, why)
    return found


def whole(given: Mapping[str, _Found], check: Callable[[str, _Found], None], left_out: LeftOut) -> dict[str, _Found]:
    """Returns what the peers gave, {peer: tensors}, without the peers for which `check(peer, tensors)` raises; as `good`."""
    return {peer: given[peer] for peer in good(given, lambda peer: check(peer, given[peer]), left_out)}


def unnoted(peer: str, why: FedDPError) -> None:
    """A `LeftOut` that notes nothing."""
