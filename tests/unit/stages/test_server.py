"""The server's check of an answer's numbers, against the bounds of the table of tasks."""

import pytest

from feddp import protocol
from feddp.errors import ContributionError
from feddp.stages.server import check_numbers
from feddp.training.columns import METRICS

TRAINED = {"loss": 0.5, "dice": 0.5, "iou": 0.0, "samples": 8.0, "seconds": 0.1, "round": 1, "phase": 0}
SUMMARY = {metric: {"mean": 0.5, "std": 0.0, "n": 3} for metric in METRICS}
EVALUATED = {"before_calibration": SUMMARY, "final": SUMMARY, "peers": {"B": SUMMARY}}


def check(task, scalars, names=()):
    check_numbers("A", scalars, names, protocol.numbers_of(task, ("A", "B"), ("lesion",)))


def test_answers_of_sites_pass():
    check("train", TRAINED, ("loss", "samples", "seconds", "dice", "iou"))
    check("train", {"loss": -0.5, "samples": 8, "seconds": 0, "withheld": 5}, ("loss", "samples", "seconds", "dice", "iou"))
    check("evaluate", EVALUATED)
    check("introduce", {"consent": False}, ("consent",))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iou", -0.1),
        ("dice", -1e-9),
        ("iou", 1.5),
        ("iou", float("nan")),
        ("iou", True),
        ("iou", "0.5"),
        ("iou", None),
        ("samples", 10**60),
        pytest.param("samples", 10**5000, id="samples-10^5000"),
        ("samples", 1e60),
        ("samples", -1),
        ("samples", True),
        ("seconds", -1.0),
        ("seconds", float("inf")),
        ("loss", 1e300),
        ("loss", -float("inf")),
        ("loss", [0.5]),
        ("withheld", -1),
        ("withheld", 10**60),
    ],
)
def test_a_number_outside_its_bounds_is_refused(name, value):
    with pytest.raises(ContributionError, match=f"site A: its answer's {name} is .*, not a finite number from"):
        check("train", TRAINED | {name: value}, ("loss", "samples", "seconds", "dice", "iou"))


@pytest.mark.parametrize(
    ("where", "name", "value", "why"),
    [
        ("final", "dice_cup", 0.5, None),
        ("final", "dice_cup", 1.5, "final/dice_cup/mean is 1.5, not a finite number from 0 to 1"),
        ("final", "dice_rim", 0.5, "final is .*, not a table of"),
        ("peers", "dice_cup", 0.5, None),
        ("peers", "dice_cup", 1.5, "peers/B/dice_cup/mean is 1.5, not a finite number from 0 to 1"),
        ("peers", "dice_rim", 0.5, "peers/B is .*, not a table of"),
    ],
)
def test_numbers_of_classes_have_the_bounds_of_their_metric(where, name, value, why):
    """Those of the plan's classes, of the site's own networks and of its peers'."""
    known = protocol.numbers_of("evaluate", ("A", "B"), ("disc", "cup"))
    more = SUMMARY | {name: {"mean": value, "std": 0.0, "n": 3}}
    said = EVALUATED | {where: more if where == "final" else {"B": more}}
    if why is None:
        check_numbers("A", said, (), known)
        with pytest.raises(ContributionError, match="not a table of"):
            check("evaluate", said)  # a plan of one class has no numbers of classes
    else:
        with pytest.raises(ContributionError, match=f"site A: its answer's {why}"):
            check_numbers("A", said, (), known)


def test_a_missing_number_is_refused_unless_it_is_withheld():
    missing = {name: value for name, value in TRAINED.items() if name != "iou"}
    with pytest.raises(ContributionError, match="iou is None"):
        check("train", missing, ("iou",))
    check("train", missing | {"withheld": 10}, ("iou",))


@pytest.mark.parametrize("value", [1, 0.0, "yes", None])
def test_consent_is_true_or_false(value):
    with pytest.raises(ContributionError, match="consent is .*, not true or false"):
        check("introduce", {"consent": value}, ("consent",))


def changed(*path, value):
    """A copy of an evaluation with another value at `path`."""

    def put(table, path):
        return value if not path else table | {path[0]: put(table.get(path[0], {}), path[1:])}

    return put(EVALUATED, path)


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        (changed("final", "dice", "mean", value=-0.2), "final/dice/mean"),
        (changed("final", "dice", "mean", value=1.2), "final/dice/mean"),
        (changed("final", "assd", "mean", value=-1), "final/assd/mean"),
        (changed("final", "assd", "n", value=10**400), "final/assd/n"),
        (changed("final", "dice", "n", value=True), "final/dice/n"),
        (changed("final", "dice", "median", value=0.5), "final/dice"),
        (changed("final", "dice", value=0.5), "final/dice"),
        (changed("final", "accuracy", value={"mean": 1}), "final"),
        (changed("final", value=[]), "final"),
        (changed("peers", value={"C": SUMMARY}), "peers"),
    ],
)
def test_a_wrong_table_is_refused(answer, place):
    with pytest.raises(ContributionError, match=f"site A: its answer's {place} is .*, not a"):
        check("evaluate", answer)


def test_a_distance_may_be_above_1():
    check("evaluate", changed("final", "assd", "mean", value=12.5))
