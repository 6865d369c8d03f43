"""The page of runs: hostile names, the same bytes again, its size, what it holds and what it does not, refusals."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from feddp.cli import app
from feddp.errors import InputError
from feddp.pages import charts, measures, run_page, template
from feddp.pages.attendance import attendance
from feddp.pages.collected import Collected, FinishedRun, Measurements, collect
from feddp.pages.run_page import report
from feddp.protocol import EVALUATING, LOADING, STORING, WHEN
from feddp.reporting.tables import BLANK, ResultTable, Value
from feddp.stages.accounting import SITE
from support.compare_runs import SITES, federation, write_run

HOSTILE = "<script>alert('x')</script>"
DICE = {
    site: {
        "start": {f"{site}-scan{i}": 0.5 + 0.01 * i for i in range(6)},
        "calibrated": {f"{site}-scan{i}": 0.8 for i in range(6)},
    }
    for site in SITES
}


class Elements(HTMLParser):
    """The names of a page's elements and of their attributes."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.attributes = set(), set()
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def run(folder, **more):
    return write_run(folder, DICE, events=federation(3, home=True), **more)


def page(tmp_path, *folders) -> str:
    return report(folders, tmp_path / "page.html").read_text(encoding="utf-8")


def test_names_from_elsewhere_are_escaped(tmp_path):
    """As a site's, a network's, a setting's and a reason's text; a folder gives a method its name where two are alike."""
    dice = {HOSTILE.replace("/", "|"): DICE["site-1"], "site-2": DICE["site-2"]}
    events = federation(3, home=False) + [
        {"event": "refused", "time": 31, "site": "site-2", "task": "train", "reason": HOSTILE}
    ]
    more = {
        "missing": {"<b>gone": HOSTILE},
        "network": HOSTILE,
        "settings": {"x": HOSTILE},
        "without": {"calibration": {"site-2": HOSTILE}},
    }
    one = write_run(tmp_path / "<i>one", dice, events=events, **more)
    html = page(tmp_path, one, write_run(tmp_path / "two", dice, rounds=9))
    assert "&lt;script&gt;" in html
    assert "&lt;i&gt;one" in html
    seen = Elements(html)
    assert seen.tags & {"html", "table", "svg"} == {"html", "table", "svg"}
    assert seen.tags & {"script", "b", "i"} == set()
    assert [name for name in seen.attributes if name.startswith("on")] == []


def test_the_same_files_give_the_same_bytes_wherever_they_lie(tmp_path):
    first = report([run(tmp_path / "a/run")], tmp_path / "one.html").read_bytes()
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    (tmp_path / "elsewhere/run/progress.jsonl").touch()
    assert report([tmp_path / "elsewhere/run"], tmp_path / "two.html").read_bytes() == first
    assert str(tmp_path).encode() not in first


def test_it_is_one_file_of_means_without_scripts_pictures_or_an_images_value(tmp_path):
    html = page(tmp_path, run(tmp_path / "feddp"), write_run(tmp_path / "local", DICE, method="local"))
    assert len(html.encode()) < 300_000
    assert "scan" not in html, "the name of an image"
    assert [
        word for word in ("<script", "data:image", "http://", "https://", "src=", "@import", "url(http") if word in html
    ] == []
    assert html.count("<svg") >= 3
    assert html.count("<title>") == html.count("<svg") + 1, "every figure has a title"
    assert 'href="data:,"' in html, "no request for an icon"


def seconds(folder, evaluating, **more):
    """A run of `federation` of one round whose sites say how long they scored: its 2 s are 1.5 at the site, 0.5 to receive."""
    events = federation(1, home=True)
    for event in events:
        if event["event"] == "answer" and event["task"] == "train":
            event["scalars"] |= {LOADING: 0.0, STORING: 0.0, EVALUATING: evaluating}
    return write_run(folder, DICE, events=events, **more)


def test_the_time_of_a_mean_round_is_drawn_over_the_seeds(tmp_path, monkeypatch):
    """Sites score for 0.5 s in the one run and for 1 s in the other, and train for the rest of 1.5 s."""
    folders = [seconds(tmp_path / str(seed), share, seed=seed) for seed, share in enumerate((0.5, 1.0))]
    drawn, stacked = [], charts._stacked
    monkeypatch.setattr(charts, "_stacked", lambda parts, label: drawn.append(parts) or stacked(parts, label))
    html = page(tmp_path, *folders)
    known = {"computing": 0.75, "evaluating": 0.75, "receiving": 0.5}
    assert drawn == [{site: dict.fromkeys(SITE, 0.0) | known for site in SITES}]
    assert "<title>Seconds of a mean round by site</title>" in html
    assert "FedDP, means over the seeds 0, 1. Receiving" in html
    assert "FedDP, seed 1. Receiving" in page(tmp_path, folders[1])
    assert "Seconds per stage" in html
    assert re.search(r'<th scope="row">FedDP</th><td>3.00</td><td>6.00</td><td>10.00</td>', html)


def test_a_run_that_does_not_know_a_part_has_no_share_in_its_mean(tmp_path, monkeypatch):
    """The times of evaluating are 0.5 s in the one run and unknown in the other: 0.5 s, not 0.25."""
    known, unknown = (seconds(tmp_path / str(seed), 0.5, seed=seed) for seed in (0, 1))
    events = [json.loads(line) for line in (unknown / "progress.jsonl").read_text().splitlines()]
    for event in events:
        event.get("scalars", {}).pop(EVALUATING, None)
    (unknown / "progress.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    drawn, stacked = [], charts._stacked
    monkeypatch.setattr(charts, "_stacked", lambda parts, label: drawn.append(parts) or stacked(parts, label))
    page(tmp_path, known, unknown)
    assert [parts[site]["evaluating"] for parts in drawn for site in SITES] == [0.5, 0.5]


def test_without_events_no_time_is_drawn(tmp_path):
    html = page(tmp_path, write_run(tmp_path / "run", DICE))
    assert "Seconds of a mean round" not in html
    assert "Seconds per stage" not in html


def test_the_heat_map_and_the_tables_hold_the_means(tmp_path):
    """Final Dice is 80 at every image; before it is 50, 51, ... 55: 52.5. IoU of 0.8: 0.8 / 1.2 = 66.67;
    ASSD 10 (1 - 0.8) = 2, before 10 (1 - 0.525) = 4.75."""
    html = page(tmp_path, run(tmp_path / "feddp"))
    assert re.search(r'<th scope="row">FedDP</th><td class="filled" style="--depth:0.500">80.0</td>', html)
    row = re.search(r'<th scope="row">site-1</th><td>52.50</td><td>80.00</td><td>4.75</td><td>2.00</td>', html)
    assert row
    assert "66.67" in html
    assert "FedDP after the calibration is better than before it: +27.5 points" in html


def test_a_site_that_is_missing_costs_no_average(tmp_path):
    """FedAvg has 80 at A and 60 at B, FedDP 80 and 40 there and 90 at C; nobody has D: the averages over A and B are 70 and 60,
    and in FedDP's spread the best of these is A: a gap of 40 points, a variance of 400."""
    folders = [
        write_run(
            tmp_path / method, {s: {"start": {"a": d, "b": d}} for s, d in dice.items()}, method=method, missing={"D": "lost"}
        )
        for method, dice in (("fedavg", {"A": 0.8, "B": 0.6}), ("feddp", {"A": 0.8, "B": 0.4, "C": 0.9}))
    ]
    found = collect(folders)
    rows = dict(measures.dice_map(found).rows)
    assert [cell.text for cell in rows["FedAvg"]] == ["80.0", "60.0", BLANK, BLANK, "70.0"]
    assert [cell.text for cell in rows["FedDP"]] == ["80.0", "40.0", "90.0", BLANK, "60.0"]
    table = measures.metric_tables(found)[0]
    assert [str(row[-1]) for row in table.rows] == ["70.00 ± 10.00", "60.00 ± 20.00"]
    alone = write_run(tmp_path / "alone", {"A": {"start": {"a": 0.8, "b": 0.8}}}, method="fedavg")
    assert str(measures.metric_tables(collect([alone]))[0].rows[0][-1]) == "80.00", "no deviation of one site"
    assert list(map(str, measures.spread_over_sites(found).rows[1])) == ["FedDP", "60.00", "400.00", "40.00", "B", "40.00"]


def test_many_sites_stand_one_below_the_other(tmp_path):
    """Thirteen sites with Dice 10, 11, ... 22: each has a row, and the last is their average, 16."""
    dice = {f"site-{i:02}": {"start": {"a": 0.1 + 0.01 * i}} for i in range(13)}
    found = collect([write_run(tmp_path / "run", dice, method="fedavg")])
    heat = measures.dice_map(found)
    assert (heat.corner, heat.heads) == ("Site", ("FedAvg",))
    rows = [(name, cells[0].text) for name, cells in heat.rows]
    assert (rows[0], rows[12], rows[13]) == (("site-00", "10.0"), ("site-12", "22.0"), ("Average", "16.0"))
    table = measures.metric_tables(found)[0]
    assert table.heads == ("Site", "FedAvg")
    assert [(row[0], str(row[1])) for row in table.rows[:1]] == [("site-00", "10.00")]
    assert str(table.rows[-1][1]).startswith("16.00 ± ")


def test_a_class_has_tables_of_its_own(tmp_path):
    folder = run(tmp_path / "feddp")
    results = json.loads((folder / "results.json").read_text())
    for entry in results["sites"].values():
        for when in ("before_calibration", "final"):
            entry[when]["dice_cup"] = {"mean": 0.123, "std": 0.0, "n": 4}
    (folder / "results.json").write_text(json.dumps(results))
    html = page(tmp_path, folder)
    assert "<summary>Dice (%), cup</summary>" in html
    assert "12.30" in html
    assert 'class="best"' not in html, "of one method"


def test_who_took_part(tmp_path):
    """site-1 consented; site-2 refused the exchange and was refused twice for one reason; site-3 was lost."""
    consent = {"event": "answer", "time": 9, "site": "site-1", "task": "collect", "bytes": 3, "scalars": {"consent": True}}
    refused = {"event": "refused", "time": 9, "site": "site-2", "task": "train", "reason": "/opt/x/y.png is missing"}
    peers = {"calibration": {"calibrated": True, "peers": 1, "tuned": True}}
    folder = write_run(
        tmp_path / "run",
        DICE,
        events=[*federation(3, home=True), consent, refused, refused],
        missing={"site-3": "site site-3 was lost at train"},
        missed={"site-2": 2},
        without={"calibration": {"site-2": "does not consent"}},
    )
    results = json.loads((folder / "results.json").read_text())
    results["sites"]["site-1"] |= peers
    results["sites"]["site-2"] |= peers | {"std_withheld": 20}
    (folder / "results.json").write_text(json.dumps(results))
    one, two, three = attendance(collect([folder]).runs[0])
    assert (one.state, one.exchange, one.withheld, one.remarks) == (
        "took part",
        "consented; calibration: 1 peer",
        "nothing",
        (),
    )
    assert (two.exchange, two.withheld) == (
        "calibration: does not consent",
        "standard deviations over fewer than 20 images or cases",
    )
    assert two.remarks == ("no contribution in 2 rounds of 3", "refused: train: …/y.png is missing")
    assert (three.state, three.remarks) == ("missing", ("site site-3 was lost at train",))


def test_a_warning_of_a_site_s_own_record_is_shown_where_it_may_be_read(tmp_path):
    """Both records have it; site-2 withholds something, and a name that only an event gives leads to no file."""
    elsewhere = {"event": "refused", "time": 9, "site": "..", "task": "train", "reason": "x"}
    folder = write_run(tmp_path / "run", DICE, events=[*federation(3, home=True), elsewhere])
    line = json.dumps({"event": "drifted", "time": 9, "message": HOSTILE}) + "\n"
    for place in ("sites/site-1", "sites/site-2", "."):
        (folder / place / "record.jsonl").write_text(line)
    results = json.loads((folder / "results.json").read_text())
    results["sites"]["site-2"]["std_withheld"] = 20
    (folder / "results.json").write_text(json.dumps(results))
    outside, one, two = attendance(collect([folder]).runs[0])
    assert one.remarks == ("warning: its record says that the shared tensors were unusually far from the first ones",)
    assert two.remarks == ()
    assert outside.remarks == ("refused: train: x",)


def test_networks_have_their_hash(tmp_path):
    """SHA-256 of b"abc" is the first test vector of FIPS 180-2."""
    folder = run(tmp_path / "run")
    (folder / "shared.safetensors").write_bytes(b"abc")
    assert "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" in page(tmp_path, folder)


@pytest.mark.parametrize(("name", "says"), [("", "is a folder; name a file"), ("results.json", "ends with .html")])
def test_no_other_file_is_replaced_by_a_page(tmp_path, feddp, name, says):
    folder = run(tmp_path / "run")
    before = (folder / "results.json").read_bytes()
    code, _, error = feddp("report", folder, "--out", folder / name)
    assert (code, says in error) == (2, True)
    assert (folder / "results.json").read_bytes() == before


def test_of_a_run_that_was_broken_off_the_message_says_how_it_goes_on(tmp_path, feddp):
    folder = run(tmp_path / "run")
    (folder / "results.json").rename(folder / "run.json")
    code, _, error = feddp("report", folder, "--out", tmp_path / "page.html")
    assert code == 2
    assert error == (
        f"feddp: {folder} is not a finished run (it has no results.json); wait for its end, or continue it: feddp run --resume"
        f" {folder}\n"
    )


def test_a_page_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(template, "PAGE_BYTES", 10_000)
    with pytest.raises(InputError, match="at most 10,000; name fewer runs"):
        report([run(tmp_path / "run")], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_many_methods_rounds_and_sites_stay_below_the_limit(tmp_path):
    """Twelve methods of 200 rounds at 12 sites: of the sites' curves only those of the worst are drawn."""
    sites = [f"site-{i:02}" for i in range(12)]
    dice = {site: {"start": {"a": 0.5 + 0.01 * i}} for i, site in enumerate(sites)}
    events = [
        {
            "event": "answer",
            "time": t,
            "site": site,
            "task": "train",
            "round": t,
            "bytes": 1,
            "scalars": {"iou": t % 7 / 10, "seconds": 1},
        }
        for t in range(1, 201)
        for site in sites
    ]
    folders = [write_run(tmp_path / f"run{i}", dice, method="fedavg", rounds=i, events=events) for i in range(12)]
    assert len(page(tmp_path, *folders).encode()) < template.PAGE_BYTES


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("results.json", None, "not a finished run"),
        ("results.json", "{", "not a finished run"),
        ("results.json", '{"sites": {"A": {}}}', "lacks method, network, rounds, seed"),
        ("sites/site-1/images.csv", "network,image\nstart,a\n", "images.csv is no table of images"),
        ("progress.jsonl", "3\n", "no JSON object"),
        (
            "progress.jsonl",
            "{}\n",
            "has an event without a name. Take it from where the run was again, or remove the run's folder",
        ),
        (
            "progress.jsonl",
            '{"event": "answer", "time": 1, "site": "A", "task": "train"}\n',
            "has an event whose bytes is missing or is none. Take it",
        ),
        ("run.json", "[]", "run.json is damaged"),
        ("run.json", '{"plan": {}, "versions": []}', "run.json is damaged"),
    ],
)
def test_a_damaged_or_missing_file_is_one_line(tmp_path, feddp, name, content, says):
    folder = run(tmp_path / "run")
    path = folder / name
    path.unlink() if content is None else path.write_text(content)
    code, said, error = feddp("report", folder, "--out", tmp_path / "page.html")
    assert (code, said) == (2, "")
    assert says in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "page.html").exists()


def test_summaries_that_are_no_numbers_are_refused(tmp_path):
    folder = run(tmp_path / "run")
    results = json.loads((folder / "results.json").read_text())
    results["sites"]["site-1"]["final"]["dice"]["mean"] = "0.8"
    (folder / "results.json").write_text(json.dumps(results))
    with pytest.raises(InputError, match="site-1's final is"):
        report([folder], tmp_path / "page.html")


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("sites", "site-1", "final", "dice", "mean"), 10**30, "site-1's final"),
        (("sites", "site-1", "calibration"), None, "site-1's calibration"),
        (("sites", "site-1", "spectra"), {}, "site-1's spectra"),
        (("sites", "site-1", "calibration"), {"peers": "2"}, "site-1's calibration"),
        (("sites", "site-1", "volumes"), ["final"], "site-1's volumes"),
        (("sites", "site-1", "volumes"), {"final": {"dice": {"std": 0.1}}}, "site-1's volumes"),
        (("matrix",), [], "matrix is"),
        (("matrix",), {"site-1": {"site-2": {}}}, "matrix is"),
        (("matrix",), {"site-1": {"site-2": {"dice": {"mean": "0.5"}}}}, "matrix is"),
    ],
)
def test_entries_of_another_form_are_refused(tmp_path, place, value, named):
    folder = run(tmp_path / "run")
    results = entry = json.loads((folder / "results.json").read_text())
    for name in place[:-1]:
        entry = entry[name]
    entry[place[-1]] = value
    (folder / "results.json").write_text(json.dumps(results))
    with pytest.raises(InputError, match=f"results.json: {named}"):
        report([folder], tmp_path / "page.html")


def test_the_page_has_the_versions_of_all_participants_those_alike_together(tmp_path):
    folder = run(tmp_path / "run")
    results = json.loads((folder / "results.json").read_text())
    results["versions"] = {"server": {"torch": "2.15.0"}, "A": {"torch": "2.14.1"}, "B": {"torch": "2.15.0"}}
    (folder / "results.json").write_text(json.dumps(results))
    found = page(tmp_path, folder)
    assert "<dt>versions at server, B</dt><dd>torch 2.15.0</dd>" in found
    assert "<dt>versions at A</dt><dd>torch 2.14.1</dd>" in found
    results["versions"] = {"server": "2.15.0"}
    (folder / "results.json").write_text(json.dumps(results))
    with pytest.raises(InputError, match="results.json is damaged: its versions are not those of participants"):
        report([folder], tmp_path / "page.html")


def test_versions_of_another_form_are_named(tmp_path):
    """The plan is whole: the message does not ask for it."""
    folder = run(tmp_path / "run")
    (folder / "run.json").write_text('{"plan": {}, "versions": []}')
    with pytest.raises(InputError, match="run.json is damaged: its versions are no names and versions"):
        report([folder], tmp_path / "page.html")


def test_a_comparison_of_folds_has_its_tables(tmp_path):
    """And the reasons of what failed, without the folders of the machine that ran it."""
    table = ResultTable(
        "methods", "The methods, 5 folds", ("Method", "x"), (None, max), (("FedAvg", Value(12.5, 0.5)), ("local", Value(9.0)))
    )
    content = {"methods": [], "studies": [], "results": {}, "failed": {"one": "no /home/eve/x"}, "tables": [table.to_json()]}
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    html = page(tmp_path, tmp_path)
    assert "No run of --methods finished here" in html
    assert '<td class="best">12.50 ± 0.50</td>' in html
    assert "no …/x" in html


# a comparison of one table, sound as it stands
TABLE = (
    '{"methods": [], "studies": [], "results": {}, "failed": {}, "tables": [{"name": "n", "title": "t", "heads": ["M", "x"],'
    ' "better": [null, "max"], "rows": [["a", {"mean": 2.5, "std": null, "digits": 2}]], "notes": [], "apart": []}]}'
)


def test_a_sound_table_is_shown(tmp_path):
    (tmp_path / "comparison.json").write_text(TABLE)
    assert "<td>2.50</td>" in page(tmp_path, tmp_path)


@pytest.mark.parametrize(
    "broken",
    [
        "[]",
        '{"methods": ["feddp"]}',
        '{"methods": [3], "results": {"a": {"folders": {"0": "../.."}}}}',
        TABLE.replace("2.5", '"2.5"'),
        TABLE.replace("2.5", "1" + "0" * 400),
        TABLE.replace('"n"', "[]"),
        TABLE.replace('["a", {', '["a", "b", {'),
        TABLE.replace('"digits": 2', '"digits": 1000000000'),
    ],
)
def test_a_damaged_comparison_is_refused(tmp_path, broken):
    (tmp_path / "comparison.json").write_text(broken)
    with pytest.raises(InputError, match="comparison.json is damaged"):
        report([tmp_path], tmp_path / "page.html")


def test_a_table_survives_the_comparisons_file():
    table = ResultTable("n", "t", ("M", "x"), (None, max), (("a", Value(1.5, 0.5, 1)), ("b", BLANK)), ("note",), frozenset({1}))
    assert ResultTable.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_a_failing_report_costs_the_page_alone(tmp_path, monkeypatch, capsys):
    from feddp.cli.report import after

    monkeypatch.setattr(run_page, "collect", lambda folders: 1 / 0)
    after(tmp_path)
    said = capsys.readouterr()
    assert said.err == f"no report was written (ZeroDivisionError: division by zero); to try again: feddp report {tmp_path}\n"
    assert said.out == ""


def test_a_pixel_needs_a_site():
    done = CliRunner().invoke(app, ["report", "x", "--pixel", "1,2"])
    assert isinstance(done.exception, InputError)
    done = CliRunner().invoke(app, ["report", "x", "--site", "y", "--pixel", "a,2"])
    assert "write X,Y" in str(done.exception)


def test_volumes_are_of_the_row_s_networks_and_of_all_seeds(tmp_path):
    """Before: (0.4 + 0.6) / 2 = 0.5; after: (0.7 + 0.9) / 2 = 0.8. site-2 has pictures."""

    def of(last, seed, before, final):
        volumes = {when: {"dice": {"mean": dice}} for when, dice in zip(WHEN, (before, final), strict=True)}
        results = {"seed": seed, "sites": {"site-1": {"volumes": volumes}, "site-2": {}}}
        return FinishedRun(tmp_path, "x", results, last)

    methods = {
        name: Measurements(name, (of(last, 0, 0.4, 0.7), of(last, 1, 0.6, 0.9)))
        for name, last in (("before", WHEN[0]), ("after", WHEN[1]))
    }
    table = measures.volume_table(Collected(methods, {}, (), {}, {}))
    assert table.heads == ("Method", "site-1", "site-2")
    assert [tuple(map(str, row)) for row in table.rows] == [("before", "50.00", BLANK), ("after", "80.00", BLANK)]
