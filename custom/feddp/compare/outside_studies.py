"""What a hospital outside is offered, and what IOP-FL (004) varies of it: its Table II and its Figs. 6 to 8.

Deviations: Fig. 7a is of one hospital outside and does not say which clients stay inside: here every site in turn is outside,
and n inside are the first n of the others in alphabetical order. Fig. 8 removes one loss at a time; "none" is ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from feddp.adaptation.adapt import Settings
from feddp.compare.variants import Variant

TABLE_II = "leave_one_out"
PERSONAL, PLAIN = "iop_fl", "fedavg"


@dataclass(frozen=True)
class Entry:
    """What stands below the study's heads; the strategy, and the variant whose run gives the models."""

    labels: tuple[str, ...]
    variant: Variant
    how: str
    settings: Settings = Settings()
    inside: int | None = None  # how many of the other sites the run is of; None: all

    def sites(self, outside: str, sites: Sequence[str]) -> tuple[str, ...]:
        """The sites inside while `outside` is not."""
        return tuple(site for site in sorted(sites) if site != outside)[: self.inside]


@dataclass(frozen=True)
class Study:
    title: str
    heads: tuple[str, ...]
    entries: tuple[Entry, ...]


def _entry(label: str, variant: str, how: str, **settings: float) -> Entry:
    return Entry((label,), Variant.parse(variant), how, Settings(**settings))


# a row of Table II is a line here: its label, the run it takes its models from, the way
_WAYS = (
    _entry("FedAvg", PLAIN, "global"),
    _entry("Average of the models", PERSONAL, "average"),
    _entry("Ensemble of the models", PERSONAL, "ensemble"),
    _entry("Tent", PLAIN, "tent"),
    _entry("TTT", "ttt", "ttt"),
    _entry("FedDG", "feddg", "global"),
    _entry("IOP-FL, routing", PERSONAL, "routing"),
)
_LOSSES = (("both", {}), ("shape alone", {"noise": 0.0}), ("consistency alone", {"beta": 0.0}), ("none", {"epochs": 0}))


def _table(sites: int) -> Study:
    return Study("IOP-FL's Table II: each site in turn outside the federation", ("Method",), _WAYS)


def _inside_sites(sites: int) -> Study:
    entries = [
        Entry((label, str(n)), Variant.parse(variant), how, inside=n)
        for label, variant, how in (("FedAvg", PLAIN, "global"), ("IOP-FL", PERSONAL, "routing"))
        for n in range(1, sites)
    ]
    return Study("IOP-FL's Fig. 7a: sites inside", ("Method", "Inside"), tuple(entries))


def _losses(sites: int) -> Study:
    entries = tuple(_entry(label, PERSONAL, "routing", **settings) for label, settings in _LOSSES)
    return Study("IOP-FL's Fig. 8: the losses of test-time routing", ("Losses",), entries)


def _tau(sites: int) -> Study:
    rates = ("0.1", "0.3", "0.5", "0.7", "0.9", "1")
    entries = tuple(_entry(tau, f"{PERSONAL}@tau={tau}", "routing") for tau in rates)
    return Study("IOP-FL's Fig. 6: the accumulation rate τ, outside", ("τ",), entries)


def _time(sites: int) -> Study:
    routed = tuple(_entry(f"routing, {n} epochs", PERSONAL, "routing", epochs=n) for n in (0, 1, 2, 5, 10))
    others = tuple(entry for entry in _WAYS if entry.how != "routing")
    return Study("IOP-FL's Fig. 7b: Dice against seconds a sample", ("Method",), others + routed)


# name -> the study of so many sites
OUTSIDE: dict[str, Callable[[int], Study]] = {
    TABLE_II: _table,
    "inside_sites": _inside_sites,
    "losses": _losses,
    "tau": _tau,
    "time": _time,
}
