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


def _entry(labels: tuple[str, ...], variant: str, when: str = FINAL) -> Entry:
    return Entry(labels, Variant.parse(variant), when)


_YES = "✓"
_PRIVATE = ("query", "key", "value", "query|key", "query|head")
_NETWORKS = ("resnet18-fpn", "resnet34-fpn", "resnet50-fpn", "pvt_v2_b0-fpn", "pvt_v2_b1-fpn", "pvt_v2_b2-fpn")
_LAMBDAS = ("0", "0.1", "1", "10")

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
        "pFLFE's Table 4: enhancement, and what of the decoder is private",
        ("Enhancement", "Private"),
        tuple(
            _entry((_YES if on == "true" else "", label), f"pflfe@enhance={on}@private={roles}")
            for on in ("false", "true")
            for label, roles in (("head", "head|projector"), ("decoder and head", "decoder|head|projector"))
        ),
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
