"""What a terminal shows of results: whole numbers, what the columns mean, and only what happened."""

import pytest

from feddp.reporting.page import table, write_markdown
from feddp.reporting.screen import on_screen, show
from feddp.reporting.tables import ResultTable, Value, shown_value
from feddp.training.columns import METRICS

NAMES = [f"hospital-of-the-{side}" for side in ("north", "south")]


def results(peers: int = 1, **more) -> dict:
    summary = {metric: {"mean": 0.8125, "std": 0.0625, "n": 8} for metric in METRICS}
    site = {"before_calibration": summary, "final": summary}
    calibration = {"calibrated": peers > 0, "peers": peers, "tuned": True}
    return {
        "method": "feddp",
        "network": "unet",
        "rounds": 1,
        "seed": 0,
        "federated": True,
        "selection": "val",
        "sites": {name: site | {"calibration": calibration} for name in NAMES},
        "average": site,
        "start_round": 1,
        "best_round": 1,
        "missing": {},
        "matrix": {},
        **more,
    }


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_number_and_no_name_is_cut(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    show(table(results()))
    heads = ("Method", *(f"Dice (%) {name}" for name in NAMES), "Average")
    cells = ("feddp@private=query|head", *(Value(81.25, 6.25) for _ in range(3)))
    show(on_screen(ResultTable("t", "A [title]", heads, (None, max, max, None), (cells,), ("A [note].",))))
    said = capsys.readouterr().out
    assert "…" not in said
    assert said.count("81.25 ± 6.25") == 2 * 3 + 3
    assert all(word in said for word in (*NAMES, "feddp@private=query|head", "A [title]", "A [note].", "peers"))


def test_the_title_says_what_was_done_and_the_note_what_the_columns_are():
    assert table(results()).title == "feddp on unet, 1 round, seed 0"
    assert "final: after it. Without a local stage" in table(results()).caption
    joined = results(joined={"run": "runs/x", "train": ["head"]})
    assert table(joined).title == "local post-training after feddp on unet, 1 round, seed 0"
    assert "final: after local post-training" in write_markdown(joined)
    assert "| before |" in write_markdown(joined)


def test_the_page_says_which_round_was_selected():
    assert "Stage 1 selected round 1 (best by the sites' validation IoU: 1)." in write_markdown(results())
    own = write_markdown(results(best_per_site=True))
    assert "Stage 1 selected each site's own best round by validation IoU (best by the sites' validation IoU: 1)." in own


def test_one_number_alone_has_no_deviation():
    """An average over one site, whose own two images have one; where a site withholds its own, — takes its place."""
    alone = {metric: {"mean": 0.5, "std": 0.0, "n": 1} for metric in METRICS}
    both = {"before_calibration": alone, "final": alone}
    found = results() | {"average": both}
    assert list(table(found).columns[2].cells) == ["81.25 ± 6.25", "81.25 ± 6.25", "50.00"]
    line = next(line for line in write_markdown(found).splitlines() if line.startswith("| final"))
    assert "| 81.25 ± 6.25 | 81.25 ± 6.25 | 50.00 |" in line
    withheld = {metric: {"mean": 0.5, "n": 2} for metric in METRICS}
    site = {"before_calibration": withheld, "final": withheld}
    assert list(table(found | {"average": site}).columns[2].cells)[-1] == "50.00 ± —"
    assert shown_value(alone, "dice") == Value(50.0)
    assert shown_value(alone | {"dice": {"mean": 0.5, "std": 0.0, "n": 2}}, "dice") == Value(50.0, 0.0), "two equal numbers"


def test_classes_have_rows_below_their_mean_where_there_are_several():
    """Disc 0.9 and cup 0.7 at every site. Results of one class, or made before classes were kept apart, have no more rows."""
    plain = results()
    cells = {name: {"mean": mean, "std": 0.0, "n": 8} for name, mean in (("dice_disc", 0.9), ("dice_cup", 0.7))}
    cells |= {f"assd_{name}": {"mean": 2.0, "std": 0.0, "n": 8} for name in ("disc", "cup")}
    summary = plain["average"]["final"] | cells
    both = {"before_calibration": summary, "final": summary}
    several = plain | {"sites": {name: site | both for name, site in plain["sites"].items()}, "average": both}
    names = [name for part in (*NAMES, "Average") for name in (part, "  disc", "  cup")]
    assert list(table(several).columns[0].cells) == names
    assert list(table(several).columns[2].cells)[:3] == ["81.25 ± 6.25", "90.00 ± 0.00", "70.00 ± 0.00"]
    assert list(table(plain).columns[0].cells) == [*NAMES, "Average"]
    rows = [line.split(" | ")[0] for line in write_markdown(several).splitlines() if line.startswith(("| before", "| final"))]
    assert rows == ["| before", "| final", "| before, disc", "| final, disc", "| before, cup", "| final, cup"]
    assert "disc" not in write_markdown(plain)


@pytest.mark.parametrize(
    ("sealed", "peers", "said"), [(True, 1, "encrypted from site to site"), (False, 1, "in the clear"), (False, 0, None)]
)
def test_how_an_exchange_went_is_said_where_there_was_one(sealed, peers, said):
    text = write_markdown(results(peers, sealed=sealed))
    assert ("What the sites exchanged went" in text) == (said is not None)
    assert said is None or said in text
