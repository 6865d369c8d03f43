"""Studies of virtual classes (Liu et al., 2024) and pFLFE (Xie et al., 2024): each row is a plan with its private tensors."""

import pytest
from PIL import Image

from feddp.compare import figures
from feddp.compare.figures import draw_study
from feddp.compare.scores import Result, average
from feddp.compare.studies import STUDIES
from feddp.compare.variants import Common, Variant
from feddp.networks import build
from feddp.partition import resolve
from feddp.plan.resolve import build_network, partition_of
from feddp.plan.schema import Plan
from feddp.reporting.tables import SHOWN, shown_value
from support.compare_runs import SITES as PAIR
from support.compare_runs import federation, row, write_run

SITES = ["A", "B", "C", "D"]
REQUIRED = {"channels": 3, "classes": ("disc", "cup"), "labels": "nested"}
CN = 3 * 4  # classes with the background, times sites
VIRTUAL = "segmentation_head.0.virtual"
LEVELS = {"unet": [f"decoder.stages.{i}" for i in range(4)], "pvt_v2_b0-fpn": [f"decoder.{p}" for p in ("p4", "p3", "p2")]}


def plan_of(variant: Variant, network: str) -> Plan:
    return variant.options(Common(2, None, network, 32), seed=0).plan(REQUIRED, SITES)


def rows(study: str, network: str):
    """{labels: (plan, network, private keys)} of a study's entries."""
    found = {}
    for entry in STUDIES[study].entries:
        plan = plan_of(entry.source.variant, network)
        built = build_network(plan)
        found[entry.labels] = plan, built, set(partition_of(plan, built).private)
    return found


def affinity(network: str, *letters: str) -> set[str]:
    kinds = ("weight", "bias")
    return {f"{level}.affinity.conv_{x}.{kind}" for level in LEVELS[network] for x in letters for kind in kinds}


@pytest.mark.parametrize("network", LEVELS)
def test_tables_ii_and_iii_of_virtual_classes(network):
    """Table II's first row is FedAvg (its numbers are Table I's FedAvg's: 72.39 and 62.48 mIoU). In Table III the affinity
    aggregation is everywhere, and where it is not personalized nothing is private."""
    q_and_m, none = affinity(network, "q", "m"), set()
    for study, wanted in (
        ("vc_components", {("", ""): none, ("✓", ""): none, ("", "✓"): q_and_m, ("✓", "✓"): q_and_m}),
        ("vc_paa", {("", ""): none, ("", "✓"): q_and_m, ("✓", ""): none, ("✓", "✓"): q_and_m}),
    ):
        found = rows(study, network)
        assert {labels: private for labels, (_, _, private) in found.items()} == wanted
        for (virtual, paa), (plan, built, _) in found.items():
            state = built.state_dict()
            assert (VIRTUAL in state) == bool(virtual)
            assert (f"{LEVELS[network][0]}.affinity.conv_k.weight" in state) == (study == "vc_paa" or bool(paa))
            assert plan.method == ("fedavg" if (study, virtual, paa) == ("vc_components", "", "") else "virtual_class")


@pytest.mark.parametrize("network", LEVELS)
def test_one_of_query_key_and_matrix_is_shared(network):
    found = {label: private for (label,), (_, _, private) in rows("vc_private", network).items()}
    assert found == {
        "Q": affinity(network, "k", "m"),
        "K": affinity(network, "q", "m"),
        "M": affinity(network, "q", "k"),
    }


def test_from_a_quarter_to_four_times_as_many_virtual_classes():
    """3 classes, the background one of them, at 4 sites: CN = 12."""
    found = {label: len(built.state_dict()[VIRTUAL]) for (label,), (_, built, _) in rows("vc_number", "unet").items()}
    assert found == {"CN/4": 3, "CN/2": 6, "CN": 12, "2CN": 24, "4CN": 48}


def test_the_weight_of_the_virtual_loss_and_nothing_else():
    plans = {entry.labels[0]: plan_of(entry.source.variant, "unet") for entry in STUDIES["vc_lambda"].entries}
    assert {label: plan.hyper.lambda_v for label, plan in plans.items()} == {"0.1": 0.1, "0.5": 0.5, "1": 1.0, "2": 2.0}
    assert all(plan.settings.keys() <= {"lambda_v", "min_sites"} for plan in plans.values())


@pytest.mark.parametrize("study", ["vc_private", "vc_number", "vc_lambda"])
def test_fig_8_is_drawn(tmp_path, study):
    slots = {"start": {"a": 0.8}}
    folder = write_run(tmp_path / "run", dict.fromkeys(("A", "B"), slots))
    draw_study(study, tmp_path, {entry.source.variant: Result({0: folder}, {}) for entry in STUDIES[study].entries}, ["A", "B"])
    with Image.open(tmp_path / f"{study}.png") as picture:
        assert picture.size[0] > picture.size[1], "two panels, IoU and HD"
        assert len(picture.convert("L").getcolors()) > 10, "an empty canvas"


def test_iop_fls_fig_6_has_a_value_for_each_tau(tmp_path, monkeypatch):
    """Dice 80 at A and 60 at B, under every τ."""
    drawn = []
    draw, save = figures.draw_spread, figures.save
    monkeypatch.setattr(
        figures, "draw_spread", lambda groups, *labels: drawn.append((groups, labels[0])) or draw(groups, *labels)
    )
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(path.name) or save(figure, path))
    folder = write_run(tmp_path / "run", {"A": {"start": {"a": 0.8}}, "B": {"start": {"a": 0.6}}})
    results = {entry.source.variant: Result({0: folder}, {}) for entry in STUDIES["tau"].entries}
    draw_study("tau", tmp_path, results, ["A", "B"])
    (groups, axis), name = drawn
    assert (name, axis) == ("tau.png", "τ")
    assert list(groups) == ["0.1", "0.3", "0.5", "0.7", "0.9", "1"]
    assert all(dice == pytest.approx([80, 60]) for dice in groups.values())


def test_iop_fls_fig_5_has_a_panel_for_each_number_of_epochs_and_a_line_for_each_method(tmp_path, monkeypatch):
    """The sites' mean validation IoU of round t is (t − 1)/10 + 0.005 (`federation`)."""
    drawn = []
    draw, save = figures.draw_curves, figures.save
    monkeypatch.setattr(figures, "draw_curves", lambda panels, ylabel: drawn.append((panels, ylabel)) or draw(panels, ylabel))
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(path.name) or save(figure, path))
    folder = write_run(tmp_path / "run", dict.fromkeys(PAIR, {"start": {"a": 0.8}}), events=federation(3, False))
    results = {entry.source.variant: Result({0: folder}, {}) for entry in STUDIES["local_epochs"].entries}
    draw_study("local_epochs", tmp_path, results, list(PAIR))
    (panels, axis), name = drawn
    assert (name, axis) == ("curves_local_epochs.png", "validation IoU")
    assert list(panels) == ["1 epoch", "2 epochs", "4 epochs", "8 epochs", "10 epochs"]
    for lines in panels.values():
        assert list(lines) == ["fedrep", "fedbn", "pfedme", "iop_fl"]
        assert all(curve == pytest.approx({1: 0.105, 2: 0.205, 3: 0.305}) for (curve,) in lines.values())


ROWS = ("head", "1 level", "2 levels", "3 levels", "whole decoder")
PARTS = {
    # from the output: what a level of FPN is, its lateral convolution with the blocks that bring its map to the output's size
    "unet": [("stages.3",), ("stages.2",), ("stages.1",), ("stages.0",)],
    "pvt_v2_b0-fpn": [("p2", "seg_blocks.3"), ("p3", "seg_blocks.2"), ("p4", "seg_blocks.1"), ("p5", "seg_blocks.0")],
    "resunet": [(f"blocks.{i}",) for i in (4, 3, 2, 1)],
    "unetplusplus": [tuple(f"blocks.x_{i}_{j}" for i in range(n)) for j, n in ((4, 1), (3, 4), (2, 3), (1, 2))],
}


@pytest.mark.parametrize("network", PARTS)
def test_pflfe_table_4_a_level_more_at_a_time(network):
    """With n levels: head, projector, and all below the last n parts. The whole decoder is everything below `decoder`."""
    found = rows("enhancement", network)
    assert list(found) == [(on, label) for on in ("", "✓") for label in ROWS]
    for (on, label), (plan, built, private) in found.items():
        assert plan.hyper.enhance == (on == "✓")
        chosen = [part for level in PARTS[network][: ROWS.index(label)] for part in level]
        inside = ("decoder.",) if label == ROWS[-1] else tuple(f"decoder.{part}." for part in chosen)
        wanted = ("segmentation_head.", "projector.", *inside)
        assert private == {key for key in built.state_dict() if key.startswith(wanted)}


@pytest.mark.parametrize(("network", "depth"), [("unet", 4), ("resnet18-fpn", 4), ("resunet", 5), ("unetplusplus", 5)])
def test_the_levels_are_the_decoder_each_tensor_in_one(network, depth):
    built = build(network, 3, 1, seed=0)
    levels = [resolve(built, (f"decoder.{n}",)).private for n in range(1, depth + 1)]
    together = [key for level in levels for key in level]
    assert len(together) == len(set(together))
    assert set(together) == set(resolve(built, ("decoder",)).private)


def test_each_study_reports_its_paper_s_metrics():
    """(Liu et al., 2024) reports mean IoU and Hausdorff distance, the others Dice and ASSD. HD = 10 (1 − Dice) pixels here."""
    shown = {name: study.metrics for name, study in STUDIES.items()}
    assert {name for name, metrics in shown.items() if metrics == ("iou", "hd")} == {n for n in shown if n.startswith("vc_")}
    assert {metrics for name, metrics in shown.items() if not name.startswith("vc_")} == {("dice", "assd")}
    summary = average({"A": {m: {"mean": v} for m, v in row(0.8).items()}})
    assert shown_value(summary, "hd").mean == pytest.approx(2.0)
    assert SHOWN["hd"].head == "HD (pix.)"
