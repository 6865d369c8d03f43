"""`feddp runs slim`: what a comparison's runs lose and keep, and that `feddp compare` and `feddp report` go on from it.

The runs are real ones, of the toy network without FLARE, so that files which a later version adds are seen here too.
"""

import json
import shutil

import pytest

from feddp.adaptation.models import read_models
from feddp.errors import InputError
from feddp.pages.site_page import networks_of
from feddp.reporting.tables import BLANK
from feddp.run.folders import to_slim
from feddp.training.claim import release
from support.compare_runs import SITES, compare_in, read
from support.report_runs import toy_run

HEAVY = ("*.safetensors", "tb_events", "metrics", "job", "workspace", "simulated")


@pytest.fixture
def compared(tiny_root, tmp_path, toy):
    """Runs `feddp compare` in a folder below tmp_path; this process holds no run after it."""

    def run(out, *arguments):
        done = compare_in(out, toy, tiny_root)("--env", "local", *arguments)
        release(out)
        assert done.exit_code == 0, done.output
        return done

    return run


def heavy(folder) -> list[str]:
    return [str(path.relative_to(folder)) for pattern in HEAVY for path in folder.rglob(pattern)]


def small_files(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_comparison_goes_on_from_small_files_alone(compared, tmp_path, tiny_root, feddp):
    """What is kept is copied to another place, as git would. There another method runs alone; all numbers of the first ones are
    the same, only the time of inference is not there; nor are Table IV's, of networks on an unseen site."""
    first, clone = tmp_path / "first", tmp_path / "clone"
    shutil.copytree(tiny_root / "site-1", tmp_path / "clinic")
    unseen = ["--unseen", tmp_path / "clinic"]
    compared(first, "--methods", "fedavg,feddp", *unseen)
    assert heavy(first)
    before = {name: read(first / f"table_{name}.csv") for name in ("methods", "methods_more", "ranking", "times", "efficiency")}
    size = sum(path.stat().st_size for path in first.rglob("*") if path.is_file())
    code, said, _ = feddp("runs", "slim", first, "--yes")
    assert code == 0, said
    assert "in 2 runs; " in said
    assert heavy(first) == []
    assert size > sum(path.stat().st_size for path in first.rglob("*") if path.is_file())
    run = ["local.log", "progress.jsonl", "results.json", "results.md", "run.json", "run.yaml", "time.json"]
    sites = [f"sites/{site}/{name}" for site in SITES for name in ("images.csv", "record.jsonl")]
    assert small_files(first / "runs" / "fedavg" / "seed-0") == sorted([".lock", *run, *sites])

    shutil.copytree(first, clone, ignore=shutil.ignore_patterns(".lock", "report.html", "*.png"))
    done = compared(clone, "--methods", "fedavg,feddp,local", *unseen)
    assert "fedavg, seed 0 (finished before)" in done.stderr
    assert "run 3 of 3: local, seed 0\n" in done.stderr
    after = {name: {row["Method"]: row for row in read(clone / f"table_{name}.csv")} for name in before}
    for name in ("methods", "methods_more", "times"):
        assert [after[name][row["Method"]] for row in before[name]] == before[name]
    costs = after["efficiency"]
    for row in before["efficiency"]:
        assert float(row.pop("Inference (ms)")) > 0
        assert costs[row["Method"]].pop("Inference (ms)") == BLANK
        assert costs[row["Method"]] == row
    assert float(costs["local"]["Inference (ms)"]) > 0
    tables = (clone / "tables.md").read_text(encoding="utf-8")
    assert f"Inference is {BLANK} where no network of the runs is left." in tables
    assert f"{BLANK}: a network of a site is not there (fedavg, feddp)." in tables
    assert (clone / "curves_methods.png").exists()
    assert "Table V: efficiency" in (clone / "report.html").read_text(encoding="utf-8")
    page = tmp_path / "run.html"
    assert feddp("report", clone / "runs" / "feddp" / "seed-0", "--out", page)[0] == 0
    assert page.exists()


def test_the_unfinished_and_what_no_answer_allows_stay(compared, tmp_path, feddp, monkeypatch):
    out = tmp_path / "out"
    compared(out, "--methods", "fedavg", "--seeds", "0,1")
    record = out / "runs" / "fedavg" / "seed-1.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"finished": False}))
    found = heavy(out)
    monkeypatch.setattr("typer.confirm", lambda text: False)
    code, said, _ = feddp("runs", "slim", out)
    assert (code, heavy(out)) == (1, found)
    monkeypatch.setattr("typer.confirm", lambda text: True)
    code, said, _ = feddp("runs", "slim", out)
    assert code == 0
    assert f"stays as it is, because it is not finished or in use: {out / 'runs' / 'fedavg' / 'seed-1'}" in said
    assert heavy(out / "runs" / "fedavg" / "seed-0") == []
    assert heavy(out / "runs" / "fedavg" / "seed-1")


@pytest.mark.parametrize("kind", ["missing", "other files", "comparisons"])
def test_a_folder_of_neither_is_refused(kind, tmp_path):
    """Among them a folder with comparisons below it: nobody loses all networks by a slip."""
    folder = tmp_path / "runs"
    if kind != "missing":
        folder.mkdir()
        (folder / "network.safetensors").write_text("mine")
    if kind == "comparisons":
        (folder / "one").mkdir()
        (folder / "one" / "comparison.json").write_text("{}")
    with pytest.raises(InputError, match="is no run and no finished comparison: it has no run.json and no comparison.json"):
        to_slim(folder)


def test_what_needs_the_networks_says_that_they_are_gone(toy, tmp_path):
    run = toy_run(tmp_path / "run", toy)
    for file in run.rglob("*.safetensors"):
        file.unlink()
    with pytest.raises(InputError, match="has no network of site-1, site-2: it ended without one, or `feddp runs"):
        read_models(run)
    with pytest.raises(InputError, match="holds no network .`feddp runs slim` removes them"):
        networks_of([run], "site-1")
