"""Which methods differ: patients as observations, Holm's correction, ranks, published orders; every number by hand."""

import numpy as np
import pytest

from feddp.compare.pairs import pairs_tables
from feddp.compare.patients import PatientScores, firsts, holm, percentiles, ranks
from feddp.compare.published import PUBLISHED, orderings_table
from feddp.compare.ranking import finished, ranking_tables
from feddp.compare.scores import BEFORE, Result, scores
from feddp.compare.tested import empty_masks, patients, with_structures
from feddp.data.folder import SiteFolder, write_site
from feddp.reporting.tables import BLANK, Value
from support.compare_runs import SITES, write_run


def names(patients: int, images: int = 1) -> dict[str, dict[str, str]]:
    """Of both sites: so many patients with so many images each, called 0a, 0b, ..., 1a, ..."""
    return {site: {f"{p}{'abc'[i]}": str(p) for p in range(patients) for i in range(images)} for site in SITES}


def dice(values, images: int = 1) -> dict:
    """A run in which every image of patient p of both sites has the Dice values[p]."""
    return {
        site: {"start": {f"{p}{'abc'[i]}": value for p, value in enumerate(values) for i in range(images)}} for site in SITES
    }


@pytest.fixture
def found(tmp_path):
    """Makes {method: scores} from each method's Dice by patient, equal at both sites."""

    def make(**methods):
        runs = {label: Result({0: write_run(tmp_path / label, dice(values))}, {}) for label, values in methods.items()}
        return finished(runs, list(SITES))

    return make


def test_holm_by_hand():
    """0.01 · 3 = 0.03; then 0.03 · 2 = 0.06; then 0.04 · 1 = 0.04, which is no smaller than the one before: 0.06."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_patient_weighs_as_many_images_as_it_has():
    """Patient x has images of 50 and 70 %, y one of 90 %: the site's mean is 210/3 = 70. One of two patients is drawn: 60 or
    90. By Wilcoxon, patients count once: x by its mean."""
    tested = PatientScores(("m",), (np.array([2, 1]),), (np.array([[120.0], [90.0]]),))
    assert tested.means() == pytest.approx([70])
    assert set(tested.resampled()[:, 0]) == {60.0, 90.0}


def test_of_returns_the_sums_of_each_patient(tmp_path):
    run = {site: {"start": {"a": 0.5, "b": 0.7, "c": 0.9}} for site in SITES}
    found = {"m": scores(Result({0: write_run(tmp_path / "m", run)}, {}), list(SITES))}
    tested = PatientScores.of({"m": found["m"].rows}, "dice", {site: {"a": "x", "c": "y", "b": "x"} for site in SITES})
    assert [list(images) for images in tested.images] == [[2, 1], [2, 1]]
    assert [sums.tolist() for sums in tested.sums] == [[[pytest.approx(120)], [pytest.approx(90)]]] * 2
    assert tested.count == 4
    assert not tested.enough, "six patients are needed"


def test_few_patients_vary_as_much_as_they_should():
    """Two patients of 0 and 10: s² = 50, so the mean's variance is s²/n = 25. One draw is 0 or 10, each with probability 1/2:
    variance 25. Two draws would be 0, 5, 5 or 10: 12.5. Two such sites: 25 · 2/4 = 12.5. The variance of 4000 draws, of which
    (mean − 5)² is 0 or 25 with probability 1/2 each, has the standard error 12.5/√4000 = 0.2."""
    site = np.array([[0.0], [10.0]])
    one = PatientScores(("m",), (np.ones(2),), (site,)).resampled()
    assert np.var(one) == pytest.approx(25, abs=0.1)
    assert np.var(PatientScores(("m",), (np.ones(2),) * 2, (site, site)).resampled()) == pytest.approx(12.5, abs=0.8)


def test_the_same_patients_are_drawn_for_all_methods():
    """The second method is 3 above the first for each patient, so in each draw too."""
    site = np.array([[0.0, 3.0], [10.0, 13.0], [4.0, 7.0]])
    drawn = PatientScores(("one", "other"), (np.ones(3),), (site,)).resampled()
    assert drawn[:, 1] - drawn[:, 0] == pytest.approx(3)
    assert len(np.unique(drawn[:, 0])) > 3


def test_wilcoxon_over_patients_not_images():
    """Three patients at each site, two images each, all better by different amounts: 6 differences of one sign, exact
    two-sided p = 2/2⁶ = 0.03125. Twelve images would give 2/2¹² = 0.0005."""
    better = np.array([[10.0, 12.0], [10.0, 14.0], [10.0, 18.0]])
    tested = PatientScores(("one", "other"), (np.full(3, 2),) * 2, (better, better + [[0, 20.0]]))
    assert tested.p_value(1, 0) == pytest.approx(0.03125)
    assert tested.p_value(0, 0) == 1.0


def test_wilcoxon_takes_a_patients_mean_however_many_images_it_has():
    """Differences of +1 in ten images, −2 and +3 in one each: ranks 1, 2, 3, of which 2 are negative. Of the 8 sums of ranks 3
    are at most 2 (0, 1, 2): p = 2 · 3/8. By sums, +10 would have rank 3, −2 rank 1: p = 2 · 2/8."""
    tested = PatientScores(("one", "other"), (np.array([10, 1, 1]),), (np.array([[0.0, 10.0], [2.0, 0.0], [0.0, 3.0]]),))
    assert tested.p_value(1, 0) == pytest.approx(0.75)


def test_a_draw_of_patients_is_the_mean_over_their_images():
    """Three images of 10 %, one of 20, one of 30. Two patients are drawn: 10, (30 + 20)/4, (30 + 30)/4, 20, 25 or 30."""
    tested = PatientScores(("m",), (np.array([3, 1, 1]),), (np.array([[30.0], [20.0], [30.0]]),))
    assert set(tested.resampled()[:, 0]) == {10.0, 12.5, 15.0, 20.0, 25.0, 30.0}


def test_equal_methods_share_a_rank():
    assert ranks(np.array([[3.0, 1.0, 3.0], [1.0, 2.0, 3.0]])).tolist() == [[1.5, 3.0, 1.5], [3.0, 2.0, 1.0]]


def test_an_interval_is_wider_where_patients_are_few():
    """The middle 95 % of 0 to 1000 are 25 to 975. Of two sites with two patients each, two degrees of freedom: Gosset's t is
    4.303, the normal distribution's z 1.960, their ratio 2.195. Around 500: 500 ± 475 · 2.195 = 500 ± 1042.8."""
    draws = np.arange(1001.0)
    assert percentiles(draws) == pytest.approx((25, 975))
    few = PatientScores(("m",), (np.ones(2),) * 2, (np.zeros((2, 1)),) * 2)
    assert few.interval(draws, 500.0) == pytest.approx((-542.8, 1542.8), abs=0.3)
    many = PatientScores(("m",), (np.ones(501),) * 2, (np.zeros((501, 1)),) * 2)  # 1000: t = 1.962, by a table
    assert many.interval(draws, 500.0) == pytest.approx((24.4, 975.6), abs=0.3)


def test_of_true_differences_of_nothing_one_interval_in_twenty_excludes_it():
    """Normal values of four sites of three patients: 300 samples, 5 % of which are 15 ± 3.8. With percentiles alone, the share
    is about twice that."""
    rng, outside = np.random.default_rng(3), 0
    for _ in range(300):
        tested = PatientScores(("m",), (np.ones(3),) * 4, tuple(rng.standard_normal((4, 3, 1))))
        low, high = tested.interval(tested.resampled()[:, 0], tested.means()[0])
        outside += low > 0 or high < 0
    assert 5 <= outside <= 27


def test_the_table_of_methods(found):
    """feddp is 5 points above fedavg for each of 3 patients at both sites, local 10 below: so in each draw. Six differences
    of one sign: p = 2/64 = 0.03125, by Holm 2 · that = 0.0625 for both. Ranks are always 1, 2, 3."""
    methods = found(local=[0.4, 0.5, 0.7], feddp=[0.55, 0.65, 0.85], fedavg=[0.5, 0.6, 0.8])
    (table,) = ranking_tables(methods, names(3), names(3))
    assert [row[0] for row in table.rows] == ["feddp", "fedavg", "local"]
    rows = {row[0]: dict(zip(table.heads[1:], row[1:], strict=True)) for row in table.rows}
    first, last = rows["feddp"], rows["local"]
    assert str(first["Dice (%)"]) == "68.33"
    assert first["Worst site"] == "site-1"
    assert str(first["difference"]) == "5.00"
    assert first["interval of it"] == "5.00 to 5.00"
    assert last["interval of it"] == "-10.00 to -10.00"
    assert (str(first["p"]), str(first["p by Holm"])) == ("0.0312", "0.0625")
    assert (str(last["p"]), str(last["p by Holm"])) == ("0.0312", "0.0625")
    assert (str(first["Mean rank"]), first["interval of the rank"], str(first["First in (%)"])) == (
        "1.0",
        "1.0 to 1.0",
        "100.0",
    )
    assert str(last["First in (%)"]) == "0.0"
    assert rows["fedavg"]["p"] == BLANK
    assert first["Variance over sites"] == Value(0.0)
    low, high = map(float, rows["fedavg"]["interval"].split(" to "))
    # draws are means from 50 to 80, 13.33 and 16.67 from the mean; wider by t / z = 2.776 / 1.960 of 4 degrees of freedom
    assert 63.33 - 1.417 * 13.34 <= low < 63.33 < high <= 63.33 + 1.417 * 16.67
    assert any("6 test patients of 2 sites" in note for note in table.notes)
    assert "Variance over sites: the population's, of the sites' means." in table.notes


def test_each_method_has_its_own_interval_and_the_variance_over_all_sites(tmp_path):
    """fedavg has 40, 50, 60 at the first site and 60, 70, 80 at the second, means 50 and 70: their variance is 10² = 100 (over
    one site fewer, 200). feddp is 5 above it at each patient of the first site and 15 at the second's: 55 and 85, variance
    15² = 225. other is 20 above fedavg everywhere, so in each draw, and both ends of its interval are."""
    first, second = [0.4, 0.5, 0.6], [0.6, 0.7, 0.8]
    runs = {}
    for label, more in (("fedavg", (0, 0)), ("feddp", (0.05, 0.15)), ("other", (0.2, 0.2))):
        images = [{f"{p}a": value + more[i] for p, value in enumerate(each)} for i, each in enumerate((first, second))]
        values = {site: {"start": each} for site, each in zip(SITES, images, strict=True)}
        runs[label] = Result({0: write_run(tmp_path / label, values)}, {})
    (table,) = ranking_tables(finished(runs, list(SITES)), names(3), names(3))
    rows = {row[0]: dict(zip(table.heads, row, strict=True)) for row in table.rows}
    variances = {label: row["Variance over sites"].mean for label, row in rows.items()}
    assert variances == pytest.approx({"fedavg": 100, "feddp": 225, "other": 100})
    base, above = ([float(end) for end in rows[label]["interval"].split(" to ")] for label in ("fedavg", "other"))
    assert above == pytest.approx([end + 20 for end in base], abs=0.011)


def test_equal_methods_share_the_draws_in_which_they_are_the_best():
    """Of four draws a wins one, a and b share one, all three share one, and c wins one: a has 1 + 1/2 + 1/3 = 11/6 of 4, b 1/2
    + 1/3 = 5/6, c 1/3 + 1 = 4/3, together 4."""
    draws = np.array([[3, 2, 1], [3, 3, 1], [2, 2, 2], [1, 1, 2]])
    assert firsts(ranks(draws)) == pytest.approx(np.array([11 / 6, 5 / 6, 4 / 3]) / 4 * 100)


def test_methods_that_are_equal_everywhere_are_first_as_often(found):
    """fedavg and feddp are equal and above local: in each draw, half of the first place for either."""
    (table,) = ranking_tables(found(local=[0.4, 0.5, 0.7], feddp=[0.5, 0.6, 0.8], fedavg=[0.5, 0.6, 0.8]), names(3), names(3))
    at = table.heads.index("First in (%)")
    assert {row[0]: str(row[at]) for row in table.rows} == {"feddp": "50.0", "fedavg": "50.0", "local": "0.0"}


def test_too_few_patients_have_no_interval(found):
    (table,) = ranking_tables(found(fedavg=[0.5], feddp=[0.6]), names(1), names(1))
    feddp = dict(zip(table.heads, table.rows[0], strict=True))
    assert feddp["interval"] == feddp["interval of the rank"] == BLANK
    assert str(feddp["difference"]) == "10.00"
    assert ranking_tables(found(only=[0.5]), names(1), names(1)) == []


def test_images_with_an_empty_mask_are_also_left_out(found):
    """Five patients at both sites; the masks of patients 0 and 1 are empty at the first. Over all images fedavg has
    (200 + 180) / 5 = 76 at both, feddp (100 + 210) / 5 = 62. Without the empty ones the first site has 60 and 70: means 68
    and 66."""
    methods = found(fedavg=[1, 1, 0.6, 0.6, 0.6], feddp=[1, 0, 0.7, 0.7, 0.7])
    kept = with_structures(names(5), {SITES[0]: {"0a", "1a"}, SITES[1]: set()})
    every, filled = ranking_tables(methods, names(5), kept)
    assert [(row[0], str(row[1])) for row in every.rows] == [("fedavg", "76.00"), ("feddp", "62.00")]
    rows = {row[0]: dict(zip(filled.heads, row, strict=True)) for row in filled.rows}
    assert str(rows["fedavg"]["Dice (%)"]) == "68.00", "60 and 76"
    assert str(rows["feddp"]["Dice (%)"]) == "66.00", "70 and 62"
    assert (rows["feddp"]["Worst site"], str(rows["feddp"]["Worst site's Dice (%)"])) == (SITES[1], "62.00")
    assert not any("empty" in head for head in filled.heads), "a mean of two images"
    assert any("8 test patients of 2 sites" in note for note in filled.notes)
    assert any("2 test images with an empty mask" in note for note in filled.notes)


def test_the_dice_of_empty_masks_where_there_are_six(found):
    """Patients 0 to 2 at both sites: feddp has 100, 0 and 100, mean 66.7; fedavg 100."""
    methods = found(fedavg=[1, 1, 1, 0.6, 0.6], feddp=[1, 0, 1, 0.7, 0.7])
    kept = with_structures(names(5), dict.fromkeys(SITES, {"0a", "1a", "2a"}))
    filled = ranking_tables(methods, names(5), kept)[1]
    assert [(row[0], str(row[1]), str(row[-1])) for row in filled.rows] == [
        ("feddp", "70.00", "66.7"),
        ("fedavg", "60.00", "100.0"),
    ]
    assert filled.heads[-1] == "Dice (%) of 6 empty masks"


def test_a_site_without_structures_has_no_table_of_them(found):
    methods = found(fedavg=[1, 1], feddp=[1, 0])
    kept = with_structures(names(2), {SITES[0]: {"0a", "1a"}, SITES[1]: set()})
    assert len(ranking_tables(methods, names(2), kept)) == 1


def test_every_two_methods(found):
    """For each of 4 patients at both sites feddp is 5 points above fedavg, and fedavg 10 above local: so in each draw, and n
    differences of one sign have p = 2/2ⁿ: 2/256 of all eight, 2/64 = 0.03125 of the six without patient 0."""
    methods = found(local=[0, 0.5, 0.7, 0.4], feddp=[0.15, 0.65, 0.85, 0.55], fedavg=[0.1, 0.6, 0.8, 0.5])
    kept = with_structures(names(4), dict.fromkeys(SITES, {"0a"}))
    every, filled = pairs_tables(methods, names(4), kept)
    assert every.heads == ("Method", "feddp", "fedavg", "local")
    rows = [tuple(map(str, row)) for row in filled.rows]
    assert rows == [
        ("feddp", BLANK, "5.00 (5.00 to 5.00)", "15.00 (15.00 to 15.00)"),
        ("fedavg", "0.0312", BLANK, "10.00 (10.00 to 10.00)"),
        ("local", "0.0312", "0.0312", BLANK),
    ]
    assert str(every.rows[1][1]) == "0.0078", "eight patients: 2/2⁸"


def test_the_interval_of_two_methods_is_that_of_which_methods_differ(found):
    """And each p is that of its own pair: feddp is above local for every patient, below fedavg for one of them."""
    methods = found(local=[0.2, 0.1, 0.75], fedavg=[0.5, 0.9, 0.7], feddp=[0.9, 0.7, 0.8])
    (ranking,), (pairs,) = ranking_tables(methods, names(3), names(3)), pairs_tables(methods, names(3), names(3), {"feddp"})
    against = {row[0]: dict(zip(ranking.heads, row, strict=True)) for row in ranking.rows}["feddp"]
    assert pairs.rows[0][2] == f"{against['difference']} ({against['interval of it']})", "feddp less fedavg"
    assert pairs.rows[1][1] == against["p"]
    below = {(row, column): pairs.rows[row][1 + column].mean for row in range(3) for column in range(row)}
    order = pairs.heads[1:]
    for (row, column), p in below.items():
        two = {label: methods[label].rows for label in (order[row], order[column])}
        assert p == PatientScores.of(two, "dice", names(3)).p_value(0, 1)
    assert len(set(below.values())) == 3
    assert pairs.notes[1].startswith("Of the last round, or gone on from it: feddp; ")


def test_pairs_of_few_patients_or_methods(found):
    methods = found(fedavg=[0.5], feddp=[0.6], local=[0.3])
    (table,) = pairs_tables(methods, names(1), names(1))
    assert [str(cell) for cell in table.rows[0]] == ["feddp", BLANK, "10.00", "30.00"]
    assert len(table.notes) == 1, "all are of the best round"
    assert "interval" not in table.notes[0]
    two = {label: methods[label] for label in ("fedavg", "feddp")}
    assert pairs_tables(two, names(1), names(1)) == [], "the ranking has the pair"


def test_published_orders_count_images_with_an_empty_mask_only_if_a_site_has_no_others(found):
    """The note says which."""
    methods = found(fedavg=[1, 0.5], feddp=[0, 0.6])
    for empty, says in (({"0a"}, True), (set(), True), ({"0a", "1a"}, False)):
        kept = with_structures(names(2), {SITES[0]: empty, SITES[1]: set()})
        note = orderings_table(methods, names(2), kept).notes[0]
        assert ("always show the structure, so images with an empty mask are left out." in note) == says
        assert ("images with an empty mask count here all the same, because a site has no others." in note) != says


def test_an_empty_mask_has_no_foreground_at_the_networks_size(tmp_path):
    """At 8 px, every fourth pixel of 32 is looked at: of a mask with one pixel, that is seen at (2, 2) and not at (0, 0)."""
    pixel = np.zeros((3, 32, 32), np.uint8)
    pixel[1, 0, 0] = pixel[2, 2, 2] = 1
    samples = [(name, name, "test", np.zeros((32, 32), np.uint8), mask) for name, mask in zip("abc", pixel, strict=True)]
    write_site(tmp_path / "site", {"name": "toy", "channels": 1, "classes": ["lesion"], "labels": "nested"}, samples)
    folder = SiteFolder.open(tmp_path / "site")
    assert empty_masks(folder, 32) == {"a"}
    assert empty_masks(folder, 8) == {"a", "b"}
    assert patients(folder) == {"a": "a", "b": "b", "c": "c"}


def test_equal_methods_have_neither_order(found):
    """A pair that is equal here counts in neither; where all are equal, there is no τ."""
    rows = {row[0]: row[1:] for row in orderings_table(found(fedavg=[0.5, 0.9], feddp=[0.5, 0.9]), names(2), names(2)).rows}
    assert rows["FedDP, Table I"][1:] == ("1", "0", BLANK, "0", BLANK, BLANK)


def test_methods_that_failed_under_a_seed_are_left_out(tmp_path):
    """As are those without a federation."""
    whole = Result({0: write_run(tmp_path / "whole", dice([0.5]))}, {})
    partly = Result({0: write_run(tmp_path / "partly", dice([0.5]))}, {1: "broke"})
    pooled = Result({0: write_run(tmp_path / "pooled", dice([0.5]), federated=False)}, {})
    assert list(finished({"whole": whole, "partly": partly, "pooled": pooled}, list(SITES))) == ["whole"]


def test_before_the_last_stage(tmp_path):
    """`when` of a result says which networks are measured: start, not calibrated."""
    run = write_run(tmp_path / "run", {site: {"start": {"a": 0.5}, "calibrated": {"a": 0.7}} for site in SITES})
    assert scores(Result({0: run}, {}), list(SITES)).average["dice"]["mean"] == pytest.approx(0.7)
    assert scores(Result({0: run}, {}, BEFORE), list(SITES)).average["dice"]["mean"] == pytest.approx(0.5)


def test_published_orders_by_hand(found):
    """Of Table I: local < fedavg < feddp. Here fedavg < feddp < local, each by the same amount at every patient, so beyond
    chance: local−fedavg and local−feddp are the other way, fedavg−feddp is the same way. τ = (1 − 2)/3 = −0.33."""
    table = orderings_table(found(local=[0.7, 0.8, 0.9], fedavg=[0.5, 0.6, 0.7], feddp=[0.6, 0.7, 0.8]), names(3), names(3))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["FedDP, Table I"] == ("local, fedavg, feddp", "3", "1", "1", "2", "2", Value(pytest.approx(-1 / 3)))
    assert rows["FedDP, Table III, polyps"] == ("fedavg, feddp", "1", "1", "1", "0", "0", Value(pytest.approx(1.0)))
    assert "FedDP, Table I: fedavg above local; here below, beyond chance." in table.notes
    assert "FedDP, Table I: feddp above local; here below, beyond chance." in table.notes
    assert "Virtual classes, Table I, fundus, U-Net" not in rows, "it has fedavg alone of these"


def test_fedavg_s_last_round_is_fedavg_where_its_best_is_missing(found):
    """The same numbers under another name, the same row, a note. Of a label that is not of the last round it is not taken."""
    dice = {"finetune": [0.7, 0.8, 0.9], "feddp": [0.6, 0.7, 0.8]}
    known = found(fedavg=[0.5, 0.6, 0.7], **dice)
    other = {"finetune@when=before" if label == "fedavg" else label: scores for label, scores in known.items()}
    wanted = orderings_table(known, names(3), names(3), {*known})
    assert "fedavg" in wanted.rows[0][1]
    table = orderings_table(other, names(3), names(3), {*other})
    assert table.rows == wanted.rows
    assert table.notes == (wanted.notes[0], "fedavg is finetune@when=before here.", *wanted.notes[1:])
    without = orderings_table(other, names(3), names(3), {"finetune", "feddp"})
    assert without.rows[0][1] == "finetune, feddp"


def test_a_small_difference_is_within_chance(found):
    """feddp is above fedavg for one patient and below for another, on average a little below."""
    found = found(fedavg=[0.5, 0.9, 0.7, 0.6], feddp=[0.8, 0.5, 0.7, 0.6])
    rows = {row[0]: row[1:] for row in orderings_table(found, names(4), names(4)).rows}
    assert rows["FedDP, Table I"][1:6] == ("1", "0", "0", "1", "0")


def test_published_values_are_those_of_the_papers():
    """Three averages of each paper's table, read again."""
    table = {each.source: each.averages for each in PUBLISHED}
    assert (table["FedDP, Table I"]["local"], table["FedDP, Table I"]["fedlc"]) == (61.69, 84.36)
    assert table["FedDP, Table II"]["ditto"] == 91.53
    assert table["FedDP, Table III, polyps"]["feddp@when=before"] == 84.80
    assert table["Virtual classes, Table I, polyps, U-Net"]["iop_fl"] == 63.30
