"""What a variant's text means as a run's options."""

from dataclasses import replace

import pytest

from feddp.compare.variants import Common, Variant
from feddp.errors import FedDPError
from feddp.plan.schema import Plan

COMMON = Common(rounds=3, calibration_epochs=4, network="pvt_v2_b0-fpn", size=64, settings=("lr=0.01", "private=query,key"))


def settings(text: str, common: Common = COMMON) -> dict[str, str]:
    return dict(pair.split("=") for pair in Variant.parse(text).options(common, 0).settings)


@pytest.mark.parametrize(
    "text",
    ["feddp", "fedavg+igc", "feddp@lambda=0", "finetune+igc@network=resnet18-fpn@lr=0.1", "feddp@when=before"],
)
def test_a_variant_reads_back(text):
    assert str(Variant.parse(f" {text} ")) == text


def test_which_networks_are_measured_is_no_setting_of_the_run():
    before = Variant.parse("feddp@when=before@lambda=0")
    assert (before.when, before.changes) == ("before", (("lambda", "0"),))
    assert before.options(COMMON, 0) == Variant.parse("feddp@lambda=0").options(COMMON, 0)
    assert str(Variant.parse("feddp@when=final")) == "feddp"
    with pytest.raises(FedDPError, match="when=after is neither before nor final"):
        Variant.parse("feddp@when=after")


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("feddg", "FedDG interpolation"),
        ("feddg+igc@spectra=4", "FedDG interpolation+igc@spectra=4"),
        ("feddp@private=query|head", "feddp@private=query|head"),
    ],
)
def test_a_table_does_not_call_a_part_or_a_reading_by_the_name_of_the_whole(text, label):
    assert Variant.parse(text).label == label


def test_a_bar_is_a_comma():
    variant = Variant.parse("feddp@private=query|head")
    assert variant.changes == (("private", "query,head"),)
    assert str(variant) == "feddp@private=query|head"


@pytest.mark.parametrize("text", ["", "+igc", "@lambda=0", "feddp@", "feddp@lambda", "feddp@=1", "feddp@lambda="])
def test_what_is_no_variant(text):
    with pytest.raises(FedDPError, match="is no variant; write"):
        Variant.parse(text)


def test_a_variants_own_change_wins_over_the_common_settings():
    assert settings("feddp") == {"lr": "0.01", "private": "query,key"}
    assert settings("feddp@private=head@lambda=0") == {"lr": "0.01", "private": "head", "lambda": "0"}


def test_a_common_setting_without_a_value_is_refused():
    with pytest.raises(FedDPError, match="--set lr: write key=value"):
        Variant.parse("feddp").options(Common(1, None, "pvt_v2_b0-fpn", 32, ("lr",)), 0)


def test_options_hold_what_the_runs_share():
    options = Variant.parse("fedavg+igc@network=resnet18-fpn").options(COMMON, seed=7)
    assert (options.method, options.then, options.rounds, options.size, options.seed) == ("fedavg", "igc", 3, 64, 7)
    assert options.network == "resnet18-fpn"
    assert Variant.parse("fedavg").options(COMMON, 7).network == "pvt_v2_b0-fpn"


def test_epochs_at_home_reach_the_stages_that_have_them():
    """4 epochs: for the calibration of feddp and +igc, fedlc's heads and finetune's tuning, unless the stage has a setting of
    its own; not for local and fedavg, which refuse them."""

    def epochs(text: str, common: Common = COMMON):
        return Variant.parse(text).options(common, 0).calibration_epochs, settings(text, common).get("tune_epochs")

    def plan(text: str, more: tuple[str, ...] = ()) -> Plan:
        options = Variant.parse(text).options(Common(rounds=3, calibration_epochs=4, network="pvt_v2_b0-fpn", size=64), 0)
        metadata = {"channels": 3, "classes": ("lesion",), "labels": "nested"}
        return replace(options, settings=(*options.settings, *more)).plan(metadata, ["A", "B"])

    def heads(text: str) -> int:
        return plan(text).heads.heads_epochs

    assert epochs("feddp") == (4, None)
    assert epochs("fedavg+igc") == (4, None)
    assert epochs("local") == epochs("fedavg") == (None, None)
    assert epochs("finetune") == (None, "4")
    assert epochs("finetune+igc") == (4, "4")
    assert epochs("finetune@tune_epochs=2") == (None, "2")
    assert epochs("feddp@calibration_epochs=0") == (0, None)
    own = Common(1, 4, "pvt_v2_b0-fpn", 32, ("tune_epochs=3", "calibration_epochs=9"))
    assert epochs("finetune", own) == (None, "3")
    assert epochs("feddp", own) == epochs("fedavg", own) == (None, "3")
    assert settings("feddp", own)["calibration_epochs"] == "9"
    assert epochs("feddp@calibration_epochs=2", own) == (2, "3")
    assert "calibration_epochs" not in settings("feddp@calibration_epochs=2", own)
    assert epochs("feddp", Common(1, None, "pvt_v2_b0-fpn", 32)) == (None, None)
    assert plan("feddp", ("calibration_epochs=9",)).calibration.calibration_epochs == 9
    assert [heads(text) for text in ("fedlc", "fedlc@heads_epochs=9", "fedlc@calibration_epochs=9")] == [4, 9, 9]
    with pytest.raises(FedDPError, match="calibration_epochs='x' is not a whole number"):
        Variant.parse("feddp@calibration_epochs=x").options(COMMON, 0)
