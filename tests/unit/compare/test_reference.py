"""Methods that go on from the last round are compared with FedAvg's last, the others with its best; numbers by hand."""

import pytest

from feddp.compare.published import orderings_table
from feddp.compare.ranking import finished, ranking_tables
from feddp.compare.reference import reference, unlike
from feddp.compare.scores import Result
from feddp.reporting.tables import BLANK
from support.compare_runs import SITES, write_run

LAST = {"finetune", "finetune@when=before", "feddp", "feddp@when=before"}
NAMES = {site: {str(patient): str(patient) for patient in range(3)} for site in SITES}


@pytest.fixture
def found(tmp_path):
    """FedAvg's best round has 10 points less than its last at each patient; feddp lies in between, bn above both."""

    def make(*methods, **more):
        dice = {
            "fedavg": [0.4, 0.5, 0.6],
            "finetune@when=before": [0.5, 0.6, 0.7],
            "feddp": [0.45, 0.55, 0.65],
            "feddp@when=before": [0.43, 0.53, 0.63],
            "fedbn": [0.6, 0.7, 0.8],
        } | more
        runs = {}
        for label in (*methods, *more):
            values = {site: {"start": {str(patient): value for patient, value in enumerate(dice[label])}} for site in SITES}
            runs[label] = Result({0: write_run(tmp_path / label, values)}, {})
        return finished(runs, list(SITES))

    return make


@pytest.mark.parametrize(
    ("label", "methods", "last", "other"),
    [
        ("feddp", ["fedavg", "feddp"], LAST, "fedavg"),  # there is no other
        ("feddp", ["fedavg", "finetune@when=before", "feddp"], LAST, "finetune@when=before"),
        ("fedbn", ["fedavg", "finetune@when=before", "fedbn"], LAST, "fedavg"),
        ("finetune@when=before", ["fedavg", "finetune@when=before"], LAST, "fedavg"),  # what the choice of round does
        ("feddp", ["fedavg", "fedavg@start=last", "feddp"], LAST | {"fedavg@start=last"}, "fedavg@start=last"),
        ("feddp", ["fedavg", "finetune@when=before", "feddp"], set(), "fedavg"),  # with start=best, all are of the best
        ("feddp", ["fedavg", "finetune@when=before", "feddp"], LAST | {"fedavg"}, "fedavg"),  # with start=last, of the last
        ("feddp", ["local", "feddp"], LAST, "local"),
        # without FedAvg's best round there is one reference for all, itself included
        ("local", ["local", "finetune@when=before", "feddp"], LAST, "finetune@when=before"),
        ("feddp", ["local", "finetune@when=before", "feddp"], LAST, "finetune@when=before"),
        ("finetune@when=before", ["finetune", "finetune@when=before"], LAST, "finetune@when=before"),
    ],
)
def test_what_a_method_is_compared_with(label, methods, last, other):
    assert reference(label, methods, last) == other


def test_the_differences_are_to_the_same_choice_of_round(found):
    """feddp is 5 below FedAvg's last round (and 5 above its best), fedbn 20 above its best (and 10 above its last)."""
    methods = found("fedavg", "finetune@when=before", "feddp", "fedbn")
    (table,) = ranking_tables(methods, NAMES, NAMES, LAST)
    against, minus = (table.heads.index(head) for head in ("Against", "difference"))
    assert {row[0]: (row[against], str(row[minus])) for row in table.rows} == {
        "fedbn": ("fedavg", "20.00"),
        "finetune@when=before": ("fedavg", "10.00"),
        "feddp": ("finetune@when=before", "-5.00"),
        "fedavg": (BLANK, BLANK),
    }
    assert any("finetune@when=before is FedAvg's last round" in note for note in table.notes)
    assert any("corrected for 3 tests" in note for note in table.notes)


def test_a_table_without_the_last_round_says_so(found):
    (table,) = ranking_tables(found("fedavg", "feddp", "fedbn"), NAMES, NAMES, LAST)
    assert unlike(["fedavg", "feddp", "fedbn"], LAST) == ["feddp"]
    assert any(note.startswith("feddp: of the last round") for note in table.notes)
    assert unlike(["fedavg", "feddp", "fedbn"], LAST | {"fedavg", "fedbn"}) == []
    assert unlike(["local", "feddp"], LAST) == ["feddp"]


def test_a_table_without_the_best_round_says_so(found):
    (table,) = ranking_tables(found("finetune@when=before", "feddp", "fedbn"), NAMES, NAMES, LAST)
    assert unlike(["finetune@when=before", "feddp", "fedbn"], LAST) == ["fedbn"]
    (note,) = [note for note in table.notes if note.startswith("fedbn: of the best round")]
    assert "compared with finetune@when=before, of the last round. To compare with FedAvg's best round, add fedavg." in note


def test_published_orders_say_with_whom_fedavg_is_of_another_round(found):
    methods = found("fedavg", "feddp", "finetune@when=before")
    assert "except" not in orderings_table(methods, NAMES, NAMES, LAST).notes[0]
    del methods["finetune@when=before"]
    note = orderings_table(methods, NAMES, NAMES, LAST).notes[0]
    assert "that the other method takes (*Which methods differ*), except beside feddp;" in note


def test_one_pair_is_one_test(found):
    """Without fedavg: feddp is 5 points below FedAvg's last round at each of six patients, p = 2/2⁶, by Holm the same."""
    (table,) = ranking_tables(found("feddp", "finetune@when=before"), NAMES, NAMES, LAST)
    rows = {row[0]: dict(zip(table.heads, row, strict=True)) for row in table.rows}
    assert rows["finetune@when=before"]["p"] == BLANK
    assert str(rows["feddp"]["difference"]) == "-5.00"
    assert (str(rows["feddp"]["p"]), str(rows["feddp"]["p by Holm"])) == ("0.0312", "0.0312")


def test_the_rank_correlation_is_of_the_pairs_that_are_counted(found):
    """Of Table I: ditto < fedavg < fedbabu < feddp. Ditto, of the best round, is below all here too, and fedbabu below feddp: 4
    pairs. FedAvg's last round is above fedbabu and feddp: 2 of the other order, τ = (4 − 2)/6. With its best round, which is
    below both, all six would hold, and τ be 1."""
    methods = {"fedavg": [0.4, 0.5, 0.6], "finetune@when=before": [0.5, 0.6, 0.7], "ditto": [0.1, 0.2, 0.3]}
    methods |= {"fedbabu": [0.43, 0.53, 0.63], "feddp": [0.45, 0.55, 0.65]}
    row = orderings_table(found(**methods), NAMES, NAMES, LAST | {"fedbabu"}).rows[0]
    assert (row[0], row[2], row[3], row[5]) == ("FedDP, Table I", "6", "4", "2")
    assert row[-1].mean == pytest.approx((4 - 2) / 6)


def test_published_orders_take_the_same_choice_of_round(found):
    """Of Table III: fedavg < LQ < feddp. Against FedAvg's last round both are below it, beyond chance, and only LQ < feddp
    holds: τ = (1 − 2)/3. Against its best round all three would hold."""
    methods = found("fedavg", "finetune@when=before", "feddp@when=before", "feddp")
    rows = {row[0]: row[1:] for row in orderings_table(methods, NAMES, NAMES, LAST).rows}
    name, pairs, same, _, other, beyond, tau = rows["FedDP, Table III, polyps"]
    assert (name, pairs, same, other, beyond) == ("fedavg, feddp@when=before, feddp", "3", "1", "2", "2")
    assert tau.mean == pytest.approx(-1 / 3)
    best = {row[0]: row[1:] for row in orderings_table(methods, NAMES, NAMES).rows}
    assert best["FedDP, Table III, polyps"][1:3] == ("3", "3")
