"""Studies of FedDP (Wang et al., TMI 2024): each row is a plan with its stages."""

from feddp.compare.studies import STUDIES
from feddp.compare.variants import Common
from feddp.protocol import CALIBRATE, TRAIN, TUNE
from support.compare_runs import SITES

REQUIRED = {"channels": 3, "classes": ("polyp",), "labels": "nested"}


def test_fig_10_calibrates_iop_fl_and_fedbabu_beside_feddp():
    """The caption names IOP-FL and FedBABU, the text λ = 0: each without calibration, and with λ = 0 and 1. What is scored
    *before* is what the last stage starts from, so FedBABU without calibration is tuned, as its paper has it."""
    found = {}
    for entry in STUDIES["igc"].entries:
        plan = entry.source.variant.options(Common(2, None, "pvt_v2_b0-fpn", 32), seed=0).plan(REQUIRED, SITES)
        found[entry.labels] = plan.method, plan.stages, plan.calibration.lambda_, entry.source.when
    stages = {"iop_fl": (TRAIN, CALIBRATE), "fedbabu": (TRAIN, TUNE, CALIBRATE), "feddp": (TRAIN, CALIBRATE)}
    labels = {"none": (1.0, "before"), "λ = 0": (0.0, "final"), "λ = 1": (1.0, "final")}
    assert found == {
        (method, label): (method, stages[method], weight, when) for method in stages for label, (weight, when) in labels.items()
    }
