"""What each study of the papers compares, in the order it is shown.

STUDIES are of sites inside the federation. OUTSIDE are of unseen sites: the strategies that they can use, what IOP-FL
(Jiang et al., TMI 2023) varies of them in its Table II and its Figs. 6 to 8, and the tuning with labels of pFLFE's Table 7.

Deviations: Fig. 7a is of one unseen site and does not say which clients train: here every site in turn is unseen, and the n
sites inside are the first n of the others in alphabetical order. Fig. 8 removes one loss at a time; "none" is ours. The
methods of Table 7 are ours: our text of (Xie et al., 2024) lacks its rows; LG-FedAvg shares no encoder that could be frozen.
Most values of τ are ours, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from feddp.adaptation.choices import Settings
from feddp.compare.scores import BEFORE, FINAL
from feddp.compare.variants import Variant
from feddp.methods import METHODS

TABLE_II = "leave_one_out"
TABLE_7 = "joined"
JOIN = "join"  # in the place of a strategy of STRATEGIES: `feddp join`


@dataclass(frozen=True)
class TrainedNetworks:
    """The networks that the runs of a variant leave at their sites, before or after the last stage there."""

    variant: Variant
    when: str = FINAL


@dataclass(frozen=True)
class AdaptedModels:
    """The models of a variant's runs, adapted to an unseen site by a strategy of STRATEGIES, or JOIN."""

    variant: Variant
    strategy: str
    settings: Settings = Settings()
    inside: int | None = None  # how many of the other sites train; None: all

    def sites(self, unseen: str, sites: Sequence[str]) -> tuple[str, ...]:
        """The sites that train while `unseen` does not."""
        return tuple(site for site in sorted(sites) if site != unseen)[: self.inside]


Source = TypeVar("Source", TrainedNetworks, AdaptedModels)


@dataclass(frozen=True)
class Entry(Generic[Source]):
    """One row: its labels below the study's heads, and what is measured."""

    labels: tuple[str, ...]
    source: Source


@dataclass(frozen=True)
class Study(Generic[Source]):
    title: str
    heads: tuple[str, ...]
    entries: tuple[Entry[Source], ...]
    metrics: tuple[str, ...] = ("dice", "assd")  # those that its paper reports


def _entry(labels: tuple[str, ...], variant: str, when: str = FINAL) -> Entry[TrainedNetworks]:
    return Entry(labels, TrainedNetworks(Variant.parse(variant), when))


def _unseen(label: str, variant: str, strategy: str, settings: Settings = Settings()) -> Entry[AdaptedModels]:
    return Entry((label,), AdaptedModels(Variant.parse(variant), strategy, settings))


_YES = "✓"
_PRIVATE = ("query", "key", "value", "query|key", "query|head")
_NETWORKS = ("resnet18-fpn", "resnet34-fpn", "resnet50-fpn", "pvt_v2_b0-fpn", "pvt_v2_b1-fpn", "pvt_v2_b2-fpn")
_LAMBDAS = ("0", "0.1", "1", "10")
# (Jiang et al., TMI 2023) states 0.9, 1 and "τ ≥ 0.5" alone: the other values of its figure are ours
_TAUS = ("0.1", "0.3", "0.5", "0.7", "0.9", "1")
# (Xie et al., 2024) names neither the rows of its table nor the order in which levels become private: ours begins at the output
_DECODERS = {
    "head": "",
    "1 level": "decoder.1|",
    "2 levels": "decoder.1|decoder.2|",
    "3 levels": "decoder.1|decoder.2|decoder.3|",
    "whole decoder": "decoder|",
}
_VIRTUAL = ("iou", "hd")  # what (Liu et al., 2024) reports

STUDIES: dict[str, Study[TrainedNetworks]] = {
    "ablation": Study(
        "Table III: self-attention (SA), local query (LQ) and calibration (IGC)",
        ("SA", "LQ", "IGC"),
        (
            # the last round, as with LQ: the best of all rounds would have an advantage by the choice
            _entry(("", "", ""), "fedavg@start=last@network=resnet18-fpn"),
            _entry((_YES, "", ""), "fedavg@start=last"),
            _entry((_YES, _YES, ""), "feddp", BEFORE),
            _entry((_YES, _YES, _YES), "feddp"),
        ),
    ),
    "backbones": Study(
        "Fig. 6: networks",
        ("Method", "Network"),
        tuple(_entry((m, network), f"{m}@network={network}") for m in ("fedavg", "fedrep") for network in _NETWORKS),
    ),
    "private": Study(
        "Fig. 8: what is private (without calibration)",
        ("Private",),
        tuple(_entry((roles.replace("|", "+"),), f"feddp@calibration_epochs=0@private={roles}") for roles in _PRIVATE),
    ),
    "lambda": Study(
        "Fig. 9: the weight λ of the calibration",
        ("λ",),
        (
            *(_entry((weight,), f"feddp@lambda={weight}") for weight in _LAMBDAS),
            _entry(("1, δ as released",), "feddp@lambda=1@delta=std"),
        ),
    ),
    "local_epochs": Study(
        "IOP-FL's Fig. 5: local epochs a round",
        ("Local epochs", "Method"),
        tuple(
            _entry((f"{n} epochs" if n > 1 else "1 epoch", method), f"{method}@local_epochs={n}")
            for n in (1, 2, 4, 8, 10)
            for method in ("fedrep", "fedbn", "pfedme", "iop_fl")
        ),
    ),
    "tau": Study(
        "IOP-FL's Fig. 6: the accumulation rate τ, inside",
        ("τ",),
        tuple(_entry((tau,), f"iop_fl@tau={tau}") for tau in _TAUS),
    ),
    "enhancement": Study(
        "pFLFE's Table 4: enhancement, and what of the decoder is private with the head",
        ("Enhancement", "Private"),
        tuple(
            _entry((_YES if on == "true" else "", label), f"pflfe@enhance={on}@private={levels}head|projector")
            for on in ("false", "true")
            for label, levels in _DECODERS.items()
        ),
    ),
    "vc_components": Study(
        "Virtual classes' Table II: virtual classes (VC) and personalized affinity aggregation (PAA)",
        ("VC", "PAA"),
        (
            _entry(("", ""), "fedavg"),  # the same numbers as FedAvg's in its Table I
            _entry((_YES, ""), "virtual_class@paa=false"),
            _entry(("", _YES), "virtual_class@virtual=0"),
            _entry((_YES, _YES), "virtual_class"),
        ),
        _VIRTUAL,
    ),
    "vc_paa": Study(
        "Virtual classes' Table III: PAA shared or personalized",
        ("VC", "Personalized"),
        (
            _entry(("", ""), "virtual_class@virtual=0@private=none"),
            _entry(("", _YES), "virtual_class@virtual=0"),
            _entry((_YES, ""), "virtual_class@private=none"),
            _entry((_YES, _YES), "virtual_class"),
        ),
        _VIRTUAL,
    ),
    "vc_private": Study(
        "Virtual classes' Fig. 8 e, f: which of PAA's Q, K, M is shared, the others private",
        ("Shared",),
        (
            _entry(("Q",), "virtual_class@private=affinity_key|affinity_matrix"),
            _entry(("K",), "virtual_class@private=affinity_query|affinity_matrix"),
            _entry(("M",), "virtual_class@private=affinity_query|affinity_key"),
        ),
        _VIRTUAL,
    ),
    "vc_number": Study(
        "Virtual classes' Fig. 8 c, d: how many virtual classes, of C classes and N sites",
        ("V",),
        tuple(
            _entry((label,), f"virtual_class@virtual={times}")
            for label, times in (("CN/4", "0.25"), ("CN/2", "0.5"), ("CN", "1"), ("2CN", "2"), ("4CN", "4"))
        ),
        _VIRTUAL,
    ),
    "vc_lambda": Study(
        "Virtual classes' Fig. 8 g, h: the weight λ_v of the virtual classes' loss",
        ("λ_v",),
        # (Liu et al., 2024) does not give the figure's values, only that less than 1 is worse
        tuple(_entry((weight,), f"virtual_class@lambda_v={weight}") for weight in ("0.1", "0.5", "1", "2")),
        _VIRTUAL,
    ),
    "igc": Study(
        "Fig. 10: the calibration after other methods",
        ("Method", "Calibration"),
        tuple(
            _entry((method, label), f"{method}{then}@lambda={weight}", when)
            for method, then in (("iop_fl", "+igc"), ("fedbabu", "+igc"), ("feddp", ""))
            for label, weight, when in (("none", "1", BEFORE), ("λ = 0", "0", FINAL), ("λ = 1", "1", FINAL))
        ),
    ),
}


# Table II, one row per line: the label, the variant that gives the models, the strategy
_PERSONAL, _PLAIN = "iop_fl", "fedavg"
_STRATEGIES = (
    _unseen("FedAvg", _PLAIN, "global"),
    _unseen("Average of the models", _PERSONAL, "average"),
    _unseen("Ensemble of the models", _PERSONAL, "ensemble"),
    _unseen("Tent", _PLAIN, "tent"),
    _unseen("TTT", "ttt", "ttt"),
    _unseen(METHODS["feddg"].label, "feddg", "global"),
    _unseen("IOP-FL, routing", _PERSONAL, "routing"),
)
_LOSSES = {
    "both": Settings(),
    "shape alone": Settings(noise=0.0),
    "consistency alone": Settings(beta=0.0),
    "none": Settings(epochs=0),
}


def _table(sites: int) -> Study[AdaptedModels]:
    return Study("IOP-FL's Table II: each site in turn outside the federation", ("Method",), _STRATEGIES)


def _inside_sites(sites: int) -> Study[AdaptedModels]:
    entries = [
        Entry((label, str(n)), AdaptedModels(Variant.parse(variant), strategy, inside=n))
        for label, variant, strategy in (("FedAvg", _PLAIN, "global"), ("IOP-FL", _PERSONAL, "routing"))
        for n in range(1, sites)
    ]
    return Study("IOP-FL's Fig. 7a: sites inside", ("Method", "Inside"), tuple(entries))


def _losses(sites: int) -> Study[AdaptedModels]:
    entries = tuple(_unseen(label, _PERSONAL, "routing", settings) for label, settings in _LOSSES.items())
    return Study("IOP-FL's Fig. 8: the losses of test-time routing", ("Losses",), entries)


def _tau(sites: int) -> Study[AdaptedModels]:
    entries = tuple(_unseen(tau, f"{_PERSONAL}@tau={tau}", "routing") for tau in _TAUS)
    return Study("IOP-FL's Fig. 6: the accumulation rate τ, outside", ("τ",), entries)


def _time(sites: int) -> Study[AdaptedModels]:
    routed = tuple(_unseen(f"routing, {n} epochs", _PERSONAL, "routing", Settings(epochs=n)) for n in (0, 1, 2, 5, 10))
    others = tuple(entry for entry in _STRATEGIES if entry.source.strategy != "routing")
    return Study("IOP-FL's Fig. 7b: Dice against seconds a sample", ("Method",), others + routed)


def _joined(sites: int) -> Study[AdaptedModels]:
    entries = tuple(_unseen(method, method, JOIN) for method in ("fedavg", "fedper", "fedrep", "fedbn", "pflfe", "fc_pflfe"))
    return Study("pFLFE's Table 7: each site in turn outside, its decoder tuned with labels", ("Method",), entries)


# name -> the study of a federation with this number of sites
OUTSIDE: dict[str, Callable[[int], Study[AdaptedModels]]] = {
    TABLE_II: _table,
    "inside_sites": _inside_sites,
    "losses": _losses,
    "tau": _tau,
    "time": _time,
    TABLE_7: _joined,
}
