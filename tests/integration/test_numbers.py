"""What is measured leaves a site coarse: rounded, and without a standard deviation over few images."""

import json
import shutil

import numpy as np
import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey
from rich.console import Console

from feddp import protocol
from feddp.data.folder import SiteFolder
from feddp.data.loading import load
from feddp.flare import messages
from feddp.protocol import rounded
from feddp.reporting.page import table, write_markdown
from feddp.run import pooled
from feddp.run.options import Options, run_here
from feddp.stages.train import adopt
from feddp.training.columns import METRICS, columns
from support.server import SITES, Run, good
from support.site import NUMBERS

PIXELS = 32 * 32
FINE = {"mean": 0.123456789, "std": 0.298765432, "n": 2}  # three decimals are three digits
COARSE = {"mean": 0.123, "std": 0.299, "n": 2}
MEANS = {"mean": 0.123, "n": 2}


def tables(cell, metrics=METRICS):
    summary = dict.fromkeys(metrics, cell)
    return {"before_calibration": summary, "final": summary}


@pytest.fixture
def dealt(tiny_root, tmp_path):
    """A copy of site-1 of which the first `test` images are to test, two a patient or all of one; the next two validate."""

    def make(test, patients=None):
        data = shutil.copytree(tiny_root / "site-1", tmp_path / "data")
        header, *rows = (data / "split.csv").read_text().splitlines()
        stems = [row.split(",")[0] for row in rows]
        lines = []
        for i, stem in enumerate(stems):
            split = "test" if i < test else "val" if i < test + 2 else "train"
            lines.append(f"{stem},{split}-{i if patients is None else i % patients},{split}")
        (data / "split.csv").write_text("\n".join([header, *lines]) + "\n")
        return data

    return make


@pytest.mark.parametrize(
    ("task", "said", "left"),
    [
        (
            "train",
            {"round": 1, "phase": 0, "loss": 0.693147, "dice": 0.98765, "iou": 0.5, "samples": 1234.0, "seconds": 12.345},
            {"round": 1, "phase": 0, "loss": 0.693, "dice": 0.988, "iou": 0.5, "samples": 1234.0, "seconds": 12.3},
        ),
        ("train", {"loss": 1234.5}, {"loss": 1230.0}),
        ("train", {"loss": 0.00012345}, {"loss": 0.000123}),
        ("score", {"round": 199, "dice": 0.0004, "iou": 0.00061}, {"round": 199, "dice": 0.0, "iou": 0.001}),
        (
            "tune",
            {"loss": 0.12345, "iou_before": 0.12345, "iou": 0.98765, "epoch": 17},
            {"loss": 0.123, "iou_before": 0.123, "iou": 0.988, "epoch": 17},
        ),
        ("evaluate", tables(FINE), tables(COARSE)),
        ("evaluate", {"peers": {"site-2": {"dice": FINE}}}, {"peers": {"site-2": {"dice": COARSE}}}),
        (
            "evaluate",
            tables({"mean": 0.0123456, "std": 9.87654, "n": 2}, ("hd", "assd-medpy")),
            tables({"mean": 0.0123, "std": 9.88, "n": 2}, ("hd", "assd-medpy")),
        ),
        ("evaluate", tables({"mean": 0.0123456, "n": 2}, ("iou",)), tables({"mean": 0.012, "n": 2}, ("iou",))),
        ("evaluate", {"peers": {"site-2": {"hd95": {"mean": 123.456}}}}, {"peers": {"site-2": {"hd95": {"mean": 123.0}}}}),
        (
            "adapt",
            {"images": 2, "empty_masks": 1, "seconds": 0.123, "loss_before": 0.98765, "loss": 0.12345, "epoch": 3},
            {"images": 2, "empty_masks": 1, "seconds": 0.1, "loss_before": 0.988, "loss": 0.123, "epoch": 3},
        ),
        ("adapt", {"images": 2, "scores": {"dice": FINE}}, {"images": 2, "scores": {"dice": COARSE}}),
    ],
)
def test_what_leaves_is_rounded_and_counts_are_not(hospital, task, said, left):
    """Shares to three decimals, pixels and losses to three digits, seconds to tenths; what has left once passes as it is."""
    site = hospital(consent=["calibration", "outside"])
    assert site.sends(task, messages.pack(**said)) == ({}, left)
    assert site.sends(task, messages.pack(**left)) == ({}, left)
    assert site.audited() == []


@pytest.mark.parametrize(
    "settings",
    [{"method": "fedavg"}, {"precision": "float16"}, {"lr": 1e-30, "batch": 1, "seed": 7}, {"selection": "test"}, {"size": 64}],
)
def test_nothing_that_a_job_sets_changes_it(hospital, plan_for, toy, settings):
    site = hospital(plan=plan_for(network=toy, **settings), std_images=3)
    numbers = NUMBERS | {"loss": 0.693147, "dice": 0.98765}
    assert site.sends("train", messages.pack(**numbers))[1] == NUMBERS | {"loss": 0.693, "dice": 0.988}
    assert site.sends("evaluate", messages.pack(**tables(FINE)))[1] == tables(MEANS) | {"std_withheld": 3}
    site.stopped("evaluate", messages.pack(**tables(FINE), std_withheld=1), "'std_withheld' among its scalars")


def test_rounding_twice_is_rounding_once():
    """And halves, which binary numbers seldom are, too."""
    rng = np.random.default_rng(0)
    for name, above in (("iou", ""), ("mean", "dice"), ("mean", "hd95_cup"), ("loss", ""), ("seconds", ""), ("samples", "")):
        values = [*(rng.random(2000) * 10.0 ** rng.integers(-4, 4, 2000)).tolist(), 0.0005, 0.0015, 0.5, 0.0, 1.0, 1e300]
        once = [rounded(name, value, above) for value in values]
        assert [rounded(name, value, above) for value in once] == once
        assert (once == values) == (name == "samples")


# --- the standard deviation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "left"), [(5, COARSE), (6, MEANS)])
def test_a_deviation_over_too_few_images_stays(hospital, dealt, least, left):
    """Five test images, by the folder; the means leave in both."""
    said = tables(FINE | {"n": 5}) | {"peers": {"site-2": dict.fromkeys(METRICS, FINE | {"n": 5})}}
    kept = tables(left | {"n": 5}) | {"peers": {"site-2": dict.fromkeys(METRICS, left | {"n": 5})}}
    word = {} if "std" in left else {"std_withheld": least}
    assert hospital(data=dealt(5), std_images=least).sends("evaluate", messages.pack(**said)) == ({}, kept | word)


def test_twenty_unless_a_policy_says(hospital, dealt):
    site = hospital(data=dealt(5))
    del site.policy["std_images"]
    site.submitted(site.plan)
    assert site.sends("evaluate", messages.pack(**tables(FINE))) == ({}, tables(MEANS) | {"std_withheld": 20})


def test_a_table_is_believed_where_it_says_fewer(hospital, dealt):
    """Never where it says more than the folder's five."""
    site = hospital(data=dealt(5))
    for least, n, kept in ((5, 4, MEANS), (5, 5, COARSE), (5, 500, COARSE), (6, 500, MEANS)):
        site.submitted(site.plan, std_images=least)
        assert site.sends("evaluate", messages.pack(**tables(FINE | {"n": n})))[1]["final"]["dice"] == kept | {"n": n}


def test_volumes_count_cases(hospital, dealt):
    """Six test images of two patients: the images' deviations leave, the cases' do not."""
    said = tables(FINE | {"n": 6}) | {"volumes": tables(FINE, ("dice", "iou"))}
    sent = hospital(data=dealt(6, patients=2), std_images=3).sends("evaluate", messages.pack(**said))[1]
    assert sent == tables(COARSE | {"n": 6}) | {"volumes": tables(MEANS, ("dice", "iou")), "std_withheld": 3}


def test_numbers_of_classes_leave_as_the_means_do(hospital, dealt, plan_for, toy):
    """Rounded, without deviation, or not at all; of its peers' networks too, and of no other class."""
    names = columns(METRICS, ("disc", "cup"))
    site = hospital(data=dealt(5), plan=plan_for(network=toy, classes=("disc", "cup")), std_images=5)
    said = tables(FINE | {"n": 5}, names)
    assert site.sends("evaluate", messages.pack(**said)) == ({}, tables(COARSE | {"n": 5}, names))
    site.submitted(site.plan, std_images=6)
    assert site.sends("evaluate", messages.pack(**said)) == ({}, tables(MEANS | {"n": 5}, names) | {"std_withheld": 6})
    site.submitted(site.plan, min_images=6)
    assert site.sends("evaluate", messages.pack(**said)) == ({}, {"withheld": 6})
    few = said | {"final": said["final"] | {"dice_cup": FINE | {"n": 1}}}
    site.submitted(site.plan, min_images=5)
    assert site.sends("evaluate", messages.pack(**few)) == ({}, {"withheld": 5})
    peers = tables(COARSE | {"n": 5}, names)["final"]
    assert site.sends("evaluate", messages.pack(**said, peers={"site-2": said["final"]}))[1]["peers"] == {"site-2": peers}
    few = {"site-2": said["final"] | {"dice_cup": FINE | {"n": 1}}}
    assert site.sends("evaluate", messages.pack(**said, peers=few)) == ({}, {"withheld": 5})
    site.stopped("evaluate", messages.pack(**tables(FINE, ("dice_rim",))), "'dice_rim' among its scalars")


@pytest.mark.parametrize(("settings", "left"), [({}, COARSE), ({"std_images": 4}, MEANS), ({"min_images": 4}, None)])
def test_scores_of_classes_leave_an_unseen_site_as_the_means_do(hospital, dealt, plan_for, toy, settings, left):
    """Three test images, to which the site adapts."""
    names = columns(METRICS, ("disc", "cup"))
    plan = plan_for(network=toy, classes=("disc", "cup"))
    site = hospital(data=dealt(3), plan=plan, consent=["outside"], std_images=3)
    site.submitted(site.plan, **settings)
    said = {"images": 3, "scores": dict.fromkeys(names, FINE | {"n": 3})}
    kept = {} if left is None else {"scores": dict.fromkeys(names, left | {"n": 3})}
    word = {"withheld": 4} if left is None else {"std_withheld": 4} if left is MEANS else {}
    assert site.sends("adapt", messages.pack(**said)) == ({}, {"images": 3} | kept | word)


def test_sites_may_have_the_names_of_numbers(hospital, dealt, plan_for, toy):
    """Peers called n and std: their tables are tables, counted and without deviations like others."""
    site = hospital(data=dealt(5), plan=plan_for(network=toy, sites=("n", "site-1", "std")), std_images=6)
    said = tables(FINE | {"n": 5}) | {"peers": dict.fromkeys(("n", "std"), tables(FINE | {"n": 5})["final"])}
    kept = tables(MEANS | {"n": 5}) | {"peers": dict.fromkeys(("n", "std"), tables(MEANS | {"n": 5})["final"])}
    assert site.sends("evaluate", messages.pack(**said)) == ({}, kept | {"std_withheld": 6})
    few = said | {"peers": {"n": tables(FINE | {"n": 1})["final"]}}
    assert site.sends("evaluate", messages.pack(**few)) == ({}, {"withheld": 2})


# --- five images, one mean ----------------------------------------------------------------------------------------------------


def everywhere(shared):
    """γ of the toy with which it says foreground in every pixel."""
    return shared | {"head.weight": torch.zeros(1, 4, 1, 1), "head.bias": torch.full((1,), 50.0)}


def solutions(found):
    """All five areas, in order of size, that a table over five images leaves.

    Of an image with a lesion of a pixels of N that is predicted everywhere, IoU = a/N and Dice = 2a/(N+a), in float32. So the
    mean IoU gives Σa, its deviation Σa², and the mean Dice tells apart what is left. Three areas are tried, the other two solve
    the two sums.
    """
    mean, std = found["iou"]["mean"], found["iou"]["std"]
    total, squares = round(5 * PIXELS * mean), round(5 * PIXELS**2 * (std**2 + mean**2))
    most = int(squares**0.5) + 1
    second, third = (part.ravel() for part in np.meshgrid(np.arange(most), np.arange(most), indexing="ij"))
    second, third = second[second <= third], third[second <= third]
    results = set()
    for first in range(total // 5 + 1):
        rest, left = total - first - second - third, squares - first**2 - second**2 - third**2
        root = 2 * left - rest**2  # of the difference between the last two
        whole = np.sqrt(np.maximum(root, 0)).round().astype(int)
        fits = (second >= first) & (root >= 0) & (whole**2 == root) & ((rest - whole) % 2 == 0) & ((rest - whole) // 2 >= third)
        for b, c, r, w in zip(second[fits], third[fits], rest[fits], whole[fits], strict=True):
            areas = (first, int(b), int(c), int(r - w) // 2, int(r + w) // 2)
            if abs(np.mean([float(np.float32(2 * a) / np.float32(PIXELS + a)) for a in areas]) - found["dice"]["mean"]) < 1e-12:
                results.add(areas)
    return results


def test_five_lesions_areas_come_out_of_exact_numbers_and_not_out_of_rounded_ones(hospital, dealt, plan_for, toy):
    """A job whose network says foreground everywhere and does not learn. What its executor answers gives the area of each of
    five lesions exactly (the control). What the guard sends has no deviation, and of two numbers three decimals: 1001² answers
    at most for C(1028, 5) = 9.5 · 10¹² fivefold areas, 9 million for each on average. Of those within ten pixels of the true
    areas alone there are still tens of thousands, and no area is left fewer than all of its 21 values: Σa is known to ±2.56
    (0.0005 · 5 N), which leaves at least 5 of its values, so at least 5 · 0.0275 of the 21⁵ (the sum of five uniform numbers
    has a deviation of 13.5), 560,000; the mean Dice, whose slope 2N/(N+a)² differs little between areas, repeats most of that.
    """
    data = dealt(5)
    site = hospital(data=data, plan=plan_for(network=toy, method="fedavg", lr=1e-30), min_images=5, std_images=20)
    gamma = everywhere(site.shared)
    adopt(site.open(), gamma, 1)
    answer = site.executed(protocol.EVALUATE)
    exact = messages.unpack(answer)[1]["final"]
    masks = [sample["mask"] for sample in load(SiteFolder.open(data), "test", 32)]
    areas = [int(mask.sum()) for mask in masks]
    assert len(set(areas)) > 1
    assert solutions(exact) == {tuple(sorted(areas))}

    sent = site.sends(protocol.EVALUATE, answer)[1]
    assert sent["std_withheld"] == 20
    assert all(cell.keys() == {"mean", "n"} for cell in sent["final"].values())
    near = np.stack(np.meshgrid(*[np.arange(a - 10, a + 11) for a in areas], indexing="ij"), axis=-1).reshape(-1, 5)
    near = near[(near >= 0).all(axis=1)]
    fits = np.isclose((near / PIXELS).mean(axis=1).round(3), sent["final"]["iou"]["mean"])
    fits &= np.isclose((2 * near / (PIXELS + near)).mean(axis=1).round(3), sent["final"]["dice"]["mean"])
    left = near[fits]
    assert (left == areas).all(axis=1).any()
    assert len(left) > 50_000
    assert all(len(set(column)) == 21 for column in left.T if min(column) > 0)


@pytest.mark.parametrize("area", [1, 17, 100, 513])
def test_passes_a_single_area_to_a_quarter_per_cent_of_the_image(hospital, dealt, area):
    """What rounding leaves: a network that misses four lesions of five makes their IoU 0, so that the mean is a fifth of the
    last one's: to ±0.0005, which is 2.56 of 1024 pixels."""
    site = hospital(data=dealt(5), min_images=5, std_images=20)
    sent = site.sends("evaluate", messages.pack(**tables({"mean": area / PIXELS / 5, "std": 0.1, "n": 5})))[1]
    assert abs(5 * PIXELS * sent["final"]["iou"]["mean"] - area) <= 2.561
    assert len({rounded("iou", a / PIXELS / 5) for a in range(area, area + 5)}) <= 2


# --- the server ---------------------------------------------------------------------------------------------------------------


def from_guards(cell, **more):
    """Answers as a site's guard leaves them."""

    def answer(site, task, tensors, scalars):
        made = good(site, task, tensors, scalars)
        return messages.pack(**tables(cell), peers={}, **more) if task == "evaluate" else made

    return answer


def test_results_and_tables_say_what_is_rounded_and_what_is_withheld(tmp_path, plan_for, capsys):
    run = Run(tmp_path, plan_for(method="fedavg", rounds=1), SITES, from_guards(MEANS, std_withheld=20))
    run.run("train", "evaluate")
    assert run.panics == []
    assert run.progress("refused") == []
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["sites"]["A"]["std_withheld"] == 20
    assert results["sites"]["A"]["final"]["dice"] == MEANS
    assert results["average"]["final"]["dice"] == {"mean": pytest.approx(0.123), "std": pytest.approx(0), "n": 3}
    text = write_markdown(results | {"rounded": True})
    (final,) = [line for line in text.splitlines() if line.startswith("| final |")]
    assert final.startswith("| final | 12.30 ± — | 12.30 ± — | 12.30 ± — | 12.30 ± 0.00 | 0.12 ± — |")
    why = "A: its policy withholds the standard deviation (± —) over fewer than 20 test images or cases."
    coarse = "Each site rounded what it sent: Dice and IoU to three decimals, distances and losses to three digits."
    assert {why, coarse} <= set(text.splitlines())
    Console(width=120).print(table(results | {"rounded": True}))
    shown = " ".join(capsys.readouterr().out.split())
    assert why in shown
    assert coarse in shown
    assert "12.30 ± —" in shown
    assert coarse not in write_markdown(results | {"rounded": False})


def test_results_hold_each_class_beside_the_mean(tmp_path, plan_for):
    """The sites' discs 0.9, 0.9 and 0.6, mean 0.8 ± √0.02; each cup 0.3; A measured C's network too, its cup 0.4.

    A site that says nothing of a class of its own network is refused; of a peer's, an earlier version says nothing of classes.
    """

    def answer(site, task, tensors, scalars):
        if task != "evaluate":
            return good(site, task, tensors, scalars)
        said = tables({"mean": 0.5, "std": 0.1, "n": 9}, columns(METRICS, ("disc", "cup")))["final"]
        for name, mean in (("dice_disc", 0.6 if site == "C" else 0.9), ("dice_cup", 0.3)):
            said = said | {name: {"mean": mean, "std": 0.1, "n": 9}}
        cup, alone = {"dice_cup": {"mean": 0.4, "std": 0.1, "n": 9}}, dict.fromkeys(METRICS, said["dice"])
        peers = {"A": {"C": said | cup}, "B": {"C": alone}}.get(site, {})
        before = said | {"dice_cup": {"mean": 0.2, "std": 0.1, "n": 9}}
        if site == silent:
            said.pop("assd_cup")
        return messages.pack(before_calibration=before, final=said, peers=peers)

    plan = plan_for(method="fedavg", rounds=1, classes=("disc", "cup"))
    for silent in ("", "B"):
        run = Run(tmp_path / f"silent-{silent}", plan, SITES, answer)
        run.run("train", "evaluate")
        assert [event["site"] for event in run.progress("refused")] == ([silent] if silent else [])
        if not silent:
            results = json.loads((tmp_path / "silent-/results.json").read_text())
            assert results["matrix"].keys() == {"A", "B"}
            assert [results["matrix"]["A"][model]["dice_cup"]["mean"] for model in ("A", "C")] == [0.2, 0.4]
            final = results["average"]["final"]
            assert final["dice_disc"] == pytest.approx({"mean": 0.8, "std": 0.02**0.5, "n": 3})
            assert final["dice_cup"] == pytest.approx({"mean": 0.3, "std": 0, "n": 3})
            assert results["sites"]["C"]["final"]["dice_disc"]["mean"] == 0.6
            lines = write_markdown(results).splitlines()
            (shown,) = [line for line in lines if line.startswith("| final, disc |")]
            assert shown.startswith("| final, disc | 90.00 ± 10.00 | 90.00 ± 10.00 | 60.00 ± 10.00 | 80.00 ± 14.14 |")
            assert any(line.startswith("| before, cup | 20.00 ± 10.00 |") for line in lines)
            rows = [line for line in lines if line.startswith(("| A |", "| B |"))]  # both classes' mean, the disc, the cup
            assert rows[0::2] == ["| A | 50.00 |  | 50.00 |", "| A | 90.00 |  | 90.00 |", "| A | 20.00 |  | 40.00 |"]
            assert rows[1::2] == ["| B |  | 50.00 | 50.00 |", "| B |  | 90.00 |  |", "| B |  | 20.00 |  |"]


@pytest.mark.parametrize("secure", [True, False])
def test_the_results_say_whether_guards_stood(tmp_path, plan_for, secure):
    """They stand wherever there are certificates, and not in FLARE's simulator."""
    run = Run(tmp_path, plan_for(method="fedavg", rounds=1), SITES, from_guards(COARSE)).run("train")
    run.fl_ctx.set_prop(FLContextKey.SECURE_MODE, secure)
    run.run("evaluate")
    assert json.loads((tmp_path / "results.json").read_text())["rounded"] is secure


@pytest.mark.parametrize("more", [{}, {"std_withheld": "all"}, {"withheld": 5}])
def test_a_deviation_is_missing_with_the_word_alone(tmp_path, plan_for, more):
    run = Run(tmp_path, plan_for(method="fedavg", rounds=1), SITES, from_guards(MEANS, **more))
    run.run("train", "evaluate")
    assert {event["site"] for event in run.progress("refused")} == set(SITES)


@pytest.mark.parametrize(("second", "best"), [(0.3004, 1), (0.3006, 2)])
@pytest.mark.parametrize("guarded", [True, False])
def test_the_best_round_is_the_same_with_guards_and_without(tmp_path, plan_for, guarded, second, best):
    """A says 0.2004 after both rounds, B and C 0.3 and then a little more, which counts where the third decimal is another."""
    ious = {"A": (0, 0.2004, 0.2004), "B": (0, 0.3, second), "C": (0, 0.3, second)}

    def answer(site, task, tensors, scalars):
        made = good(site, task, tensors, scalars, ious=dict(enumerate(ious[site])))
        tensors, said = messages.unpack(made)
        return messages.pack(tensors, **rounded("", said)) if guarded else made

    run = Run(tmp_path, plan_for(method="fedavg", rounds=2), SITES, answer).run("train", "evaluate")
    assert run.panics == []
    assert json.loads((tmp_path / "results.json").read_text())["best_round"] == best


@pytest.mark.parametrize(("second", "best"), [(0.3004, 1), (0.3006, 2)])
def test_a_pooled_run_compares_its_rounds_alike(tiny_root, tmp_path, monkeypatch, toy, second, best):
    scores = iter([{"dice": 0.5, "iou": 0.3}, {"dice": 0.5, "iou": second}])
    monkeypatch.setattr(pooled.PooledSite, "validate", lambda self: next(scores, {"dice": 0.5, "iou": 0.0}))
    options = Options("centralized", rounds=2, size=32, network=toy, settings=("batch=4",))
    assert run_here(tiny_root, tmp_path / "out", options)["best_round"] == best
