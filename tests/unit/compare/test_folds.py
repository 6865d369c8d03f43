"""`feddp compare --folds`: who is tested when, what is written, and the means over folds."""

import csv
import json
import shutil

import pytest

from feddp.compare.folds import over_folds
from feddp.data.folder import SiteFolder
from feddp.data.loading import load
from feddp.data.prepare.split import deal_patients
from feddp.data.synthesize import synthesize
from feddp.errors import FedDPError
from feddp.reporting.tables import BLANK, ResultTable, Value
from feddp.run import options as run_options
from feddp.training.columns import METRICS, of_class
from support.compare_runs import FakeRuns, break_off, compare_in, read, row


class FoldRuns(FakeRuns):
    """Dice 0.5 at site-1 and 0.3 at site-2 in fold 1, 0.1 more in each later fold, on the images of the fold's test split."""

    def __call__(self, data, out, options, **more):
        super().__call__(data, out, options, **more)
        fold = int(data.parent.name.removeprefix("fold-"))
        for site, dice in (("site-1", 0.4 + 0.1 * fold), ("site-2", 0.2 + 0.1 * fold)):
            rows = [{"network": "start", "image": r.image, **row(dice)} for r in SiteFolder.open(data / site).rows_of("test")]
            with open(out / "sites" / site / "images.csv", "w", newline="", encoding="utf-8") as handle:
                writer = csv.DictWriter(handle, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        return {}


@pytest.fixture
def fake(monkeypatch) -> FoldRuns:
    fake = FoldRuns()
    monkeypatch.setattr(run_options, "run_here", fake)
    return fake


@pytest.fixture
def compare(tiny_root, tmp_path, toy):
    return compare_in(tmp_path / "out", toy, tiny_root)


def test_every_patient_is_tested_once_and_in_one_split_of_a_fold():
    """7 patients in 3 folds: 3, 2 and 2 to test; of the other 4 or 5 a fifth, 1, validates."""
    patients = [f"p{i}" for i in range(7)]
    folds = deal_patients([*patients, "p0"], 3, seed=1)
    tested = [[p for p, word in fold.items() if word == "test"] for fold in folds]
    assert sorted(map(len, tested)) == [2, 2, 3]
    assert sorted(sum(tested, [])) == patients
    assert all(fold.keys() == set(patients) for fold in folds)
    assert [list(fold.values()).count("val") for fold in folds] == [1, 1, 1]
    assert folds == deal_patients(reversed(patients), 3, seed=1)
    assert folds != deal_patients(patients, 3, seed=2)


@pytest.mark.parametrize(("patients", "folds", "enough"), [(5, 5, True), (4, 5, False), (3, 2, False), (4, 2, True)])
def test_no_split_of_a_fold_is_empty(patients, folds, enough):
    """Of 3 patients in 2 folds, the fold of two would leave one, which cannot both train and validate."""
    dealt = deal_patients(map(str, range(patients)), folds, seed=0)
    assert bool(dealt) is enough
    assert all(set(fold.values()) == {"train", "val", "test"} for fold in dealt)


def test_five_folds_leave_data_runs_and_two_tables(compare, fake, tmp_path, tiny_root):
    """Averages of the folds: 0.4, 0.5 ... 0.8, mean 60, population deviation √(2 · (10² + 20²)/5) = √200. In each fold the
    sites are 20 points apart, a variance of 10² = 100, the same in all."""
    done = compare("--methods", "fedavg,local", "--folds", 5)
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    assert len(fake.calls) == 10
    assert {options.method for _, options in fake.calls} == {"fedavg", "local"}
    for site in ("site-1", "site-2"):
        own = SiteFolder.open(tiny_root / site)
        folds = [SiteFolder.open(out / f"folds/fold-{i}/data" / site) for i in range(1, 6)]
        tested = [row.image for fold in folds for row in fold.rows_of("test")]
        assert sorted(tested) == sorted(row.image for row in own.rows)
        assert all([(r.image, r.patient) for r in fold.rows] == [(r.image, r.patient) for r in own.rows] for fold in folds)
        assert all((fold.site, fold.dataset, fold.labels) == (site, own.dataset, own.labels) for fold in folds)
        assert len(load(folds[0], "test", 32)) == len(folds[0].rows_of("test")), "images and masks are there"
    found = read(out / "table_methods.csv")[0]
    assert float(found["Dice (%) site-1"]) == pytest.approx(70)
    assert float(found["Dice (%) Average"]) == pytest.approx(60)
    assert float(found["Dice (%) Average ±"]) == pytest.approx(200**0.5)
    assert float(found["ASSD (pix.) Average"]) == pytest.approx(4)
    spread = read(out / "table_spread.csv")[0]
    assert float(spread["Dice (%) per client"]) == pytest.approx(60)
    assert float(spread["Dice (%) per client ±"]) == pytest.approx(200**0.5)
    assert float(spread["Variance over clients"]) == pytest.approx(100)
    assert float(spread["Variance over clients ±"]) == pytest.approx(0)
    text = (out / "tables.md").read_text()
    assert "The methods, 5 folds" in text
    assert "mean over 5 folds" in text


def test_finished_folds_are_not_run_again_and_keep_their_data(compare, fake, tmp_path):
    fake.broken = {"local"}
    done = compare("--methods", "fedavg,local", "--folds", 3)
    assert isinstance(done.exception, FedDPError)
    assert "3 runs failed" in str(done.exception)
    assert "fold-2: local, seed 0;" in str(done.exception)
    assert "- fold-2: local, seed 0: the job failed" in (tmp_path / "out/tables.md").read_text()
    assert "failed: the job failed" in read(tmp_path / "out/table_methods.csv")[1]["Dice (%) site-1"]
    fake.broken, calls = set(), len(fake.calls)
    assert compare("--methods", "fedavg,local", "--folds", 3).exit_code == 0
    assert [folder for folder, _ in fake.calls[calls:]] == ["local/seed-0"] * 3


def test_an_unfinished_run_of_a_fold_is_no_place_for_another_plan(compare, fake, tmp_path):
    assert compare("--methods", "fedavg", "--folds", 2).exit_code == 0
    run = tmp_path / "out/folds/fold-2/runs/fedavg/seed-0"
    break_off(run)
    shutil.rmtree(tmp_path / "out/folds/fold-1/runs")
    done = compare("--methods", "fedavg", "--folds", 2, "--rounds", 3)
    assert str(done.exception).startswith(f"{run} holds an unfinished run of another plan or other data; ")
    assert len(fake.calls) == 2
    assert (run / "progress.jsonl").exists()


def test_tables_that_a_comparison_does_not_write_again_are_removed(compare, fake, tmp_path):
    """Only its own, which its comparison.json names."""
    assert compare("--methods", "fedavg", "--folds", 3).exit_code == 0
    for ending in ("csv", "tex"):
        (tmp_path / f"out/table_mine.{ending}").write_text("mine")
    before = {path.name for path in (tmp_path / "out").glob("table_*")}
    listed = json.loads((tmp_path / "out/comparison.json").read_text())
    listed["tables"].append(listed["tables"][0] | {"name": "gone"})
    (tmp_path / "out/comparison.json").write_text(json.dumps(listed))
    for ending in ("csv", "tex"):
        (tmp_path / f"out/table_gone.{ending}").write_text("old")
    assert compare("--methods", "fedavg", "--folds", 3).exit_code == 0
    assert {path.name for path in (tmp_path / "out").glob("table_*")} == before


def test_other_folds_in_the_same_folder_are_refused(compare, fake):
    assert compare("--methods", "fedavg", "--folds", 3).exit_code == 0
    calls = len(fake.calls)
    for other in (["--folds", 4], ["--folds", 3, "--seeds", "1"]):
        done = compare("--methods", "fedavg", *other)
        assert "holds other folds, or the folds of other data; choose another --out" in str(done.exception)
    assert len(fake.calls) == calls


@pytest.mark.parametrize("content", [b"\xff\xfe", b'"' + b"x" * 200_000])
def test_a_table_of_folds_that_cannot_be_read_is_another(compare, fake, tmp_path, content):
    """Bytes that are no text, and a field longer than Python's csv reads."""
    assert compare("--methods", "fedavg", "--folds", 3).exit_code == 0
    next((tmp_path / "out").rglob("split.csv")).write_bytes(content)
    done = compare("--methods", "fedavg", "--folds", 3)
    assert "holds other folds, or the folds of other data; choose another --out" in str(done.exception)


def test_more_seeds_have_the_folds_of_the_first(compare, fake):
    """Otherwise the folder would hold other folds."""
    assert compare("--methods", "fedavg", "--folds", 2).exit_code == 0
    done = compare("--methods", "fedavg", "--folds", 2, "--seeds", "0,1")
    assert done.exit_code == 0, done.output
    assert [folder for folder, _ in fake.calls] == [*["fedavg/seed-0"] * 2, *["fedavg/seed-1"] * 2]


def test_sites_with_the_same_names_of_patients_are_dealt_apart(compare, fake, tmp_path, tiny_root):
    """A copy of a site under another name, whose patients are no more alike than those of other hospitals."""
    for name in ("site-1", "site-2"):
        shutil.copytree(tiny_root / "site-1", tmp_path / "data" / name)
    assert compare("--methods", "fedavg", "--folds", 3, data=tmp_path / "data").exit_code == 0
    one, other = (
        [(tmp_path / f"out/folds/fold-{i}/data/{name}/split.csv").read_text() for i in (1, 2, 3)]
        for name in ("site-1", "site-2")
    )
    assert one != other


def test_the_folds_of_an_image_that_has_changed_since_are_refused(compare, fake, tiny_root, tmp_path):
    """They are links to the file as it was, which a new file in its place does not change."""
    root = shutil.copytree(tiny_root, tmp_path / "data")
    assert compare("--methods", "fedavg", "--folds", 3, data=root).exit_code == 0
    image = next((root / "site-1/images").iterdir())
    content = image.read_bytes()
    image.unlink()
    image.write_bytes(content)
    assert compare("--methods", "fedavg", "--folds", 3, data=root).exit_code == 0, "a copy is the same image"
    image.unlink()
    shutil.copyfile(next(path for path in image.parent.iterdir() if path.read_bytes() != content), image)
    done = compare("--methods", "fedavg", "--folds", 3, data=root)
    assert "holds other folds, or the folds of other data; choose another --out" in str(done.exception)
    assert len(fake.calls) == 3


def test_a_site_with_too_few_patients_is_named_before_anything_is_written(compare, fake, tmp_path):
    """Every patient of site-1 can be dealt; site-2 has four."""
    root = tmp_path / "few"
    synthesize(root, sites=2, images=12, size=32)
    path = root / "site-2/split.csv"
    lines = path.read_text().split()
    path.write_text("\n".join([lines[0], *(f"{line.split(',')[0]},p{i % 4},train" for i, line in enumerate(lines[1:]))]))
    done = compare("--methods", "fedavg", "--folds", 5, data=root)
    assert f"{root / 'site-2'} has 4 patients, too few for 5 folds" in str(done.exception)
    assert not fake.calls
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "fedavg", "--folds", "1"], "at least 2 are needed"),
        (["--methods", "fedavg", "--folds", "-2"], "at least 2 are needed"),
        (["--methods", "fedavg", "--folds", "5", "--studies", "tau"], "--folds compares --methods"),
        (["--methods", "fedavg", "--folds", "5", "--leave-one-out"], "--folds compares --methods"),
        (["--folds", "5"], "nothing to compare"),
        (["--methods", "fedavg,fedpony", "--folds", "5"], "unknown method 'fedpony'"),
        (["--methods", "feddp,feddp@lambda=1", "--folds", "5"], "are the same run"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(compare, fake, tmp_path, arguments, message):
    assert message in str(compare(*arguments).exception)
    assert not fake.calls
    assert not (tmp_path / "out").exists()


def test_a_fold_without_a_finished_run_keeps_the_tables_of_the_classes(fake, tiny_root, tmp_path, toy, monkeypatch):
    """Its runs write no table from which the classes could be read."""

    class OfClasses(FoldRuns):
        def __call__(self, data, out, options, **more):
            if data.parent.name == "fold-2":
                raise FedDPError("no memory")
            super().__call__(data, out, options, **more)
            for path in out.glob("sites/*/images.csv"):
                lines = path.read_text().splitlines()
                heads = "".join(f",{of_class(metric, 'disc')}" for metric in METRICS)
                more = [heads] + [",0.5" * len(METRICS)] * (len(lines) - 1)
                path.write_text("".join(f"{line}{end}\n" for line, end in zip(lines, more, strict=True)))

    monkeypatch.setattr(run_options, "run_here", OfClasses())
    done = compare_in(tmp_path / "out", toy, tiny_root)("--methods", "fedavg", "--folds", 3)
    assert "1 runs failed" in str(done.exception)
    (row,) = read(tmp_path / "out/table_methods_class_1.csv")
    assert row["Dice (%) site-1"] == "failed: no memory"


def test_what_is_no_number_in_a_fold_is_none_over_folds():
    """20 and 40: 30 ± 10, with as many digits. Of a failure's row the text stays; a blank cell stays blank."""
    heads, better = ("Method", "Dice"), (None, max)
    one = ResultTable("t", "T", heads, better, (("a", Value(20.0, digits=1)), ("b", Value(1.0)), ("c", BLANK)), ("note",))
    two = ResultTable(
        "t", "T", heads, better, (("a", Value(40.0, digits=1)), ("b", "failed: x"), ("c", Value(2.0))), (), frozenset({1})
    )
    found = over_folds([one, two])
    assert found.rows == (("a", Value(30.0, 10.0, 1)), ("b", "failed: x"), ("c", BLANK))
    assert found.apart == {1}
    assert found.notes[1:] == ("note",)
    assert "population standard deviation over folds" in found.notes[0]


def test_a_fold_s_plan_counts_its_split(compare, fake, tmp_path):
    """The record of a run holds a digest of the fold's own split.csv, so that no fold passes for another."""
    assert compare("--methods", "fedavg", "--folds", 3).exit_code == 0
    records = [json.loads((tmp_path / f"out/folds/fold-{i}/runs/fedavg/seed-0.json").read_text()) for i in (1, 2, 3)]
    assert len({record["data"]["site-1"] for record in records}) == 3
