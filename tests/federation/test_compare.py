"""`feddp compare` as people type it: what it writes, where it goes on, what it refuses, how it ends."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from feddp.cli import app
from feddp.compare import comparison
from feddp.compare.studies import STUDIES
from feddp.compare.tables import OPTIMISTIC
from feddp.compare.unseen import ENSEMBLE, measure_networks
from feddp.data.synthesize import synthesize
from feddp.errors import FedDPError
from feddp.files import COMPARISON
from feddp.networks import NETWORKS
from feddp.run import options as run_options
from support import ROOT
from support.compare_runs import FakeRuns, read

TABLES = {
    "Table I / II": "_methods",
    "The methods by IoU": "_more",
    "Dice and its spread": "_spread",
    "Which methods differ": "_ranking",
    "Whether published": "_published",
}
BACKBONES = ("resnet18-fpn", "resnet34-fpn", "resnet50-fpn", "pvt_v2_b0-fpn", "pvt_v2_b1-fpn", "pvt_v2_b2-fpn")


@pytest.fixture
def drawn():
    """For a test that looks at figures."""


@pytest.fixture(autouse=True)
def _empty_figures(request):
    """Tables, pages and exit codes do not depend on what a figure shows."""
    if "drawn" not in request.fixturenames:
        request.getfixturevalue("empty_figures")


@pytest.fixture
def fake(monkeypatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(run_options, "run_here", fake)
    return fake


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """A site that is not of the federation, its folder called `clinic`: 2 images in split test."""
    root = tmp_path_factory.mktemp("strange")
    synthesize(root, sites=1, images=12, size=32, seed=5)
    return (root / "site-1").rename(root / "clinic")


@pytest.fixture
def compare(tiny_root, tmp_path, toy):
    """Runs the command in one folder, 2 rounds; returns what `CliRunner` does."""

    def run(*arguments, network: str = toy, rounds: int = 2):
        common = ["--data", tiny_root, "--out", tmp_path / "out", "--network", network, "--size", 32, "--rounds", rounds]
        return CliRunner().invoke(app, ["compare", *map(str, [*common, *arguments])])

    return run


def sections(out) -> dict[str, str]:
    """tables.md by heading."""
    text = (out / "tables.md").read_text(encoding="utf-8")
    return {part.splitlines()[0]: part for part in text.split("\n## ")}


def test_methods_leave_tables_and_curves(compare, fake, drawn, tmp_path, strange, monkeypatch):
    """The fake's Dice is 0.5 + 0.01 a letter of the method, 0.02 more a seed, 0.1 more calibrated; site-1's images lie 0 and
    0.2 below, site-2's 0.1 and 0.2. feddp, over two seeds: 0.66; site-1 0.56 ± 0.1, site-2 0.51 ± 0.05, average 0.535 ± 0.025,
    ± 0.01 over the seeds; fedavg 0.57, 0.09 less on each of the 4 images, which are
    of one patient at each site: p = 2/2^2 = 0.5."""
    monkeypatch.setattr(sys, "argv", ["feddp", "compare", "--methods", "fedavg,feddp"])
    done = compare("--methods", "fedavg,feddp", "--seeds", "0,1", "--unseen", strange)
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    row = {r["Method"]: r for r in read(out / "table_methods.csv")}["feddp"]
    expected = {"site-1": 56, "site-1 ±": 10, "site-2": 51, "site-2 ±": 5, "Average": 53.5, "Average ±": 2.5, "± seeds": 1}
    assert {key: float(row[f"Dice (%) {key}"]) for key in expected} == pytest.approx(expected)
    assert float(row["ASSD (pix.) Average"]) == pytest.approx(4.65)
    assert "Average" in (out / "table_methods_more.tex").read_text()
    more = {r["Method"]: r for r in read(out / "table_methods_more.csv")}["feddp"]
    assert [float(more[f"{metric} (pix.) Average"]) for metric in ("HD95", "HD")] == pytest.approx([4.65, 4.65])
    assert not (out / "table_volumes.csv").exists()

    found = sections(out)
    head = next(iter(found.values()))
    assert "feddp compare --methods fedavg,feddp" in head
    assert f"torch {torch.__version__}" in head
    assert "Seeds 0, 1; 2 rounds" in head
    assert "32 px; toy" in head
    table = found["Table I / II: the methods"]
    assert "**53.50 ± 2.50**" in table
    assert (
        "feddp against fedavg: n = 2 test patients, 2 of them differ, median difference +9.00 points of Dice, p = 0.5. feddp is"
        " of the last round or went on from it; fedavg is of the best round." in table
    )
    assert "feddp against fedavg" in " ".join(done.output.split())
    assert found["Runs that failed"].endswith("None.\n")

    unseen = read(out / "table_unseen.csv")
    assert [r["Method"] for r in unseen] == ["fedavg", "feddp"]
    assert all(0 <= float(r[f"Dice (%) {c}"]) <= 100 for r in unseen for c in ("site-1", "site-2", "Ensemble"))
    assert "2 images of clinic in split test" in found["Table IV: the unseen site clinic"]
    costs = {r["Method"]: r for r in read(out / "table_efficiency.csv")}
    assert float(costs["feddp"]["Train time (s)"]) == 4
    assert (float(costs["feddp"]["Local time (s)"]), float(costs["fedavg"]["Local time (s)"])) == (3 + 3, 0)
    assert (float(costs["feddp"]["Joint (MB)"]), float(costs["feddp"]["Local (KB)"])) == pytest.approx((0.001, 0.012))
    assert float(costs["feddp"]["Inference (ms)"]) > 0
    with Image.open(out / "curves_methods.png") as picture:
        assert picture.size[0] > picture.size[1] > 300
    page = (out / "report.html").read_text(encoding="utf-8")
    assert f"Report: {out / 'report.html'}" in done.output
    assert "FedDP scores higher than FedAvg: +9.0 points of Dice on average over 2 sites. There is no interval" in page
    assert "By seed, the average difference is +9.0 to +9.0." in page
    assert "Table IV: the unseen site clinic" in page


def test_networks_before_the_last_stage_are_a_row_of_their_own(compare, fake, tmp_path):
    """The fake's averages: FedAvg 0.56 − 0.125 = 43.5 %, FedDP 42.5 before its calibration and 52.5 after it, the same for
    both images of the one test patient of each site. Wilcoxon of 2 patients' differences of one sign: p = 2/2^2 = 0.5, by Holm
    2 · that."""
    done = compare("--methods", "fedavg,feddp,feddp@when=before")
    assert done.exit_code == 0, done.output
    assert [folder for folder, _ in fake.calls] == ["fedavg/seed-0", "feddp/seed-0"]
    out = tmp_path / "out"
    dice = {r["Method"]: float(r["Dice (%) Average"]) for r in read(out / "table_methods.csv")}
    assert dice == pytest.approx({"fedavg": 43.5, "feddp": 52.5, "feddp@when=before": 42.5})
    ranked = {r["Method"]: r for r in read(out / "table_ranking.csv")}
    assert list(ranked) == ["feddp", "fedavg", "feddp@when=before"]
    before = ranked["feddp@when=before"]
    assert float(before["difference"]) == pytest.approx(-1)
    assert (float(before["p"]), float(before["p by Holm"])) == pytest.approx((0.5, 1))
    pairs = {r["Method"]: r for r in read(out / "table_pairs.csv")}
    assert float(pairs["feddp"]["feddp@when=before"]) == pytest.approx(10)
    assert float(pairs["feddp@when=before"]["feddp"]) == pytest.approx(0.5)
    published = {r["Published"]: r for r in read(out / "table_published.csv")}["FedDP, Table III, polyps"]
    assert (published["Pairs"], published["Same order"], published["Other order"]) == ("3", "2", "1")
    for table in ("efficiency", "times", "stages"):
        assert [r["Method"] for r in read(out / f"table_{table}.csv")] == ["fedavg", "feddp"], "each run once"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Whether published orders hold" in page
    assert "FedDP scores higher than FedAvg: +9.0 points" in page


def test_a_run_that_only_a_row_before_its_last_stage_names_has_its_own_name_where_the_whole_run_counts(
    compare, fake, tmp_path, strange
):
    """Costs are those of FedDP with its calibration (3 + 3 s). Table IV is of the networks that runs end with: FedDP's have
    been calibrated, so there is no row of them before it."""
    done = compare("--methods", "fedavg,feddp@when=before", "--unseen", strange)
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    assert [r["Method"] for r in read(out / "table_methods.csv")] == ["fedavg", "feddp@when=before"]
    for table in ("efficiency", "times", "stages"):
        assert [r["Method"] for r in read(out / f"table_{table}.csv")] == ["fedavg", "feddp"]
    assert float(read(out / "table_efficiency.csv")[1]["Local time (s)"]) == 3 + 3
    assert [r["Method"] for r in read(out / "table_unseen.csv")] == ["fedavg"]


@pytest.mark.parametrize(
    ("methods", "best"),
    [
        ("fedavg,apfl,feddp@when=before", "fedavg against feddp@when=before"),
        ("feddp,feddp@when=before,local", "feddp against local"),
        ("feddp,feddp@when=before,ditto,fedavg", "feddp against fedavg"),
    ],
)
def test_the_best_two_are_of_two_runs(compare, fake, tmp_path, methods, best):
    """Averages, in per cent: FedDP 52.5 and 42.5 before its calibration; FedAvg 43.5, Ditto and Local Train 42.5, APFL 41.5."""
    assert compare("--methods", methods).exit_code == 0
    assert f"per patient, seeds averaged), {best}: " in (tmp_path / "out/tables.md").read_text()


@pytest.mark.parametrize("selection", ["val", "test"])
def test_what_was_chosen_on_the_test_images_is_marked_in_every_table_of_scores(compare, fake, tmp_path, selection):
    assert compare("--methods", "fedavg,feddp,feddp@when=before", "--set", f"selection={selection}").exit_code == 0
    found = sections(tmp_path / "out")
    for title, name in TABLES.items():
        (text,) = [part for heading, part in found.items() if heading.startswith(title)]
        assert text.count(OPTIMISTIC) == (selection == "test"), title
        (tex,) = (tmp_path / "out").glob(f"table*{name}.tex")
        assert tex.read_text().count("Optimistic: rounds") == (selection == "test"), title


def test_tables_of_a_comparison_before_one_that_was_broken_off_are_removed(compare, fake, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert compare("--methods", "fedavg,local", "--seeds", "0,1").exit_code == 0
    for ending in ("csv", "tex"):
        (out / f"table_mine.{ending}").write_text("a note")
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "methods_tables", lambda *arguments: sys.exit(130))
        assert compare("--methods", "fedavg,local").exit_code == 130
    assert (out / "table_seeds.csv").exists(), "the control"
    assert compare("--methods", "fedavg,local").exit_code == 0
    assert not list(out.glob("table_seeds.*"))
    assert [(out / f"table_mine.{ending}").read_text() for ending in ("csv", "tex")] == ["a note"] * 2
    assert not list(out.glob(".comparison*"))


def test_another_comparison_in_the_folder_may_start_at_the_same_moment(compare, fake, tmp_path, monkeypatch):
    """Both rename the comparison.json of the one before them; here the other one is first."""
    out, replace, renamed = tmp_path / "out", Path.replace, []

    def both(self, target):
        if self.name == COMPARISON:
            renamed.append(replace(self, target))
        return replace(self, target)

    assert compare("--methods", "fedavg,local").exit_code == 0
    monkeypatch.setattr(Path, "replace", both)
    done = compare("--methods", "fedavg,local")
    assert done.exit_code == 0, done.output
    assert renamed == [out / f".{COMPARISON}"]
    assert (out / COMPARISON).exists()
    assert not renamed[0].exists()


def test_studies_leave_tables_and_figures_and_share_runs(compare, fake, drawn, tmp_path, monkeypatch, request):
    """ablation 3 runs (FedAvg's hand on the last round), backbones 12, private 5, lambda 5 of which λ = 1 is ablation's feddp,
    igc 6 of which feddp's two are lambda's: 3 + 12 + 5 + 4 + 4 = 28; the method fedavg is among backbones'. The toy network
    has no key and value layers; its query stands for them."""
    for name in BACKBONES:
        monkeypatch.setitem(NETWORKS, name, NETWORKS["toy"])
    query = NETWORKS["toy"].roles["query"]
    monkeypatch.setattr(NETWORKS["toy"], "roles", {"query": query, "key": query, "value": query, "head": ("head",)})
    studies = "ablation,backbones,private,lambda,igc"
    done = compare("--studies", studies, "--methods", "fedavg", network="pvt_v2_b0-fpn")
    assert done.exit_code == 0, done.output
    assert len(fake.calls) == len({folder for folder, _ in fake.calls}) == 28
    out = tmp_path / "out"
    for name in ("curves_methods", "curves_backbones", "private", "lambda", "igc"):
        with Image.open(out / f"{name}.png") as picture:
            assert picture.format == "PNG"
            assert len(picture.convert("L").getcolors()) > 10, "an empty canvas"
    # 0.56 of fedavg, 0.55 of feddp before its calibration and 0.65 after: the average is 0.125 below
    ablation = read(out / "table_ablation.csv")
    assert [(r["SA"], r["LQ"], r["IGC"]) for r in ablation] == [("", "", ""), ("✓", "", ""), ("✓", "✓", ""), ("✓", "✓", "✓")]
    assert [float(r["Dice (%) Average"]) for r in ablation] == pytest.approx([43.5, 43.5, 42.5, 52.5])
    assert r"$\surd$" in (out / "table_ablation.tex").read_text()
    page = (out / "report.html").read_text(encoding="utf-8")
    for study in ("ablation", "lambda", "igc"):
        assert f"<h3>{STUDIES[study].title}</h3>" in page
    assert "SA + LQ + IGC" in page
    igc = {(r["Method"], r["Calibration"]): float(r["Dice (%) Average"]) for r in read(out / "table_igc.csv")}
    assert igc["iop_fl", "λ = 1"] - igc["iop_fl", "none"] == pytest.approx(10)
    assert len(igc) == 9
    options = {folder: o for folder, o in fake.calls}
    assert options["feddp@calibration_epochs=0@private=query,head/seed-0"].calibration_epochs == 0
    assert "delta=std" in options["feddp@delta=std/seed-0"].settings
    before = len(fake.calls)
    (out / "report.html").unlink()
    request.getfixturevalue("empty_figures")  # once is enough
    assert compare("--studies", studies, network="pvt_v2_b0-fpn").exit_code == 0
    assert len(fake.calls) == before
    assert f"<h3>{STUDIES['lambda'].title}</h3>" in (out / "report.html").read_text(encoding="utf-8"), "without --methods too"


def test_a_failed_run_is_told_everywhere_and_the_exit_code_is_two(compare, fake, tmp_path):
    fake.broken = {"feddp"}
    done = compare("--methods", "fedavg,feddp,local", "--studies", "lambda")
    assert isinstance(done.exception, FedDPError)  # `main` prints it and exits with 2
    assert "5 runs failed, the same command tries them again: feddp, seed 0; feddp@lambda=0, seed 0;" in str(done.exception)
    out = tmp_path / "out"
    row = next(r for r in read(out / "table_methods.csv") if r["Method"] == "feddp")
    assert row["Dice (%) site-1"] == "failed: the job failed: feddp | diverged at 50%"
    assert "- feddp, seed 0: the job failed: feddp | diverged" in sections(out)["Runs that failed"]
    assert r"failed: the job failed: feddp \textbar{} diverged at 50\%" in (out / "table_methods.tex").read_text()
    assert "failed: the job" in sections(out)["Table V: efficiency"]
    fake.broken, calls = set(), len(fake.calls)
    assert compare("--methods", "fedavg,feddp,local").exit_code == 0
    assert [folder for folder, _ in fake.calls[calls:]] == ["feddp/seed-0"]
    assert "failed" not in (out / "table_methods.csv").read_text()


def test_device_threads_and_environment_reach_the_runs(compare, fake):
    """A comparison that was begun in one environment continues in the other. Real runs of the two leave the same files
    (`test_one_process_and_the_simulator_leave_the_same` of test_new_stage.py), and so the same tables. The centralized method
    has no sites to run at once, and would refuse --threads."""
    assert compare("--methods", "local,centralized", "--device", "cpu:0", "--threads", 1).exit_code == 0
    assert compare("--methods", "fedavg", "--env", "local").exit_code == 0
    for env in ((), ("--env", "local")):
        assert compare("--methods", "local,fedavg", *env).output.count("(finished before)") == 2
    assert fake.places == [("sim", "cpu:0", 1), ("sim", "cpu:0", None), ("local", "cpu", None)]


def test_whatever_happens_to_one_run_the_others_go_on(compare, fake, tmp_path):
    """Out of memory on a GPU, a full disk: said by name, and the other method is in the table."""
    failing = {"fedavg": RuntimeError, "apfl": OSError, "ditto": KeyError}
    fake.broken = set(failing)
    fake.error = lambda text: failing[fake.calls[-1][1].method](text)
    assert isinstance(compare("--methods", ",".join([*failing, "local"])).exception, FedDPError)
    text = (tmp_path / "out/tables.md").read_text()
    for method, error in failing.items():
        assert f"- {method}, seed 0: {error.__name__}: " in text
    assert "| local |" in text


def test_everything_failed(compare, fake, tmp_path):
    fake.broken = {"fedavg"}
    assert isinstance(compare("--methods", "fedavg").exception, FedDPError)
    assert "needs two methods" in sections(tmp_path / "out")["Table I / II: the methods"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "nothing to compare"),
        ("--methods local,fedpony", "unknown method 'fedpony'"),
        ("--methods local --set pony=1", "unknown setting 'pony'"),
        ("--methods local --studies pony", "--studies pony: unknown; there are ablation"),
        ("--methods local --seeds 0,x", "--seeds 0,x: write whole numbers"),
        ("--methods local --seeds 0,-1", "--seeds 0,-1: write whole numbers from 0 on"),
        ("--methods local --seeds 0,0", "each once"),
        ("--methods feddp,feddp@lambda=1", "feddp and feddp@lambda=1 are the same run"),
        ("--studies lambda --unseen {strange}", "--unseen measures the networks of --methods"),
        ("--methods local --unseen {root}/site-1", "is a site of the federation"),
        ("--methods local --unseen {root}/nowhere", "there is no such folder"),
        ("--methods local --device cuda:99", "--device cuda:99 cannot be used"),
        ("--leave-one-out --device cuda:99", "--device cuda:99 cannot be used"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(compare, fake, tmp_path, tiny_root, strange, arguments, message):
    done = compare(*shlex.split(arguments.format(strange=strange, root=tiny_root)))
    assert isinstance(done.exception, FedDPError)
    assert message in str(done.exception)
    assert not fake.calls
    assert not (tmp_path / "out").exists()


def test_poc_is_no_environment_of_a_comparison(compare, fake, tmp_path):
    done = compare("--methods", "local", "--env", "poc")
    assert done.exit_code == 2
    assert "'poc' is not one of 'local', 'sim'" in " ".join(done.output.split())
    assert not fake.calls
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_place_for_a_comparison(compare, fake, tmp_path):
    (tmp_path / "out").write_text("mine")
    done = compare("--methods", "local")
    assert "is a file; name a folder" in str(done.exception)
    assert not fake.calls
    assert (tmp_path / "out").read_text() == "mine"


def test_a_finished_run_is_no_place_for_a_comparison(compare, fake, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/results.json").write_text("{}")
    assert "is the folder of a finished run; name another folder" in str(compare("--methods", "local").exception)
    assert not fake.calls
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [(("nested", "exclusive"), "prepare it like the federation's"), (("test", "train"), "no image in split test")],
)
def test_an_unseen_site_that_does_not_fit_is_refused(compare, fake, tmp_path, edit, message):
    synthesize(tmp_path, sites=1, images=12, size=32)
    for name in ("dataset.json", "split.csv"):
        path = tmp_path / "site-1" / name
        path.write_text(path.read_text().replace(*edit))
    done = compare("--methods", "local", "--unseen", tmp_path / "site-1")
    assert message in str(done.exception)
    assert not fake.calls


@pytest.mark.parametrize(
    ("probabilities", "dice"), [((0.999, 0.3, 0.1), 0.0), ((0.6, 0.6, 0.1), 0.0), ((0.9, 0.4, 0.3), 2 / 3)]
)
def test_the_ensemble_is_the_mean_of_the_probability_maps(toy, probabilities, dice):
    """Networks that say p everywhere, whatever they see (the head's weight 0, its bias log p/(1 − p)); half of the mask is
    foreground. The means are 0.466, 0.433 and 0.533: background, Dice 0, and foreground, Dice 2 · 8/(16 + 8) = 2/3. A mean of
    logits would take the first for foreground, a vote of the sites the second, and the third for background."""
    networks = {}
    for i, p in enumerate(probabilities):
        network = networks[f"site-{i}"] = NETWORKS[toy](3, 1)
        torch.nn.init.zeros_(network.head.weight)
        torch.nn.init.constant_(network.head.bias, torch.logit(torch.tensor(p)).item())
    mask = torch.zeros(1, 4, 4)
    mask[:, :2] = 1
    rows = measure_networks(networks, [{"image": torch.rand(3, 4, 4), "mask": mask, "stem": "a"}])
    assert rows[ENSEMBLE][0]["dice"] == pytest.approx(dice)
    for i, p in enumerate(probabilities):
        assert rows[f"site-{i}"][0]["dice"] == pytest.approx(2 / 3 if p > 0.5 else 0)


# without FLARE and torch's compiler, whatever this process has imported
WITHOUT_FLARE = """
import sys
from feddp.cli import main
from feddp.networks import NETWORKS

def pvt(*given, **more):
    from benchmarks.small import shallow  # imports torch, which the command is to do itself

    return shallow(*given, **more)

NETWORKS["pvt"] = pvt
try:
    main()
finally:
    print("FLARE is imported" if "nvflare" in sys.modules else "without FLARE")
    print("torch compiles" if "torch._inductor" in sys.modules else "without a compiler")
"""


def one_round(root, out, methods: str, *more) -> list[str]:
    common = ["--data", root, "--out", out, "--methods", methods, "--rounds", 1, "--size", 32, "--network", "pvt"]
    return ["compare", *map(str, [*common, "--set", "batch=4", *more])]


@pytest.fixture(scope="module")
def finished(few_root, tmp_path_factory, strange):
    """Local Train and FedAvg in one process, one round, their networks tested on another site: the comparison's folder, the
    finished process and the command."""
    out = tmp_path_factory.mktemp("finished") / "out"
    command = one_round(few_root, out, "local,fedavg", "--env", "local", "--unseen", strange)
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))}
    words = [sys.executable, "-c", WITHOUT_FLARE, *command]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return out, done, command


def test_two_real_runs_from_the_command_line(finished):
    out, done, _ = finished
    assert "run 1 of 2: local, seed 0" in done.stderr
    assert "run 2 of 2: fedavg, seed 0" in done.stderr
    assert "without FLARE" in done.stdout
    assert "without a compiler" in done.stdout
    for method in ("local", "fedavg"):
        run = out / "runs" / method / "seed-0"
        results = json.loads((run / "results.json").read_text())
        row = next(r for r in read(out / "table_methods.csv") if r["Method"] == method)
        for site, found in results["sites"].items():
            assert float(row[f"Dice (%) {site}"]) == pytest.approx(100 * found["final"]["dice"]["mean"])
            assert float(row[f"ASSD (pix.) {site} ±"]) == pytest.approx(found["final"]["assd"]["std"])
        assert float(row["Dice (%) Average ±"]) == pytest.approx(100 * results["average"]["final"]["dice"]["std"])
        # to each site and back, once, and once more to adopt (local: nothing)
        costs = next(r for r in read(out / "table_efficiency.csv") if r["Method"] == method)
        sends = 2 * 3 * results["bytes"]["shared"] + (2 * results["bytes"]["shared"] if "score" in progress(run) else 0)
        assert float(costs["Joint (MB)"]) == pytest.approx(sends / 1e6)
    local, fedavg = read(out / "table_unseen.csv")
    assert fedavg["Dice (%) site-1"] == fedavg["Dice (%) site-2"] == fedavg["Dice (%) Ensemble"], "one network, three times"
    assert local["ASSD (pix.) Ensemble"]
    with Image.open(out / "curves_methods.png") as picture:
        assert picture.format == "PNG"


def test_the_same_command_starts_no_run_and_another_plan_is_refused(finished, feddp, pvt):
    _, _, command = finished
    code, _, err = feddp(*command)
    assert code == 0, err
    assert err.count("(finished before)") == 2
    assert "round 1" not in err
    code, _, err = feddp(*command, "--set", "lr=0.1")
    assert code == 2
    assert "choose another --out" in err
    assert len(err.strip().splitlines()) == 1


def progress(run) -> set[str]:
    """The tasks of a run."""
    return {e.get("task") for e in map(json.loads, (run / "progress.jsonl").read_text().splitlines())}
