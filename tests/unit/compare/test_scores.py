"""The numbers of the tables, against sums done by hand."""

import csv
from pathlib import Path

import pytest

from feddp.compare import figures
from feddp.compare.efficiency import (
    efficiency_table,
    inference_ms,
    local_seconds,
    stages_table,
    times_table,
    traffic,
    train_seconds,
)
from feddp.compare.figures import draw_methods, maxima, mean_curve
from feddp.compare.ranking import best_two, sentence
from feddp.compare.scores import BEFORE, CASE, FINAL, Result, scores
from feddp.compare.tables import methods_tables, scores_table, spread_table
from feddp.errors import FedDPError
from feddp.files import PROGRESS, read_events
from feddp.reporting.tables import BLANK, ResultTable, Value
from feddp.stages.scored import curves
from feddp.training.columns import METRICS
from support.compare_runs import SITES, federation, write_cases, write_run

ONE = [
    {"site-1": {"start": {"a": 0.6, "b": 0.9}}, "site-2": {"start": {"a": 0.4, "b": 0.7}}},
    {"site-1": {"start": {"a": 0.8, "b": 0.9}}, "site-2": {"start": {"a": 0.6, "b": 0.7}}},
]
OTHER = [{"site-1": {"start": {"a": 0.5, "b": 0.7}}, "site-2": {"start": {"a": 0.6, "b": 0.8}}}] * 2
NAMES = {site: {"a": "x", "b": "y"} for site in SITES}  # each image is of a patient of its own


@pytest.fixture
def result(tmp_path):
    """Makes the result of one variant from its Dice values by seed, as `write_run` takes them."""

    def make(name: str, seeds: list, **more) -> Result:
        return Result({i: write_run(tmp_path / name / str(i), dice, **more) for i, dice in enumerate(seeds)}, {})

    return make


@pytest.fixture
def table(result):
    """Dice and ASSD of ONE and OTHER at both sites."""
    entries = [(("one",), result("one", ONE), FINAL), (("other",), result("other", OTHER), FINAL)]
    return scores_table("methods", "Table", ("Method",), entries, ("dice", "assd"), list(SITES), seeds=2, per_site=True)


def test_means_over_seeds_then_images_then_sites(table):
    """one, image by image over two seeds: site-1 0.7 and 0.9, mean 0.8 ± 0.1; site-2 0.5 and 0.7, mean 0.6 ± 0.1; the
    sites' average 0.7 ± 0.1. By seed: (0.75 + 0.55)/2 = 0.65 and (0.85 + 0.65)/2 = 0.75, so ± 0.05 over the seeds.
    other: 0.6 ± 0.1 and 0.7 ± 0.1, average 0.65 ± 0.05, the same under both seeds. ASSD = 10 (1 − Dice): one 2, 4 and
    3 ± 1, ± 0.5 over the seeds; other 4, 3 and 3.5 ± 0.5."""
    assert table.heads == (
        "Method",
        *("Dice (%) site-1", "Dice (%) site-2", "Dice (%) Average", "Dice (%) ± seeds"),
        *("ASSD (pix.) site-1", "ASSD (pix.) site-2", "ASSD (pix.) Average", "ASSD (pix.) ± seeds"),
    )
    one, other = ([str(cell) for cell in row] for row in table.rows)
    dice = ["80.00 ± 10.00", "60.00 ± 10.00", "70.00 ± 10.00", "5.00"]
    assert one == ["one", *dice, "2.00 ± 1.00", "4.00 ± 1.00", "3.00 ± 1.00", "0.50"]
    dice = ["60.00 ± 10.00", "70.00 ± 10.00", "65.00 ± 5.00", "0.00"]
    assert other == ["other", *dice, "4.00 ± 1.00", "3.00 ± 1.00", "3.50 ± 0.50", "0.00"]


def test_the_best_of_a_column_is_the_largest_dice_and_the_smallest_assd(table):
    """one is best at site-1 and on average, other at site-2; nothing is best about a deviation over seeds."""
    assert table.best() == {(0, 1), (1, 2), (0, 3), (0, 5), (1, 6), (0, 7)}
    one, other = table.markdown().splitlines()[4:6]
    assert one.startswith("| one | **80.00 ± 10.00** | 60.00 ± 10.00 | **70.00 ± 10.00** | 5.00 | **2.00 ± 1.00** |")
    assert "| **70.00 ± 10.00** | 65.00 ± 5.00 |" in other
    assert r"one & \textbf{80.00 $\pm$ 10.00} & 60.00 $\pm$ 10.00 &" in table.latex()


def test_values_that_read_alike_are_both_best():
    table = ResultTable("t", "t", ("m", "x"), (None, min), (("a", Value(1.001)), ("b", Value(0.999)), ("c", Value(1.02))))
    assert table.best() == {(0, 1), (1, 1)}


def test_the_csv_reads_back_with_all_digits(table, tmp_path):
    table.write(tmp_path)
    with open(tmp_path / "table_methods.csv", newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["Method"] for row in rows] == ["one", "other"]
    assert float(rows[0]["Dice (%) site-1"]) == pytest.approx(80)
    assert float(rows[1]["Dice (%) Average ±"]) == pytest.approx(5)
    assert float(rows[0]["ASSD (pix.) ± seeds"]) == pytest.approx(0.5)
    assert "ASSD (pix.) ± seeds ±" not in rows[0]


def test_latex_escapes_what_has_a_meaning_there():
    table = ResultTable("t", "t", ("Dice (%)", "λ, δ, τ"), (None, None), ((r"a_b & 5% \ #1 {x} $ ^ ~ |", "✓ — 1 ± 2"),))
    body = table.latex().splitlines()
    assert body[3] == r"Dice (\%) & $\lambda$, $\delta$, $\tau$ \\"
    assert body[5] == (
        r"a\_b \& 5\% \textbackslash{} \#1 \{x\} \$ \textasciicircum{} \textasciitilde{} \textbar{} & $\surd$ --- 1 $\pm$ 2 \\"
    )


def test_a_pipe_does_not_end_a_cell():
    assert "| a\\|b |" in ResultTable("t", "t", ("m",), (None,), (("a|b",),)).markdown()


def test_the_final_network_is_the_last_one_and_before_is_the_one_before(result):
    """After a tuning and a calibration: 0.6 and 0.7. A site that failed its calibration has one network: it is both."""
    three = {"tuned": {"a": 0.6}, "calibrated": {"a": 0.7}}
    found = result("x", [{"site-1": three, "site-2": {"start": {"a": 0.3}}}])
    means = {when: scores(found, list(SITES), when).sites for when in (BEFORE, FINAL)}
    assert [means[BEFORE][site]["dice"]["mean"] for site in SITES] == [0.6, 0.3]
    assert [means[FINAL][site]["dice"]["mean"] for site in SITES] == [0.7, 0.3]


def test_a_calibration_that_failed_takes_nothing_from_what_was_before_it(result):
    """Tuned to 0.6, then calibrated at site-1 alone: before it, site-2's network is the tuned one too, not the start."""
    slots = {"start": {"a": 0.3}, "tuned": {"a": 0.6}}
    found = result("x", [{"site-1": {"tuned": {"a": 0.6}, "calibrated": {"a": 0.7}}, "site-2": slots}])
    for when, wanted in ((BEFORE, [0.6, 0.6]), (FINAL, [0.7, 0.6])):
        assert [scores(found, list(SITES), when).sites[site]["dice"]["mean"] for site in SITES] == wanted


def test_an_upper_bound_and_some_of_the_seeds_do_not_compete(result):
    """`pool` is best by far and no federation, `partly` lacks a seed: `other` is best of what remains, and stands alone."""
    pool = result("pool", [{site: {"start": {"a": 0.99}} for site in SITES}] * 2, federated=False)
    partly = Result(result("one", ONE).folders, {2: "it diverged"})
    entries = [((name,), r, FINAL) for name, r in (("pool", pool), ("partly", partly), ("other", result("other", OTHER)))]
    table = scores_table("t", "t", ("m",), entries, ("dice",), list(SITES), 3)
    assert table.best() == {(2, 1)}
    assert any("compete neither" in note for note in table.notes)


def test_the_spread_over_clients_and_the_mean_over_images(result):
    """Sites of 1 and 3 images, Dice 0.9 and 0.3, 0.5, 0.7: the clients' means are 0.9 and 0.5, their mean 70 %, their variance
    20² = 400 points²; over all four images 2.4/4 = 60 %."""
    dice = {"site-1": {"start": {"a": 0.9}}, "site-2": {"start": {"a": 0.3, "b": 0.5, "c": 0.7}}}
    table = spread_table({"x": result("x", [dice])}, list(SITES))
    assert [str(cell) for cell in table.rows[0]] == ["x", "70.00", "60.00", "400.00"]
    assert table.notes == ("Variance over clients: the population's, of the sites' means.",)


def test_a_missing_site_leaves_no_average_to_compare(result):
    lost = result("lost", [ONE[0], {"site-1": ONE[1]["site-1"]}])
    entries = [(("lost",), lost, FINAL), (("one",), result("one", ONE), FINAL)]
    rows = scores_table("t", "t", ("m",), entries, ("dice",), list(SITES), 2, per_site=True).rows
    assert [str(cell) for cell in rows[0]] == ["lost", "80.00 ± 10.00", "—", "—", "—"]


def test_each_sites_spread_over_the_seeds(result):
    """`one`: site-1's means under the seeds are 0.75 and 0.85, site-2's 0.55 and 0.65, the averages 0.65 and 0.75: ± 0.05 each.
    IoU = Dice/(2 − Dice): of 0.4 and 0.7 at site-2, 0.25 and 7/13, mean 0.39423; of 0.6 and 0.7, 3/7 and 7/13, mean 0.48352;
    so 43.89 ± 4.46. HD = 10 (1 − Dice). `other` is the same under both. `lost` failed under a seed: one seed has no spread."""
    lost = Result({0: result("lost", ONE[:1]).folders[0]}, {1: "broke"})
    named = {"one": result("one", ONE), "other": result("other", OTHER), "lost": lost, "never": Result({}, {0: "broke"})}
    table = methods_tables(named, list(SITES), NAMES, 2, ())[-1]
    assert (table.name, table.heads[:5]) == (
        "seeds",
        ("Method", *(f"Dice (%) {c}" for c in (*SITES, "Average")), "IoU (%) site-1"),
    )
    cells = [[str(cell) for cell in row] for row in table.rows]
    assert cells[0][1:4] == ["80.00 ± 5.00", "60.00 ± 5.00", "70.00 ± 5.00"]
    assert cells[0][5] == "43.89 ± 4.46"
    assert cells[0][7:] == ["2.00 ± 0.50", "4.00 ± 0.50", "3.00 ± 0.50"]
    assert cells[1][1:4] == ["60.00 ± 0.00", "70.00 ± 0.00", "65.00 ± 0.00"]
    assert cells[2][:4] == ["lost (1 of 2 seeds)", "75.00", "55.00", "65.00"]
    assert cells[3] == ["never", "failed: broke", *[""] * 8]
    assert table.best() == {(0, 1), (1, 2), (0, 3), (0, 4), (1, 5), (0, 6), (0, 7), (1, 8), (0, 9)}
    assert "over the seeds" in table.notes[0]
    single = methods_tables({"one": result("single", ONE[:1])}, list(SITES), NAMES, 1, ())
    assert "seeds" not in [table.name for table in single]


def test_failed_runs_are_in_the_table(result):
    """Two of three seeds count where the third failed; where all did, the reason stands there."""
    partly = Result(result("one", ONE).folders, {2: "it diverged"})
    entries = [(("partly",), partly, FINAL), (("never",), Result({}, {0: "it | broke"}), FINAL)]
    table = scores_table("t", "t", ("m",), entries, ("dice",), list(SITES), 3)
    assert [str(cell) for cell in table.rows[0]] == ["partly (2 of 3 seeds)", "70.00 ± 10.00", "5.00"]
    assert table.rows[1] == ("never", "failed: it | broke", "")
    assert "| never | failed: it \\| broke |  |" in table.markdown()


def test_a_choice_on_the_test_images_is_said_below_the_table(result, table):
    assert not table.notes
    chosen = [(("x",), result("x", ONE, selection="test"), FINAL)]
    assert "Optimistic" in scores_table("t", "t", ("m",), chosen, ("dice",), list(SITES), 2).markdown()


def test_seeds_on_different_images_are_refused(result):
    other = {**ONE[1], "site-2": {"start": {"a": 0.6, "c": 0.7}}}
    with pytest.raises(FedDPError, match="site-2: the seeds were tested on different images"):
        scores(result("x", [ONE[0], other]), list(SITES))


def with_cases(result, dice: list):
    for folder, seed in zip(result.folders.values(), dice, strict=True):
        write_cases(folder, seed)
    return result


def test_cases_take_the_images_place(result):
    """`one` by case, over two seeds: site-1's case x is 0.4 and 0.6, mean 0.5, y 0.7: 0.6 ± 0.1; site-2's one case 0.8. Average
    0.7 ± 0.1; by seed (0.55 + 0.8)/2 = 0.675 and (0.65 + 0.8)/2 = 0.725, ± 0.025. IoU, at site-2: 0.8/1.2 = 2/3. `old` was run
    before there were volumes, `partly` has them at one site. Its images' Dice is what it was."""
    seeds = [{"site-1": {"start": {"x": x, "y": 0.7}}, "site-2": {"start": {"z": 0.8}}} for x in (0.4, 0.6)]
    one = with_cases(result("one", ONE), seeds)
    old = result("old", OTHER)
    partly = with_cases(result("partly", OTHER), [{"site-1": seed["site-1"]} for seed in seeds])
    more = methods_tables({"one": one, "old": old, "partly": partly}, list(SITES), NAMES, 2, ())
    table = more[-1]
    assert table.name == "volumes"
    assert table.heads[1:6] == (*(f"Dice (%) {c}" for c in (*SITES, "Average", "± seeds")), "IoU (%) site-1")
    cells = [[str(cell) for cell in row] for row in table.rows]
    assert cells[0][:5] == ["one", "60.00 ± 10.00", "80.00", "70.00 ± 10.00", "2.50"]
    assert cells[0][6] == "66.67", "one case alone has no deviation"
    assert cells[1] == ["old", *["—"] * 8]
    assert cells[2][:5] == ["partly", "60.00 ± 10.00", *["—"] * 3]
    assert str(more[0].rows[0][1]) == "80.00 ± 10.00"
    assert "one volume" in table.markdown()


def with_classes(result, cups: list):
    """Adds the classes disc and cup to a run's images: the cup has these Dice by seed and ASSD 2, the disc 1 and 0."""
    for folder, cup in zip(result.folders.values(), cups, strict=True):
        for path in folder.glob("sites/*/images.csv"):
            rows = list(csv.DictReader(path.open(newline="")))
            for row in rows:
                row |= {f"{metric}_disc": 1.0 if metric in ("dice", "iou") else 0.0 for metric in METRICS}
                row |= {f"{metric}_cup": cup if metric in ("dice", "iou") else 2.0 for metric in METRICS}
            with path.open("w", newline="") as handle:
                writer = csv.DictWriter(handle, rows[0])
                writer.writeheader()
                writer.writerows(rows)
    return result


def test_each_of_several_classes_has_a_table(result):
    """The cup of `one` is 0.4 and 0.6 by seed: 50 % at both sites, ± 10 over the seeds. `old` was run before classes were kept
    apart: it has the means over classes, as before. `both` lacks them under one seed, so its seeds have none in common."""
    one, old = with_classes(result("one", ONE), [0.4, 0.6]), result("old", OTHER)
    both = with_classes(result("both", ONE), [0.4, 0.6])
    write_run(tmp := both.folders[1].parent / "again", ONE[1])
    both.folders[1] = tmp
    named = {"one": one, "old": old, "both": both}
    tables = methods_tables(named, list(SITES), NAMES, 2, ())
    assert [table.name for table in tables] == [
        "methods",
        "methods_class_1",
        "methods_class_2",
        "methods_more",
        "spread",
        "seeds",
    ]
    assert [table.title for table in tables[1:3]] == ["The methods: disc alone", "The methods: cup alone"]
    disc, cup = ([[str(cell) for cell in row] for row in table.rows] for table in tables[1:3])
    assert cup[0] == ["one", *["50.00 ± 0.00"] * 3, "10.00", *["2.00 ± 0.00"] * 3, "0.00"]
    assert disc[0][1:5] == [*["100.00 ± 0.00"] * 3, "0.00"]
    assert [row[1:] for row in (*disc[1:], *cup[1:])] == [["—"] * 8] * 4
    first = [[str(cell) for cell in row] for row in tables[0].rows]
    assert first[0][1:5] == first[2][1:5] == ["80.00 ± 10.00", "60.00 ± 10.00", "70.00 ± 10.00", "5.00"]
    assert first[1][1] == "60.00 ± 10.00"


def test_runs_without_volumes_have_no_table_of_them(result):
    tables = methods_tables({"one": result("one", ONE), "never": Result({}, {0: "broke"})}, list(SITES), NAMES, 2, ())
    assert [table.name for table in tables] == ["methods", "methods_more", "spread", "seeds"]


def test_the_cases_of_the_network_before_and_after(result):
    slots = {"tuned": {"a": 0.6}, "calibrated": {"a": 0.7}}
    found = with_cases(
        result("x", [dict.fromkeys(SITES, slots)]), [{"site-1": {"tuned": {"x": 0.1}, "calibrated": {"x": 0.2}}}]
    )
    means = [scores(found, ["site-1"], when, CASE).average["dice"]["mean"] for when in (BEFORE, FINAL)]
    assert means == [0.1, 0.2]


@pytest.mark.parametrize("text", [None, "", "network,case\nstart,x\n"])
def test_a_broken_table_of_cases_is_named(result, text):
    made = with_cases(result("x", [ONE[0]]), [{"site-2": {"start": {"z": 0.8}}}])
    path = made.folders[0] / "sites/site-2/cases.csv"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(FedDPError, match="site-2/cases.csv .* case"):
        scores(made, list(SITES), unit=CASE)


@pytest.mark.parametrize("text", [None, "", "network,image\nstart,a\n", "network,image,dice\n"])
def test_a_broken_table_of_images_is_named(result, text):
    made = result("x", [ONE[0]])
    path = made.folders[0] / "sites/site-2/images.csv"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(FedDPError, match="site-2/images.csv"):
        scores(made, list(SITES))


def test_wilcoxon_by_hand(result):
    """Five patients, differences of 1, 2, 3, 4 and 5 points, all for one side: the rank sum is extreme, and of the 2^5 equally
    likely signs two are as extreme, so p = 2/32 = 0.0625. The median difference is 3 points. The pairs span both sites. Patient
    r has two images, 1 and 5 points better: one observation of 3 points. Over the six images p would be 2/64."""
    better = {"site-1": {"start": {"a": 0.51, "b": 0.62}}, "site-2": {"start": {"a": 0.71, "c": 0.6, "d": 0.84, "e": 0.55}}}
    worse = {"site-1": {"start": {"a": 0.5, "b": 0.6}}, "site-2": {"start": {"a": 0.7, "c": 0.55, "d": 0.8, "e": 0.5}}}
    names = {"site-1": {"a": "p", "b": "q"}, "site-2": {"a": "r", "c": "r", "d": "s", "e": "t"}}
    worst = {site: {"start": dict.fromkeys(slots["start"], 0.1)} for site, slots in worse.items()}
    found = {name: scores(result(name, [dice]), list(SITES)) for name, dice in (("w", worse), ("b", better), ("x", worst))}
    assert best_two(found) == ["b", "w"]
    test = (
        "Wilcoxon signed-rank test (two-sided, per patient, seeds averaged), b against w: n = 5 test patients, 5 of them"
        " differ, median difference +3.00 points of Dice, p = 0.0625."
    )
    for alike in ((), ("b", "w"), ("x",)):
        assert sentence(found, names, alike) == test
    for one, other in (("b", "w"), ("w", "b")):
        said = f"{test} {one} is of the last round or went on from it; {other} is of the best round."
        assert sentence(found, names, (one,)) == said


def test_wilcoxon_where_nothing_differs(result):
    """Image a of each site is of one patient, image b of another: four patients."""
    same = scores(result("a", ONE), list(SITES))
    assert sentence({"a": same, "b": same}, NAMES, ()).endswith("a against b: no difference in any patient (n = 4).")
    assert "needs two methods" in sentence({"a": same}, NAMES, ())


def test_seconds_and_bytes_by_hand(result):
    """Three rounds of 2 s; 2 sites receive and send 100 bytes in each, and receive 100 more to adopt: 3 (200 + 200) + 200 =
    1400. At home: each gives 3 bytes and receives 3, 12 together; 3 s to collect and 3 s to calibrate: 6 s, without the
    evaluation that follows, and without the night for which a run was broken off between the two."""
    events = read_events(result("x", [ONE[0]], events=federation(3, home=True)).folders[0] / PROGRESS)
    assert train_seconds(events) == 6
    assert local_seconds(events) == 6
    broken_off = [e for e in events if e["event"] != "answer" or e["task"] != "calibrate"]
    a_night_later = [e | {"time": e["time"] + 28_800} for e in events if e.get("task") == "calibrate"]
    assert local_seconds([*broken_off, *a_night_later]) == 6
    assert traffic(events) == (1400, 12)
    without = federation(3, home=False)
    assert (local_seconds(without), traffic(without)) == (0, (1400, 0))


def test_bytes_of_a_run_that_was_broken_off_count_once():
    """The server is killed in round 2 of 3, after one of two answers, and once more after one answer to the calibration: each
    request is made again, and counts as it ended. So the bytes are those of a run that nothing broke off, 1400 and 12."""
    events = federation(3, home=True)
    for task, round in (("train", 2), ("calibrate", None)):
        asked = next(i for i, e in enumerate(events) if (e["event"], e.get("task"), e.get("round")) == ("ask", task, round))
        resumed = {"event": "resumed", "time": 0.0, "round": 1, "of": 3}
        events = [*events[: asked + 2], resumed, *events[asked:]]
    assert traffic(events) == (1400, 12)


def test_seconds_per_round_by_hand(result):
    """Three rounds of 2 s; a site trains for 1.5 s of them and says no more. It is asked at 0, 2, 4 s and answers 2 s later,
    when the round ends: 0.5 s to receive, none idle."""
    folder = result("x", [ONE[0]], events=federation(3, home=True))
    table = times_table({"x": folder})
    said = {head: cell.mean for head, cell in zip(table.heads, table.rows[0], strict=True) if isinstance(cell, Value)}
    assert said == {"Wall": 2.0, "Receiving": 0.5, "Idle": 0.0}


def test_seconds_per_stage_by_hand(result):
    """Three rounds of 2 s, and 1 s for the choice of one; at home 3 s to collect and 3 s to calibrate; 10 s of evaluation. The
    second method has no calibration and two seeds, whose rounds take 6 s and 2 s: 4 + 1 s on average. The third failed."""
    home = result("x", [ONE[0]], events=federation(3, home=True))
    seeds = [result(name, [ONE[0]], events=federation(n, home=False)).folders[0] for name, n in (("y", 3), ("z", 1))]
    table = stages_table({"x": home, "y": Result(dict(enumerate(seeds)), {}), "z": Result({}, {0: "why"})})
    assert table.heads == ("Method", "Train", "Calibrate", "Evaluate")
    assert [list(map(str, row)) for row in table.rows] == [
        ["x", "7.00", "6.00", "10.00"],
        ["y", "5.00", BLANK, "10.00"],
        ["z", "failed: why", "", ""],
    ]


def test_a_round_of_which_nothing_is_known_adds_no_seconds():
    """Three rounds of 2 s; the server died before it noted the second: 4 s are known."""
    events = [event for event in federation(3, home=False) if (event["event"], event.get("round")) != ("round", 2)]
    assert train_seconds(events) == 4


def test_a_run_without_a_federation_has_no_traffic(tmp_path):
    assert traffic([]) is None
    assert (train_seconds([]), local_seconds([]), curves([]), mean_curve({})) == (0, 0, {}, {})
    assert read_events(tmp_path / PROGRESS) == []
    lone = [{"event": "answer", "site": "pool", "task": "train", "round": 2, "scalars": {"iou": 0.5}}]
    assert traffic(lone) is None
    assert mean_curve(curves(lone)) == {1: 0.5}


def test_a_rounds_score_comes_with_the_next_round():
    """Round t's network scores t/10 at site-1 and 0.01 more at site-2: rounds 1 and 2 with the answers of rounds 2 and 3,
    round 3 when it is adopted. A round that one site lacks has no mean."""
    found = curves(federation(3, home=True))
    assert found["site-1"] == {1: 0.1, 2: 0.2, 3: 0.3}
    assert mean_curve(found) == pytest.approx({1: 0.105, 2: 0.205, 3: 0.305})
    del found["site-2"][2]
    assert sorted(mean_curve(found)) == [1, 3]


def test_the_maxima_of_every_ten_rounds():
    """Rounds 1 to 23 at 0.01 times their number, but 0.5 in round 4: 0.5 of 1 to 10, 0.2 of 11 to 20, 0.23 of 21 to 23."""
    curve = {round: round / 100 for round in range(1, 24)} | {4: 0.5}
    assert maxima(curve) == {10: 0.5, 20: 0.2, 23: 0.23}
    assert maxima({1: 0.1, 2: 0.05}) == {2: 0.1}


@pytest.mark.parametrize("rounds", [10, 11])
def test_only_runs_of_more_than_ten_rounds_have_a_figure_of_maxima(result, tmp_path, monkeypatch, rounds):
    """Round t scores t/10 at site-1 and 0.01 more at site-2, 0.005 more on average. Of rounds 1 to 10, the highest is that of
    10; round 11 is alone. Both seeds are alike."""
    drawn = []
    draw, save = figures.draw_curves, figures.save
    monkeypatch.setattr(figures, "draw_curves", lambda panels, ylabel: drawn.append((panels, ylabel)) or draw(panels, ylabel))
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(path.name) or save(figure, path))
    named = {"one": result("one", ONE, events=federation(rounds, home=False))}
    draw_methods(tmp_path, named, list(SITES))
    above = {"Average": 0.005, "site-1": 0.0, "site-2": 0.01}
    figures_of = {"curves_methods.png": (range(1, rounds + 1), "validation IoU")}
    if rounds > 10:
        figures_of["curves_methods_maxima.png"] = ((10, 11), "validation IoU, maximum of 10 rounds")
    assert drawn[1::2] == list(figures_of)
    for (panels, axis), (shown, said) in zip(drawn[::2], figures_of.values(), strict=True):
        assert (axis, list(panels)) == (said, list(above))
        for site, more in above.items():
            assert panels[site] == {"one": [pytest.approx({t: t / 10 + more for t in shown})] * 2}
    assert {path.name for path in tmp_path.glob("*.png")} == set(figures_of)


def test_inference_is_timed_one_image_at_a_time_after_three_passes():
    import torch

    class Counting(torch.nn.Module):
        shapes: list = []

        def forward(self, x):
            self.shapes.append(tuple(x.shape))
            return x

    network = Counting()
    assert inference_ms(network, [torch.zeros(3, 8, 8)] * 5) > 0
    assert network.shapes == [(1, 3, 8, 8)] * 8


def test_the_note_says_of_which_round_each_method_is(result):
    """With start=last all are of the last round, whatever their stages."""
    named = {"fedavg": result("a", ONE), "feddp": result("b", OTHER)}

    def said(last):
        return methods_tables(named, list(SITES), NAMES, 2, last)[0].notes[1]

    best = "the round that is best on the selection split, in Local Train each site's own"
    assert said({"feddp"}) == f"Of the last round, or gone on from it (Algorithm 1): feddp. Of {best}: fedavg."
    assert said({"fedavg", "feddp"}) == "All networks are of the last round, or gone on from it (Algorithm 1)."
    assert said(()) == f"All networks are of {best}."


def test_seeds_that_are_missing_are_named_in_every_table_of_times(result):
    some = Result(result("a", ONE[:1], events=federation(3, home=True)).folders, {1: "broke", 2: "broke"})
    tables = (times_table({"a": some}), stages_table({"a": some}), efficiency_table({"a": some}, Path("data"), "cpu"))
    assert [table.rows[0][0] for table in tables] == ["a (1 of 3 seeds)"] * 3


@pytest.mark.parametrize(("device", "said"), [("cpu", "on one CPU thread, the"), ("cuda:1", "on the device cuda:1, the")])
def test_the_note_of_the_times_names_the_device_of_inference(device, said):
    """The table of a method that never finished measures nothing, and needs no such device."""
    notes = efficiency_table({"a": Result({}, {0: "broke"})}, Path("data"), device).notes
    assert said in notes[0]
    assert ("CPU" in notes[0]) == (device == "cpu")
