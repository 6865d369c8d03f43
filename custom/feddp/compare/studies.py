"""The paper's studies: what each compares, in the order it is shown."""

from dataclasses import dataclass

from feddp.compare.results import BEFORE, FINAL
from feddp.compare.variants import Variant


@dataclass(frozen=True)
class Entry:
    """What stands below the study's heads, the variant, and which of its networks counts."""

    labels: tuple[str, ...]
    variant: Variant
    when: str = FINAL


@dataclass(frozen=True)
class Study:
    title: str
    heads: tuple[str, ...]
    entries: tuple[Entry, ...]
    metrics: tuple[str, ...] = ("dice", "assd")  # those that its paper reports


def _entry(labels: tuple[str, ...], variant: str, when: str = FINAL) -> Entry:
    return Entry(labels, Variant.parse(variant), when)


_YES = "✓"
_PRIVATE = ("query", "key", "value", "query|key", "query|head")
_NETWORKS = ("resnet18-fpn", "resnet34-fpn", "resnet50-fpn", "pvt_v2_b0-fpn", "pvt_v2_b1-fpn", "pvt_v2_b2-fpn")
_LAMBDAS = ("0", "0.1", "1", "10")
# 002 says neither which rows its table has nor in which order levels become private: ours from the output, as on U-Net and FPN
_DECODERS = {
    "head": "",
    "1 level": "decoder.1|",
    "2 levels": "decoder.1|decoder.2|",
    "3 levels": "decoder.1|decoder.2|decoder.3|",
    "whole decoder": "decoder|",
}
_VIRTUAL = ("iou", "hd")  # what 003 reports

STUDIES = {
    "ablation": Study(
        "Table III: self-attention (SA), local query (LQ) and calibration (IGC)",
        ("SA", "LQ", "IGC"),
        (
            # the last round, as LQ hands on: the best of all rounds would be ahead by the choice
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
        ("Local epochs",),
        tuple(_entry((epochs,), f"iop_fl@local_epochs={epochs}") for epochs in ("1", "2", "4", "8", "10")),
    ),
    "tau": Study(
        "IOP-FL's Fig. 6: the accumulation rate τ, inside",
        ("τ",),
        tuple(_entry((tau,), f"iop_fl@tau={tau}") for tau in ("0.1", "0.3", "0.5", "0.7", "0.9", "1")),
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
            _entry(("", ""), "fedavg"),  # the same numbers as FedAvg's in 003's Table I
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
        # 003's text does not give the figure's values, only that less than 1 is worse
        tuple(_entry((weight,), f"virtual_class@lambda_v={weight}") for weight in ("0.1", "0.5", "1", "2")),
        _VIRTUAL,
    ),
    "igc": Study(
        "Fig. 10: the calibration after other methods",
        ("Method", "Calibration"),
        tuple(
            _entry((method, label), f"{method}{then}@lambda={weight}", when)
            for method, then in (("fedbabu", "+igc"), ("ditto", "+igc"), ("feddp", ""))
            for label, weight, when in (("none", "1", BEFORE), ("λ = 0", "0", FINAL), ("λ = 1", "1", FINAL))
        ),
    ),
}
